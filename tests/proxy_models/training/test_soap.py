"""Another implementation of SOAP as the oracle, and matrices that ranks share as those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_optimizer import SOAP
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from proxy_models.architecture.sharded import laid_out, own, whole
from proxy_models.training import soap
from proxy_models.training.soap import SOAPWithAdamW
from proxy_models.training.state import StateError
from tests.muscale.gloo_ranks import GlooRanks

SHAPES = ((6, 10), (6, 10), (12, 5), (6, 10))
RATE, EPS, BETAS = 0.01, 1e-12, (0.9, 0.95)
N_STEPS = 25
Layout = Callable[[Tensor], Tensor]


def parameters(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def optimizer_of(parameters: list[nn.Parameter], *, stack: bool = False, decay: float = 0.0) -> SOAPWithAdamW:
    group = {"params": parameters, "lr": RATE, "weight_decay": decay, "eps": EPS, "rotated": True, "stack": stack}
    return SOAPWithAdamW([group], betas=BETAS)


def train(
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    steps: range = range(N_STEPS),
    as_gradient: Layout = lambda values: values,
) -> list[Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = as_gradient(torch.randn(parameter.shape, generator=generator) * 1e-3)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("limit", [10_000, 10, 5], ids=["both sides", "one side", "one side or none"])
def test_without_a_least_root_it_is_pytorch_optimizer_s(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soap, "_LEAST_ROOT", 0.0)
    monkeypatch.setattr(soap, "MAX_ROTATED_DIM", limit)
    ours, theirs = parameters(), parameters()
    options: dict[str, Any] = {"weight_decay": 0.0, "precondition_frequency": 10, "max_precondition_dim": limit}
    expected = train(theirs, SOAP(theirs, lr=RATE, betas=BETAS, eps=EPS, merge_dims=False, **options))
    for found, other in zip(train(ours, optimizer_of(ours)), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)


def test_a_convolution_is_its_matrix_and_a_stack_its_matrices() -> None:
    (matrix, *_), (convolution,) = parameters(((6, 12),)), parameters(((6, 3, 2, 2),))
    torch.testing.assert_close(*(train([one], optimizer_of([one]))[0].flatten() for one in (matrix, convolution)))
    stack = parameters(((3, 6, 10),))
    apart = [nn.Parameter(matrix.detach().clone()) for matrix in stack[0]]
    one, several = optimizer_of(stack, stack=True), optimizer_of(apart)
    for step in range(N_STEPS):
        stack[0].grad = torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(step))
        for parameter, gradient in zip(apart, stack[0].grad, strict=True):
            parameter.grad = gradient.clone()
        one.step()
        several.step()
    torch.testing.assert_close(stack[0].detach(), torch.stack([*apart]).detach())


def test_the_first_step_finds_the_eigenbasis_and_only_decays() -> None:
    found = parameters()
    optimizer = optimizer_of(found, decay=0.5)
    train(found, optimizer, steps=range(1))
    for parameter, start in zip(found, parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), start.detach() * (1 - 0.5 * RATE))
    state = optimizer.state[found[0]]
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "step": (),
        "exp_avg": (1, 6, 10),
        "exp_avg_sq": (1, 6, 10),
        "left": (1, 6, 6),
        "left_basis": (1, 6, 6),
        "right": (1, 10, 10),
        "right_basis": (1, 10, 10),
    }
    basis, factor = state["left_basis"], state["left"]
    rotated = basis.mT @ factor @ basis
    torch.testing.assert_close(rotated, torch.diag_embed(rotated.diagonal(dim1=1, dim2=2)), atol=1e-12, rtol=0)
    assert [tuple(optimizer.state[parameter]["left"].shape) for parameter in found] == [
        (1, len(p), len(p)) for p in found
    ]


def _train_sharded() -> None:
    dist.init_process_group("gloo")
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    flat = init_device_mesh("cpu", (4,))
    layouts: list[tuple[Any, Any]] = [
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (world["shards"], [Shard(0)]),
        (world, [Replicate(), Shard(0)]),
        (world, [Shard(0), Shard(1)]),
    ]
    for shapes, stack in ((SHAPES, False), (((5, 6, 4),), True)):
        alone = parameters(shapes)
        optimizer = optimizer_of(alone, stack=stack)
        train(alone, optimizer, steps=range(12))
        kept = [
            (p.detach().clone(), {kind: value.clone() for kind, value in optimizer.state[p].items()}) for p in alone
        ]
        expected = train(alone, optimizer, steps=range(12, N_STEPS))
        for mesh, placements in layouts:

            def shared(values: Tensor, mesh: Any = mesh, placements: Any = placements) -> Tensor:
                return distribute_tensor(values.detach().clone(), mesh, placements)

            sharded = [nn.Parameter(shared(weight)) for weight, _ in kept]
            again = optimizer_of(sharded, stack=stack)
            for parameter, (_, state) in zip(sharded, kept, strict=True):
                again.state[parameter] = {kind: laid_out(value.clone(), parameter) for kind, value in state.items()}
            found = train(sharded, again, steps=range(12, N_STEPS), as_gradient=shared)
            for parameter, ours, one in zip(sharded, found, expected, strict=True):
                torch.testing.assert_close(whole(ours), one, rtol=1e-4, atol=1e-5)
                n_matrices = own(again.state[parameter].get("left", torch.empty(0))).shape[:1].numel()
                of_all = torch.tensor(n_matrices)
                dist.all_reduce(of_all)
                copies = 4 // mesh.size() * (2 if stack and Replicate() in placements else 1)
                assert of_all == copies * (5 if stack else 1)


def test_ranks_that_share_matrices_go_on_from_the_state_of_one_process_as_it_does(gloo_ranks: GlooRanks) -> None:
    gloo_ranks.call(_train_sharded, world_size=4)


def test_a_state_of_an_earlier_version_is_continued_and_one_without_some_matrices_is_refused() -> None:
    """Earlier versions kept the state of all matrices of a shape with the first of them."""
    expected = train(plain := parameters(), optimizer_of(plain))
    found = parameters()
    optimizer = optimizer_of(found)
    train(found, optimizer, steps=range(12))
    first, *others = (optimizer.state[parameter] for parameter in (found[0], found[1], found[3]))
    for kind in first.keys() - {"step"}:
        first[kind] = torch.cat([first[kind], *(state.pop(kind) for state in others)])
    for ours, one in zip(train(found, optimizer, steps=range(12, N_STEPS)), expected, strict=True):
        torch.testing.assert_close(ours, one)
    del others[0]["left"]
    with pytest.raises(StateError):
        train(found, optimizer, steps=range(1))
