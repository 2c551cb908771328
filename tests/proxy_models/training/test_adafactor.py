"""Torch's Adafactor as the oracle below its cap, and no cap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from proxy_models.training.adafactor import Adafactor
from tests.muscale.gloo_ranks import GlooRanks

SHAPES = ((31, 20), (20,), (6, 40), (3, 10, 4), (1, 5, 6), (4, 3, 2, 2))
N_STEPS = 20


def parameters() -> list[nn.Parameter]:
    """A matrix, a vector, a matrix below the least size that counts, and tensors of more dimensions."""
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator) * scale)
        for shape, scale in zip(SHAPES, (1, 1, 1e-5, 1, 1, 1), strict=True)
    ]


def train(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    parameters: list[nn.Parameter],
    as_gradient: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> list[nn.Parameter]:
    optimizer = make([{"params": parameters, "lr": 0.01, "weight_decay": 0.1}])
    generator = torch.Generator().manual_seed(1)
    for _ in range(N_STEPS):
        for parameter in parameters:
            parameter.grad = as_gradient(torch.randn(parameter.shape, generator=generator) * 1e-3)
        optimizer.step()
    return parameters


def test_below_torch_s_cap_it_is_torch_s() -> None:
    expected = train(lambda settings: torch.optim.Adafactor(settings, eps=(1e-18, 1e-3)), parameters())
    for ours, theirs in zip(train(Adafactor, parameters()), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n_before", [0, 10_000])
def test_the_relative_update_is_proportional_to_the_rate_however_late(n_before: int) -> None:
    def relative_updates(rate: float) -> list[float]:
        tensors = parameters()[:2]
        optimizer = Adafactor([{"params": tensors, "lr": rate, "weight_decay": 0.0}])
        for parameter in tensors:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for state in optimizer.state.values():
            state["step"] += n_before
        before = [parameter.detach().clone() for parameter in tensors]
        optimizer.step()
        return [
            float((parameter.detach() - old).norm() / old.norm())
            for parameter, old in zip(tensors, before, strict=True)
        ]

    for rate in (0.001, 0.01, 0.1):
        assert relative_updates(rate) == pytest.approx([rate, rate], rel=1e-3)


def test_a_matrix_keeps_its_rows_and_columns_only_and_no_gradient_moves_nothing() -> None:
    tensors = parameters()
    optimizer = Adafactor([{"params": tensors, "lr": 0.01, "weight_decay": 0.0}])
    tensors[0].grad = torch.zeros(SHAPES[0])
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(tensors, parameters(), strict=True))
    tensors[3].grad = torch.zeros(SHAPES[3])
    optimizer.step()
    for number, rows, columns in ((0, (31, 1), (1, 20)), (3, (3, 10, 1), (3, 1, 4))):
        shapes = {kind: tuple(value.shape) for kind, value in optimizer.state[tensors[number]].items()}
        assert shapes == {"step": (), "row_var": rows, "col_var": columns}
    assert tensors[1] not in optimizer.state


def _train_sharded() -> None:
    dist.init_process_group("gloo")
    expected = [parameter.detach() for parameter in train(Adafactor, parameters())]
    mesh = init_device_mesh("cpu", (2,))
    sharded = [nn.Parameter(distribute_tensor(tensor.detach(), mesh, [Shard(0)])) for tensor in parameters()]
    train(Adafactor, sharded, lambda gradient: distribute_tensor(gradient, mesh, [Shard(0)]))
    for parameter, whole in zip(sharded, expected, strict=True):
        assert isinstance(parameter.data, DTensor)
        torch.testing.assert_close(parameter.data.full_tensor(), whole, rtol=1e-5, atol=1e-7)


def test_shards_of_uneven_sizes_are_trained_as_the_whole(gloo_ranks: GlooRanks) -> None:
    gloo_ranks.call(_train_sharded, world_size=2)
