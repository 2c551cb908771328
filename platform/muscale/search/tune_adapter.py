"""Between the engine, the pool and Ray Tune: a Tune trial is a job of the engine's with a leased worker.

Nothing depends on Tune's own state files. A diverged trial has no loss in the record; only Tune gets a finite number.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ray.tune import search as tune_search
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from muscale.errors import StageError
from muscale.search.jobs import AnnealJob, TrialSegment, job_to_json
from muscale.search.record import RungResult
from muscale.search.trainable import JOB, METRIC, MODE, WORKER
from muscale.search.tune_internals import keep_idle

if TYPE_CHECKING:
    from muscale.actors.pool import PooledWorker, WorkerPool
    from muscale.search.engine import Engine

PLACE = "place"  # in the config that Tune carries: which of the places a trial's process takes
_PLACES = 8  # that differ; trials of more workers share them, and their processes
_LOOK_SECONDS = 1.0  # between two looks for an interruption while no worker has started


class EngineSearcher(tune_search.Searcher):
    """Gives Tune the engine's jobs as suggestions, each with a worker of the pool, and the engine what came of them.

    Attributes:
        n_places: How many processes of its trials Tune can tell apart, by what they ask for. Otherwise it gives a trial whose
            process is starting the one that a short trial leaves, and ends its own: again and again, 1.5 s of a processor each.
        broke: What first kept the driver from asking or telling the engine, as a ledger without room does; Tune wraps it into
            an error of its own, or trips over it.
    """

    broke: Exception | None = None

    def __init__(self, engine: Engine, pool: WorkerPool) -> None:
        super().__init__(metric=METRIC, mode=MODE)
        self._engine, self._pool = engine, pool
        self._waiting: deque[TrialSegment | AnnealJob] = deque()  # for a worker
        self._in_flight: dict[str, tuple[TrialSegment | AnnealJob, PooledWorker, int]] = {}  # and its place
        self.n_places = min(pool.resources.workers, _PLACES)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles its own state, which nobody reads."""
        return {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        """The next job; None while there is none or no worker for it, and the end once none is at work either."""
        with self.noting():
            found = self._next()
        if found is None:
            return str(tune_search.Searcher.FINISHED) if self._engine.is_idle else None
        taken = Counter(place for *_, place in self._in_flight.values())
        place = min(range(self.n_places), key=taken.__getitem__)
        job, worker, _ = self._in_flight[trial_id] = (*found, place)
        return {**job.path[-1][1], JOB: job_to_json(job), WORKER: worker.name, PLACE: place}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Note a result on the way."""
        if "rung" in result:
            with self.noting():
                self._engine.add_result(rung_result(result))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Note the last result and the end, or what came instead of it."""
        job, worker, _ = self._in_flight.pop(trial_id)
        if error:  # its process died, and the worker may be at work still
            self._engine.lost(job, "the process of its Tune trial died")
            self._pool.discard(worker)
        elif not result or "problem" not in result:
            self._pool.give_back(worker)
            if result:
                self.on_trial_result(trial_id, result)
            self._engine.finished(job)
        else:
            note = {"lost": self._engine.lost, "refuse": self._engine.refuse, "failed": self._engine.failed}
            note[result["problem"]](job, result["why"])
            # An error in the middle of a pass leaves a model of several ranks unusable.
            failed_together = result["problem"] == "failed" and self._pool.resources.ranks_per_trial > 1
            if result["problem"] == "lost" or failed_together:
                self._pool.discard(worker)
            else:
                self._pool.give_back(worker)

    def ends(self, trial_id: str) -> bool:
        """Whether a job that came to a rung ends there."""
        with self.noting():
            return self._engine.ends(self._in_flight[trial_id][0])

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep what the block raises, as `broke`."""
        try:
            yield
        except Exception as error:
            self.broke = self.broke or error
            raise

    def _next(self) -> tuple[TrialSegment | AnnealJob, PooledWorker] | None:
        """The job that waits longest and a worker for it. As many jobs wait as there may be workers, so that these start at once."""
        engine, pool = self._engine, self._pool
        while True:
            for ended in [job for job in self._waiting if engine.ends(job)]:
                self._waiting.remove(ended)
                engine.finished(ended)
            while len(self._waiting) + len(self._in_flight) < pool.resources.workers and (job := engine.next()):
                self._waiting.append(job)
            if not self._waiting:
                pool.end_idle()
                return None
            try:
                if worker := pool.lease(len(self._waiting)):
                    return self._waiting.popleft(), worker
                if self._in_flight:
                    return None
                pool.wait(seconds=_LOOK_SECONDS)  # Tune, with nothing to run, would sleep
            except StageError as error:
                engine.refuse(self._waiting.popleft(), str(error))

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""


class StopAtRung(FIFOScheduler):
    """Lets every job end where it is going, or at its next rung once the sweep is stopping or its trial is cancelled."""

    def __init__(self, jobs: EngineSearcher, workers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._jobs, self._kept = jobs, set[Any]()
        self._share = math.ceil(workers / jobs.n_places)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Keep a process for each worker, however long it is idle."""
        if trial.placement_group_factory not in self._kept:
            self._kept.add(trial.placement_group_factory)
            keep_idle(tune_controller, trial, self._share)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Whether the job continues."""
        return str(TrialScheduler.STOP if self._jobs.ends(trial.trial_id) else TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Let go of what Tune would keep of a job that is over: queues and means of every number that was reported."""
        trial.metric_n_steps.clear()
        trial.metric_analysis.clear()


def rung_result(result: dict[str, Any]) -> RungResult:
    """Record's form of a trainable's report."""
    values = {name: result[name] for name in RungResult.__dataclass_fields__}
    return RungResult(**{**values, "loss": None if result["diverged"] else float(result["loss"])})
