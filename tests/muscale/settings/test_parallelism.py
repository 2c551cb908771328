"""Layouts that a model's family has no products for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from muscale.settings.parallelism import Parallelism
from muscale.settings.promote import PromoteSettings
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import Checkpointing, Sharding
from proxy_models.architecture.stage_layout import SPLIT_BACKWARD, PipelineSchedule
from tests.proxy_models.families import Recurrent


def test_every_batch_of_a_ramp_needs_micro_batches_for_a_pipeline() -> None:
    rounds = Parallelism(pipeline_parallel=4, pipeline_schedule="interleaved")
    assert not list(rounds.unfit(4, sequences=7, micro_batch=1))
    assert list(rounds.unfit(4, sequences=7, doublings=1, micro_batch=1))  # 14 are not 3 equal rounds
    assert not list(rounds.unfit(4, sequences=7, doublings=1))
    assert list(Parallelism(pipeline_parallel=2).unfit(6, sequences=16))  # three unequal shares


def test_a_family_without_a_plan_of_its_products_is_sharded_by_data_alone() -> None:
    model = Recurrent(vocab_size=256, context_length=32).member(32, 2)
    Parallelism().require(model)
    with pytest.raises(ValueError, match="tensor_parallel must be 1 .* got 2"):
        Parallelism(tensor_parallel=2).require(model)
    with pytest.raises(ValueError, match="context_parallel must be 1 .* got 2"):
        Parallelism(context_parallel=2).require(model)


def test_ranks_that_share_a_sequence_are_neighbours_over_which_weights_are_sharded() -> None:
    for sharding, grid in (("full", (1, 1, 4, 2)), ("none", (1, 4, 1, 2))):
        layout = Parallelism(sharding=sharding, context_parallel=2, tensor_parallel=2)  # type: ignore[arg-type]
        assert layout.grid(8) == grid
        assert (layout.data_ranks(8), layout.sequence_ranks) == (2, 4)
    assert Parallelism(sharding="hybrid", context_parallel=2, shard_ranks=4).grid(8) == (1, 2, 4, 1)
    with pytest.raises(ValueError, match="multiple of tensor_parallel · context_parallel = 4, got 6"):
        Parallelism(sharding="hybrid", context_parallel=4, shard_ranks=6)
    assert list(Parallelism(context_parallel=4).unfit(6)) == [
        "tensor_parallel · context_parallel must divide the 6 ranks, got 4"
    ]


@pytest.mark.parametrize(
    ("change", "layout", "rule"),
    [
        ({"context_length": 30}, {"context_parallel": 2}, "context_parallel must cut the 30 positions.*got 2"),
        (
            {"context_length": 36},
            {"context_parallel": 2, "tensor_parallel": 4},
            "cut the 36 positions.*tensor_parallel = 4.*got 2",
        ),
        ({"mlp_dropout": 0.1}, {"context_parallel": 2}, "context_parallel must be 1 with mlp_dropout.*got 2"),
        (
            {"positions": "learned"},
            {"context_parallel": 2, "tensor_parallel": 2},
            "context_parallel must be 1 with learned.*got 2",
        ),
    ],
)
def test_what_ranks_that_share_a_sequence_cannot_do_is_refused(
    change: dict[str, Any], layout: dict[str, Any], rule: str
) -> None:
    model = ModelConfig(d_model=64, n_layers=2, context_length=32)
    Parallelism(**layout).require(model)
    with pytest.raises(ValueError, match=rule):
        Parallelism(**layout).require(replace(model, **change))


def test_a_schedule_that_splits_backward_passes_is_not_compiled_by_default() -> None:
    assert Parallelism(pipeline_parallel=2, pipeline_schedule="zero_bubble", sharding="zero2").splits_backward
    assert not Parallelism(pipeline_schedule="zero_bubble").splits_backward
    assert not Parallelism(pipeline_parallel=2).splits_backward


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
@pytest.mark.parametrize("sharding", ["full", "hybrid"])
def test_a_schedule_that_splits_backward_passes_needs_gathered_weights(
    schedule: PipelineSchedule, sharding: Sharding
) -> None:
    """torch would lose the gradients of weights that are freed after the forward pass."""
    settings: dict[str, Any] = {"pipeline_schedule": schedule, "sharding": sharding}
    for refused in (partial(Parallelism, pipeline_parallel=2), partial(PromoteSettings, pipeline_parallel="auto")):
        with pytest.raises(ValueError, match=f'sharding.*"{schedule}".*got "{sharding}"'):
            refused(**settings)
    assert not Parallelism(**settings).splits_backward


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_a_schedule_that_splits_backward_passes_recomputes_nothing(checkpointing: Checkpointing) -> None:
    settings: dict[str, Any] = {"pipeline_schedule": "zero_bubble_v", "sharding": "zero2"}
    with pytest.raises(ValueError, match=f'activation_checkpointing.*got "{checkpointing}"'):
        Parallelism(pipeline_parallel=2, checkpointing=checkpointing, **settings)
    with pytest.raises(ValueError, match=f'activation_checkpointing.*got "{checkpointing}"'):
        PromoteSettings(pipeline_parallel="auto", activation_checkpointing=checkpointing, **settings)
