"""The steps of a sweep's jobs, as a worker's process trains them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muscale.actors.work import Trains, report
from muscale.search.sweep_jobs import JOB, AnnealJob, job_from_json
from muscale.search.trial import TrialPlan

if TYPE_CHECKING:
    from muscale.search.sweep_jobs import ConfigHistory
    from muscale.settings.sweep import RankBy
    from muscale.store.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class SweepSteps:
    """Trains a trial from rung to rung, or the whole of an annealed run.

    A trial continues as long as its next step is requested: the scheduler decides where it ends.
    """

    plan: TrialPlan
    rank_by: RankBy

    def __call__(self, config: Mapping[str, Any], worker: Trains) -> Iterator[dict[str, Any]]:
        """A report for each rung with the loss that trials are ranked by, or one for an annealed run."""
        plan, job = self.plan, job_from_json(config[JOB])
        if isinstance(job, AnnealJob):
            yield report(worker.reach(plan.branch(job.path, job.rung, seed=job.seed)).loss)
            return
        for rung in range(job.first, plan.top + 1):
            outcome = worker.reach(plan.rung(job.path, rung))
            yield report(
                rung_loss(plan, job.path, rung, outcome, rank_by=self.rank_by, worker=worker),
                rung=rung,
                segment=outcome.key,
                tokens=plan.rung_tokens[rung] - (plan.rung_tokens[rung - 1] if rung else 0),
                seconds=outcome.seconds,
            )


def rung_loss(
    plan: TrialPlan, path: ConfigHistory, rung: int, outcome: Outcome, *, rank_by: RankBy, worker: Trains
) -> float | None:
    """Loss by which a trial with this outcome is ranked at a rung, None after a divergence; the worker trains an annealed end."""
    if outcome.diverged:
        return None
    if rank_by == "annealed" and plan.has_branch(rung):
        return worker.reach(plan.branch(path, rung)).loss
    averaged = rank_by == "averaged" and outcome.averaged_loss is not None
    return outcome.averaged_loss if averaged else outcome.loss
