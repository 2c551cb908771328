"""The engine of a sweep: asks scheduler and sampler for the next job, and notes what came of it. Knows no Ray."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from muscale.actors.jobs import ATTEMPTS
from muscale.search.budget import Budget
from muscale.search.jobs import AnnealJob, TrialSegment
from muscale.search.record import Record, RungResult
from muscale.search.record_view import RecordView
from muscale.search.samplers import Sampler
from muscale.search.schedulers import GoOn, Scheduler, Start


class Engine:
    """Hands out jobs until nothing is left to do: open segments first, then the scheduler's, at last the anneal jobs.

    Args:
        record: What was suggested, measured and decided.
        scheduler, sampler, budget: Of the search.
        top: The last rung.
        on_result: Called with each new result.
        anneal_jobs: The annealed runs that are wanted and not known yet; asked when the search is over, and again when they are
            done, as what is found by some makes others wanted.

    Attributes:
        interrupted: Once set, nothing is begun.
        failures: Trials and anneal jobs that are left for the next time that the sweep is run, and why.
        refusal: Why no worker can train for this sweep, so that nothing more is begun; None while they can.
    """

    def __init__(
        self,
        record: Record,
        scheduler: Scheduler,
        sampler: Sampler,
        budget: Budget,
        *,
        top: int,
        on_result: Callable[[RungResult], None],
        anneal_jobs: Callable[[], Sequence[AnnealJob]],
    ) -> None:
        self.record, self.budget = record, budget
        self.interrupted = False
        self.failures: dict[int | AnnealJob, str] = {}
        self.refusal: str | None = None
        self._scheduler, self._sampler, self._top = scheduler, sampler, top
        self._on_result, self._anneal_jobs = on_result, anneal_jobs
        self._in_flight: set[int | AnnealJob] = set()
        self._lost_workers: Counter[int | AnnealJob] = Counter()
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
        self._lost_workers.pop(result.trial, None)
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
        """Note that a job lost its worker: it is run again, `ATTEMPTS` times in all."""
        self.finished(what)
        self._lost_workers[_name(what)] += 1
        if self._lost_workers[_name(what)] == ATTEMPTS:
            self.failed(what, f"its worker was lost {ATTEMPTS} times: {why}")
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
                number = len(record.configs)
                config = self._sampler.propose(number, RecordView(record, self._top))
                record.start(config, until)
                return self._segment(number)
            case GoOn() as move:
                record.go_on(move.trial, move.until, move.path, move.donor)
                return self._segment(move.trial)
        return None

    def _next_anneal_job(self) -> AnnealJob | None:
        if (
            not self._in_flight and not self._queue and not self.record.open
        ):  # a segment that failed is run by the next command first
            self._queue.extend(job for job in self._anneal_jobs() if job not in self.failures)
        while self._queue and self._queue[0].trial in self.record.cancelled:
            self._queue.popleft()
        if not self._queue:
            return None
        job = self._queue.popleft()
        self._in_flight.add(job)
        return job

    def _move(self) -> Start | GoOn | None:
        """The scheduler's next segment, if the budget allows it; where it allows no new trial, one of the trials that are there."""
        may_start = self.budget.allows_trial(self.record)
        move = self._scheduler.next(self.record, may_start=may_start)
        if isinstance(move, Start) and not self._allows(move):
            move = self._scheduler.next(self.record, may_start=False)
        return move if move and self._allows(move) else None

    def _allows(self, move: Start | GoOn) -> bool:
        rung = self.record.last_rung(move.trial) if isinstance(move, GoOn) else -1
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
