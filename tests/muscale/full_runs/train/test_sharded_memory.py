"""The estimate of a device's memory against what one rank of many really holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muscale.full_runs.train.sharding import build_model, mesh_of
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture import memory
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import training_loss
from proxy_models.architecture.memory import activation_bytes, largest_micro_batch, training_memory
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import make_optimizer
from tests.muscale.fake_ranks import rank_of

SEQUENCES = 4
TENSOR = Parallelism(tensor_parallel=2)
EVERYTHING = {"biases": True, "tied": True, "norm": "layernorm", "queries_per_kv": 2, "positions": "learned"}


def held(tensors: Sequence[Tensor]) -> int:
    """Bytes of them on this rank."""
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)


@pytest.mark.parametrize(
    ("parallelism", "optimizer", "variant"),
    [
        (TENSOR, "adamw", EVERYTHING),
        (TENSOR, "muon", {"qk_norm": True, "parallel": True}),
        (Parallelism(tensor_parallel=4, sharding="none"), "muon", {"activation": "gelu", "biases": True}),
        (Parallelism(tensor_parallel=4, sharding="zero2"), "lion", {}),
    ],
    ids=["full", "full, muon", "none", "zero2"],
)
def test_weights_gradients_and_moments_of_a_rank_that_shares_products(
    parallelism: Parallelism, optimizer: OptimizerName, variant: dict[str, Any]
) -> None:
    model, base = (
        ModelConfig(d_model=width, n_layers=2, head_dim=8, context_length=32, **variant) for width in (64, 32)
    )
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=256, optimizer=optimizer).resolve(25600)
    numerics = Numerics(model=model, base=base, corpus_key="", seed=0, evaluation_tokens=32)
    grid = parallelism.grid(8)
    estimate = training_memory(
        model,
        micro_batch=SEQUENCES,
        optimizer=optimizer,
        sharding=parallelism.sharding,
        world_size=grid[0] * grid[1],
        tensor_parallel=grid[2],
    )
    with rank_of(5, 8):
        built = build_model(numerics, recipe, parallelism, device=torch.device("cpu"), mesh=mesh_of(grid, "cpu"))
        made = make_optimizer(built, numerics.parametrization(optimizer), recipe)
        loss = training_loss(built, torch.zeros(SEQUENCES, 33, dtype=torch.int64))
        loss.backward()  # type: ignore[no-untyped-call]
        made.step()
        parameters = list(built.parameters())
        assert estimate.parameters == held(parameters)
        assert estimate.gradients == held([parameter.grad for parameter in parameters if parameter.grad is not None])
        moments = [value for state in made.state.values() for value in state.values() if value.ndim]
        assert estimate.optimizer == held(moments)


@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_activations_of_a_rank_that_shares_products(monkeypatch: pytest.MonkeyPatch, tensor_parallel: int) -> None:
    monkeypatch.setattr(memory, "CHUNK_ENTRIES", 256)  # a chunk is not kept
    # LayerNorm's, as a CPU's RMSNorm keeps more than a GPU's.
    model = ModelConfig(d_model=64, n_layers=2, head_dim=8, context_length=32, norm="layernorm")
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=256).resolve(25600)
    numerics = Numerics(model=model, base=model, corpus_key="", seed=0, evaluation_tokens=32)
    parallelism = Parallelism(tensor_parallel=tensor_parallel)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        kept[own.untyped_storage().data_ptr()] = own  # held, so that its address is not given away again
        return tensor

    with rank_of(0, tensor_parallel):
        mesh = mesh_of(parallelism.grid(tensor_parallel), "cpu")
        built = build_model(numerics, recipe, parallelism, device=torch.device("cpu"), mesh=mesh)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = training_loss(built, torch.zeros(SEQUENCES, 33, dtype=torch.int64))
        assert loss.requires_grad
        weights = [p.to_local() if isinstance(p, DTensor) else p for p in (*built.parameters(), *built.buffers())]
        for weight in weights:
            kept.pop(weight.untyped_storage().data_ptr(), None)
    estimate = activation_bytes(model, SEQUENCES, tensor_parallel=tensor_parallel)
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) == pytest.approx(estimate, rel=0.01)
    assert estimate < 0.7 * activation_bytes(model, SEQUENCES)


def test_norms_alone_are_whole_on_every_device() -> None:
    model = ModelConfig(d_model=64, n_layers=1, vocab_size=50_000)
    two = training_memory(model, micro_batch=1, tensor_parallel=2)
    assert two.parameters == 4 * (model.n_params_total + model.n_params_by_group["norms"]) // 2
    assert two.gathered == two.parameters, "FSDP2 computes with a copy, of one shard too"
    limit = training_memory(model, micro_batch=8, world_size=2, tensor_parallel=2).total
    assert largest_micro_batch(model, 8, limit=limit, world_size=2, tensor_parallel=2) == 8
    assert largest_micro_batch(model, 8, limit=limit, world_size=2) < 8
    with pytest.raises(ValueError, match="tensor_parallel must be at least 1, got 0"):
        training_memory(model, micro_batch=1, tensor_parallel=0)
