"""View of a sweep's record for a searcher: each trial with its expected loss at the last rung."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import cached_property
from typing import Generic, TypeVar

from muscale.search.protocols import Observation
from muscale.search.record import Record, SweepEvent
from search_spaces import Config, Space

T = TypeVar("T")


class RecordView:
    """View of a record, computed on first use because a grid never reads it."""

    def __init__(self, record: Record, top: int) -> None:
        self._record, self._top = record, top

    @property
    def space(self) -> Space:
        """The space of the present round."""
        return self._record.rounds[-1].space

    @property
    def events(self) -> list[SweepEvent]:
        """The record's events."""
        return self._record.events

    @cached_property
    def pending(self) -> list[Config]:
        """Configurations of the trials that have no result yet."""
        record = self._record
        return [
            config
            for trial, config in record.configs.items()
            if record.last_rung(trial) < 0 and trial not in record.cancelled
        ]

    @cached_property
    def observations(self) -> list[Observation]:
        """Every trial with a result, oldest first; a trial at a lower rung has its loss corrected to the last rung.

        The correction is the median change of log loss from rung to rung of the trials that advanced, so losses of different
        horizons are not mixed. Of the ways tried it has the least error (.048 of log loss, where a rung's loss as it is has .28;
        tests/benchmarks/rungs.py); leaving out stopped trials gave the worst suggestions.
        """
        record, seen = self._record, []
        steps = [self._step(rung) for rung in range(self._top)]
        factors = [math.exp(sum(steps[rung:])) for rung in range(self._top + 1)]
        for trial in record.configs:
            if (rung := record.last_rung(trial)) >= 0:
                loss = record.results[trial, rung].loss
                corrected = None if loss is None else loss * factors[rung]
                seen.append(Observation(config=record.config_at(trial, rung), loss=corrected))
        return seen

    def _step(self, rung: int) -> float:
        """Median change of log loss from a rung to the next; 0 if no trial has made the step."""
        changes = self._record.changes(rung)
        return statistics.median(changes) if changes else 0.0


class MemoizedByConfig(Generic[T]):
    """A function of a configuration with cached values: a searcher calls it on all trials for every suggestion."""

    def __init__(self, function: Callable[[Config], T]) -> None:
        self._function = function
        self._known: dict[int, tuple[Config, T]] = {}

    def __call__(self, config: Config) -> T:
        """Value of the function at a configuration, which must not change afterwards."""
        known = self._known.get(id(config))
        if known is None:  # the cache holds the configuration, so that no other object gets its id
            known = self._known[id(config)] = config, self._function(config)
        return known[1]
