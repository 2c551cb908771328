"""The estimate of a device that has some of the experts against what such a rank really holds."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muscale.full_runs.train.sharding import Meshes, build_model, rank_grid
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture import decoder_part
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import training_loss
from proxy_models.architecture.decoder_memory import activation_bytes, training_memory
from proxy_models.architecture.memory import Precision
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.architecture.shared_experts import ExpertShare
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import make_optimizer
from tests.muscale.fake_ranks import fullest_rank, rank_of
from tests.muscale.full_runs.train.test_sharded_memory import held
from tests.muscale.gloo_ranks import GlooRanks

SEQUENCES, RANKS = 4, 8
MIXTURE: dict[str, Any] = {
    "n_experts": 8,
    "expert_ratio": 1.0,
    "n_shared_experts": 1,
    "first_dense_layers": 1,
    "norm": "layernorm",  # as a CPU's RMSNorm keeps more than a GPU's
}


def numerics_of(precision: Precision = "fp32") -> Numerics:
    model, base = (
        ModelConfig(d_model=width, n_layers=3, head_dim=8, context_length=32, **MIXTURE) for width in (64, 32)
    )
    return Numerics(model=model, base=base, corpus_key="", seed=0, evaluation_tokens=32, precision=precision)


@pytest.mark.parametrize(
    ("parallelism", "optimizer"),
    [
        (Parallelism(expert_parallel=2), "adamw"),
        (Parallelism(expert_parallel=8), "muon"),
        (Parallelism(expert_parallel=2, sharding="zero2"), "lion"),
        (Parallelism(expert_parallel=4, sharding="none"), "muon"),
        (Parallelism(expert_parallel=2, sharding="hybrid", shard_ranks=4), "lamb"),
    ],
    ids=["full", "one expert", "zero2", "none", "hybrid"],
)
def test_weights_gradients_and_moments_of_a_rank_that_has_some_of_the_experts(
    parallelism: Parallelism, optimizer: OptimizerName
) -> None:
    numerics, grid = numerics_of(), parallelism.grid(RANKS)
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=1024, optimizer=optimizer).resolve(102_400)
    config = numerics.model
    assert isinstance(config, ModelConfig)
    estimate = training_memory(
        config, micro_batch=SEQUENCES, optimizer=optimizer, **parallelism.memory_conditions(grid)
    )
    with rank_of(3, RANKS), fullest_rank(parallelism.expert_parallel, SEQUENCES * 32 * 2):
        meshes = Meshes.of(parallelism, grid, "cpu")
        built = build_model(numerics, recipe, parallelism, device=torch.device("cpu"), meshes=meshes)
        made = make_optimizer(built, numerics.parametrization(optimizer), recipe)
        training_loss(built, torch.zeros(SEQUENCES, 33, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
        made.step()
        parameters = list(built.parameters())
        assert estimate.parameters == held(parameters)
        assert estimate.gradients == held([parameter.grad for parameter in parameters if parameter.grad is not None])
        moments = [value for state in made.state.values() for value in state.values() if value.ndim]
        assert estimate.optimizer == held(moments)


def kept(numerics: Numerics, parallelism: Parallelism) -> tuple[int, float]:
    """Bytes that autograd keeps on this rank besides weights, and the rows for its experts over its own rows."""
    dist.init_process_group("gloo")
    grid, cpu = rank_grid(parallelism), torch.device("cpu")
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=256).resolve(25_600)
    built = build_model(numerics, recipe, parallelism, device=cpu, meshes=Meshes.of(parallelism, grid, "cpu"))
    found: dict[int, Tensor] = {}
    left, arrived = [], []
    counts = ExpertShare._counts

    def counted(self: ExpertShare, load: Tensor) -> tuple[Tensor, list[int], list[int]]:
        received, leaving, arriving = counts(self, load)
        left.extend(leaving)
        arrived.extend(arriving)
        return received, leaving, arriving

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor  # held, so that its address is not given away again
        return tensor

    generator = torch.Generator().manual_seed(dist.get_rank())
    sequences = torch.randint(256, (SEQUENCES, 33), generator=generator)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with patch.object(ExpertShare, "_counts", counted), hooks:
        loss = training_loss(built, sequences)
    assert loss.requires_grad
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in (*built.parameters(), *built.buffers())]
    for weight in weights:
        found.pop(weight.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values()), sum(arrived) / sum(left)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_of_ranks_that_share_out_experts_are_what_autograd_keeps(
    gloo_ranks: GlooRanks, monkeypatch: pytest.MonkeyPatch, precision: Precision
) -> None:
    numerics = numerics_of(precision)
    config = numerics.model
    assert isinstance(config, ModelConfig)
    ranks = gloo_ranks.call(kept, numerics, Parallelism(expert_parallel=2, sharding="zero2"), world_size=2)
    assert sum(share for _, share in ranks) == pytest.approx(2)
    for found, share in ranks:
        monkeypatch.setattr(decoder_part, "fullest", lambda _, share=share: share)
        assert found == pytest.approx(activation_bytes(config, SEQUENCES, precision, expert_parallel=2), rel=0.01)
    monkeypatch.undo()
    full = activation_bytes(config, SEQUENCES, precision, expert_parallel=2)
    assert full > activation_bytes(config, SEQUENCES, precision)


def test_ranks_gather_their_own_experts_alone() -> None:
    config = numerics_of().model
    assert isinstance(config, ModelConfig)
    stacks = config.n_params_by_group["experts"] // 2
    state: dict[str, Any] = {"micro_batch": 1, "precision": "bf16"}
    whole, shared = (
        training_memory(config, **state, sharding="zero2", world_size=8, expert_parallel=n) for n in (1, 8)
    )
    assert whole.gathered - shared.gathered == 2 * 2 * stacks * 7 // 8
    whole, shared = (training_memory(config, **state, sharding="full", world_size=8, expert_parallel=n) for n in (1, 8))
    assert (whole.parameters, whole.optimizer) == (shared.parameters, shared.optimizer), "as many weights in all"
    assert whole.gathered - shared.gathered >= 2 * (2 * stacks - 2 * stacks // 8)
    with pytest.raises(ValueError, match=r"expert_parallel must.*1, got 0"):
        training_memory(config, micro_batch=1, expert_parallel=0)
