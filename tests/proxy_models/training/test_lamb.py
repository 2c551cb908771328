"""LAMB's step written out by hand, and shards as the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from proxy_models.training.lamb import LAMB
from tests.muscale.gloo_ranks import GlooRanks

SHAPES = ((31, 20), (5, 6, 4), (20,), (3, 7), (6, 5, 3))
RATE, DECAY, EPS, BETAS = 0.01, 0.3, 1e-9, (0.9, 0.95)
N_STEPS = 6


def parameters() -> list[nn.Parameter]:
    """A matrix, a stack of matrices with one of zeros, a vector that starts at a constant, a matrix of zeros, a convolution."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    values[1][2], values[2][:], values[3][:] = 0.0, 1.0, 0.0
    return [nn.Parameter(one) for one in values]


def gradients() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator) * 1e-3 for shape in SHAPES] for _ in range(N_STEPS)]


def train(parameters: list[nn.Parameter], laid_out: Callable[[Tensor], Tensor] = lambda values: values) -> LAMB:
    matrix, stack, vector, zeros, convolution = parameters
    group: dict[str, Any] = {"lr": RATE, "weight_decay": DECAY, "eps": EPS}
    settings = [
        {"params": [matrix, zeros, convolution], "adapted": True, "stack": False, **group},
        {"params": [stack], "adapted": True, "stack": True, **group},
        {"params": [vector], **group | {"weight_decay": 0.0}},
    ]
    optimizer = LAMB(settings, betas=BETAS)
    for of_step in gradients():
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = laid_out(gradient)
        optimizer.step()
    return optimizer


def by_hand(value: Tensor, gradients: list[Tensor], *, adapted: bool, decay: float) -> Tensor:
    """Algorithm 2 of the paper for one tensor, in double precision."""
    value = value.detach().double()
    mean, square = torch.zeros_like(value), torch.zeros_like(value)
    for step, gradient in enumerate(gradients, start=1):
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        adam = (mean / (1 - BETAS[0] ** step)) / ((square / (1 - BETAS[1] ** step)).sqrt() + EPS)
        direction = adam + decay * value
        weight = float(value.norm())
        ratio = weight / float(direction.norm()) if adapted and weight else 1.0
        value = value - RATE * ratio * direction
    return value


def test_a_step_is_the_rate_times_the_ratio_of_norms_times_adamw_s_direction() -> None:
    start, found, steps = parameters(), parameters(), gradients()
    train(found)
    for number, adapted in ((0, True), (2, False), (3, True), (4, True)):
        decay = DECAY if adapted else 0.0
        expected = by_hand(start[number], [step[number] for step in steps], adapted=adapted, decay=decay)
        torch.testing.assert_close(found[number].detach(), expected.float(), rtol=1e-5, atol=1e-7)
    for matrix in range(len(found[1])):
        of_matrix = [step[1][matrix] for step in steps]
        expected = by_hand(start[1][matrix], of_matrix, adapted=True, decay=DECAY)
        torch.testing.assert_close(found[1][matrix].detach(), expected.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("decay", [0.0, 5.0])
def test_a_step_changes_a_tensor_by_the_rate_times_its_norm_whatever_decay_and_gradient(decay: float) -> None:
    matrix = parameters()[0]
    before = matrix.detach().clone()
    optimizer = LAMB(
        [{"params": [matrix], "lr": RATE, "weight_decay": decay, "eps": EPS, "adapted": True}], betas=BETAS
    )
    matrix.grad = gradients()[0][0] * 1e-3
    optimizer.step()
    assert float((matrix.detach() - before).norm() / before.norm()) == pytest.approx(RATE, rel=1e-4)


def _train_sharded() -> None:
    dist.init_process_group("gloo")
    expected = parameters()
    train(expected)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for names, placements in (("shards", [Shard(0)]), (("replicas", "shards"), [Replicate(), Shard(0)])):

        def laid_out(values: Tensor, mesh: Any = mesh[names], placements: Any = placements) -> Tensor:
            return distribute_tensor(values.detach(), mesh, placements)

        sharded = [nn.Parameter(laid_out(parameter)) for parameter in parameters()]
        train(sharded, laid_out)
        for parameter, whole in zip(sharded, expected, strict=True):
            assert isinstance(parameter.data, DTensor)
            torch.testing.assert_close(parameter.data.full_tensor(), whole.detach(), rtol=1e-5, atol=1e-7)


def test_shards_and_copies_are_trained_as_the_whole(gloo_ranks: GlooRanks) -> None:
    gloo_ranks.call(_train_sharded, world_size=4)
