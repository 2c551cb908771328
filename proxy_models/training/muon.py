"""Muon for hidden matrices (Jordan et al., 2024, github.com/KellerJordan/Muon), AdamW for the other parameters.

The weight of a convolution is the matrix (outputs, inputs · kernel), as there. In a stack, each matrix is orthogonalised.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

from proxy_models.architecture.sharded import is_sharded, own
from proxy_models.training.matrices import MatricesWithAdamW, move
from proxy_models.training.whole_matrices import WholeMatrices, by_matrix

_MOMENTUM = 0.95  # Jordan et al., 2024; Liu et al., arXiv 2502.16982


class MuonWithAdamW(MatricesWithAdamW):
    """Muon for the groups marked `orthogonal`.

    The update equals that of torch's Muon with Nesterov's momentum, which supports only matrices and would communicate in each
    product of sharded matrices. Here owners orthogonalise sharded matrices, exchanged in bf16, the precision of torch's iteration.
    """

    mark = "orthogonal"

    def __init__(self, settings: list[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        super().__init__(settings, betas=betas)
        self._exchange: WholeMatrices | None = None
        for group in self._groups(marked=True):
            group["eps"] = EPS

    def _step_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Apply momentum, decay and the orthogonalised updates to each rank's own part."""
        moving = [(group, p) for group in groups for p in group["params"] if p.grad is not None]
        shared = [(group, p) for group, p in moving if is_sharded(p) and not group["stack"]]
        for group, parameter in moving:
            factor = _factor(parameter, stack=group["stack"])
            if group["stack"]:
                momentum = self._nesterov(parameter).bfloat16()
                move(parameter, group, by_matrix(momentum, partial(orthogonalized, stack=True)), factor=factor)
            elif not is_sharded(parameter):
                move(parameter, group, orthogonalized(self._nesterov(parameter), stack=False), factor=factor)
        if not shared:
            return
        self._exchange = self._exchange or WholeMatrices([parameter for _, parameter in shared], _cost)
        momenta = [own(self._nesterov(parameter)).bfloat16() for _, parameter in shared]
        for (group, parameter), update in zip(shared, self._exchange(momenta, _orthogonalize), strict=True):
            move(parameter, group, update, factor=_factor(parameter, stack=False))

    def _nesterov(self, parameter: Tensor) -> Tensor:
        """Update the momentum with the gradient, and return Nesterov's momentum."""
        gradient, state = cast(Tensor, parameter.grad), self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = cast(Tensor, state["momentum_buffer"]).lerp_(gradient, 1 - _MOMENTUM)
        return gradient.lerp(momentum, _MOMENTUM)


def orthogonalized(update: Tensor, *, stack: bool) -> Tensor:
    """Return an update orthogonalised in bf16: each matrix of a stack, or else the single matrix (outputs, all other dimensions).

    torch's iteration supports a single matrix; the code for stacks repeats its steps.
    """
    if not stack:
        coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
        matrix = _zeropower_via_newtonschulz(update.flatten(1), coefficients, DEFAULT_NS_STEPS, EPS)
        return matrix.reshape(update.shape)
    matrices, is_tall = update.bfloat16(), update.shape[-2] > update.shape[-1]
    if is_tall:
        matrices = matrices.mT
    matrices = matrices / torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(DEFAULT_NS_STEPS):
        gram = matrices @ matrices.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=DEFAULT_B, alpha=DEFAULT_C)
        matrices = torch.baddbmm(matrices, polynomial, matrices, beta=DEFAULT_A)
    return matrices.mT if is_tall else matrices


def _orthogonalize(matrices: dict[int, Tensor]) -> None:
    """Replace each matrix by the orthogonalised matrix."""
    for number, matrix in matrices.items():
        matrices[number] = orthogonalized(matrix, stack=False)


def _cost(rows: int, columns: int) -> int:
    """Return a number proportional to the products of a matrix with itself."""
    return max(rows, columns) * min(rows, columns) ** 2


def _factor(parameter: Tensor, *, stack: bool) -> float:
    """Return the factor of an orthogonalised update with which AdamW's rates and decays are usable.

    From Liu et al., arXiv 2502.16982, section 2.2.
    """
    rows, *others = parameter.shape[1:] if stack else parameter.shape
    return 0.2 * math.sqrt(max(rows, math.prod(others)))
