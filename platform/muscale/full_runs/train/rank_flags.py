"""Save and stop flags, reduced with the loss, so that all ranks act at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from muscale.full_runs.distributed import rank


class RankFlags:
    """The flags after each step.

    Attributes:
        saves: A checkpoint is due, by rank 0's clock.
        ends: Some rank was notified of a preemption.
    """

    def __init__(self, *, every_seconds: float | None, notice: Callable[[], bool]) -> None:
        self.saves = self.ends = False
        self._every, self._notice, self._saved_at = every_seconds, notice, time.monotonic()

    def mean(self, loss: Tensor) -> Tensor:
        """Mean of the loss over ranks with equal shares; also reduces the flags."""
        wishes = [self._is_time(), self._notice()]
        if dist.is_initialized():
            reduced = torch.stack([loss, *(loss.new_tensor(float(wish)) for wish in wishes)])
            dist.all_reduce(reduced)
            loss = reduced[0] / dist.get_world_size()
            wishes = [count > 0 for count in reduced[1:].tolist()]
        self.saves, self.ends = wishes
        return loss

    def saved(self) -> None:
        """Restart the checkpoint clock."""
        self._saved_at = time.monotonic()

    def _is_time(self) -> bool:
        return self._every is not None and rank() == 0 and time.monotonic() - self._saved_at >= self._every
