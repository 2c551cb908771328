"""SOAP (Vyas et al., arXiv 2409.11321, algorithm 3) for hidden matrices, AdamW for the other parameters.

Adam works in the eigenbasis of Shampoo's factors, the running means of G·Gᵀ and Gᵀ·G. As in the authors' code, these means have
the weight of the second moment, the first step only finds the eigenbasis, since a gradient is diagonal in its own, and every ten
steps one power iteration with a QR decomposition renews the eigenbasis. A side above `MAX_ROTATED_DIM` has no factor and is not
rotated. Unlike there, each matrix has a least root of the second moment (`_LEAST_ROOT`).

The weight of a convolution is the matrix (outputs, inputs · kernel). In a stack, each matrix has its own eigenbasis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from proxy_models.architecture.memory import MAX_ROTATED_DIM, rotated_numbers, rotated_together
from proxy_models.architecture.sharded import is_sharded, own
from proxy_models.training.matrices import MatricesWithAdamW, move
from proxy_models.training.state import StateError
from proxy_models.training.whole_matrices import WholeMatrices, by_matrix, placements_between

_FREQUENCY = 10  # steps between renewals of the eigenbasis; the authors' default
_LEAST_ROOT = 1e-2
"""Added to the root of the second moment, relative to its root mean square in the matrix. In the first eigenbasis, and wherever
gradients have a low rank, most entries are rounding, which Adam would scale up to whole updates. Measured here: without it, first
updates in the coordinate check grow with the width by a power that is up to .4 larger; the loss after 150 steps at width 64 was the
same within .007 for values from 0 to .1."""
_SIDES = {"left": -2, "right": -1}  # as dimensions of a matrix
_Group = dict[str, Any]


class SOAPWithAdamW(MatricesWithAdamW):
    """SOAP for the groups marked `rotated`.

    Each parameter has its own state, whose first dimension is the number of its matrices: 1 except in a stack. Small matrices of a
    shape are computed together, and their states are views of one tensor. The owner of a sharded matrix alone has its state, as
    ordinary tensors; the state of a sharded stack is sharded between its matrices. So any layout can read the checkpoint of any other.
    Gradients and updates are exchanged in fp32.
    """

    mark = "rotated"

    def __init__(self, settings: list[_Group], *, betas: tuple[float, float]) -> None:
        super().__init__(settings, betas=betas)
        self._exchange: WholeMatrices | None = None
        for group in self._groups(marked=True):
            group["betas"] = betas

    def _step_matrices(self, groups: list[_Group]) -> None:
        """Take a step of every matrix."""
        alone, shared = dict[Tensor, _Group](), dict[Tensor, _Group]()
        for group, parameter in [(of, p) for of in groups for p in of["params"] if p.grad is not None]:
            state = self.state[parameter]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1  # on the CPU
            if group["stack"]:
                updates = by_matrix(cast(Tensor, parameter.grad), partial(self._updates, group, [parameter]))
                move(parameter, group, updates)
            else:
                is_shared = is_sharded(parameter) and parameter.device_mesh.size() > 1
                (shared if is_shared else alone)[parameter] = group
        for group, alike in self._alike(alone.items()):
            self._step_alone(group, alike)
        if shared:
            self._step_shared(shared)

    def _step_alone(self, group: _Group, parameters: list[Tensor]) -> None:
        """Take a step of parameters that this rank has whole, and that are computed together."""
        gradients = _stacked([_gradient(parameter) for parameter in parameters])
        for parameter, update in zip(parameters, self._updates(group, parameters, gradients), strict=True):
            move(parameter, group, update.view(parameter.shape))

    def _step_shared(self, groups: dict[Tensor, _Group]) -> None:
        """Take a step of matrices that ranks share, each with its group."""
        parameters = list(groups)
        self._exchange = self._exchange or WholeMatrices(cast(Any, parameters), rotated_numbers)
        for parameter, owner in zip(parameters, self._exchange.owners, strict=True):
            if owner != self._exchange.group.rank():  # `restore` gives every rank the whole
                self.state[parameter] = {"step": self.state[parameter]["step"]}

        def compute(matrices: dict[int, Tensor]) -> None:
            ours = {parameters[number]: number for number in matrices}
            for group, alike in self._alike((parameter, groups[parameter]) for parameter in ours):
                updates = self._updates(group, alike, _stacked([matrices[ours[parameter]] for parameter in alike]))
                for parameter, update in zip(alike, updates, strict=True):
                    matrices[ours[parameter]] = update.view(parameter.shape)

        updates = self._exchange([_gradient(parameter) for parameter in parameters], compute)
        for (parameter, group), update in zip(groups.items(), updates, strict=True):
            move(parameter, group, update)

    def _alike(self, parameters: Iterable[tuple[Tensor, _Group]]) -> Iterator[tuple[_Group, list[Tensor]]]:
        """Generate groups, each with parameters of one shape and number of steps that are computed together."""
        found: dict[tuple[int, ...], tuple[_Group, list[Tensor]]] = {}
        for parameter, group in parameters:
            kind = id(group), int(self.state[parameter]["step"]), len(parameter), parameter.shape[1:].numel()
            found.setdefault(kind, (group, []))[1].append(parameter)
        for (_, _, *shape), (group, alike) in found.items():
            n_together = rotated_together(*shape)
            for first in range(0, len(alike), n_together):
                yield group, alike[first : first + n_together]

    def _updates(self, group: _Group, parameters: list[Tensor], gradients: Tensor) -> Tensor:
        """Take in the gradients of this rank's matrices of parameters that are alike, and return their updates."""
        beta1, beta2 = group["betas"]
        step = int(self.state[parameters[0]]["step"]) - 1
        state = self._state(group, parameters, gradients, is_first=not step)
        sides = {name: side for name, side in _SIDES.items() if name in state}
        mean, squares = state["exp_avg"], state["exp_avg_sq"]
        if step:
            mean.lerp_(gradients, 1 - beta1)
            rotated = _rotated(gradients, state, back=False)
            squares.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
            del rotated
            root = (squares / (1 - beta2**step)).sqrt_()
            root += group["eps"] + _LEAST_ROOT * root.square().mean((1, 2), keepdim=True).sqrt()
            updates = _rotated(_rotated(mean / (1 - beta1**step), state, back=False).div_(root), state, back=True)
            del root
        else:
            updates = torch.zeros_like(gradients)
        for name, side in sides.items():
            factor, basis = state[name], state[f"{name}_basis"]
            factor.lerp_(gradients @ gradients.mT if side == _SIDES["left"] else gradients.mT @ gradients, 1 - beta2)
            if not step:
                basis.copy_(torch.linalg.eigh(factor).eigenvectors.flip(-1))
            elif step % _FREQUENCY == 0:
                product = factor @ basis
                order = (basis * product).sum(-2).argsort(descending=True)  # by the eigenvalues
                basis.copy_(torch.linalg.qr(_ordered(product, order, -1)).Q)
                squares.copy_(_ordered(squares, order, side))
        return updates

    def _state(
        self, group: _Group, parameters: list[Tensor], gradients: Tensor, *, is_first: bool
    ) -> dict[str, Tensor]:
        """Return the state of this rank's matrices, one tensor of each kind; it starts at zero.

        Raises:
            StateError: If matrices have no state after the first step, as in a state of an earlier version.
        """
        states, together = [self.state[parameter] for parameter in parameters], dict[str, Tensor]()
        shapes = dict.fromkeys(("exp_avg", "exp_avg_sq"), tuple(gradients.shape[1:]))
        for name, side in _SIDES.items():
            if (size := gradients.shape[side]) <= MAX_ROTATED_DIM:
                shapes |= dict.fromkeys((name, f"{name}_basis"), (size, size))
        for name, shape in shapes.items():
            if is_first:
                whole = gradients.new_zeros(len(gradients), *shape)
            else:
                parts = [_part(s[name], p, group) for s, p in zip(states, parameters, strict=True) if name in s]
                if (found := sum(map(len, parts))) != len(gradients):
                    raise StateError(
                        f"{name}: the state must have {len(gradients)} matrices {shape}, got {found}; SOAP can't continue from "
                        "states of earlier versions"
                    )
                if (joined := _joined(parts)) is not None:
                    together[name] = joined
                    continue
                whole = torch.cat(parts)
            for state, parameter, part in zip(states, parameters, whole.chunk(len(parameters)), strict=True):
                state[name] = _kept(part, parameter, group)
            together[name] = whole
        return together


