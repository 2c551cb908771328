"""LAMB (You et al., arXiv 1904.00962, algorithm 2): AdamW's direction, scaled to the norm of each tensor.

As there, the decay is part of the direction, so that a step changes a tensor by the rate times its norm, whatever the decay. As in the
authors' code, some tensors have no such ratio of norms and move as under AdamW. Here these are all tensors that start at a constant:
gains, biases, a readout at zero. A tensor of norm 0 needs this to move at all, and a small one would grow only by a factor per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from proxy_models.architecture.sharded import is_sharded, own, part_of
from proxy_models.training.rank_totals import RankTotals, counted_once


class LAMB(torch.optim.Optimizer):
    """LAMB, in which groups marked `adapted` have a ratio of norms for each tensor, or for each matrix of a `stack`.

    Sharded tensors are supported, with one reduction per step for all tensors, and no step waits for a device.
    """

    mark = "adapted"

    def __init__(self, settings: list[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        super().__init__(settings, {"betas": betas, self.mark: False, "stack": False})
        self._totals = RankTotals()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group, parameter in moving:
            _take_in(parameter, self.state[parameter], *group["betas"])
        # Directions are computed twice, so that those of all parameters are never in memory together.
        adapted = [(group, parameter) for group, parameter in moving if group[self.mark]]
        squares = self._totals([p for _, p in adapted], [self._squares(group, p) for group, p in adapted])
        ratios = {parameter: _ratio(sums, parameter) for (_, parameter), sums in zip(adapted, squares, strict=True)}
        for group, parameter in moving:
            direction = self._direction(group, parameter)
            if parameter in ratios:
                direction *= ratios[parameter]
            own(parameter).sub_(direction, alpha=group["lr"])
        return loss

    def _direction(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Return this rank's part of AdamW's direction: Adam's, plus decay times the parameter."""
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        mean: Tensor = own(state["exp_avg"]) / (1 - beta1 ** state["step"])
        root: Tensor = (own(state["exp_avg_sq"]) / (1 - beta2 ** state["step"])).sqrt_()
        return mean.div_(root.add_(group["eps"])).add_(own(parameter), alpha=group["weight_decay"])

    def _squares(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Return the squared norms of the parameter and of its direction; of a stack those of each matrix, zero for other ranks'."""
        pair = torch.stack([own(parameter), self._direction(group, parameter)]).square()
        if not group["stack"]:
            return counted_once(parameter, pair.flatten(1).sum(1))
        whole = pair.new_zeros(2, len(parameter))
        whole[:, _matrices_of(parameter)] = pair.sum((2, 3))
        return counted_once(parameter, whole.flatten())


def _ratio(squares: Tensor, parameter: Tensor) -> Tensor:
    """Return the ratio of norms for this rank's part of the parameter, 1 if a norm is 0."""
    weights, directions = squares.sqrt().view(2, -1)
    ratio = torch.where((weights > 0) & (directions > 0), weights / directions, 1.0)
    return ratio[_matrices_of(parameter)].view(-1, 1, 1) if len(ratio) > 1 else ratio


def _matrices_of(stack: Tensor) -> slice:
    """Return the numbers of the matrices that this rank has of a stack."""
    return part_of(stack)[0] if is_sharded(stack) else slice(None)


def _take_in(parameter: Tensor, state: dict[str, Tensor], beta1: float, beta2: float) -> None:
    """Update the moments with the gradient."""
    gradient = cast(Tensor, parameter.grad)
    if not state:
        state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        state["step"] = torch.tensor(0.0)  # on the CPU
    state["step"] += 1
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    own(state["exp_avg_sq"]).mul_(beta2).addcmul_(own(gradient), own(gradient), value=1 - beta2)
