"""Fake CPU tensors that take a GPU's kernels: shapes, dtypes and what autograd keeps are those of a run on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from proxy_models.architecture import attention, products
from proxy_models.architecture.attention import cuda_kernel
from proxy_models.architecture.layers import Embedding
from proxy_models.architecture.sharded import group_of, part_of
from proxy_models.training import adafactor, rank_totals, whole_matrices
from proxy_models.training.whole_matrices import WholeMatrices


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *, is_causal: bool, dropout_p: float,
    scale: float, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    kernel = cuda_kernel(query.dtype, query.shape[-1], biased=attn_mask is not None, grouped=enable_gqa)
    if kernel == "flash":
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if kernel == "math":
        raise AssertionError("a GPU would take the math kernel")
    if attn_mask is not None:
        attn_mask = attn_mask.expand(len(query), -1, -1, -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


class _FusedRMSNorm(torch.autograd.Function):
    """Keeps its input and a number a row, as torch's fused kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, _shape: Any, weight: Tensor, _eps: float) -> Tensor:
    if not isinstance(x, DTensor):
        return cast(Tensor, _FusedRMSNorm.apply(x, weight))  # type: ignore[no-untyped-call]
    gain = cast(DTensor, weight).to_local(grad_placements=[Partial()])
    normed = _FusedRMSNorm.apply(x.to_local(), gain)  # type: ignore[no-untyped-call]
    return DTensor.from_local(normed, x.device_mesh, x.placements, run_check=False)


def _look_up(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.embedding(ids, weight.to(dtype))


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same on real tensors, as ranks of a mesh are numbers that are read."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return called


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Tensors made inside are fake, and operators are those that a GPU would run."""
    with ExitStack() as stack:
        for owner, name, value in (
            (F, "scaled_dot_product_attention", _attention),
            (F, "rms_norm", _rms_norm),
            (Embedding, "_look_up", staticmethod(_look_up)),
            (attention, "_on_gpu", lambda _: True),
            (products, "MKL_IS_SLOW", False),
            *((WholeMatrices, name, property(_real(vars(WholeMatrices)[name].func))) for name in ("_places", "_parts")),
            *(
                (DeviceMesh, name, staticmethod(_real(getattr(DeviceMesh, name))))
                for name in ("_concatenate", "from_group")
            ),
            *((module, "group_of", _real(group_of)) for module in (rank_totals, whole_matrices)),
            (adafactor, "part_of", _real(part_of)),
            *(
                (DeviceMesh, name, _real(getattr(DeviceMesh, name)))
                for name in ("__init__", "__getitem__", "get_coordinate")
            ),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield
