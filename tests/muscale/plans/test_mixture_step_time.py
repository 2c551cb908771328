"""The predicted step of a mixture of experts: products of the experts that a token passes, collectives of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from muscale.plans.step_time import LINK_SHARE, LINKS, StepTime
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.decoder import training_loss
from proxy_models.architecture.memory import Checkpointing, fullest
from proxy_models.training.fsdp import between_parts
from tests.gpu_free.cases import SHAPES
from tests.muscale.collectives import Collectives
from tests.muscale.fake_ranks import fullest_rank, rank_of
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


EXPERTS = Parallelism(expert_parallel=2)


@pytest.mark.parametrize(
    ("parallelism", "n_experts"),
    [
        (Parallelism(), 8),
        (Parallelism(), 4),
        (Parallelism(sharding="zero2"), 4),
        (Parallelism(sharding="none"), 4),
        *((replace(EXPERTS, checkpointing=kind), 8) for kind in get_args(Checkpointing)),
        (Parallelism(expert_parallel=4), 4),
        (Parallelism(expert_parallel=8), 8),
        (Parallelism(sharding="zero2", expert_parallel=2, checkpointing="full"), 4),
        (Parallelism(sharding="none", expert_parallel=2), 4),
        (Parallelism(sharding="hybrid", shard_ranks=4, expert_parallel=2), 8),
    ],
    ids=str,
)
def test_the_bytes_of_a_step_are_those_of_the_collectives_that_a_rank_calls(
    parallelism: Parallelism, n_experts: int
) -> None:
    n, rows = parallelism.expert_parallel, SEQUENCES * TIME * 2
    with rank_of(0, RANKS), fullest_rank(n, rows):
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
    whole, own = parallelism.grid(RANKS), predicted._expert_grid
    stacks = model.config.n_params_by_group["experts"] // 2 // n  # of each of two blocks

    def sent(kind: str, dtype: torch.dtype, ring: Callable[[int], float]) -> float:
        """Return the seconds of the link for what a rank sends in rings of as many ranks."""
        of_experts = dtype.itemsize * stacks // (1 if kind == "reduce-scatter" else own.shards)
        seconds = 0.0
        for (of, size), number in found.of(kind).items():
            if of == dtype and size > 2 * SEQUENCES * TIME * FP32:
                grid = own if n > 1 and size == of_experts else whole
                seconds += size * number * ring(grid.replicas if kind == "all-reduce" else grid.shards)
        return seconds / (LINK_SHARE * alone.node)

    bf16, fp32 = torch.bfloat16, torch.float32
    of_weights = sent("all-gather", bf16, lambda ranks: ranks - 1)  # a rank's part goes to all others
    reduced = sent("reduce-scatter", fp32, lambda ranks: (ranks - 1) / ranks)
    reduced += sent("all-reduce", fp32, lambda ranks: 2 * (ranks - 1) / ranks)
    assert predicted.communication == pytest.approx(of_weights + reduced, rel=0.01), "but for the last norm"
    # Of two exchanges of the fullest rank, one sends its own rows and receives more, the other returns those.
    more = n * round(fullest(n) * rows / n) / rows
    exchanged = sent("all-to-all", bf16, lambda _: 2 * fullest(n) / (1 + more) * (n - 1) / n)
    assert predicted.experts == pytest.approx(exchanged, rel=1e-3)
    assert predicted.total > predicted.experts + predicted.exposed


def test_ranks_that_share_out_experts_gather_less_and_exchange_rows_over_the_slowest_link() -> None:
    """Each of eight neighbours has one of Mixtral's experts in each block."""
    model, tokens = SHAPES["8x7B"], 2**22 // 64
    rows = fullest(8) * tokens * 2 * model.d_model * 2  # bytes of a step
    slow = replace(H100, network=1e6)
    whole, within = (step("8x7B", slow, expert_parallel=n) for n in (1, 8))
    assert within.experts == pytest.approx(32 * 4 * rows * 7 / 8 / (LINK_SHARE * H100.node), rel=0.05)
    assert whole.experts == 0
    far = step("64x16B", slow, expert_parallel=16)
    assert far.experts > 100 * step("64x16B", slow, expert_parallel=8).experts
    again = step("8x7B", slow, expert_parallel=8, checkpointing="selective")
    assert again.experts == pytest.approx(1.5 * within.experts)
    eager = replace(step("8x7B", slow, workers=8), compiled=False)
    shared = step("8x7B", slow, workers=8, expert_parallel=8)
    products = 6 * model.n_params_by_group["experts"] * model.active_share * 2**22 / 8 / (H100.products * 989.5e12)
    assert shared.communication < eager.communication / 5, "attention and tables alone"
    assert (
        shared.products - shared._traffic.contended
        > eager.products - eager._traffic.contended + (fullest(8) - 1) * products
    )
    assert shared.optimizer == pytest.approx(eager.optimizer)


def test_a_pipeline_of_unequal_blocks_waits_less_if_stages_are_balanced() -> None:
    # dense blocks take a third of the others' products
    model = replace(SHAPES["64x16B"], mlp_ratio=1.0, first_dense_layers=6)
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
