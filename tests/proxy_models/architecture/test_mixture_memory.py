"""The estimate of a mixture's memory against what autograd, the optimizer and a step really keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder, training_loss
from proxy_models.architecture.decoder_memory import activation_bytes, evaluation_memory, fitting, training_memory
from proxy_models.architecture.memory import Checkpointing, Precision, least_memory
from proxy_models.architecture.parametrization import OptimizerName, parametrize
from proxy_models.architecture.pipeline_counts import PipelineShare
from proxy_models.architecture.stage_layout import blocks_of_stages
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.optimizer import make_optimizer
from tests.proxy_models.architecture.test_memory import SEQUENCES, kept_by_autograd
from tests.proxy_models.peak_memory import peak_bytes

# LayerNorm's, as a CPU's RMSNorm keeps more than a GPU's.
MIXTURE = ModelConfig(d_model=64, n_layers=3, context_length=64, norm="layernorm", n_experts=8, expert_ratio=1.0)
VARIANTS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "softmax": {"router_scores": "softmax"},
    "shared": {"n_shared_experts": 2},
    "dense first": {"first_dense_layers": 1, "n_shared_experts": 1},
    "square roots": {"expert_scheme": "sqrt_gate"},
    "penalties": {"router_z_loss": 1e-3, "balance_loss": 1e-2},
    "many": {"n_experts": 32, "experts_per_token": 6, "expert_ratio": 0.25},
    "gelu": {"activation": "gelu", "parallel": True},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_activations_are_what_autograd_keeps(fields: dict[str, Any], precision: Precision) -> None:
    config = replace(MIXTURE, **fields)
    copies = training_memory(config, micro_batch=SEQUENCES, precision=precision).gathered
    expected = activation_bytes(config, SEQUENCES, precision) + copies
    assert kept_by_autograd(config, precision) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "lamb", "soap", "adafactor"])
def test_weights_gradients_and_moments_are_those_of_a_real_step(name: OptimizerName) -> None:
    config = replace(MIXTURE, context_length=16, first_dense_layers=1, n_shared_experts=1)
    model = Decoder(config)
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=16).resolve(1600)
    optimizer = make_optimizer(model, parametrize(config, config, optimizer=name), recipe)
    training_loss(model, torch.zeros(1, 17, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    estimate = training_memory(config, micro_batch=1, optimizer=name)
    assert estimate.parameters == sum(p.nbytes for p in model.parameters()) == 4 * config.n_params_total
    assert estimate.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    if name == "adafactor":  # the estimate has no means of norms
        assert estimate.optimizer == pytest.approx(sum(moment.nbytes for moment in moments), rel=0.05)
    else:
        assert estimate.optimizer == sum(moment.nbytes for moment in moments)


@pytest.mark.parametrize(("kind", "tolerance"), [("none", 0.1), ("selective", 0.15), ("full", 0.15)])
@pytest.mark.parametrize("fields", [{}, {"n_experts": 16, "experts_per_token": 4, "n_shared_experts": 1}], ids=str)
def test_the_estimate_of_each_checkpointing_is_near_the_measured_peak(
    fields: dict[str, Any], kind: Checkpointing, tolerance: float
) -> None:
    config = replace(MIXTURE, n_layers=8, context_length=128, **fields)
    model, sequences = Decoder(config), torch.zeros(SEQUENCES, 129, dtype=torch.int64)
    for block in model.blocks:
        block.checkpointing = kind  # type: ignore[assignment]

    def step() -> None:
        training_loss(model, sequences).backward()  # type: ignore[no-untyped-call]

    step()  # its gradients stay, so that only activations are counted
    estimate = training_memory(config, micro_batch=SEQUENCES, checkpointing=kind)
    assert peak_bytes(step) == pytest.approx(estimate.activations + estimate.reduced, rel=tolerance)


def test_idle_experts_take_state_and_no_activations() -> None:
    few, many = MIXTURE, replace(MIXTURE, n_experts=32)
    assert few.n_params < many.n_params < 1.1 * few.n_params
    more = many.n_params_total - few.n_params_total
    one, other = (training_memory(each, micro_batch=1) for each in (few, many))
    assert other.parameters - one.parameters == other.gradients - one.gradients == 4 * more
    assert other.optimizer - one.optimizer == 8 * more
    of_scores = 3 * 4 * 24 * SEQUENCES * 64  # of three blocks, 24 experts more
    assert activation_bytes(many, SEQUENCES) - activation_bytes(few, SEQUENCES) == of_scores
    assert least_memory(many, "adamw", sharding="full", world_size=4) == 4 * 4 * many.n_params_total // 4


def test_ranks_gather_all_experts_of_a_block_and_parts_of_experts_once_more() -> None:
    config = replace(MIXTURE, n_layers=8, first_dense_layers=2)
    groups = config.n_params_by_group
    stacks = groups["experts"] // 6
    even, uneven = (
        training_memory(config, micro_batch=1, sharding="full", world_size=ranks, precision="bf16") for ranks in (8, 16)
    )
    assert even.gathered > 2 * 2 * stacks
    assert uneven.gathered - even.gathered == 2 * stacks
    held = uneven.parameters + uneven.optimizer
    assert evaluation_memory(config, 1, uneven, "bf16", sharding="full", world_size=16) - held > 4 * 2 * stacks


def test_stages_have_equal_work_with_cheap_blocks_first() -> None:
    config = ModelConfig(
        d_model=64, n_layers=16, vocab_size=64, n_experts=8, experts_per_token=4, mlp_ratio=1.0, first_dense_layers=8
    )
    flops = config.block_flops
    assert sum(flops) + 6 * 64 * 64 == pytest.approx(config.train_flops_per_token)
    assert flops[0] == pytest.approx(replace(config.with_blocks(8, 0), vocab_size=64).block_flops[0])
    stages = blocks_of_stages(config, 4)
    assert [number for blocks in stages for number in blocks] == list(range(16))
    costs = [sum(flops[number] for number in blocks) for blocks in stages]
    assert max(costs) - min(costs) <= flops[-1]
    assert len(stages[0]) > len(stages[-1])


def test_a_stage_of_dense_blocks_alone_keeps_what_a_dense_decoder_s_keeps() -> None:
    config = replace(MIXTURE, n_layers=8, first_dense_layers=4)
    pipeline = PipelineShare(schedule="1f1b", ranks=4, sequences=32)
    found = training_memory(config, micro_batch=2, sharding="zero2", world_size=4, pipeline=pipeline)
    dense = training_memory(config.with_blocks(8, 0), micro_batch=2, sharding="zero2", world_size=4, pipeline=pipeline)
    assert found == dense, "the first rank needs the most"


def test_a_mixture_takes_the_micro_batch_that_fits() -> None:
    config, state = replace(MIXTURE, n_layers=8), {"precision": "bf16", "optimizer": "adamw"}
    limit = training_memory(config, micro_batch=5, **state).total  # type: ignore[arg-type]
    assert fitting(config, 24, limit=limit, **state) == (4, "none")  # type: ignore[arg-type]
    assert fitting(config, 24, limit=4 * 4 * config.n_params_total, **state) == (1, "full")  # type: ignore[arg-type]
