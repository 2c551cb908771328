"""Interventions after loss spikes, and their effect on later steps.

Skipping a batch means skipping a position: its tokens count and the schedule advances, but no step is taken. Positions come from
the record of incidents, so a resumed or rolled back run skips the same positions.
"""

from __future__ import annotations

from collections.abc import Iterator

from muscale.settings.promote import SpikePolicy
from muscale.store.spike_handling import Incident
from proxy_models.recipes.batch_ramp import BatchRamp
from proxy_models.recipes.schedule import warmup_factor


class Interventions:
    """The incidents and the spike policy of a run, equal on all ranks."""

    def __init__(self, policy: SpikePolicy | None, ramp: BatchRamp, incidents: list[Incident]) -> None:
        self.policy, self.incidents = policy, incidents
        self._ramp = ramp

    @property
    def is_spent(self) -> bool:
        """Whether the next spike ends the run."""
        if self.policy is None:
            return True
        taken = sum(incident.action != "restart" for incident in self.incidents)
        return taken >= self.policy.max_interventions

    def position(self, tokens: int) -> int:
        """The first position at or after `tokens` that is not skipped."""
        while later := [end for start, end in self._left_out() if start <= tokens < end]:
            tokens = max(later)
        return tokens

    def _left_out(self) -> Iterator[tuple[int, int]]:
        return (incident.left_out for incident in self.incidents if incident.left_out)

    def rewarmth(self, tokens: int, batch_tokens: int) -> float:
        """Re-warming factor on the rate of the step after `tokens` tokens, due to earlier rollbacks."""
        rewarm = self.policy.rewarm_tokens if self.policy else 0
        returns = [one.back_to for one in self.incidents if one.action == "rollback" and one.back_to is not None]
        return min(
            (warmup_factor(tokens - start, batch_tokens, rewarm) for start in returns if start <= tokens), default=1.0
        )

    def around(self, tokens: int, *, margin: int = 0) -> tuple[int, int]:
        """Positions [from, to) of the batch after `tokens` tokens and of the batches within `margin` tokens."""
        start = end = 0
        for before, batch in self._ramp.steps(0, tokens + margin + self._ramp.batch_tokens):
            if before <= tokens - margin:
                start = before
            end = before + batch
            if before >= tokens and end >= tokens + self._ramp.batch_at(tokens) + margin:
                break
        return start, end
