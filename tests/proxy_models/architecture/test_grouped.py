from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from proxy_models.architecture.grouped import grouped_product, outer_by_loop, product_by_loop

ENDS = torch.tensor([3, 3, 10, 17], dtype=torch.int32)  # the second group is empty


def values(dtype: torch.dtype, n_rows: int = 17) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n_rows, 16, generator=generator).to(dtype).requires_grad_()
    matrices = torch.randn(4, 24, 16, generator=generator).to(dtype).requires_grad_()
    return rows, matrices


def one_by_one(rows: Tensor, matrices: Tensor) -> Tensor:
    bounds = [0, *ENDS.tolist()]
    return torch.cat([rows[begin:end] @ matrices[n].T for n, (begin, end) in enumerate(pairwise(bounds))])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_those_of_one_matrix_after_the_other(dtype: torch.dtype, compiled: bool) -> None:
    rows, matrices = values(dtype)
    product = torch.compile(grouped_product, fullgraph=True, dynamic=False) if compiled else grouped_product
    results = []
    for function in (lambda: product(rows, matrices, ENDS), lambda: one_by_one(rows, matrices)):
        result = function()  # type: ignore[no-untyped-call]
        rows.grad = matrices.grad = None
        result.sum(0).square().sum().backward()  # type: ignore[no-untyped-call]  # its gradient is expanded
        results.append((result, rows.grad, matrices.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    gradient = results[0][2]
    assert gradient is not None
    assert not gradient[1].any()


def test_devices_without_the_kernel_compute_the_same_by_a_loop() -> None:
    rows, matrices = values(torch.float32)
    whole = grouped_product(rows, matrices, ENDS)
    (of_matrices,) = torch.autograd.grad(whole, matrices, torch.ones_like(whole))
    torch.testing.assert_close(product_by_loop(rows, matrices.transpose(1, 2), ENDS), whole)
    torch.testing.assert_close(outer_by_loop(torch.ones_like(whole), rows, ENDS), of_matrices)


def test_no_row_gives_no_product_and_a_gradient_of_zero() -> None:
    rows, matrices = values(torch.float32, n_rows=0)
    result = grouped_product(rows, matrices, torch.zeros_like(ENDS))
    (gradient,) = torch.autograd.grad(result.sum(), matrices)
    assert result.shape == (0, 24)
    assert not gradient.any()


def test_a_product_is_counted_and_needs_no_values() -> None:
    rows, matrices = values(torch.float32)
    with FlopCounterMode(display=False) as counter:
        grouped_product(rows, matrices, ENDS).sum().backward()  # type: ignore[no-untyped-call]
    assert counter.get_total_flops() == 3 * 2 * 17 * 16 * 24
    assert grouped_product(rows.to("meta"), matrices.to("meta"), ENDS.to("meta")).shape == (17, 24)
