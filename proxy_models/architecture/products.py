"""The decoder's matrix products. On an AMD processor with AVX-512, oneDNN computes fp32 products instead of MKL.

torch sends fp32 products to MKL, which uses its AVX-512 kernels only on Intel's processors; oneDNN uses them on all. Measured here
(AMD EPYC, one thread, 1024 rows, GFLOP/s): MKL 95 to 100 from width 64 on; oneDNN 171 to 230 forward and for the gradient of the
input, 101 to 193 for the gradient of the weight. All products stay fp32; only the order of the sums differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import library as operators
from torch.utils.flop_counter import register_flop_formula

from proxy_models.architecture.layers import cast_like

_MIN_FEATURES, _MIN_ROWS = 64, 256  # for smaller products the overhead of a call exceeds its savings


def _mkl_is_slow() -> bool:
    cpu_info = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu_info.exists()
        and "AuthenticAMD" in cpu_info.read_text()
    )


MKL_IS_SLOW = _mkl_is_slow()  # computed at import, since torch.compile would trace a first call
"""True if MKL has AVX-512 kernels that it does not use on this machine's processor."""


class Linear(nn.Linear):
    """torch's linear layer in the precision of its input, computed by the faster library."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, in_features) to (…, out_features)."""
        if self.bias is None and _suits(input, self.weight):
            rows = cast(Tensor, _Product.apply(input.flatten(0, -2), self.weight))
            return rows.unflatten(0, input.shape[:-1])
        return F.linear(input, self.weight.to(input.dtype), cast_like(self.bias, input))


def _suits(input: Tensor, weight: Tensor) -> bool:
    return (
        type(input) is Tensor  # a DTensor has rules for torch's products only
        and min(weight.shape) >= _MIN_FEATURES
        and input.numel() >= _MIN_ROWS * input.shape[-1]
        and input.dtype == weight.dtype == torch.float32
        and input.device.type == "cpu"
        and not torch._C._are_functorch_transforms_active()  # `_Product` does not support these transforms
        and MKL_IS_SLOW
    )


_LIBRARY = operators.Library("muscale", "DEF")  # type: ignore[no-untyped-call]  # `custom_op` costs 10 microseconds more a call
_LIBRARY.define("product(Tensor left, Tensor right) -> Tensor")  # type: ignore[no-untyped-call]


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], ""))


def _shape_alone(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


_LIBRARY.impl("product", _by_onednn, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("product", _shape_alone, "Meta")  # type: ignore[no-untyped-call]


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two fp32 matrices, (n, k) and (k, m) to (n, m), by oneDNN; without gradients."""
    return cast(Tensor, torch.ops.muscale.product.default(left, right))


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices, (n, k) and (k, m) to (n, m), by the faster library; without gradients."""
    return product(left, right) if left.dim() == 2 and _suits(left, right) else left @ right


@register_flop_formula(torch.ops.muscale.product)
def _flops(left: tuple[int, int], right: tuple[int, int], **_: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


class _Product(torch.autograd.Function):
    """Product input · weightᵀ with gradients."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return product(input, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # the caller needs a graph of the gradients, which torch's products provide
            return gradient @ weight, gradient.t() @ input
        return product(gradient, weight), product(gradient.t(), input)
