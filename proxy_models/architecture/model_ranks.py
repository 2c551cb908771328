"""Ranks that hold one sharded model and use it together.

A forward pass gathers weights from all ranks, so every rank has to make the same number of passes. The ranks therefore run the same
program and divide only its passes among themselves; a rank without a share repeats another rank's pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from proxy_models.architecture.sharded import whole

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the ranks of a model. All ranks call each method, in the same order.

    Attributes:
        rank: Number of this process, from 0.
        n: Number of ranks; 1 for a model that is whole in this process.
    """

    rank: int = 0
    n: int = 1

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return the ranks of a model; FSDP2 must have sharded it over all ranks of the process group."""
        fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import; without it no model is sharded
        is_sharded = fsdp is not None and isinstance(model, fsdp.FSDPModule)
        return cls(rank=dist.get_rank(), n=dist.get_world_size()) if is_sharded else cls()

    def gather(self, value: T) -> list[T]:
        """Return the value of each rank, by rank."""
        values = [value] * self.n
        if self.n > 1:
            dist.all_gather_object(values, value)
        return values

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on rank 0; the other ranks do not call it."""
        made = [make() if self.rank == 0 else None]
        if self.n > 1:
            dist.broadcast_object_list(made, src=0)
        return cast(T, made[0])

    def to_first(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors by name, on rank 0 only; all ranks call this and take all.

        Sharded tensors are gathered. An ordinary tensor that rank 0 lacks comes from the first rank that has its name.
        """
        of_ranks = self.gather({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
        for name in dict.fromkeys(name for names in of_ranks for name in names):
            owner = next(rank for rank, names in enumerate(of_ranks) if name in names)
            if owner == 0 and name in tensors:
                found = whole(tensors[name])
            elif owner == self.rank:
                dist.send(tensors[name], dst=0)
            elif self.rank == 0:
                shape, dtype = of_ranks[owner][name]
                found = torch.empty(shape, dtype=dtype, device=next(iter(tensors.values())).device)
                dist.recv(found, src=owner)
            if self.rank == 0:
                yield name, found

    def map(self, function: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
        """Yield the function of each item, in order and on all ranks.

        Each rank computes one of `n` items at a time. The function may make forward passes, as many for every item; `generate` makes
        the numbers equal by itself.
        """
        for first in range(0, len(items), self.n):
            part = items[first : first + self.n]
            yield from self.gather(function(part[min(self.rank, len(part) - 1)]))[: len(part)]
