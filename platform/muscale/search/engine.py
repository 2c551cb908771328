"""Engine of a sweep: gets the next job from scheduler and searcher, and records its outcome. It does not know Ray."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from muscale.actors.trial_retries import Attempts
from muscale.actors.work import LOSS, Next
from muscale.errors import StageError, refusing
from muscale.search.budget import SweepBudget
from muscale.search.population import may_follow
from muscale.search.protocols import Advance, Scheduler, Searcher, Start
from muscale.search.record import Record, RungResult
from muscale.search.record_view import RecordView
from muscale.search.schedulers import PreferenceScheduler
from muscale.search.sweep_jobs import AnnealJob, TrialSegment
from search_spaces import Config, SpaceError

MOST_ALONE = 3
"""If this many jobs fail before one succeeds, the set-up is blamed, and the jobs are left for the next run (assumed)."""


class Engine:
    """Source of jobs until nothing is left to do: open segments first, then the scheduler's, finally the anneal jobs.

    Args:
        top: The last rung.
        anneal_jobs: Returns the wanted annealed runs that have no result yet. The engine calls it when the search is over, and
            again when these runs are done, since their results may call for further runs.
        copies: Whether trials may continue from each other's states.

    Attributes:
        interrupted: Once set, the engine starts no job.
        failures: Trials and anneal jobs that failed at every attempt, with the reasons. They are recorded as failed once another job
            has ended in this run, which shows that the set-up works; otherwise the next run of the sweep tries them again.
        refusal: Reason why no worker can train for this sweep, so that no further job starts; None while workers can.
    """

    stage = "sweep"

    def __init__(
        self,
        record: Record,
        scheduler: Scheduler,
        searcher: Searcher,
        budget: SweepBudget,
        *,
        top: int,
        on_result: Callable[[RungResult], None],
        anneal_jobs: Callable[[], Sequence[AnnealJob]],
        copies: bool = False,
    ) -> None:
        self.record, self.budget = record, budget
        self.interrupted = False
        self.refusal: str | None = None
        self._scheduler, self._searcher, self._top = scheduler, searcher, top
        self._on_result, self._anneal_jobs, self._copies = on_result, anneal_jobs, copies
        self._in_flight: set[int | AnnealJob] = set()
        self._attempts = Attempts()
        self._works = False  # whether a job has ended in this run
        self._queue: deque[AnnealJob] = deque()

    @property
    def failures(self) -> dict[Any, str]:
        """Reasons of the failures, by trial or anneal job."""
        return self._attempts.failures

    @property
    def failure(self) -> str:
        """Number of trials that failed, and why the first did; "" if none."""
        return self._attempts.describe("trial", lambda what: f"trial {_trial(what)}")

    @property
    def is_stopping(self) -> bool:
        """Whether no further job begins and running trials end at their next rung."""
        return self.interrupted or self.refusal is not None

    @property
    def is_idle(self) -> bool:
        """Whether no job is running."""
        return not self._in_flight

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return not self.record.open and self._move() is None and not self._wanted_runs()

    def next(self) -> TrialSegment | AnnealJob | None:
        """Return the next job, or None if there is nothing to start now."""
        if self.is_stopping:
            return None
        self.record.read_cancel_requests()
        self._record_failures()
        job = self._next_segment() or self._next_anneal_job()
        if job is None and self.is_idle and self.record.results and 0 < len(self.failures) < MOST_ALONE:
            self._works = True  # the sweep has results, and only these few jobs fail
            return self.next()
        return job

    def add_result(self, result: RungResult) -> None:
        """Record a result, unless the record has it."""
        self._works = True
        self._attempts.succeeded(result.trial)
        if (result.trial, result.rung) not in self.record.results:
            self.record.add_result(result)
            self._on_result(result)

    def note(self, job: TrialSegment | AnnealJob, report: Mapping[str, Any]) -> Next:
        """Record the report of a step: the loss at a rung, or the end of an annealed run."""
        if isinstance(job, AnnealJob):
            self.finished(job)
            return Next.END
        loss = None if report["diverged"] else float(report[LOSS])
        values = {name: report[name] for name in ("rung", "segment", "tokens", "seconds")}
        self.add_result(RungResult(trial=job.trial, loss=loss, **values))
        if loss is not None and report["rung"] < job.until and not self.ends(job):
            return Next.CONTINUE
        self.finished(job)
        return Next.END if loss is None or report["rung"] == self._top else Next.WAIT

    def withdraws(self, job: TrialSegment | AnnealJob) -> bool:
        """Whether a job that waits for a process should not begin: the engine is stopping, or the trial was cancelled."""
        if not self.ends(job):
            return False
        self.finished(job)
        return True

    def ends(self, what: TrialSegment | AnnealJob) -> bool:
        """Whether a job at a rung, or before its start, should end: the engine is stopping, or the trial was cancelled."""
        self.record.read_cancel_requests()
        return self.is_stopping or what.trial in self.record.cancelled

    def finished(self, what: TrialSegment | AnnealJob) -> None:
        """Record that a job has ended."""
        self._works |= isinstance(what, AnnealJob)
        self._in_flight.discard(_name(what))

    def lost(self, what: TrialSegment | AnnealJob, why: str) -> None:
        """Record that a job lost its worker. The job runs again, unless it has lost too many workers."""
        self._end(what, again=self._attempts.lost(_name(what), f"trial {what.trial}", why))

    def failed(self, what: TrialSegment | AnnealJob, why: str) -> None:
        """Record that a job raised an error, which a divergence does not. The job runs again, unless it raised before."""
        self._end(what, again=self._attempts.failed(_name(what), f"trial {what.trial}", why))

    def refuse(self, what: TrialSegment | AnnealJob, why: str) -> None:
        """Record that no worker can train for this sweep, as this job showed."""
        self._in_flight.discard(_name(what))
        self.refusal = self.refusal or why

    def _end(self, what: TrialSegment | AnnealJob, *, again: bool) -> None:
        self._in_flight.discard(_name(what))
        if again and isinstance(what, AnnealJob):
            self._queue.append(what)

    def _record_failures(self) -> None:
        """Record the failures as results without a loss, once another job has shown that the set-up works."""
        while self.failures and self._works:
            what, why = self.failures.popitem()
            if isinstance(what, AnnealJob):
                self.record.fail_run(what, why)
            elif what in self.record.open:
                self._on_result(self.record.fail(what, why))
            else:  # the trial was cancelled
                continue
            _log.warning("trial %d: %s; it counts as diverged, and the sweep continues without it", _trial(what), why)

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
        # Anneal jobs wait while a failed segment is not recorded as failed: the next run of the sweep tries it again first.
        if not self._in_flight and not self._queue and not self.record.open:
            self._queue.extend(job for job in self._wanted_runs() if job not in self.failures)
        while self._queue and self._queue[0].trial in self.record.cancelled:
            self._queue.popleft()
        if not self._queue:
            return None
        job = self._queue.popleft()
        self._in_flight.add(job)
        return job

    def _wanted_runs(self) -> list[AnnealJob]:
        """The annealed runs without a result, except runs recorded as failed."""
        return [job for job in self._anneal_jobs() if not self.record.has_failed(job)]

    def _move(self) -> Start | Advance | None:
        """Return the scheduler's first move that the budget allows; it advances an existing trial where no new one is allowed."""
        may_start = len(self.record.configs) < self.budget.trials
        moves = [self._moves(may_start=True)] if may_start else []
        moves.append(self._moves(may_start=False))
        return next((move for some in moves for move in some if self._allows(move)), None)

    def _moves(self, *, may_start: bool) -> Iterator[Start | Advance]:
        """Yield the scheduler's moves, the preferred first; raise StageError if a custom scheduler's move breaks the record."""
        scheduler = self._scheduler
        moves: Iterable[Start | Advance | None]
        if isinstance(scheduler, PreferenceScheduler) and type(scheduler).next is PreferenceScheduler.next:
            moves = scheduler.moves(self.record, may_start=may_start)
        else:
            moves = [scheduler.next(self.record, may_start=may_start)]
        for move in moves:
            if move is None:
                return
            if fault := self._fault(move, may_start=may_start):
                raise StageError(f"sweep: scheduler {type(scheduler).__name__}: {fault}; got {move}")
            yield move

    def _fault(self, move: Start | Advance, *, may_start: bool) -> str:
        """Return the rule that a move breaks, "" if none."""
        record, top = self.record, self._top
        if isinstance(move, Start):
            if not may_start:
                return "no trial may be started if may_start is false"
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
            return 'a copy must name its donor, and needs sweep.scheduler = "pbt" in the study file, whose rules it follows'
        *before, (first, config) = move.path
        copied, donors = record.config_at(move.donor, rung), record.path_towards(move.donor, rung)
        if first != rung + 1 or tuple(before) != donors or not may_follow(record.rounds[-1].space, config, copied):
            return (
                f"a copy's path is its donor's and ({rung + 1}, a configuration of the space that changes only what can change in "
                "mid-run)"
            )
        return ""

    def _proposed(self) -> Config:
        """Return the searcher's next configuration; raise StageError if a custom searcher's lies outside the space."""
        number = len(self.record.configs)
        view = RecordView(self.record, self._top)
        proposed = self._searcher.propose(number, view)
        config = {name: value.item() if isinstance(value, np.generic) else value for name, value in proposed.items()}
        searcher = type(self._searcher).__name__
        with refusing(f"sweep: searcher {searcher}: trial {number} must lie in sweep.space", SpaceError):
            view.space.validate(config)
        return config

    def _allows(self, move: Start | Advance) -> bool:
        rung = self.record.last_rung(move.trial) if isinstance(move, Advance) else -1
        training = [what for what in self._in_flight if isinstance(what, int)]
        return self.budget.allows(self.record, rung, move.until, training)

    def _segment(self, trial: int) -> TrialSegment:
        self._in_flight.add(trial)
        record = self.record
        return TrialSegment(
            trial=trial, path=record.paths[trial], first=record.last_rung(trial) + 1, until=record.open[trial]
        )


_log = logging.getLogger(__name__)


def _name(what: TrialSegment | AnnealJob) -> int | AnnealJob:
    """Identity of a job: its trial for a segment, since the segment's first rung changes as the trial advances."""
    return what if isinstance(what, AnnealJob) else what.trial


def _trial(what: int | AnnealJob) -> int:
    """Number of the trial of a job with this identity."""
    return what.trial if isinstance(what, AnnealJob) else what
