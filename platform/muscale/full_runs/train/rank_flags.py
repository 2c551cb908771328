"""Save and stop flags on which all ranks agree every few steps over gloo, so that all ranks act at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from muscale.full_runs.distributed import rank

MOST_STEPS = 16
"""Most steps between two agreements. An agreement takes under a millisecond, steps of small models take milliseconds."""
MOST_SECONDS = 5.0
"""Longest time between two agreements, unless a step takes longer: a preempted machine has 30 s (Kubernetes' grace period)."""

AGREEMENTS_NAMED = 64
"""Agreements after which the slowest rank is named again: five minutes of long steps."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank for which the others waited most: per step, the median rank waited `slowest_seconds` longer than this rank.

    Collectives keep ranks in step, so all have the same step time, and the rank that arrives last waits least. For a slow GPU this
    shows only the work after a step's last collective, for a slow host all of its work.
    """

    slowest_rank: int
    slowest_seconds: float

    @classmethod
    def of(cls, waited: Tensor, steps: int) -> Self:
        """Compute from the seconds that each rank waited in agreements, over this many steps."""
        behind = waited.quantile(0.5) - waited.min()
        return cls(slowest_rank=int(waited.argmin()), slowest_seconds=float(behind) / max(steps, 1))


class RankFlags:
    """The flags of the last agreement.

    Attributes:
        saves: Whether a checkpoint is due, by rank 0's clock.
        ends: Whether any rank was notified of a preemption.
        steps: Steps until the next agreement, from the slowest rank's step time.
        straggler: The slowest rank, at every 64th agreement of several ranks; otherwise None.
    """

    def __init__(self, *, every_seconds: float | None, notice: Callable[[], bool], timeout: timedelta) -> None:
        """Prepare; joins no group before the first agreement.

        Args:
            every_seconds: Time between checkpoints, by rank 0's clock; None: not by time.
            notice: Function that tells if this rank was notified of a preemption.
        """
        self.saves = self.ends = False
        self.steps = 1
        self._every, self._notice, self._timeout = every_seconds, notice, timeout
        self._saved_at = self._agreed_at = time.monotonic()
        self._group: dist.ProcessGroup | None = None
        self.straggler: Straggler | None = None
        self._agreements = self._taken = 0
        self._waited = 0.0  # seconds in agreements since a straggler was last named

    def agree(self, taken: int) -> None:
        """Agree on the flags, `taken` steps after the last agreement; all ranks call this."""
        now = time.monotonic()
        wishes = torch.tensor([self._is_time(), self._notice(), (now - self._agreed_at) / max(taken, 1), self._waited])
        if dist.is_initialized():
            # A separate group, since a checkpoint's write uses the other gloo group in its thread.
            self._group = self._group or dist.new_group(backend="gloo", timeout=self._timeout)
            of_ranks = [torch.empty_like(wishes) for _ in range(dist.get_world_size())]
            dist.all_gather(of_ranks, wishes, group=self._group)
            self._waited += time.monotonic() - now
            self._name(torch.stack(of_ranks)[:, 3], taken)
            wishes = torch.stack(of_ranks).amax(dim=0)
        saves, ends, seconds, _ = wishes.tolist()
        self.saves, self.ends, self._agreed_at = bool(saves), bool(ends), now
        self.steps = max(1, int(min(MOST_STEPS, MOST_SECONDS / max(seconds, 1e-9))))

    def _name(self, waited: Tensor, taken: int) -> None:
        self._agreements, self._taken, self.straggler = self._agreements + 1, self._taken + taken, None
        if self._agreements % AGREEMENTS_NAMED == 0 and len(waited) > 1:
            self.straggler = Straggler.of(waited, self._taken)
            self._taken, self._waited = 0, 0.0

    def saved(self) -> None:
        """Restart the checkpoint clock."""
        self._saved_at = time.monotonic()

    def _is_time(self) -> bool:
        return self._every is not None and rank() == 0 and time.monotonic() - self._saved_at >= self._every
