"""Muon for hidden matrices (Jordan et al., 2024, github.com/KellerJordan/Muon), AdamW for the other parameters.

The weight of a convolution is the matrix (outputs, inputs · kernel), as there. In a stack, each matrix is orthogonalised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim._muon import EPS

from proxy_models.architecture.sharded import is_sharded, own
from proxy_models.training.orthogonal import Orthogonalization, orthogonalized

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MOMENTUM = 0.95  # Jordan et al., 2024; Liu et al., arXiv 2502.16982


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the groups marked `orthogonal`, and torch's AdamW for the others, which receives groups and state for each step.

    The update equals that of torch's Muon with Nesterov's momentum, which supports only matrices and would communicate in each
    product of sharded matrices. `Orthogonalization` orthogonalises sharded matrices, except for the groups marked `stack`: FSDP2
    shards a stack between its matrices, so that each rank has whole matrices.
    """

    def __init__(self, settings: list[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        super().__init__(settings, {"orthogonal": False})
        self._orthogonalization: Orthogonalization | None = None
        self._adamw: torch.optim.AdamW | None = None
        for group in self._groups(orthogonal=True):
            group["eps"] = EPS
        if others := self._groups(orthogonal=False):
            copies = [dict(group) for group in others]
            self._adamw = torch.optim.AdamW(copies, betas=betas, fused=True)
            for ours, theirs in zip(others, copies, strict=True):
                ours.update(theirs)  # theirs have the defaults filled in

    def _groups(self, *, orthogonal: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["orthogonal"] is orthogonal]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices(self._groups(orthogonal=True))
        if self._adamw:
            self._adamw.param_groups, self._adamw.state = self._groups(orthogonal=False), self.state
            self._adamw.step()
        return loss

    def _step_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Apply momentum, decay and the orthogonalised updates to each rank's own part."""
        moving = [(group, p) for group in groups for p in group["params"] if p.grad is not None]
        shared = [(group, p) for group, p in moving if is_sharded(p) and not group["stack"]]
        for group, parameter in moving:
            if group["stack"] or not is_sharded(parameter):
                update = orthogonalized(own(self._nesterov(parameter)), stack=group["stack"])
                _move(parameter, group, update)
        if not shared:
            return
        if not self._orthogonalization:
            self._orthogonalization = Orthogonalization([parameter for _, parameter in shared])
        momenta = [cast("DTensor", self._nesterov(parameter)) for _, parameter in shared]
        for (group, parameter), update in zip(shared, self._orthogonalization(momenta), strict=True):
            _move(parameter, group, update)

    def _nesterov(self, parameter: Tensor) -> Tensor:
        """Update the momentum with the gradient, and return Nesterov's momentum."""
        gradient, state = cast(Tensor, parameter.grad), self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = cast(Tensor, state["momentum_buffer"]).lerp_(gradient, 1 - _MOMENTUM)
        return gradient.lerp(momentum, _MOMENTUM)


def _move(parameter: Tensor, group: dict[str, Any], update: Tensor) -> None:
    """Apply decay and an orthogonalised update to this rank's part; the factor makes AdamW's rates and decays usable.

    The factor is from Liu et al., arXiv 2502.16982, section 2.2.
    """
    rows, *others = parameter.shape[1:] if group["stack"] else parameter.shape
    rate = group["lr"] * (0.2 * math.sqrt(max(rows, math.prod(others))))
    own(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)
