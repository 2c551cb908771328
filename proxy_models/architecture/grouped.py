"""Products of groups of rows, each with its own matrix, as the experts of a mixture need them.

torch's grouped product can neither be compiled nor traced in fp32 and counts no FLOPs, so it is an operator here. On a GPU torch has
it in bf16 only; in other precisions a loop over the groups computes it, which waits for the device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch import library as operators
from torch.utils.flop_counter import register_flop_formula

from proxy_models.architecture import products  # noqa: F401  # defines the library that the fragment belongs to

_LIBRARY = operators.Library("muscale", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("grouped_product(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define("grouped_outer(Tensor left, Tensor right, Tensor ends) -> Tensor")  # type: ignore[no-untyped-call]


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each group of rows with its matrix, with gradients for both.

    Args:
        rows: Rows of all groups, one group after the other, (rows, inputs); in bytes, a row is a multiple of 16.
        matrices: Matrix of each group in the dtype of the rows, (groups, outputs, inputs); `outputs` as `inputs` fill 16 bytes.
        ends: Number of rows up to the end of each group, (groups,), int32; the last is the number of rows. Groups may be empty.

    Returns:
        Products, (rows, outputs).
    """
    return cast(Tensor, _GroupedProduct.apply(rows, matrices, ends))  # type: ignore[no-untyped-call]


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices, ends)
        return cast(Tensor, torch.ops.muscale.grouped_product.default(rows, matrices.transpose(1, 2), ends))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, matrices, ends = ctx.saved_tensors
        gradient = gradient.contiguous()  # torch refuses expanded rows
        of_rows = torch.ops.muscale.grouped_product.default(gradient, matrices, ends)
        return of_rows, torch.ops.muscale.grouped_outer.default(gradient, rows, ends), None


def _has_kernel(rows: Tensor) -> bool:
    return rows.device.type == "cpu" or rows.dtype == torch.bfloat16


def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if not len(rows):  # torch 2.13 refuses the strides of no row
        return rows.new_empty(0, matrices.shape[2])
    if _has_kernel(rows):
        return torch._grouped_mm(rows, matrices, offs=ends)
    return product_by_loop(rows, matrices, ends)


def _outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if not len(left):
        return left.new_zeros(len(ends), left.shape[1], right.shape[1])
    if _has_kernel(left):
        return torch._grouped_mm(left.t(), right, offs=ends)
    return outer_by_loop(left, right, ends)


def product_by_loop(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return what the operator returns, from one product after another; matrices are (groups, inputs, outputs)."""
    return torch.cat([rows[group] @ matrix for group, matrix in zip(_groups(ends), matrices, strict=True)])


def outer_by_loop(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return leftᵀ · right of each group of rows, (groups, columns of left, columns of right), from one product after another."""
    return torch.stack([left[group].t() @ right[group] for group in _groups(ends)])


def _groups(ends: Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("grouped_product", _product, _device)  # type: ignore[no-untyped-call]
    _LIBRARY.impl("grouped_outer", _outer, _device)  # type: ignore[no-untyped-call]
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "grouped_product", lambda rows, matrices, _: rows.new_empty(rows.shape[0], matrices.shape[2]), "Meta"
)
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "grouped_outer", lambda left, right, ends: left.new_empty(len(ends), left.shape[1], right.shape[1]), "Meta"
)


@register_flop_formula(torch.ops.muscale.grouped_product)
def _flops_of_product(rows: tuple[int, int], matrices: tuple[int, int, int], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * rows[1] * matrices[2]


@register_flop_formula(torch.ops.muscale.grouped_outer)
def _flops_of_outer(left: tuple[int, int], right: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