def _gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient."""
    return own(cast(Tensor, parameter.grad))


def _stacked(matrices: list[Tensor]) -> Tensor:
    """Return tensors as matrices (outputs, all other dimensions) in a stack; do not copy a single one."""
    return torch.stack([one.flatten(1) for one in matrices]) if len(matrices) > 1 else matrices[0].flatten(1)[None]


def _part(value: Tensor, parameter: Tensor, group: _Group) -> Tensor:
    """Return this rank's part of a parameter's state, also of one that `restore` laid out."""
    if not is_sharded(value):
        return value
    if not group["stack"]:
        return own(value).clone()  # which every rank has
    return own(value.redistribute(placements=placements_between(cast(Any, parameter))))


def _kept(part: Tensor, parameter: Tensor, group: _Group) -> Tensor:
    """Return the state of a parameter of which this is the rank's part."""
    if not is_sharded(parameter) or not group["stack"]:
        return part
    from torch.distributed.tensor import DTensor

    between, like = placements_between(parameter), torch.empty(len(parameter), *part.shape[1:], device="meta")
    return DTensor.from_local(
        part, parameter.device_mesh, between, run_check=False, shape=like.shape, stride=like.stride()
    )


def _joined(parts: list[Tensor]) -> Tensor | None:
    """Return the tensor of which these are the parts, in this order, or None."""
    whole, first = parts[0]._base, 0
    for part in parts:
        if whole is None or part._base is not whole or part.storage_offset() != first:
            return None
        first += part.numel()
    return whole if whole is not None and whole.numel() == first else None


def _ordered(matrices: Tensor, order: Tensor, side: int) -> Tensor:
    """Return the matrices with the columns, or rows at side -2, in another order; `take_along_dim` would copy the indices."""
    return matrices.gather(side, order.unsqueeze(-3 - side).expand_as(matrices))


def _rotated(matrices: Tensor, state: dict[str, Tensor], *, back: bool) -> Tensor:
    """Return the matrices in the eigenbasis, or `back` in their own."""
    if "left" in state:
        basis = state["left_basis"]
        matrices = (basis if back else basis.mT) @ matrices
    if "right" in state:
        basis = state["right_basis"]
        matrices = matrices @ (basis.mT if back else basis)
    return matrices
