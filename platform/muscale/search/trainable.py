"""Tune's trainable: a process that lets a worker of the pool train, and reports the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray import tune

from muscale.actors.pool import result_of
from muscale.errors import MuscaleError, TrainingFailedError, WorkerLostError, of_storage
from muscale.search.jobs import AnnealJob, TrialSegment, job_from_json
from muscale.search.trial import TrialPlan

if TYPE_CHECKING:
    from muscale.search.jobs import ConfigHistory
    from muscale.settings.sweep import RankBy
    from muscale.store.lineage import Chain
    from muscale.store.outcome import Outcome

METRIC, MODE = "loss", "min"
JOB, WORKER = "job", "worker"  # what a Tune trial trains and the name of who does, in the config that Tune carries
WORST_LOSS = 1e9  # Tune refuses NaN; nobody ranks by it


class SweepTrainable(tune.Trainable):
    """A job of the sweep: each step has the leased worker train to the next rung, or the whole of an annealed run.

    It imports no torch, settings or database and holds no state, so that a process of it costs little. What a training raises is
    reported and not raised, as Tune would hand it to nobody but its own folder.
    """

    def setup(self, config: dict[str, Any], *, plan: TrialPlan, rank_by: RankBy) -> None:  # type: ignore[override]
        """Start a job in a fresh process."""
        self._plan, self._rank_by = plan, rank_by
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start another job in this process."""
        self._worker = new_config[WORKER]
        self._job = job_from_json(new_config[JOB])
        self._rung = self._job.first if isinstance(self._job, TrialSegment) else self._job.rung
        return True

    def step(self) -> dict[str, Any]:
        """Train, and report the loss that trials are ranked by, or which of the engine's methods is to hear of a problem."""
        try:
            return self._anneal(self._job) if isinstance(self._job, AnnealJob) else self._next_rung(self._job)
        except WorkerLostError as error:
            problem, why = "lost", str(error)
        except TrainingFailedError as error:
            problem, why = "failed", str(error)
        except MuscaleError as error:
            problem, why = "refuse", str(error)
        except Exception as error:
            on_disk = of_storage(error)  # what others train would not be kept either
            problem, why = ("refuse", on_disk) if on_disk else ("failed", f"{type(error).__name__}: {error}")
        return {METRIC: WORST_LOSS, "problem": problem, "why": why, "done": True}

    def _anneal(self, job: AnnealJob) -> dict[str, Any]:
        outcome = self._reach(self._plan.branch(job.path, job.rung, seed=job.seed))
        return {METRIC: WORST_LOSS if outcome.loss is None else outcome.loss, "done": True}

    def _next_rung(self, job: TrialSegment) -> dict[str, Any]:
        plan, rung = self._plan, self._rung
        outcome = self._reach(plan.rung(job.path, rung))
        loss = rung_loss(plan, job.path, rung, outcome, rank_by=self._rank_by, reach=self._reach)
        self._rung += 1
        return {
            METRIC: WORST_LOSS if loss is None else loss,
            "diverged": loss is None,
            "trial": job.trial,
            "rung": rung,
            "segment": outcome.key,
            "tokens": plan.rung_tokens[rung] - (plan.rung_tokens[rung - 1] if rung else 0),
            "seconds": outcome.seconds,
            "done": loss is None or rung == job.until,
        }

    def _reach(self, chain: Chain) -> Outcome:
        """The outcome at the end of a chain, trained by the leased worker."""
        try:
            worker = ray.get_actor(self._worker)
        except ValueError as gone:
            raise WorkerLostError(f"{self._worker} is gone") from gone
        outcome: Outcome = result_of(worker.reach.remote(chain))
        return outcome

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: the ledger keeps the state."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing: the ledger keeps the state."""


def rung_loss(
    plan: TrialPlan,
    path: ConfigHistory,
    rung: int,
    outcome: Outcome,
    *,
    rank_by: RankBy,
    reach: Callable[[Chain], Outcome],
) -> float | None:
    """Loss by which a trial with this outcome is ranked at a rung, None after a divergence; `reach` trains an annealed end."""
    if outcome.diverged:
        return None
    if rank_by == "annealed" and plan.has_branch(rung):
        return reach(plan.branch(path, rung)).loss
    averaged = rank_by == "averaged" and outcome.averaged_loss is not None
    return outcome.averaged_loss if averaged else outcome.loss
