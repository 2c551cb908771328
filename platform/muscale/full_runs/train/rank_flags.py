"""Save and stop flags of all ranks, reduced with the loss: what one rank knows, all do at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from muscale.full_runs.distributed import rank


class RankFlags:
    """Of the ranks, after each step.

    Attributes:
        saves: It is time for a checkpoint, by rank 0's clock.
        ends: Some rank was notified that it will lose its machine.
    """

    def __init__(self, *, every_seconds: float | None, notice: Callable[[], bool]) -> None:
        self.saves = self.ends = False
        self._every, self._notice, self._saved_at = every_seconds, notice, time.monotonic()

    def mean(self, loss: Tensor) -> Tensor:
        """Mean over ranks of a loss whose parts count alike; what they want is settled along the way."""
        wishes = [self._is_time(), self._notice()]
        if dist.is_initialized():
            told = torch.stack([loss, *(loss.new_tensor(float(wish)) for wish in wishes)])
            dist.all_reduce(told)
            loss = told[0] / dist.get_world_size()
            wishes = [count > 0 for count in told[1:].tolist()]
        self.saves, self.ends = wishes
        return loss

    def saved(self) -> None:
        """A checkpoint was begun: the clock starts anew."""
        self._saved_at = time.monotonic()

    def _is_time(self) -> bool:
        return self._every is not None and rank() == 0 and time.monotonic() - self._saved_at >= self._every
