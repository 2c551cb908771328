"""What is done about a step that is out of the ordinary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SpikePolicy:
    """What is done about a step whose loss or gradient norm the guard finds out of the ordinary, or which is not finite.

    Attributes:
        action: "skip" leaves the batch out; "rollback" returns to the last checkpoint, and leaves it out on the way, as was
            done for PaLM by hand (Chowdhery et al., arXiv 2204.02311, section 5.1).
        max_interventions: In the whole run; one more spike ends it as diverged.
        margin_tokens: Left out before and after the batch, too; "rollback" only, rounded up to whole batches.
        rewarm_tokens: Of a linear warmup of the rate from the checkpoint that was returned to; 0: none.
    """

    action: Literal["skip", "rollback"]
    max_interventions: int = 3
    margin_tokens: int = 0
    rewarm_tokens: int = 0

    def __post_init__(self) -> None:
        if self.action not in ("skip", "rollback"):
            raise ValueError(f'action must be "skip" or "rollback", got {self.action!r}')
        for name in ("max_interventions", "margin_tokens", "rewarm_tokens"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
