"""A Ray Tune scheduler in a sweep: the record is replayed into it, and its decisions are the sweep's moves.

A new object gets every event of the record in order, so a restarted sweep continues exactly, regardless of the state that the
scheduler keeps in memory. Global generators are seeded for each event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from muscale.search.population import may_follow
from muscale.search.protocols import Advance, Start
from muscale.search.record import Record, SweepEvent
from muscale.search.schedulers import PreferenceScheduler
from muscale.search.tune_methods import Reports, seeded, tune_scheduler
from muscale.settings.sweep import SweepSettings, changeable
from search_spaces import Config, Integer, LogUniform, Space, Uniform


@dataclass(frozen=True, kw_only=True)
class TuneScheduler(PreferenceScheduler):
    """Moves of a Ray Tune scheduler."""

    settings: SweepSettings
    space: Space
    loss_unit: str
    _replays: list[_Replay] = field(default_factory=list, compare=False, repr=False)  # the latest

    def moves(self, record: Record, *, may_start: bool) -> Iterator[Start | Advance]:
        """Yield the trials that Tune's scheduler continues, the trial that it chooses of those that wait, or a new one.

        A population and HyperBand's brackets are complete before their first results count: Tune's controller too adds trials
        before there is room for them, and HyperBand would halve a bracket that is not full.
        """
        if self.begins_all_first and may_start:
            yield Start(until=0)
            return
        replay = self._replay(record)
        for trial in (*replay.continuing, *replay.chosen(may_start=may_start)):
            if (rung := record.last_rung(trial.number)) < self.top and trial.number not in record.open:
                path = (*record.path_towards(trial.donor, rung), (rung + 1, trial.config)) if trial.copies else None
                donor = trial.donor if trial.copies else None
                yield Advance(trial=trial.number, until=rung + 1, path=path, donor=donor)
        if may_start:
            yield Start(until=0)
        else:
            yield from self.last_moves(record)

    @property
    def begins_all_first(self) -> bool:
        """Whether all trials begin before the first advances."""
        return self.settings.is_population or self.settings.scheduler == "tune:HyperBandScheduler"

    def _replay(self, record: Record) -> _Replay:
        """Return the replay of a record's present round, up to its last event."""
        first = record.rounds[-1].first_trial
        if not self._replays or self._replays[0].of != (id(record), first):
            self._replays[:] = [_Replay(self, record, first)]
        self._replays[0].catch_up()
        return self._replays[0]


class _TuneTrial(Trial):
    """A trial as Tune's scheduler sees it: nothing is stored, and its checkpoint stands for its state at its latest rung."""

    is_finished: Callable[[], bool]
    set_status: Callable[[str], None]
    set_config: Callable[[Config], None]

    def __init__(self, number: int, config: Config) -> None:
        super().__init__("muscale", config=dict(config), trial_id=f"{number:08d}", stub=True)
        self.number, self.donor, self.rung = number, number, -1
        self.is_diverged = False

    @property
    def checkpoint(self) -> Any:
        """The state that another trial may copy."""
        return self.number, self.rung

    @property
    def copies(self) -> bool:
        """Whether the trial continues from another's state."""
        return self.donor != self.number


class _Controller:
    """The part of Tune's controller that its schedulers call."""

    def __init__(self, replay: _Replay) -> None:
        self._replay = replay
        nothing = SimpleNamespace(on_pause=lambda trial_id: None, on_unpause=lambda trial_id: None)
        self.search_alg = SimpleNamespace(searcher=nothing)  # whose limit of running trials a BOHB scheduler moves
        self.pending: list[_TuneTrial] = []  # one that stands for a new trial, where one may begin

    def get_trials(self) -> list[_TuneTrial]:
        return [*self._replay.trials.values(), *self.pending]

    def get_live_trials(self) -> set[_TuneTrial]:
        return {trial for trial in self.get_trials() if not trial.is_finished()}

    def pause_trial(self, trial: _TuneTrial, should_checkpoint: bool = True) -> None:
        trial.set_status(Trial.PAUSED)

    def stop_trial(self, trial: _TuneTrial) -> None:
        if trial.is_finished():
            return
        if trial.status == Trial.RUNNING and trial.has_reported_at_least_once:
            self._replay.scheduler.on_trial_complete(self, trial, trial.last_result)
        else:
            self._replay.scheduler.on_trial_remove(self, trial)
        trial.set_status(Trial.TERMINATED)

    def _schedule_trial_save(self, trial: _TuneTrial, result: Any = None) -> Any:
        return trial.checkpoint


