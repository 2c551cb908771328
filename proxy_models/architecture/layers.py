"""Layers that compute in the precision of their input: each casts its own weights, which stay fp32.

FSDP2 gathers the weights in that precision, so the cast does nothing. One process and many therefore round at the same places.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from proxy_models.architecture.sharded import first_row, is_sharded, own, within


class Embedding(nn.Embedding):
    """torch's look-up table, in a given precision.

    If each rank has some rows of the table, each rank receives the sum of the ranks' results for its share of the positions.
    """

    def forward(self, input: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Map ids (batch, time) to rows (batch, time, embedding_dim) of the dtype; ranks that share the table split the time."""
        if not is_sharded(self.weight):
            return self._look_up(input, self.weight, dtype)
        from torch.distributed import _functional_collectives as collectives

        part = own(self.weight)
        index, absent = within(input, first_row(self.weight), len(part))
        found = self._look_up(index, part, dtype).masked_fill(cast(Tensor, absent)[..., None], 0.0)
        group = self.weight.device_mesh.get_group()
        return cast(Tensor, collectives.reduce_scatter_single_autograd(found, "sum", 1, group))

    @staticmethod
    def _look_up(input: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        table = weight.to(dtype)
        if dtype == torch.float32 or table.device.type != "cpu":
            return F.embedding(input, table)
        return cast(Tensor, _LookUp.apply(input, table))  # type: ignore[no-untyped-call]


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, width) to the same shape."""
        return F.rms_norm(x, self.normalized_shape, cast_like(self.weight, x), self.eps)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, width) to the same shape."""
        weight, bias = cast_like(self.weight, input), cast_like(self.bias, input)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def cast_like(weight: Tensor | None, input: Tensor) -> Tensor | None:
    """Return the weight in the precision of an input."""
    return None if weight is None else weight.to(input.dtype)


class _LookUp(torch.autograd.Function):
    """Look-up whose gradient is summed in fp32, as on a GPU; on the CPU, torch's sum of ones in bf16 stops at 256."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.n_rows, ctx.dtype = len(table), table.dtype
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        of_table = torch.ops.aten.embedding_dense_backward(gradient.float(), ids, ctx.n_rows, -1, False)
        return None, of_table.to(ctx.dtype)
