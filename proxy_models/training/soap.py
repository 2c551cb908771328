"""SOAP (Vyas et al., arXiv 2409.11321, algorithm 3) for hidden matrices, AdamW for the other parameters.

Adam works in the eigenbasis of Shampoo's factors, the running means of G·Gᵀ and Gᵀ·G. As in the authors' code, these means have
the weight of the second moment, the first step only finds the eigenbasis, since a gradient is diagonal in its own, and every ten
steps one power iteration with a QR decomposition renews the eigenbasis. A side above `MAX_ROTATED_DIM` has no factor and is not
rotated. Unlike there, each matrix has a least root of the second moment (`_LEAST_ROOT`).

The weight of a convolution is the matrix (outputs, inputs · kernel). In a stack, each matrix has its own eigenbasis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from proxy_models.architecture.memory import MAX_ROTATED_DIM
from proxy_models.architecture.sharded import is_sharded, own
from proxy_models.training.matrices import MatricesWithAdamW, move
from proxy_models.training.whole_matrices import WholeMatrices, by_matrix, placements_between

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_FREQUENCY = 10  # steps between renewals of the eigenbasis; the authors' default
_LEAST_ROOT = 1e-2
"""Added to the root of the second moment, relative to its root mean square in the matrix. In the first eigenbasis, and wherever
gradients have a low rank, most entries are rounding, which Adam would scale up to whole updates. Measured here: without it, first
updates in the coordinate check grow with the width by a power that is up to .4 larger; the loss after 150 steps at width 64 was the
same within .007 for values from 0 to .1."""
_SIDES = {"left": -2, "right": -1}  # as dimensions of a matrix


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """Matrices that are computed together: a group's parameters of one shape, or a parameter that is a stack.

    Attributes:
        shape: Number of matrices, rows and columns.
    """

    group: dict[str, Any]
    parameters: list[Tensor]
    shape: tuple[int, int, int]

    @property
    def is_shared(self) -> bool:
        """Return True if ranks have parts of its matrices, or copies, instead of whole matrices."""
        return is_sharded(self.parameters[0]) and not self.group["stack"]


class SOAPWithAdamW(MatricesWithAdamW):
    """SOAP for the groups marked `rotated`.

    The state of a stack belongs to the first of its parameters. Of sharded matrices, each rank keeps the state of those that it owns,
    as its part of a DTensor that is sharded between matrices, so that any layout can read the checkpoint of any other. Gradients and
    updates are exchanged in fp32.
    """

    mark = "rotated"

    def __init__(self, settings: list[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        super().__init__(settings, betas=betas)
        self._exchange: WholeMatrices | None = None
        self._mesh: DeviceMesh | None = None
        for group in self._groups(marked=True):
            group["betas"] = betas

    def _step_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Take a step of every stack."""
        stacks = [stack for group in groups for stack in _stacks(group)]
        for stack in stacks:
            for parameter in stack.parameters:
                state = self.state[parameter]
                state["step"] = state.get("step", torch.tensor(0.0)) + 1  # on the CPU
            if stack.group["stack"]:
                (parameter,) = stack.parameters
                gradient = cast(Tensor, parameter.grad)
                move(parameter, stack.group, by_matrix(gradient, partial(self._updates, stack)))
            elif not stack.is_shared:
                gradients = torch.cat([_gradient(p).reshape(-1, *stack.shape[1:]) for p in stack.parameters])
                updates = self._updates(stack, gradients)
                for parameter, update in zip(stack.parameters, updates.chunk(len(stack.parameters)), strict=True):
                    move(parameter, stack.group, update.reshape(own(parameter).shape))
        if shared := [stack for stack in stacks if stack.is_shared]:
            self._step_shared(shared)

    def _step_shared(self, stacks: list[_Stack]) -> None:
        """Take a step of stacks that ranks share."""
        owned = [(stack, parameter) for stack in stacks for parameter in stack.parameters]
        if not self._exchange:
            from torch.distributed.device_mesh import DeviceMesh

            self._exchange = WholeMatrices(
                [cast("DTensor", parameter) for _, parameter in owned], lambda _, ranks: _owners(stacks, ranks)
            )
            self._mesh = DeviceMesh.from_group(self._exchange.group, owned[0][1].device.type)

        def compute(matrices: dict[int, Tensor]) -> None:
            first = 0
            for stack in stacks:
                ours = [n for n in range(first, first + stack.shape[0]) if n in matrices]
                first += stack.shape[0]
                gradients = own(stack.parameters[0]).new_empty(len(ours), *stack.shape[1:])
                for place, number in enumerate(ours):
                    gradients[place] = matrices[number].flatten(1)
                for number, update in zip(ours, self._updates(stack, gradients), strict=True):
                    matrices[number] = update.view_as(matrices[number])

        updates = self._exchange([_gradient(parameter) for _, parameter in owned], compute)
        for (stack, parameter), update in zip(owned, updates, strict=True):
            move(parameter, stack.group, update)

    def _updates(self, stack: _Stack, gradients: Tensor) -> Tensor:
        """Take in the gradients of this rank's matrices of the stack, and return their updates."""
        beta1, beta2 = stack.group["betas"]
        step, state = int(self.state[stack.parameters[0]]["step"]) - 1, self._state(stack, gradients)
        sides = {name: side for name, side in _SIDES.items() if name in state}
        mean, squares = state["exp_avg"], state["exp_avg_sq"]
        updates = torch.zeros_like(gradients)
        if step:
            mean.lerp_(gradients, 1 - beta1)
            rotated = _rotated(gradients, state, back=False)
            squares.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
            root = (squares / (1 - beta2**step)).sqrt_()
            root += stack.group["eps"] + _LEAST_ROOT * root.square().mean((1, 2), keepdim=True).sqrt()
            updates = _rotated(_rotated(mean / (1 - beta1**step), state, back=False).div_(root), state, back=True)
        for name, side in sides.items():
            factor, basis = state[name], state[f"{name}_basis"]
            outer = gradients @ gradients.mT if side == _SIDES["left"] else gradients.mT @ gradients
            factor.lerp_(outer, 1 - beta2)
            if not step:
                basis.copy_(torch.linalg.eigh(factor).eigenvectors.flip(-1))
            elif step % _FREQUENCY == 0:
                product = factor @ basis
                order = (basis * product).sum(-2).argsort(descending=True)  # by the eigenvalues
                basis.copy_(torch.linalg.qr(product.take_along_dim(order.unsqueeze(-2), -1)).Q)
                along = order.unsqueeze(-1 if side == _SIDES["left"] else -2)
                squares.copy_(squares.take_along_dim(along, side))
        return updates

    def _state(self, stack: _Stack, gradients: Tensor) -> dict[str, Tensor]:
        """Return this rank's part of the stack's state, which starts at zero."""
        state = self.state[stack.parameters[0]]
        if "exp_avg" not in state:
            shapes = dict.fromkeys(("exp_avg", "exp_avg_sq"), stack.shape[1:])
            for name, side in _SIDES.items():
                if (size := stack.shape[side]) <= MAX_ROTATED_DIM:
                    shapes |= dict.fromkeys((name, f"{name}_basis"), (size, size))
            for name, shape in shapes.items():
                state[name] = self._kept(stack, gradients.new_zeros(len(gradients), *shape))
        moments = {name: value for name, value in state.items() if name != "step"}
        for name, value in moments.items():
            if is_sharded(value) and all(placement.is_replicate() for placement in value.placements):
                # `restore` gives every rank the whole
                state[name] = self._kept(stack, own(value)[self._ours(stack)].clone())
        return {name: own(state[name]) for name in moments}

    def _kept(self, stack: _Stack, ours: Tensor) -> Tensor:
        """Return the state of this rank's matrices as a part of the state of all."""
        first = stack.parameters[0]
        if not is_sharded(first):
            return ours
        from torch.distributed.tensor import DTensor, Shard

        mesh, placements = (
            (self._mesh, [Shard(0)]) if stack.is_shared else (first.device_mesh, placements_between(first))
        )
        like = torch.empty(stack.shape[0], *ours.shape[1:], device="meta")
        return DTensor.from_local(ours, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())

    def _ours(self, stack: _Stack) -> slice:
        """Return the numbers of the matrices in the stack that this rank computes."""
        first = stack.parameters[0]
        if self._exchange and stack.is_shared:
            share = _share(stack, self._exchange.group.size())
            return slice(self._exchange.group.rank() * share, (self._exchange.group.rank() + 1) * share)
        if not is_sharded(first):
            return slice(None)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, begins = compute_local_shape_and_global_offset(first.shape, first.device_mesh, placements_between(first))
        return slice(begins[0], begins[0] + sizes[0])


