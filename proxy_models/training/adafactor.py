"""Adafactor (Shazeer and Stern, arXiv 1804.04235) that uses the given rates; torch's own caps every rate at 1/√step.

That cap is the paper's relative step. Under a table of rates, the cap would reduce only the groups with the largest rates, and
after some thousand steps no schedule would have an effect. The rest is as in torch: the update is relative to a tensor's
root mean square, clipped at a root mean square of 1, and decay is rate · decay. A tensor of more than two dimensions keeps rows and
columns of its last two dimensions, as in torch and the authors' code (tensor2tensor/utils/adafactor.py): of each matrix in a stack,
and of (inputs, kernel) for each output of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from proxy_models.architecture.sharded import is_sharded, own, part_of
from proxy_models.training.rank_totals import RankTotals, counted_once

_DECAY = 0.8  # step t has weight t^-.8 in the second moments; algorithm 6, as are the next two constants
_LEAST_SQUARE = 1e-30  # epsilon 1, added to a mean squared gradient
_LEAST_RMS = 1e-3  # epsilon 2: a tensor with a smaller root mean square moves as if it had this one


class Adafactor(torch.optim.Optimizer):
    """Adafactor without momentum; matrices keep a mean squared gradient per row and per column, vectors one per entry.

    Sharded tensors are supported, with two reductions per step for all tensors, and no step waits for a device.
    """

    def __init__(self, settings: list[dict[str, Any]]) -> None:
        super().__init__(settings, {})
        self._totals = RankTotals()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        parameters = [parameter for _, parameter in moving]
        sums = self._totals(parameters, [_sums(parameter) for parameter in parameters])
        for parameter, of_gradient in zip(parameters, sums, strict=True):
            _take_in(parameter, of_gradient, self.state[parameter])
        # Updates are computed twice, so that those of all parameters are never in memory together.
        squares = [counted_once(one, _preconditioned(one, self.state[one]).square().sum()[None]) for one in parameters]
        squares = self._totals(parameters, squares)
        for (group, parameter), own_sums, square in zip(moving, sums, squares, strict=True):
            update = _preconditioned(parameter, self.state[parameter])
            update /= _rms(square, parameter).clamp(min=1.0)
            update *= _rms(own_sums[-1:], parameter).clamp(min=_LEAST_RMS)
            own(parameter).mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
        return loss


def _sums(parameter: Tensor) -> Tensor:
    """Return summed squares of a gradient's rows and columns (except for a vector), then of the parameter.

    A shard's sums are at the shard's positions, with zeros elsewhere; only the first of several copies has nonzero sums.
    """
    entries, gradient = own(parameter).square().sum()[None], own(cast(Tensor, parameter.grad))
    edges = (-1, -2) if parameter.ndim > 1 else ()
    sums = [torch.linalg.vector_norm(gradient, dim=dim).square() for dim in edges]
    if is_sharded(parameter):
        part = part_of(parameter)
        for number, edge in enumerate(edges):
            kept = [dim for dim in range(parameter.ndim) if dim != parameter.ndim + edge]
            whole = entries.new_zeros([parameter.shape[dim] for dim in kept])
            whole[tuple(part[dim] for dim in kept)] = sums[number]
            sums[number] = whole
    return counted_once(parameter, torch.cat([*(one.flatten() for one in sums), entries]))


def _take_in(parameter: Tensor, sums: Tensor, state: dict[str, Tensor]) -> None:
    """Update the running means with a gradient and its sums."""
    state["step"] = state.get("step", torch.tensor(0.0)) + 1  # on the CPU
    weight, gradient = float(state["step"]) ** -_DECAY, cast(Tensor, parameter.grad)
    if gradient.ndim < 2:
        _average(state, "variance", gradient.square(), weight)
        return
    *stacked, n_rows, n_columns = gradient.shape
    rows, columns, _ = torch.split(sums, [gradient.numel() // n_columns, gradient.numel() // n_rows, 1])
    _average(state, "row_var", _copied(rows.view(*stacked, n_rows, 1) / n_columns, parameter), weight)
    _average(state, "col_var", _copied(columns.view(*stacked, 1, n_columns) / n_rows, parameter), weight)


def _copied(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the tensor as a replicated DTensor for a sharded parameter, so that a checkpoint stores it once."""
    if not is_sharded(parameter):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _average(state: dict[str, Tensor], name: str, squares: Tensor, weight: float) -> None:
    """Update a running mean with these squares."""
    floored = squares + _LEAST_SQUARE
    state[name] = state[name].lerp_(floored, weight) if name in state else floored


def _preconditioned(parameter: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Return this rank's part of the gradient over the root of its second moments."""
    gradient = own(cast(Tensor, parameter.grad))
    if gradient.ndim < 2:
        return gradient * own(state["variance"]).rsqrt()
    rows, columns = own(state["row_var"]), own(state["col_var"])
    mean = rows.sum(dim=-2, keepdim=True) / rows.shape[-2]  # a product of rows and columns would underflow
    if is_sharded(parameter):
        part = part_of(parameter)
        mean, rows = mean[part[:-2]], rows[part[:-1]]
        columns = columns[(*part[:-2], slice(None), part[-1])]
    return gradient * (rows / mean).rsqrt() * columns.rsqrt()


def _rms(square: Tensor, parameter: Tensor) -> Tensor:
    return square.div(parameter.numel()).sqrt()
