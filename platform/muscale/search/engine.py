"""The engine of a sweep: asks scheduler and searcher for the next job, and notes what came of it. Knows no Ray."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from muscale.actors.retries import LostWorkers
from muscale.errors import StageError
from muscale.search.budget import Budget
from muscale.search.jobs import AnnealJob, TrialSegment
from muscale.search.population import may_follow
from muscale.search.protocols import Advance, Scheduler, Searcher, Start
from muscale.search.record import Record, RungResult
from muscale.search.record_view import RecordView
from search_spaces import Config, SpaceError


class Engine:
    """Hands out jobs until nothing is left to do: open segments first, then the scheduler's, at last the anneal jobs.

    Args:
        top: The last rung.
        anneal_jobs: The annealed runs that are wanted and not known yet; asked when the search is over, and again when they are
            done, as what is found by some makes others wanted.
        copies: Whether trials may continue from each other's states.

    Attributes:
        interrupted: Once set, nothing is begun.
        failures: Trials and anneal jobs that are left for the next time that the sweep is run, and why.
        refusal: Why no worker can train for this sweep, so that nothing more is begun; None while they can.
    """

    def __init__(
        self,
        record: Record,
        scheduler: Scheduler,
        searcher: Searcher,
        budget: Budget,
        *,
        top: int,
        on_result: Callable[[RungResult], None],
        anneal_jobs: Callable[[], Sequence[AnnealJob]],
        copies: bool = False,
    ) -> None:
        self.record, self.budget = record, budget
        self.interrupted = False
        self.failures: dict[int | AnnealJob, str] = {}
        self.refusal: str | None = None
        self._scheduler, self._searcher, self._top = scheduler, searcher, top
        self._on_result, self._anneal_jobs, self._copies = on_result, anneal_jobs, copies
        self._in_flight: set[int | AnnealJob] = set()
        self._lost_workers = LostWorkers()
        self._queue: deque[AnnealJob] = deque()

    @property
    def is_stopping(self) -> bool:
        """Whether nothing more is begun, and what is at work ends at its next rung."""
        return self.interrupted or self.refusal is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is at work."""
        return not self._in_flight

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return not self.record.open and self._move() is None and not self._anneal_jobs()

    def next(self) -> TrialSegment | AnnealJob | None:
        """The next job, or None if there is nothing to start now."""
        if self.is_stopping:
            return None
        self.record.heed_cancels()
        return self._next_segment() or self._next_anneal_job()

    def add_result(self, result: RungResult) -> None:
        """Note a result."""
        self._lost_workers.came_further(result.trial)
        if (result.trial, result.rung) not in self.record.results:
            self.record.add_result(result)
            self._on_result(result)

    def ends(self, what: TrialSegment | AnnealJob) -> bool:
        """Whether a job that came to a rung, or waits to begin, ends there: all are stopping, or its trial was cancelled."""
        self.record.heed_cancels()
        return self.is_stopping or what.trial in self.record.cancelled

    def finished(self, what: TrialSegment | AnnealJob) -> None:
        """Note that a job is over."""
        self._in_flight.discard(_name(what))

    def lost(self, what: TrialSegment | AnnealJob, why: str) -> None:
        """Note that a job lost its worker: it is run again, unless it has lost too many."""
        self.finished(what)
        if given_up := self._lost_workers.lost(_name(what), f"trial {what.trial}", why):
            self.failed(what, given_up)
        elif isinstance(what, AnnealJob):
            self._queue.append(what)

    def failed(self, what: TrialSegment | AnnealJob, why: str) -> None:
        """Note that a job can't be trained here and now, for another reason than divergence."""
        self.finished(what)
        self.failures[_name(what)] = why

    def refuse(self, what: TrialSegment | AnnealJob, why: str) -> None:
        """Note that no worker can train for this sweep, as one found at this job."""
        self.finished(what)
        self.refusal = self.refusal or why

    def _next_segment(self) -> TrialSegment | None:
        record = self.record
        for trial in record.open:
            if trial not in self._in_flight and trial not in self.failures:
                return self._segment(trial)
        match self._move():
            case Start(until=until):
                return self._segment(record.start(self._proposed(), until))
            case Advance() as move:
                record.go_on(move.trial, move.until, move.path, move.donor)
                return self._segment(move.trial)
        return None

    def _next_anneal_job(self) -> AnnealJob | None:
        # A segment that failed is run by the next command first.
        if not self._in_flight and not self._queue and not self.record.open:
            self._queue.extend(job for job in self._anneal_jobs() if job not in self.failures)
        while self._queue and self._queue[0].trial in self.record.cancelled:
            self._queue.popleft()
        if not self._queue:
            return None
        job = self._queue.popleft()
        self._in_flight.add(job)
        return job

    def _move(self) -> Start | Advance | None:
        """The scheduler's next segment, if the budget allows it; where it allows no new trial, one of the trials that are there."""
        move = self._next_move(may_start=self.budget.allows_trial(self.record))
        if isinstance(move, Start) and not self._allows(move):
            move = self._next_move(may_start=False)
        return move if move and self._allows(move) else None

    def _next_move(self, *, may_start: bool) -> Start | Advance | None:
        """The scheduler's move.

        Raises:
            StageError: If the record does not allow it, as may be with a scheduler of a user's own.
        """
        move = self._scheduler.next(self.record, may_start=may_start)
        if move is not None and (fault := self._fault(move, may_start=may_start)):
            raise StageError(f"sweep: scheduler {type(self._scheduler).__name__}: {fault}; got {move}")
        return move

    def _fault(self, move: Start | Advance, *, may_start: bool) -> str:
        """The rule that a move breaks, "" if none."""
        record, top = self.record, self._top
        if isinstance(move, Start):
            if not may_start:
                return "no trial may be started where may_start is false"
            return "" if 0 <= move.until <= top else f"rungs go from 0 to {top}"
        if not isinstance(move, Advance):
            return "next returns a Start, an Advance or None"
        if move.trial not in record.configs or move.trial in record.open or move.trial in record.cancelled:
            return "only a trial that waits at a rung can advance"
        rung = record.last_rung(move.trial)
        if not rung < move.until <= top:
            return f"the trial is at rung {rung} of {top}, and advances to a higher one"
        if move.path is None:
            return "" if math.isfinite(record.loss(move.trial, rung)) else "a trial that diverged cannot advance"
        if not self._copies or move.donor is None:
            return 'a copy names its donor, and needs sweep.scheduler = "pbt" in the study file, whose rules a population keeps'
        *before, (first, config) = move.path
        copied, donors = record.config_at(move.donor, rung), record.path_towards(move.donor, rung)
        if first != rung + 1 or tuple(before) != donors or not may_follow(record.rounds[-1].space, config, copied):
            return (
                f"a copy's path is its donor's and ({rung + 1}, a configuration of the space that changes only what can change in "
                "mid-run)"
            )
        return ""

    def _proposed(self) -> Config:
        """The searcher's configuration of the next trial.

        Raises:
            StageError: If it does not lie in the space, as may be with a searcher of a user's own.
        """
        number = len(self.record.configs)
        view = RecordView(self.record, self._top)
        proposed = self._searcher.propose(number, view)
        config = {name: value.item() if isinstance(value, np.generic) else value for name, value in proposed.items()}
        try:
            view.space.validate(config)
        except SpaceError as error:
            raise StageError(
                f"sweep: searcher {type(self._searcher).__name__}: trial {number} must lie in sweep.space: {error}"
            ) from error
        return config

    def _allows(self, move: Start | Advance) -> bool:
        rung = self.record.last_rung(move.trial) if isinstance(move, Advance) else -1
        return self.budget.allows(self.record, rung, move.until)

    def _segment(self, trial: int) -> TrialSegment:
        self._in_flight.add(trial)
        record = self.record
        return TrialSegment(
            trial=trial, path=record.paths[trial], first=record.last_rung(trial) + 1, until=record.open[trial]
        )


def _name(what: TrialSegment | AnnealJob) -> int | AnnealJob:
    """Identity of a job; a segment starts elsewhere once it has come to a rung."""
    return what if isinstance(what, AnnealJob) else what.trial
