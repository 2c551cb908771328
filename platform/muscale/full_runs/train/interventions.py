"""What was done about a run's spikes, and what it means for the steps to come.

Leaving a batch out is leaving a position out: the tokens are counted, the schedule goes on, no step is taken. Positions are read
from the record, so a run that is resumed, or returns to a checkpoint, leaves out the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from muscale.settings.promote import SpikePolicy
from muscale.store.spike_handling import Incident
from proxy_models.recipes.batch_ramp import BatchRamp
from proxy_models.recipes.schedule import warmup_factor


class Interventions:
    """The incidents of one run, its policy, and what they mean for the steps to come; all ranks hold the same."""

    def __init__(self, policy: SpikePolicy | None, ramp: BatchRamp, incidents: list[Incident]) -> None:
        self.policy, self.incidents = policy, incidents
        self._ramp = ramp

    @property
    def is_spent(self) -> bool:
        """Whether one more spike ends the run."""
        if self.policy is None:
            return True
        taken = sum(incident.action != "restart" for incident in self.incidents)
        return taken >= self.policy.max_interventions

    def position(self, tokens: int) -> int:
        """The first position at or after `tokens` that is not left out."""
        while later := [end for start, end in self._left_out() if start <= tokens < end]:
            tokens = max(later)
        return tokens

    def _left_out(self) -> Iterator[tuple[int, int]]:
        return (incident.left_out for incident in self.incidents if incident.left_out)

    def rewarmth(self, tokens: int, batch_tokens: int) -> float:
        """Factor on the rate of the step that starts after `tokens` tokens, for the returns to a checkpoint before it."""
        rewarm = self.policy.rewarm_tokens if self.policy else 0
        returns = [one.back_to for one in self.incidents if one.action == "rollback" and one.back_to is not None]
        return min(
            (warmup_factor(tokens - start, batch_tokens, rewarm) for start in returns if start <= tokens), default=1.0
        )

    def around(self, tokens: int, *, margin: int = 0) -> tuple[int, int]:
        """Positions [from, to) of the batch after `tokens` tokens, and of those less than `margin` tokens away, by whole batches."""
        start = end = 0
        for before, batch in self._ramp.steps(0, tokens + margin + self._ramp.batch_tokens):
            if before <= tokens - margin:
                start = before
            end = before + batch
            if before >= tokens and end >= tokens + self._ramp.batch_at(tokens) + margin:
                break
        return start, end
