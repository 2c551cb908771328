"""Newton–Schulz for matrices, also sharded: each matrix is orthogonalised by one rank, with the work balanced over ranks.

A step has two exchanges in bf16, the precision of torch's iteration: parts go to the orthogonalising ranks and come back. A rank
sends and receives its share of the matrices twice, whereas gathering would bring all matrices to every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

from proxy_models.architecture.sharded import group_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Part = tuple[slice, ...]


def orthogonalized(update: Tensor, *, stack: bool) -> Tensor:
    """Return an update orthogonalised in bf16: each matrix of a stack, or else the single matrix (outputs, all other dimensions).

    torch's iteration supports a single matrix; the code for stacks repeats its steps.
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
    """Orthogonalises the same sharded matrices at every step, on the ranks of their mesh."""

    def __init__(self, like: Sequence[DTensor]) -> None:
        """Prepare for matrices with these shapes and placements."""
        self._mesh = like[0].device_mesh
        self._matrices = [(matrix.shape, tuple(matrix.placements)) for matrix in like]
        self._group = group_of(like[0])
        self._rank, self._ranks = self._group.rank(), range(self._group.size())

    @cached_property
    def _places(self) -> list[list[int]]:
        """Coordinates of each of the group's ranks in the mesh."""
        return [self._mesh.mesh.eq(rank).nonzero()[0].tolist() for rank in dist.get_process_group_ranks(self._group)]

    @cached_property
    def owners(self) -> list[int]:
        """Rank of each matrix: in descending size, each matrix goes to the rank with the least work."""
        work = [0] * len(self._ranks)
        owners = [0] * len(self._matrices)
        sizes = [(shape[0], shape[1:].numel()) for shape, _ in self._matrices]
        costs = [max(size) * min(size) ** 2 for size in sizes]  # proportional to the iteration's products
        for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
            owners[number] = min(self._ranks, key=work.__getitem__)
            work[owners[number]] += costs[number]
        return owners

    @cached_property
    def _owned(self) -> list[list[int]]:
        return [[n for n, owner in enumerate(self.owners) if owner == rank] for rank in self._ranks]

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

    def __call__(self, updates: Sequence[DTensor]) -> list[Tensor]:
        """Return this rank's part of each orthogonalised matrix, bf16."""
        here, parts, ours = [update.to_local().bfloat16() for update in updates], self._parts, self._owned[self._rank]
        given = [[here[n] for n in self._owned[owner] if self._rank in self._sources[n]] for owner in self._ranks]
        taken = [[(n, parts[n][source]) for n in ours if source in self._sources[n]] for source in self._ranks]
        pieces = iter(self._exchanged(given, [[_size(part) for _, part in of] for of in taken], here[0]))
        whole = {n: here[0].new_empty(self._matrices[n][0]) for n in ours}
        for number, part in (one for of in taken for one in of):
            whole[number][part] = next(pieces)
        for number, matrix in whole.items():
            whole[number] = orthogonalized(matrix, stack=False)
        given = [[whole[n][parts[n][rank]] for n in ours] for rank in self._ranks]
        taken_back = [[tuple(here[n].shape) for n in self._owned[owner]] for owner in self._ranks]
        pieces = iter(self._exchanged(given, taken_back, here[0]))
        back = {n: next(pieces) for owned in self._owned for n in owned}
        return [back[n] for n in range(len(here))]

    def _exchanged(self, given: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor) -> list[Tensor]:
        """Send every rank its tensors, and return the received tensors, whose shapes are given by sender."""
        sizes = [[torch.Size(shape).numel() for shape in of] for of in shapes]
        flat = [tensor.flatten() for of in given for tensor in of]
        received = like.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received,
            torch.cat(flat) if flat else like.new_empty(0),
            [sum(of) for of in sizes],
            [sum(tensor.numel() for tensor in of) for of in given],
            group=self._group,
        )
        pieces = torch.split(received, [n for of in sizes for n in of])
        return [piece.view(shape) for piece, shape in zip(pieces, (one for of in shapes for one in of), strict=True)]


def _size(part: Part) -> tuple[int, ...]:
    return tuple(one.stop - one.start for one in part)
