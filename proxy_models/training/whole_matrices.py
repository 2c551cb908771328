"""Functions of whole matrices that are sharded: each matrix is computed by one rank, its owner.

A step has two exchanges, in the dtype of the parts: parts go to the owners and results come back. A rank sends and receives its
share of the matrices twice, whereas gathering would bring all matrices to every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from proxy_models.architecture.memory import least_work
from proxy_models.architecture.sharded import group_of, is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Part = tuple[slice, ...]


def by_matrix(stack: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return this rank's part of a stack (matrices, outputs, inputs) of which a function maps some whole matrices to as many.

    A stack whose matrices are sharded is exchanged for the computation, so that each rank has whole ones.
    """
    if not is_sharded(stack):
        return compute(stack)
    from torch.distributed.tensor import DTensor

    between = placements_between(stack)
    mapped = compute(stack.redistribute(placements=between).to_local()).contiguous()
    like = DTensor.from_local(
        mapped, stack.device_mesh, between, run_check=False, shape=stack.shape, stride=stack.stride()
    )
    return like.redistribute(placements=stack.placements).to_local()


def placements_between(stack: DTensor) -> list[Placement]:
    """Return the placements of a stack that is sharded between its matrices over the same ranks."""
    from torch.distributed.tensor import Shard

    return [Shard(0) if placement.is_shard() else placement for placement in stack.placements]


class WholeMatrices:
    """Exchanges of the same sharded matrices at every step, among the ranks of their mesh.

    Attributes:
        group: These ranks.
        owners: Rank of each matrix in the group.
    """

    def __init__(self, like: Sequence[DTensor], cost: Callable[[int, int], int]) -> None:
        """Prepare for matrices with these shapes and placements, of which `cost` returns the work from rows and columns."""
        self._mesh = like[0].device_mesh
        self._matrices = [(matrix.shape, tuple(matrix.placements)) for matrix in like]
        self.group = group_of(like[0])
        self._rank, self._ranks = self.group.rank(), range(self.group.size())
        costs = [cost(matrix.shape[0], matrix.shape[1:].numel()) for matrix in like]
        self.owners = least_work(costs, len(self._ranks))
        self._owned = [[n for n, owner in enumerate(self.owners) if owner == rank] for rank in self._ranks]

    @cached_property
    def _places(self) -> list[list[int]]:
        """Coordinates of each of the group's ranks in the mesh."""
        return [self._mesh.mesh.eq(rank).nonzero()[0].tolist() for rank in dist.get_process_group_ranks(self.group)]

    @cached_property
    def _parts(self) -> list[list[Part]]:
        """Part of each matrix on each rank."""
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

        known = {}
        for shape, placements in set(self._matrices):
            known[shape, placements] = [
                tuple(slice(begin, begin + size) for size, begin in zip(sizes, begins, strict=True))
                for sizes, begins in (
                    _compute_local_shape_and_global_offset(shape, self._mesh.shape, place, placements)
                    for place in self._places
                )
            ]
        return [known[matrix] for matrix in self._matrices]

    @cached_property
    def _sources(self) -> list[set[int]]:
        """Ranks in the owner's copy of each matrix; together they have each entry once."""
        sources = []
        for owner, (_, placements) in zip(self.owners, self._matrices, strict=True):
            copies = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
            home = [self._places[owner][dim] for dim in copies]
            sources.append({rank for rank in self._ranks if [self._places[rank][dim] for dim in copies] == home})
        return sources

    def __call__(self, here: Sequence[Tensor], compute: Callable[[dict[int, Tensor]], None]) -> list[Tensor]:
        """Return this rank's part of each result.

        Args:
            here: This rank's part of each matrix, all of one dtype.
            compute: Function that replaces this rank's whole matrices, by number, by results of the same shape and dtype.
        """
        parts, ours = self._parts, self._owned[self._rank]
        given = [[here[n] for n in self._owned[owner] if self._rank in self._sources[n]] for owner in self._ranks]
        taken = [[(n, parts[n][source]) for n in ours if source in self._sources[n]] for source in self._ranks]
        pieces = iter(self._exchanged(given, [[_size(part) for _, part in of] for of in taken], here[0]))
        whole = {n: here[0].new_empty(self._matrices[n][0]) for n in ours}
        for number, part in (one for of in taken for one in of):
            whole[number][part] = next(pieces)
        del pieces
        compute(whole)
        given = [[whole[n][parts[n][rank]] for n in ours] for rank in self._ranks]
        whole.clear()  # `given` has the results, until they are sent
        taken_back = [[tuple(here[n].shape) for n in self._owned[owner]] for owner in self._ranks]
        pieces = iter(self._exchanged(given, taken_back, here[0]))
        back = {n: next(pieces) for owned in self._owned for n in owned}
        return [back[n] for n in range(len(here))]

    def _exchanged(self, given: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor) -> list[Tensor]:
        """Send every rank its tensors, and return the received tensors, whose shapes are given by sender; `given` is emptied."""
        sizes = [[torch.Size(shape).numel() for shape in of] for of in shapes]
        numbers = [sum(tensor.numel() for tensor in of) for of in given]
        tensors = [tensor for of in given for tensor in of]
        sent = like.new_empty(sum(numbers))
        if tensors:
            places = torch.split(sent, [tensor.numel() for tensor in tensors])
            torch._foreach_copy_([to.view(of.shape) for to, of in zip(places, tensors, strict=True)], tensors)
        for of in (tensors, *given):
            of.clear()
        received = like.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(received, sent, [sum(of) for of in sizes], numbers, group=self.group)
        pieces = torch.split(received, [n for of in sizes for n in of])
        return [piece.view(shape) for piece, shape in zip(pieces, (one for of in shapes for one in of), strict=True)]


def _size(part: Part) -> tuple[int, ...]:
    return tuple(one.stop - one.start for one in part)
