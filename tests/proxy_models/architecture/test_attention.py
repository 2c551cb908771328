"""The kernel of attention on a GPU, and the numbers where keys and values are expanded for it."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proxy_models.architecture import attention
from proxy_models.architecture.attention import attend, cuda_kernel
from proxy_models.architecture.decoder import alibi_bias

CASES = list(product((torch.float32, torch.bfloat16, torch.float16), (1, 2), (False, True), (0.0, 0.1)))
"""Dtype, queries per key, ALiBi, dropout."""


class Attentions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of attention's kernels, and the shapes of their keys; the math kernel has none, and multiplies batches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "attention" in name or name == "bmm":
            self.kernels[name.removeprefix("_scaled_dot_product_").removesuffix("_attention")] += 1
        return func(*args, **(kwargs or {}))


def states(dtype: torch.dtype, groups: int, device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 32, heads, 16, device=device, dtype=dtype) for heads in (4, 4 // groups, 4 // groups)]


@pytest.mark.parametrize(("dtype", "groups", "biased", "dropout"), CASES)
def test_no_path_needs_the_math_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, groups: int, biased: bool, dropout: float
) -> None:
    passed: list[tuple[torch.dtype, int, bool, bool]] = []

    def record(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        assert key.shape == value.shape
        assert options["enable_gqa"] == (key.shape[1] < query.shape[1])
        assert options["dropout_p"] == dropout
        passed.append((query.dtype, query.shape[-1], options["attn_mask"] is not None, options["enable_gqa"]))
        return query

    monkeypatch.setattr(attention, "_on_gpu", lambda _: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    attend(*states(dtype, groups), bias=alibi_bias(32, 4).to(dtype) if biased else None, dropout=dropout)
    ((seen, head_dim, has_bias, grouped),) = passed
    kernel = cuda_kernel(seen, head_dim, biased=has_bias, grouped=grouped)
    assert kernel == ("efficient" if biased or dtype == torch.float32 else "flash")


@pytest.mark.parametrize("biased", [False, True])
def test_expanded_keys_and_values_give_what_groups_give(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    bias = alibi_bias(32, 4) if biased else None
    inputs = [x.requires_grad_() for x in states(torch.float32, 2)]
    grouped = attend(*inputs, bias=bias, dropout=0.0)
    monkeypatch.setattr(attention, "_on_gpu", lambda _: True)
    expanded = attend(*inputs, bias=bias, dropout=0.0)
    torch.testing.assert_close(expanded, grouped)
    for here, there in zip(
        torch.autograd.grad(expanded.square().sum(), inputs),
        torch.autograd.grad(grouped.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(here, there)


def test_a_head_that_does_not_fill_sixteen_bytes_is_for_the_math_kernel() -> None:
    assert cuda_kernel(torch.float32, 6, biased=False, grouped=False) == "math"
    assert cuda_kernel(torch.bfloat16, 12, biased=True, grouped=False) == "math"
    assert cuda_kernel(torch.bfloat16, 12, biased=False, grouped=True) == "flash"
    assert cuda_kernel(torch.bfloat16, 512, biased=False, grouped=False) == "efficient"


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "groups", "biased", "dropout"), CASES)
def test_a_gpu_takes_the_kernel_that_is_stated(dtype: torch.dtype, groups: int, biased: bool, dropout: float) -> None:
    bias = alibi_bias(32, 4).to("cuda", dtype) if biased else None
    with Attentions() as counted:
        attend(*states(dtype, groups, "cuda"), bias=bias, dropout=dropout)
    fused = {"efficient"} if biased or dtype == torch.float32 else {"flash", "cudnn"}
    assert counted.kernels.total() == 1
    assert set(counted.kernels) <= fused
