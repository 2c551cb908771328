"""Context parallelism of the decoder: ranks that share every sequence.

A sequence has 2n equal chunks for n ranks; rank r has chunks r and 2n - 1 - r, so that the causal mask leaves every rank equally many
pairs (arXiv 2407.21783, section 3.3.2). Each block gathers the keys and values of all positions, and the backward pass scatters the
sums of their gradients. This works with every mask, and with grouped heads keys and values are small. A rank computes everything else,
and the loss, for its own positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives


class SequenceShare:
    """The positions of a sequence that a rank of a group has."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank, self._ranks = group, group.rank(), group.size()

    def begins(self, time: int) -> tuple[int, int]:
        """Return the first positions of the rank's two chunks of a sequence."""
        chunk = time // (2 * self._ranks)
        return self._rank * chunk, (2 * self._ranks - 1 - self._rank) * chunk

    def own(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return the rank's positions of a tensor that has all of them along `dim`."""
        time = whole.shape[dim]
        return torch.cat([whole.narrow(dim, begin, time // (2 * self._ranks)) for begin in self.begins(time)], dim)

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all positions, in order, from the rank's own; each is (batch, time, heads, head_dim)."""
        states = torch.stack((key, value))
        every = collectives.wait_tensor(collectives.all_gather_single_autograd(states, 0, self._group))  # type: ignore[no-untyped-call]
        # Rank, key or value, batch, chunk, position, ….
        chunks = every.unflatten(0, (self._ranks, 2)).unflatten(3, (2, -1))
        in_order = torch.cat((chunks[:, :, :, 0], chunks[:, :, :, 1].flip(0)))
        whole = in_order.movedim(0, 2).flatten(2, 3)
        return whole[0], whole[1]