class _Replay:
    """Tune's scheduler after the events of a round so far.

    Attributes:
        of: Identity of the record and the round.
        trials: Trials by number.
        continuing: Trials that the scheduler lets continue at once, in the order of their results.
    """

    def __init__(self, rules: TuneScheduler, record: Record, first_trial: int) -> None:
        self.of = id(record), first_trial
        self.scheduler = tune_scheduler(rules.settings, rules.space)
        self.trials: dict[int, _TuneTrial] = {}
        self.continuing: list[_TuneTrial] = []
        self._rules, self._record, self._n_seen = rules, record, 0
        self._reports = Reports(rules.settings, rules.loss_unit)
        self._controller, self._pending = _Controller(self), _TuneTrial(-1, {})
        self._chosen: _TuneTrial | None = None

    def catch_up(self) -> None:
        """Give the scheduler the events that it has not seen; where all trials begin first, it gets all of them before a result."""
        record, new = self._record, self._record.events[self._n_seen :]
        for at, event in enumerate(new, self._n_seen):
            if event.trial >= self.of[1]:
                if event.trial not in self.trials and self._rules.begins_all_first:
                    for begun in new[at - self._n_seen :]:
                        if begun.result:
                            continue
                        if begun.rung >= 0:
                            break
                        self._begin(begun)
                self._see(event, at)
        self._n_seen += len(new)
        for number in record.cancelled.keys() & self.trials.keys():
            if not self.trials[number].is_finished():
                self._stop(self.trials[number], len(record.events), number)

    def _see(self, event: SweepEvent, at: int) -> None:
        trial = self.trials.get(event.trial)
        if trial and trial.is_finished():  # it trains on only to bring one trial to the end
            return
        self._show_pending(self._may_begin)
        with seeded(self._rules.settings.seed, self.of[1], at):
            if trial is None or event.rung < 0:
                self._begin(event)
            elif event.result:
                self._arrived(trial, event)
            else:
                trial.donor, trial.is_diverged = trial.number, False
                trial.set_status(Trial.RUNNING)
                self.continuing = [each for each in self.continuing if each is not trial]
            self._choose(may_begin=self._may_begin)

    @property
    def _may_begin(self) -> bool:
        return len(self.trials) < self._rules.settings.trials and not self._rules.begins_all_first

    def _show_pending(self, may_begin: bool) -> None:
        """Show the scheduler a pending trial while another may begin, as Tune's controller has one ready."""
        self._controller.pending = [self._pending] if may_begin else []

    def _begin(self, event: SweepEvent) -> None:
        if event.trial not in self.trials:
            trial = self.trials[event.trial] = _TuneTrial(event.trial, event.config)
            self.scheduler.on_trial_add(self._controller, trial)
            trial.set_status(Trial.RUNNING)

    def _arrived(self, trial: _TuneTrial, event: SweepEvent) -> None:
        """Report a result, and carry out what the scheduler decides."""
        loss = event.result.loss if event.result else None
        trial.rung, trial.is_diverged = event.rung, loss is None
        result = {**self._reports.of(event.rung, loss), "trial_id": trial.trial_id}
        trial.run_metadata.last_result = result
        # A member that copies another has another's result after this.
        members = self.trials.values() if self._rules.settings.is_population else ()
        before = {each: each.latest_checkpoint_result for each in members}
        if event.rung == self._rules.top:
            self._controller.stop_trial(trial)
            return
        match self.scheduler.on_trial_result(self._controller, trial, result):
            case TrialScheduler.STOP:
                self._controller.stop_trial(trial)
            case TrialScheduler.PAUSE:
                trial.set_status(Trial.PAUSED)
            case TrialScheduler.CONTINUE:
                self.continuing.append(trial)
        for each, earlier in before.items():
            if (copied := each.latest_checkpoint_result) and copied is not earlier:
                self._copy(each, cast(tuple[int, int], copied.checkpoint))
        may_copy = self._rules.settings.is_population and trial not in self.continuing  # a member that waits
        if trial.is_diverged and not trial.copies and not may_copy:
            self._controller.stop_trial(trial)
            self.continuing = [each for each in self.continuing if each is not trial]

    def _copy(self, trial: _TuneTrial, state: tuple[int, int]) -> None:
        """Note the trial that a member copies, and bring the values that it continues with into the space."""
        number, rung = state
        copied = self._record.config_at(number, rung)
        if rung == trial.rung:
            trial.donor = number
            trial.set_config(_within(self._rules.space, trial.config, copied))

    def chosen(self, *, may_start: bool) -> list[_TuneTrial]:
        """Return the waiting trial that is next, none if it is a new one."""
        if self._chosen is self._pending and not may_start:  # the budget allows fewer trials than the study file
            self._choose(may_begin=False)
        return [self._chosen] if self._chosen and self._chosen is not self._pending else []

    def _choose(self, *, may_begin: bool) -> None:
        """Ask for the trial that is next, once for each event; a member that diverged and copies nobody has ended."""
        self._show_pending(may_begin)
        while (
            (trial := self.scheduler.choose_trial_to_run(self._controller)) and trial.is_diverged and not trial.copies
        ):
            self._controller.stop_trial(trial)
        self._chosen = trial

    def _stop(self, trial: _TuneTrial, *seed: int) -> None:
        """End a trial that was cancelled."""
        with seeded(self._rules.settings.seed, *seed):
            self._controller.stop_trial(trial)
            self.continuing = [each for each in self.continuing if each is not trial]
            self._choose(may_begin=self._may_begin)


def _within(space: Space, config: Config, copied: Config) -> Config:
    """Return a copy's values within the bounds, which Tune's populations leave; the donor's where they break another rule."""
    moved: Config = {**copied}
    for name in changeable(space):
        if name in copied and name in config:
            moved[name] = config[name]
            match space[name]:
                case Uniform(low=low, high=high) | LogUniform(low=low, high=high) | Integer(low=low, high=high):
                    value = min(max(config[name], low), high)  # type: ignore[type-var]
                    moved[name] = int(value) if isinstance(space[name], Integer) else float(value)  # type: ignore[arg-type]
    return moved if may_follow(space, moved, copied) else dict(copied)
