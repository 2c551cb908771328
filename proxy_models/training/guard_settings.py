"""Settings of the stability guard, for whoever reads a study without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["skip", "rewind"]


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Definition of a spike and the action taken on one; they determine the numbers of a run.

    Attributes:
        action: "skip" leaves the step out; "rewind" also puts the weights and moments of the last snapshot back. The
            position goes on in both: the batches between snapshot and spike are not seen again.
        window: Accepted steps that a step is compared with; nothing is judged before half of them are there.
        threshold: Robust standard deviations above the median that make a spike.
        max_spikes: More than so many within `window` steps end the run as diverged.
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
            raise ValueError(f"window must be at least 8 steps for a median to mean anything, got {self.window}")
        if not self.threshold > 0:
            raise ValueError(f"threshold must be positive, got {self.threshold}")
        if self.max_spikes < 0 or self.snapshot_every < 1:
            raise ValueError(
                f"max_spikes must not be negative and snapshot_every be positive, got {self.max_spikes} and "
                f"{self.snapshot_every}"
            )
