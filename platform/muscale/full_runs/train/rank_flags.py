"""Save and stop flags, agreed by all ranks every few steps over gloo, so that all ranks act at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from muscale.full_runs.distributed import rank

MOST_STEPS = 16
"""Steps between two agreements at most. An agreement takes under a millisecond, against steps of milliseconds on small models."""
MOST_SECONDS = 5.0
"""Time between two agreements at most, or a step where one takes longer: a preempted machine has 30 s (Kubernetes' grace period)."""


class RankFlags:
    """The flags as last agreed.

    Attributes:
        saves: A checkpoint is due, by rank 0's clock.
        ends: Some rank was notified of a preemption.
        steps: Steps until the next agreement, from the slowest rank's time for a step.
    """

    def __init__(self, *, every_seconds: float | None, notice: Callable[[], bool]) -> None:
        self.saves = self.ends = False
        self.steps = 1
        self._every, self._notice = every_seconds, notice
        self._saved_at = self._agreed_at = time.monotonic()
        self._group: dist.ProcessGroup | None = None

    def agree(self, taken: int) -> None:
        """Agree on the flags, `taken` steps after the last time; all ranks call it."""
        now = time.monotonic()
        wishes = torch.tensor([self._is_time(), self._notice(), (now - self._agreed_at) / max(taken, 1)])
        if dist.is_initialized():
            # A group of its own: a checkpoint's write uses the other gloo group from its thread.
            self._group = self._group or dist.new_group(backend="gloo")
            dist.all_reduce(wishes, dist.ReduceOp.MAX, group=self._group)
        saves, ends, seconds = wishes.tolist()
        self.saves, self.ends, self._agreed_at = bool(saves), bool(ends), now
        self.steps = max(1, int(min(MOST_STEPS, MOST_SECONDS / max(seconds, 1e-9))))

    def saved(self) -> None:
        """Restart the checkpoint clock."""
        self._saved_at = time.monotonic()

    def _is_time(self) -> bool:
        return self._every is not None and rank() == 0 and time.monotonic() - self._saved_at >= self._every
