"""The estimate of a device's memory against what one rank of many really holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from muscale.full_runs.train.sharding import Meshes, build_model, fitting_micro_batch, mesh_of, rank_grid
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture import memory
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import training_loss
from proxy_models.architecture.decoder_memory import activation_bytes, training_memory
from proxy_models.architecture.families import family_of
from proxy_models.architecture.memory import MIN_UNIT_PARAMS, Sharding, largest_micro_batch
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.recipe import Recipe
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import make_optimizer
from proxy_models.training.traced_memory import traced_memory
from tests.muscale.fake_ranks import rank_of
from tests.muscale.gloo_ranks import GlooRanks
from tests.proxy_models.families import Recurrent
from tests.proxy_models.peak_memory import peak_bytes
from tests.quick import quick_and_soak

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
        (TENSOR, "soap", {"queries_per_kv": 2}),
        (Parallelism(sharding="none"), "soap", {"activation": "gelu"}),
        (TENSOR, "lamb", {}),
    ],
    ids=["full", "full, muon", "none", "zero2", "full, soap", "none, soap", "full, lamb"],
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
        world_size=grid.replicas * grid.shards,
        tensor_parallel=grid.tensor,
    )
    with rank_of(0 if optimizer == "soap" else 5, 8):  # the first rank owns the most matrices
        built = build_model(
            numerics, recipe, parallelism, device=torch.device("cpu"), meshes=Meshes(mesh_of(grid, "cpu"))
        )
        made = make_optimizer(built, numerics.parametrization(optimizer), recipe)
        loss = training_loss(built, torch.zeros(SEQUENCES, 33, dtype=torch.int64))
        loss.backward()  # type: ignore[no-untyped-call]
        made.step()
        parameters = list(built.parameters())
        assert estimate.parameters == held(parameters)
        assert estimate.gradients == held([parameter.grad for parameter in parameters if parameter.grad is not None])
        moments = [value for state in made.state.values() for value in state.values() if value.ndim]
        assert estimate.optimizer == held(moments)


@pytest.mark.parametrize(("tensor_parallel", "context_parallel"), [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)])
def test_activations_of_a_rank_that_shares_products_or_sequences(
    monkeypatch: pytest.MonkeyPatch, tensor_parallel: int, context_parallel: int
) -> None:
    monkeypatch.setattr(memory, "CHUNK_ENTRIES", 256)  # a chunk is not kept
    # LayerNorm's, as a CPU's RMSNorm keeps more than a GPU's.
    model = ModelConfig(d_model=64, n_layers=2, head_dim=8, context_length=32, norm="layernorm")
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=256).resolve(25600)
    numerics = Numerics(model=model, base=model, corpus_key="", seed=0, evaluation_tokens=32)
    parallelism = Parallelism(tensor_parallel=tensor_parallel, context_parallel=context_parallel)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        kept[own.untyped_storage().data_ptr()] = own  # held, so that its address is not given away again
        return tensor

    with rank_of(0, parallelism.sequence_ranks):
        meshes = Meshes.of(parallelism, parallelism.grid(parallelism.sequence_ranks), "cpu")
        built = build_model(numerics, recipe, parallelism, device=torch.device("cpu"), meshes=meshes)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = training_loss(built, torch.zeros(SEQUENCES, 33, dtype=torch.int64))
        assert loss.requires_grad
        weights = [p.to_local() if isinstance(p, DTensor) else p for p in (*built.parameters(), *built.buffers())]
        for weight in weights:
            kept.pop(weight.untyped_storage().data_ptr(), None)
    shared: dict[str, Any] = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
    estimate = activation_bytes(model, SEQUENCES, **shared)
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) == pytest.approx(estimate, rel=0.01)
    assert estimate < 0.7 * activation_bytes(model, SEQUENCES)


def own_bytes(
    numerics: Numerics, recipe: Recipe, parallelism: Parallelism, min_unit_params: int
) -> tuple[int, int, int, int]:
    """Bytes of weights, gradients and moments of this rank after a step, and the most that a pass makes."""
    family = family_of(numerics.model)
    dist.init_process_group("gloo")
    meshes, cpu = Meshes(mesh_of(rank_grid(parallelism), "cpu")), torch.device("cpu")
    built = build_model(numerics, recipe, parallelism, device=cpu, meshes=meshes, min_unit_params=min_unit_params)
    made = make_optimizer(built, numerics.parametrization(recipe.optimizer), recipe)
    tokens = torch.zeros(SEQUENCES, numerics.model.context_length + 1, dtype=torch.int64)

    def one_pass() -> None:
        family.training_loss(built, tokens).backward()  # type: ignore[no-untyped-call]

    one_pass()
    made.step()
    peak = peak_bytes(one_pass)
    gradients = [parameter.grad for parameter in built.parameters() if parameter.grad is not None]
    moments = [value for state in made.state.values() for value in state.values() if value.ndim]
    return held(list(built.parameters())), held(gradients), held(moments), peak


@pytest.mark.parametrize(
    ("sharding", "min_unit_params"),
    quick_and_soak([("full", MIN_UNIT_PARAMS), ("full", 0), ("none", 0)], ("full", 0)),
)
def test_a_family_s_traced_memory_is_held_by_each_of_two_ranks(
    gloo_ranks: GlooRanks, monkeypatch: pytest.MonkeyPatch, sharding: Sharding, min_unit_params: int
) -> None:
    monkeypatch.setattr("proxy_models.training.traced_memory.MIN_UNIT_PARAMS", min_unit_params)
    traced_memory.cache_clear()
    member = Recurrent(vocab_size=256, context_length=32).member(64, 4)
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=256).resolve(25600)
    numerics = Numerics(model=member, base=member, corpus_key="", seed=0, evaluation_tokens=32)
    traced = traced_memory(member, micro_batch=SEQUENCES, sharding=sharding, world_size=2)
    layout = Parallelism(sharding=sharding)
    for *state, peak in gloo_ranks.call(own_bytes, numerics, recipe, layout, min_unit_params, world_size=2):
        assert state == [traced.parameters, traced.gradients, traced.optimizer]
        assert 1.0 <= (traced.gathered + traced.reduced + traced.activations) / peak < 1.35


def test_a_pass_of_a_family_takes_the_sequences_that_fit_by_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Recurrent(vocab_size=256, context_length=8).member(64, 2)
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=24 * 8).resolve(24 * 800)
    numerics = Numerics(model=member, base=member, corpus_key="", seed=0, evaluation_tokens=32)
    limit = traced_memory(member, micro_batch=5).total
    monkeypatch.setattr("muscale.full_runs.train.sharding.memory_limit", lambda _device: limit)
    assert fitting_micro_batch(numerics, recipe, Parallelism(), device=torch.device("cuda:0")) == 4
    assert fitting_micro_batch(numerics, recipe, Parallelism(), device=torch.device("cpu")) is None


def test_norms_alone_are_whole_on_every_device() -> None:
    model = ModelConfig(d_model=64, n_layers=1, vocab_size=50_000)
    two = training_memory(model, micro_batch=1, tensor_parallel=2)
    assert two.parameters == 4 * (model.n_params_total + model.n_params_by_group["norms"]) // 2
    assert two.gathered == two.parameters, "FSDP2 computes with a copy, of one shard too"
    limit = training_memory(model, micro_batch=8, world_size=2, tensor_parallel=2).total
    estimate = partial(training_memory, model, world_size=2)
    assert largest_micro_batch(partial(estimate, tensor_parallel=2), 8, limit=limit) == 8
    assert largest_micro_batch(estimate, 8, limit=limit) < 8
    with pytest.raises(ValueError, match="tensor_parallel must.*1, got 0"):
        training_memory(model, micro_batch=1, tensor_parallel=0)
