"""The predicted step of a mixture of experts: products of the experts that a token passes, collectives of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from muscale.plans.step_time import LINK_SHARE, LINKS, StepTime
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.decoder import training_loss
from proxy_models.training.fsdp import between_parts
from tests.gpu_free.cases import SHAPES
from tests.muscale.collectives import Collectives
from tests.muscale.fake_ranks import rank_of
from tests.muscale.full_runs.train.test_collectives import FP32, RANKS, SEQUENCES, TIME, built

H100 = LINKS["H100 SXM"]


def step(shape: str, links: object = H100, workers: int = 64, **layout: object) -> StepTime:
    return StepTime(
        SHAPES[shape],
        Parallelism(**layout),  # type: ignore[arg-type]
        workers=workers,
        micro_batch=1,
        batch_tokens=2**22,
        device="H100 SXM",
        links=links,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("shape", ["8x7B", "64x16B"])
def test_products_are_those_of_the_experts_that_a_token_passes(shape: str) -> None:
    endless = replace(H100, memory=1e30, node=1e30, network=1e30, products=1.0, attention=1.0)
    model, one = SHAPES[shape], step(shape, endless, workers=1)
    attention = 12 * model.n_layers * model.context_length * model.d_model
    exact = model.train_flops_per_token - attention + attention / 2 * 7 / 6  # the causal half, 7 products for 6
    assert one.total == pytest.approx(2**22 * exact / 989.5e12)
    assert exact < 0.5 * 6 * model.n_params_total


@pytest.mark.parametrize("shape", ["8x7B", "64x16B"])
def test_collectives_and_the_optimizer_move_all_experts(shape: str) -> None:
    model, slow = SHAPES[shape], replace(H100, network=1e6)  # so that nothing but bytes counts
    n, tables = model.n_params_total, 2 * model.vocab_size * model.d_model
    full = step(shape, slow, workers=512)
    passes = full._passes
    sizes = passes * ((2 + 2 + 4) * n - 2 * tables)
    assert full.communication == pytest.approx(sizes * 511 / 512 / (LINK_SHARE * 8 * 1e6), rel=0.01)
    assert full.optimizer == pytest.approx(32 * n / 512 / (H100.memory * 0.8))


@pytest.mark.parametrize(
    ("parallelism", "n_experts"),
    [(Parallelism(), 8), (Parallelism(), 4), (Parallelism(sharding="zero2"), 4), (Parallelism(sharding="none"), 4)],
    ids=["full", "full, parts of experts", "zero2, parts of experts", "none"],
)
def test_the_bytes_of_a_step_are_those_of_the_collectives_that_a_rank_calls(
    parallelism: Parallelism, n_experts: int
) -> None:
    with rank_of(0, RANKS):
        variant: dict[str, Any] = {
            "n_experts": n_experts,
            "first_dense_layers": 1,
            "n_shared_experts": 1,
            "expert_ratio": 0.5,
        }
        model, found = built(parallelism, precision="bf16", **variant), Collectives()
        with found:
            for last in (False, True):
                between_parts(model, parallelism.sharding, last=last)
                training_loss(model, torch.zeros(SEQUENCES, TIME + 1, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    _, replicas, shards, _ = parallelism.grid(RANKS)
    alone = replace(H100, node=1e-3)  # bytes per second, so that nothing else counts
    predicted = StepTime(
        model.config,
        parallelism,
        workers=RANKS,
        micro_batch=SEQUENCES,
        batch_tokens=2 * SEQUENCES * TIME * RANKS,
        device="H100 SXM",
        links=alone,
    )

    def sent(kind: str, dtype: torch.dtype, ring: float) -> float:
        """Return the seconds of the link for what a rank sends in a ring; its part of an all-gather goes to all others."""
        calls = (
            (size, n) for (of, size), n in found.of(kind).items() if of == dtype and size > 2 * SEQUENCES * TIME * FP32
        )
        return sum(size * n for size, n in calls) * ring / (LINK_SHARE * alone.node)

    of_weights = sent("all-gather", torch.bfloat16, shards - 1)
    reduced = sent("reduce-scatter", torch.float32, (shards - 1) / shards)
    reduced += sent("all-reduce", torch.float32, 2 * (replicas - 1) / replicas)
    assert predicted.communication == pytest.approx(of_weights + reduced, rel=0.01), "but for the last norm"


def test_a_pipeline_of_unequal_blocks_waits_less_if_stages_are_balanced() -> None:
    model = replace(
        SHAPES["64x16B"], mlp_ratio=1.0, first_dense_layers=6
    )  # dense blocks take a third of the others' products
    cheap = sum(model.block_flops[:6]) / 6
    assert cheap < 0.7 * model.block_flops[-1]
    found = StepTime(
        model,
        Parallelism(pipeline_parallel=4, sharding="zero2"),
        workers=64,
        micro_batch=1,
        batch_tokens=2**22,
        device="H100 SXM",
    )
    assert 0 < found.bubble_share < 0.2
