"""Settings of the stability guard, for readers of a study without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["skip", "rewind"]


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Definition of a spike and the action after a spike; both change the numbers of a run.

    Attributes:
        action: "skip" leaves the step out; "rewind" also restores the weights and moments of the last snapshot. The
            position advances in both cases, so the batches between snapshot and spike are not seen again.
        window: Number of accepted steps for comparison; the guard judges nothing before half of them exist.
        threshold: Robust standard deviations above the median that make a spike.
        max_spikes: Largest number of spikes within `window` steps; a further spike ends the run as diverged.
        snapshot_every: Steps between snapshots, kept in memory and in the training state; for "rewind" only.
    """

    action: Action = "skip"
    window: int = 128
    threshold: float = 10.0
    max_spikes: int = 3
    snapshot_every: int = 64

    def __post_init__(self) -> None:
        if self.action not in ("skip", "rewind"):
            raise ValueError(f'action must be "skip" or "rewind", got {self.action!r}')
        if self.window < 8:
            raise ValueError(f"window must be at least 8 steps for a meaningful median, got {self.window}")
        if not self.threshold > 0:
            raise ValueError(f"threshold must be positive, got {self.threshold}")
        if self.max_spikes < 0 or self.snapshot_every < 1:
            raise ValueError(
                f"max_spikes must not be negative and snapshot_every be positive, got {self.max_spikes} and "
                f"{self.snapshot_every}"
            )
