"""Newton–Schulz of matrices, and of sharded ones: each matrix is orthogonalised by one rank, and all ranks have as much to do.

Two exchanges a step, in the precision of torch's iteration, bf16: parts go to the ranks that orthogonalise them, and come back. A rank
sends and receives its share of the matrices twice, where gathering all of them would bring every rank everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _zeropower_via_newtonschulz,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Part = tuple[slice, ...]


def orthogonalized(update: Tensor, *, stack: bool) -> Tensor:
    """Return an update orthogonalised, bf16: each matrix of a stack, or else the one matrix (outputs, everything else).

    torch's iteration takes one matrix; what follows is the same for many.
    """
    if not stack:
        coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
        matrix = _zeropower_via_newtonschulz(update.flatten(1), coefficients, DEFAULT_NS_STEPS, EPS)
        return matrix.reshape(update.shape)
    matrices, is_tall = update.bfloat16(), update.shape[-2] > update.shape[-1]
    if is_tall:
        matrices = matrices.mT
    matrices = matrices / torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(DEFAULT_NS_STEPS):
        gram = matrices @ matrices.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=DEFAULT_B, alpha=DEFAULT_C)
        matrices = torch.baddbmm(matrices, polynomial, matrices, beta=DEFAULT_A)
    return matrices.mT if is_tall else matrices


class Orthogonalization:
    """Orthogonalises the same sharded matrices at every step; the ranks of their mesh must be all there are."""

    def __init__(self, like: Sequence[DTensor]) -> None:
        """Take matrices of the same shapes and placements as those to come."""
        self._mesh = like[0].device_mesh
        self._matrices = [(matrix.shape, tuple(matrix.placements)) for matrix in like]
        self._rank, self._ranks = dist.get_rank(), range(dist.get_world_size())

    @cached_property
    def _places(self) -> list[list[int]]:
        """The coordinates of each rank in the mesh."""
        return [self._mesh.mesh.eq(rank).nonzero()[0].tolist() for rank in self._ranks]

    @cached_property
    def owners(self) -> list[int]:
        """The rank of each matrix: the largest is next, and goes to the rank with the least work."""
        work = [0] * len(self._ranks)
        owners = [0] * len(self._matrices)
        sizes = [(shape[0], shape[1:].numel()) for shape, _ in self._matrices]
        costs = [max(size) * min(size) ** 2 for size in sizes]  # as the products of the iteration
        for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
            owners[number] = min(self._ranks, key=work.__getitem__)
            work[owners[number]] += costs[number]
        return owners

    @cached_property
    def _owned(self) -> list[list[int]]:
        return [[n for n, owner in enumerate(self.owners) if owner == rank] for rank in self._ranks]

    @cached_property
    def _parts(self) -> list[list[Part]]:
        """The part of each matrix that each rank has."""
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
        """The ranks of the owner's copy of each matrix, which have all of it between them, once."""
        sources = []
        for owner, (_, placements) in zip(self.owners, self._matrices, strict=True):
            copies = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
            home = [self._places[owner][dim] for dim in copies]
            sources.append({rank for rank in self._ranks if [self._places[rank][dim] for dim in copies] == home})
        return sources

    def __call__(self, updates: Sequence[DTensor]) -> list[Tensor]:
        """Return this rank's part of each orthogonalised matrix, bf16."""
        here, parts, ours = [update.to_local().bfloat16() for update in updates], self._parts, self._owned[self._rank]
        given = [[here[n] for n in self._owned[owner] if self._rank in self._sources[n]] for owner in self._ranks]
        taken = [[(n, parts[n][source]) for n in ours if source in self._sources[n]] for source in self._ranks]
        pieces = iter(_exchanged(given, [[_size(part) for _, part in of] for of in taken], here[0]))
        whole = {n: here[0].new_empty(self._matrices[n][0]) for n in ours}
        for number, part in (one for of in taken for one in of):
            whole[number][part] = next(pieces)
        for number, matrix in whole.items():
            whole[number] = orthogonalized(matrix, stack=False)
        given = [[whole[n][parts[n][rank]] for n in ours] for rank in self._ranks]
        taken_back = [[tuple(here[n].shape) for n in self._owned[owner]] for owner in self._ranks]
        pieces = iter(_exchanged(given, taken_back, here[0]))
        back = {n: next(pieces) for owned in self._owned for n in owned}
        return [back[n] for n in range(len(here))]


def _size(part: Part) -> tuple[int, ...]:
    return tuple(one.stop - one.start for one in part)


def _exchanged(given: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor) -> list[Tensor]:
    """Send every rank its tensors, and return those of these shapes that every rank sends."""
    sizes = [[torch.Size(shape).numel() for shape in of] for of in shapes]
    flat = [tensor.flatten() for of in given for tensor in of]
    received = like.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        received,
        torch.cat(flat) if flat else like.new_empty(0),
        [sum(of) for of in sizes],
        [sum(tensor.numel() for tensor in of) for of in given],
    )
    pieces = torch.split(received, [n for of in sizes for n in of])
    return [piece.view(shape) for piece, shape in zip(pieces, (one for of in shapes for one in of), strict=True)]
