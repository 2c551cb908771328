"""A Ray Tune searcher in a sweep: the record is replayed into it, in the order in which trials started and reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from muscale.errors import StageError
from muscale.search.protocols import Known
from muscale.search.record import SweepEvent
from muscale.search.record_view import RecordView
from muscale.search.searchers import MAX_ATTEMPTS
from muscale.search.tune_methods import Reports, seeded, tune_searcher
from muscale.settings.strict import short_repr
from muscale.settings.sweep import SweepSettings
from search_spaces import Config, Fixed, Space


class TuneSearcher:
    """Suggestions of a Ray Tune searcher.

    As in Tune, the searcher gets the loss of a trial at each rung. The last loss also completes the trial: at the last rung, after
    a divergence, or once another trial is requested while this one waits.

    Args:
        first_trial: First trial of the round; the searcher sees only trials of its round.
        top: The last rung.
    """

    def __init__(
        self, settings: SweepSettings, name: str, space: Space, *, first_trial: int, top: int, loss_unit: str
    ) -> None:
        self._settings, self._name, self._space, self._loss_unit = settings, name, space, loss_unit
        self._first, self._top = first_trial, top
        self._fixed = {key: each.value for key, each in space.items() if isinstance(each, Fixed)}
        self.searcher = tune_searcher(settings, name, space)
        self._events: Sequence[SweepEvent] = ()
        self._begin(())

    def propose(self, number: int, known: Known) -> Config:
        """Return the searcher's suggestion for a trial; raise StageError if it has none."""
        known = cast(RecordView, known)  # as the engine gives it
        if self._events is not known.events:
            self._begin(known.events)
        self._catch_up()
        return self._suggested(number)

    def _begin(self, events: Sequence[SweepEvent]) -> None:
        self._events, self._n_seen = events, 0
        self._reports = Reports(self._settings, self._loss_unit)
        self._proposed: dict[int, Config] = {}
        self._ids: dict[int, str] = {}  # of trials that the searcher knows and that have not ended
        self._resting: dict[int, dict[str, Any]] = {}  # last reports of trials that wait
        if events:
            self.searcher = tune_searcher(self._settings, self._name, self._space)

    def _catch_up(self) -> None:
        new = self._events[self._n_seen :]
        self._n_seen = len(self._events)
        for event in new:
            if event.trial < self._first:
                continue
            if event.result:
                self._arrived(event)
            elif event.rung >= 0:
                self._resting.pop(event.trial, None)
            else:
                self._suggested(event.trial)
                if self._proposed[event.trial] != event.config:  # another version, or a generator that nobody seeds
                    self._ids.pop(event.trial, None)

    def _suggested(self, number: int) -> Config:
        """Return the suggestion for a trial; asked again, the same."""
        if number in self._proposed:
            return self._proposed[number]
        for trial in [*self._resting]:
            self._end(trial, self._resting.pop(trial))
        space = self._space
        for attempt in range(MAX_ATTEMPTS):
            name = f"{number:08d}-{attempt}"
            with seeded(self._settings.seed, number, attempt):
                suggested = self.searcher.suggest(name)
            if not isinstance(suggested, dict):
                raise StageError(
                    f"sweep.searcher: {self._name} gave no values for trial {number}, got {short_repr(suggested)}"
                )
            values = {**self._fixed, **{key: _plain(value) for key, value in suggested.items()}}
            config = {key: values[key] for key in space.active(values)}
            if space.contains(config):
                self._ids[number] = name
                break
            self.searcher.on_trial_complete(name, error=True)
        else:
            config = space.draw(self._settings.seed, number)
        self._proposed[number] = config
        return config

    def _arrived(self, event: SweepEvent) -> None:
        loss = event.result.loss if event.result else None
        values = {**self._reports.of(event.rung, loss), "config": event.config}
        if loss is None or event.rung == self._top:
            self._end(event.trial, values)
        elif name := self._ids.get(event.trial):
            with seeded(self._settings.seed, event.trial, event.rung):
                self.searcher.on_trial_result(name, values)
            self._resting[event.trial] = values

    def _end(self, trial: int, values: dict[str, Any]) -> None:
        if name := self._ids.pop(trial, None):
            with seeded(self._settings.seed, trial):
                self.searcher.on_trial_complete(name, values)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