def _gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient."""
    return own(cast(Tensor, parameter.grad))


def _stacks(group: dict[str, Any]) -> list[_Stack]:
    """Return the stacks of a group's parameters that have gradients."""
    moving = [parameter for parameter in group["params"] if parameter.grad is not None]
    if group["stack"]:
        return [_Stack(group=group, parameters=[parameter], shape=tuple(parameter.shape)) for parameter in moving]
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    for parameter in moving:
        by_shape.setdefault((len(parameter), parameter.shape[1:].numel()), []).append(parameter)
    return [_Stack(group=group, parameters=found, shape=(len(found), *shape)) for shape, found in by_shape.items()]


def _share(stack: _Stack, n_ranks: int) -> int:
    """Return the largest number of the stack's matrices that a rank owns, as torch shards the first dimension."""
    return -(-stack.shape[0] // n_ranks)


def _owners(stacks: Sequence[_Stack], n_ranks: int) -> list[int]:
    """Return the owner of each matrix, stack by stack."""
    return [number // _share(stack, n_ranks) for stack in stacks for number in range(stack.shape[0])]


def _rotated(matrices: Tensor, state: dict[str, Tensor], *, back: bool) -> Tensor:
    """Return the matrices in the eigenbasis, or `back` in their own."""
    if "left" in state:
        basis = state["left_basis"]
        matrices = (basis if back else basis.mT) @ matrices
    if "right" in state:
        basis = state["right_basis"]
        matrices = matrices @ (basis.mT if back else basis)
    return matrices
