"""A leg of a trial as Ray Tune runs it: from rung to rung on a warm actor, or one ending."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray import tune

from muscale.actors.actor import make_worker
from muscale.search.jobs import AnnealJob, TrialSegment, job_from_json
from muscale.search.trial import TrialPlan
from muscale.search.tune_adapter import LEG, METRIC
from muscale.settings.tables import ResourceSettings
from muscale.store.ledger import Ledger, Outcome

if TYPE_CHECKING:
    from muscale.settings.sweep import RankBy

WORST_LOSS = 1e9  # Tune refuses NaN; nobody ranks by it


class SweepTrainable(tune.Trainable):
    """A leg of a sweep's trial: each step trains to the next rung and reports there what trials are ranked by."""

    def setup(  # type: ignore[override]
        self,
        config: dict[str, Any],
        *,
        plan: TrialPlan,
        rank_by: RankBy,
        ledger: Ledger,
        resources: ResourceSettings,
        package: str,
    ) -> None:
        """Start a leg in a fresh process."""
        self._plan, self._rank_by = plan, rank_by
        self._worker = make_worker(ledger, resources, package)
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start another leg or ending in this process, with its models warm."""
        self._leg = job_from_json(new_config[LEG])
        self._rung = self._leg.first if isinstance(self._leg, TrialSegment) else self._leg.rung
        return True

    def step(self) -> dict[str, Any]:
        """Train to the next rung, or the whole of an ending."""
        leg, plan, rung = self._leg, self._plan, self._rung
        if isinstance(leg, AnnealJob):
            outcome = self._worker.reach(plan.branch(leg.path, rung, seed=leg.seed))
            return {METRIC: WORST_LOSS if outcome.loss is None else outcome.loss, "done": True}
        outcome = self._worker.reach(plan.rung(leg.path, rung))
        loss = self._loss(leg, outcome)
        self._rung += 1
        return {
            METRIC: WORST_LOSS if loss is None else loss,
            "diverged": loss is None,
            "trial": leg.trial,
            "rung": rung,
            "segment": outcome.key,
            "tokens": plan.rung_tokens[rung] - (plan.rung_tokens[rung - 1] if rung else 0),
            "seconds": outcome.seconds,
            "done": loss is None or rung == leg.until,
        }

    def _loss(self, leg: TrialSegment, outcome: Outcome) -> float | None:
        """What the trial is ranked by at this rung, None after a divergence."""
        if outcome.diverged:
            return None
        if self._rank_by == "annealed" and self._plan.has_branch(self._rung):
            return self._worker.reach(self._plan.branch(leg.path, self._rung)).loss
        averaged = self._rank_by == "averaged" and outcome.averaged_loss is not None
        return outcome.averaged_loss if averaged else outcome.loss

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: the ledger keeps the state."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing: the ledger keeps the state."""
