"""Totals over ranks of sums that each rank has of its parts of sharded parameters, all in one reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxy_models.architecture.sharded import group_of, is_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RankTotals:
    """Adds up sums of the same parameters at every step, over the ranks of their mesh."""

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None

    def __call__(self, parameters: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor]:
        """Return the totals of each parameter's sums, without a wait for the device."""
        if not parameters or not is_sharded(first := parameters[0]):
            return list(sums)
        self._group = self._group or group_of(first)
        flat = torch.cat(list(sums))
        torch.distributed.all_reduce(flat, group=self._group)
        return list(torch.split(flat, [len(one) for one in sums]))


def counted_once(parameter: Tensor, sums: Tensor) -> Tensor:
    """Return the sums, or zeros on a rank that has a further copy of the parameter's part."""
    if not is_sharded(parameter):
        return sums
    place = parameter.device_mesh.get_coordinate() or ()
    is_copy = any(at and of.is_replicate() for at, of in zip(place, parameter.placements, strict=True))
    return sums * (not is_copy)
