"""Expert parallelism of the decoder: each rank has some of a block's experts, and rows travel to the rank of their expert and back.

A rank's rows are as many as its experts were chosen for, so the host waits for the device once a block, to know how many to receive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from proxy_models.architecture.experts import RoutedMLP, inverse, permuted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from proxy_models.architecture.decoder import Decoder


def share_experts(model: Decoder, mesh: DeviceMesh) -> Iterator[nn.Module]:
    """Give each rank of a mesh as many experts of each block of a decoder without values; yield the modules of experts."""
    for mixture in (module for module in model.modules() if isinstance(module, RoutedMLP)):
        mixture.share = ExpertShare(mesh.get_group())
        for name, stack in list(mixture.experts.named_parameters()):
            setattr(mixture.experts, name, nn.Parameter(distribute_tensor(stack.detach(), mesh, [Shard(0)])))
        yield mixture.experts


class ExpertShare:
    """The exchange of rows between the ranks of a group, each with as many experts, in the order of the ranks.

    The gradients of experts are means over the group, as data parallelism has them.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __call__(self, experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, load: Tensor) -> Tensor:
        """Return what the experts of all ranks make of this rank's rows, which are sorted by expert.

        Args:
            experts: Function of rows sorted by this rank's experts, and each expert's end among them.
            load: Rows of each expert of all ranks, (experts,), int64.
        """
        n = self._group.size()
        received, leaving, arriving = self._counts(load)
        rows = self._sent(rows, arriving, leaving)
        own = torch.arange(received.shape[1], device=rows.device).repeat(n)
        order = own.repeat_interleave(received.flatten(), output_size=len(rows)).argsort(stable=True)
        places = inverse(order)
        rows = _scaled(permuted(rows, order, places), n)
        made = _scaled(experts(rows, received.sum(0).cumsum(0).int()), 1 / n)
        return self._sent(permuted(made, places, order), leaving, arriving)

    def _counts(self, load: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Return the rows that arrive for each own expert, (ranks, own experts), and those that leave and arrive by rank."""
        n = self._group.size()
        counts = wait_tensor(all_to_all_single(load, None, None, self._group))  # type: ignore[no-untyped-call]
        received = counts.view(n, -1)
        leaving, arriving = torch.stack([load.view(n, -1).sum(1), received.sum(1)]).tolist()
        return received, leaving, arriving

    def _sent(self, rows: Tensor, arriving: list[int], leaving: list[int]) -> Tensor:
        """Return the rows that arrive from each rank, for those that leave to each."""
        rows = all_to_all_single_autograd(rows, arriving, leaving, self._group)
        return cast(Tensor, wait_tensor(rows))  # type: ignore[no-untyped-call]


def _scaled(rows: Tensor, factor: float) -> Tensor:
    """Return rows whose gradient is multiplied by a factor."""
    return cast(Tensor, _Scaled.apply(rows, factor))  # type: ignore[no-untyped-call]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
