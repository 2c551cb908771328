"""Adafactor (Shazeer and Stern, arXiv 1804.04235) at the rates it is given; torch's own caps every rate at 1/√step.

That cap is the paper's relative step. Under a table of rates it would cut the groups with the largest and leave the others,
and after some thousand steps no schedule would reach any. All else is as in torch's: the update is relative to a tensor's
root mean square, clipped at a root mean square of 1, and decay is rate · decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DECAY = 0.8  # the weight of step t in the second moments is t^-.8; algorithm 6, as are the next two
_LEAST_SQUARE = 1e-30  # epsilon 1, added to a mean squared gradient
_LEAST_RMS = 1e-3  # epsilon 2: a tensor that is smaller moves as if it were of this size


class Adafactor(torch.optim.Optimizer):
    """Adafactor without momentum; a matrix keeps a mean squared gradient per row and per column, a vector per entry.

    It works on sharded tensors and never waits for a device.
    """

    def __init__(self, settings: list[dict[str, Any]]) -> None:
        super().__init__(settings, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", torch.tensor(0.0)) + 1  # on the CPU
                update = _preconditioned(parameter.grad, state)
                update /= _rms(update).clamp(min=1.0)
                update *= _rms(parameter).clamp(min=_LEAST_RMS)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
        return loss


def _preconditioned(gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The gradient over the root of its second moments, which take it in."""
    weight = float(state["step"]) ** -_DECAY
    if gradient.ndim < 2:
        return gradient * _average(state, "variance", gradient.square(), weight).rsqrt()
    rows, columns = (
        _average(state, name, torch.linalg.vector_norm(gradient, dim=dim, keepdim=True).square() / size, weight)
        for name, dim, size in (("row_var", -1, gradient.shape[-1]), ("col_var", -2, gradient.shape[-2]))
    )
    # A mean over shards of several sizes would not be that of all rows; the product of rows and columns would underflow.
    mean = rows.sum(dim=-2, keepdim=True) / rows.shape[-2]
    return gradient * (rows / mean).rsqrt() * columns.rsqrt()


def _average(state: dict[str, Tensor], name: str, squares: Tensor, weight: float) -> Tensor:
    """The running mean after these squares."""
    floored = squares + _LEAST_SQUARE
    state[name] = state[name].lerp_(floored, weight) if name in state else floored
    return state[name]


def _rms(tensor: Tensor) -> Tensor:
    return tensor.square().sum().div(tensor.numel()).sqrt()
