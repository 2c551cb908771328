"""The predicted step: the arithmetic of its terms, what must make it slower or faster, and published runs within a stated error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from muscale.plans.layouts import SCHEDULES
from muscale.plans.step_time import LINK_SHARE, LINKS, StepTime
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.decoder import training_loss
from proxy_models.architecture.memory import Checkpointing
from proxy_models.architecture.stage_layout import PipelineSchedule, blocks_of_stages, n_stages
from proxy_models.training.fsdp import between_parts
from tests.benchmarks.step_time import (
    LLAMA_8B,
    LLAMA_70B,
    PIPELINES,
    PUBLISHED,
    SCHEDULES_OF_TORCHTITAN,
    Published,
    llm_foundry,
    predicted,
    predicted_405b,
    predicted_torchtitan,
)
from tests.muscale.collectives import Collectives
from tests.muscale.fake_ranks import rank_of
from tests.muscale.full_runs.train.test_collectives import FP32, RANKS, SEQUENCES, TIME, built
from tests.proxy_models.pipeline_orders import orders, seconds

H100 = LINKS["H100 SXM"]


def step(
    model: Any = LLAMA_8B,
    workers: int = 64,
    micro_batch: int = 1,
    links: Any = None,
    attended: float | None = None,
    **layout: Any,
) -> StepTime:
    return StepTime(
        model,
        Parallelism(**layout),
        workers=workers,
        micro_batch=micro_batch,
        batch_tokens=2**22,
        device="H100 SXM",
        links=links,
        attended=attended,
    )


def test_products_take_their_flops_at_the_share_of_the_peak_that_they_reach() -> None:
    endless = replace(H100, memory=1e30, node=1e30, network=1e30, products=1.0, attention=1.0)
    one = step(workers=1, links=endless)
    tokens = 2**22
    # products alone; attention: causal half, 7 products for 6
    exact = LLAMA_8B.train_flops_per_token - 12 * 32 * 8192 * 4096
    attention = 12 * 32 * 8192 * 4096 / 2 * 7 / 6
    assert one.total == pytest.approx(tokens * (exact + attention) / 989.5e12)
    assert (one.tensor, one.exposed, one.communication) == (0, 0, 0)
    for micro_batch in (
        3,
        512,
        1000,
    ):  # of 512 sequences: a smaller last pass, one pass, and no more sequences than there are
        assert step(workers=1, links=endless, micro_batch=micro_batch).total == pytest.approx(one.total)
    documents = step(workers=1, links=endless, attended=1024.0)  # an eighth of the context
    assert documents.total == pytest.approx(tokens * (exact + attention / 8) / 989.5e12)
    window = step(replace(LLAMA_8B, attention_window=1024, global_attention_every=4), workers=1, links=endless)
    local = 1024 * (2 - 1024 / 8192) / 8192
    assert window.total == pytest.approx(tokens * (exact + attention * (3 / 4 * local + 1 / 4)) / 989.5e12)
    assert documents.mfu == pytest.approx(
        LLAMA_8B.train_flops_within(1024.0) * documents.tokens_per_second / 989.5e12, rel=1e-3
    )


def test_weights_are_gathered_in_bf16_and_gradients_reduced_in_fp32() -> None:
    n = LLAMA_8B.n_params_total
    slow = replace(H100, network=1e6)  # so that nothing but bytes counts: per-node adapters carry all of them
    tables = 2 * 128_256 * 4096  # outside the blocks, gathered once a pass
    full = step(workers=512, links=slow).communication
    assert full == pytest.approx(((2 + 2 + 4) * n - 2 * tables) * 511 / 512 / (0.8 * 8 * 1e6), rel=0.01)
    zero2 = step(workers=512, links=slow, sharding="zero2").communication
    assert full - zero2 == pytest.approx(2 * (n - tables) * 511 / 512 / (0.8 * 8 * 1e6), rel=0.01)
    hybrid = step(workers=512, links=slow, sharding="hybrid").communication
    assert hybrid == pytest.approx(2 * 4 * n / 8 * 63 / 64 / (0.8 * 1e6), rel=0.01), "shards are reduced over 64 nodes"


@pytest.mark.parametrize(
    "parallelism",
    [
        Parallelism(),
        Parallelism(sharding="zero2"),
        Parallelism(sharding="hybrid", shard_ranks=4),
        Parallelism(sharding="none"),
        *(Parallelism(sharding="none", tensor_parallel=4, checkpointing=kind) for kind in get_args(Checkpointing)),
        *(Parallelism(sharding="none", context_parallel=4, checkpointing=kind) for kind in get_args(Checkpointing)),
        Parallelism(sharding="none", tensor_parallel=2, context_parallel=2),
    ],
    ids=str,
)
def test_the_bytes_of_a_step_are_those_of_the_collectives_that_a_rank_calls(parallelism: Parallelism) -> None:
    with rank_of(0, RANKS):
        model, found = built(parallelism, precision="bf16"), Collectives()
        with found:
            for last in (False, True):
                between_parts(model, parallelism.sharding, last=last)
                training_loss(model, torch.zeros(SEQUENCES, TIME + 1, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    _, replicas, shards, tensor = parallelism.grid(RANKS)
    alone = replace(H100, node=1e-3)  # bytes per second, so that nothing else counts
    predicted = StepTime(
        model.config,
        parallelism,
        workers=RANKS,
        micro_batch=SEQUENCES,
        batch_tokens=2 * SEQUENCES * TIME * parallelism.data_ranks(RANKS),
        device="H100 SXM",
        links=alone,
    )

    def sent(kind: str, dtype: torch.dtype, ring: float) -> float:
        """Return the seconds of the link for what a rank sends in a ring; its part of an all-gather goes to all others."""
        calls = (
            (size, n) for (of, size), n in found.of(kind).items() if of == dtype and size > 2 * SEQUENCES * TIME * FP32
        )
        return sum(size * n for size, n in calls) * ring / (LINK_SHARE * alone.node)

    bf16, fp32 = torch.bfloat16, torch.float32
    reduced = sent("all-reduce", fp32, 2 * (replicas - 1) / replicas)
    if (n := max(tensor, parallelism.context_parallel)) > 1:
        of_activations = sent("all-gather", bf16, n - 1) + sent("reduce-scatter", bf16, (n - 1) / n)
        assert predicted.tensor + predicted.context == pytest.approx(of_activations)
        assert predicted.communication == pytest.approx(reduced, rel=0.01 if tensor > 1 else 2e-3), "norms are whole"
    else:
        of_weights = sent("all-gather", bf16, shards - 1) + sent("reduce-scatter", fp32, (shards - 1) / shards)
        assert predicted.communication == pytest.approx(of_weights + reduced, rel=2e-3), "but for the last norm"


def test_slower_links_longer_rings_and_shorter_passes_never_make_a_step_faster() -> None:
    for layout in ({}, {"tensor_parallel": 8}, {"sharding": "hybrid"}, {"sharding": "zero2"}):
        base = step(**layout)
        assert step(links=replace(H100, network=5e9), **layout).total >= base.total
        assert step(links=replace(H100, node=50e9), **layout).total >= base.total
        assert step(workers=512, **layout).tokens_per_second <= base.tokens_per_second
        assert step(micro_batch=2, **layout).total <= base.total
        assert step(checkpointing="full", **layout).total > base.total
        assert 0 < base.mfu < 1


def test_a_pipeline_of_equal_ranks_waits_for_the_published_bubble() -> None:
    """1F1B (P − 1)/M of the rest of the step, interleaved half of it, zero bubble a third of that if all three passes take as long."""
    endless = replace(H100, memory=1e30, node=1e30, network=1e30, attention=1e30)
    model = replace(LLAMA_8B, vocab_size=1)  # so that the last rank has no more to do
    for schedule, part in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 1 / 2),
        ("looped_bfs", 1 / 2),
        ("zero_bubble", 1 / 6),
    ):
        found = step(model, links=endless, pipeline_parallel=4, pipeline_schedule=schedule, sharding="zero2")
        assert found.bubble == pytest.approx(3 / 32 * part * found.products, rel=0.01), schedule
        assert found.bubble_share == pytest.approx(found.bubble / found.total)
        assert found.exposed_share > found.bubble_share
        whole = step(model, links=endless, sharding="zero2")
        assert found.products == pytest.approx(whole.products, rel=0.01)
        assert (whole.bubble, whole.sends) == (0, 0)


def test_a_rank_of_a_pipeline_gathers_keys_for_its_own_blocks_and_others_wait_for_them() -> None:
    slow, model = replace(H100, node=1e6), replace(LLAMA_8B, vocab_size=1)  # only bytes count, and stages are equal
    whole = step(model, links=slow, workers=8, context_parallel=2, sharding="zero2")
    staged = step(model, links=slow, workers=8, context_parallel=2, pipeline_parallel=4, sharding="zero2")
    assert staged.context == pytest.approx(whole.context * 4 / 4, rel=1e-3), (
        "4 times the sequences, a fourth of the blocks"
    )
    alone = step(model, links=slow, workers=8, pipeline_parallel=4, sharding="zero2")
    assert staged.bubble == pytest.approx(3 * staged.context / staged._passes + alone.bubble, rel=0.05)
    assert staged.sends == pytest.approx(alone.sends * (3 + 2 * alone._passes) / (3 + alone._passes) / 2, rel=1e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble", "zero_bubble_v"])
def test_unequal_stages_wait_as_in_the_order_that_torch_runs(schedule: PipelineSchedule) -> None:
    model = replace(LLAMA_8B, n_layers=18)  # 4 ranks can't have as many blocks each, and the last has a readout
    found = step(model, pipeline_parallel=4, pipeline_schedule=schedule, sharding="zero2")
    forward, backward = found._block
    weights, third = found._weight_products, found._readout / 3
    times = [
        {
            "F": n * forward + at_end * third,
            "I": n * (backward - weights) + at_end * third,
            "W": n * weights + at_end * third,
        }
        for n, at_end in ((len(blocks), blocks[-1] == 17) for blocks in blocks_of_stages(model, n_stages(schedule, 4)))
    ]
    exact = seconds(orders(schedule, 4, 32), times)
    predicted = found.products - found._traffic.contended + found.bubble
    assert predicted == pytest.approx(exact, rel=0.06)


def test_stages_reduce_gradients_once_and_gather_weights_once_or_for_every_micro_batch() -> None:
    slow = replace(H100, network=1e6)  # so that nothing but bytes counts
    sizes = LLAMA_8B.n_params_by_group
    rank = (LLAMA_8B.n_params_total - 2 * sizes["readout"]) / 32 * 9 + sizes["readout"]  # 9 blocks and a table
    layout: dict[str, Any] = {"pipeline_parallel": 4, "pipeline_schedule": "1f1b"}
    ring = 127 / 128 / (LINK_SHARE * 8 * 1e6)
    zero2 = step(workers=512, links=slow, sharding="zero2", **layout)
    assert zero2.communication == pytest.approx((2 + 4) * rank * ring, rel=0.01)
    full = step(workers=512, links=slow, sharding="full", **layout)
    assert full.communication - zero2.communication == pytest.approx(4 * 2 * (rank - sizes["readout"]) * ring, rel=0.01)


def test_stages_pass_activations_and_gradients_on() -> None:
    slow = replace(H100, network=1e6)
    size = 2 * 8192 * 4096 / (LINK_SHARE * 1e6)
    one_stage, two_stages = (
        step(links=slow, pipeline_parallel=4, pipeline_schedule=kind, sharding="zero2")
        for kind in ("1f1b", "interleaved")
    )
    assert one_stage.sends == pytest.approx(2 * (3 + 32) * size, rel=1e-3), "each is waited for"
    assert two_stages.sends == pytest.approx(2 * 7 * size, rel=1e-3), "those of the fill and drain"
    shared = step(links=slow, pipeline_parallel=4, tensor_parallel=8, sharding="zero2")
    assert shared.sends == pytest.approx(2 * (3 + 256) * size / 8, rel=1e-3), "a rank sends its own positions"


def test_micro_batches_that_a_schedule_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 1 sequences.* got 14 sequences"):
        StepTime(
            LLAMA_8B,
            Parallelism(pipeline_parallel=4, pipeline_schedule="interleaved"),
            workers=4,
            micro_batch=1,
            batch_tokens=14 * 8192,
            device="H100 SXM",
        )


def test_tensor_parallelism_over_nodes_is_slower_than_within_one() -> None:
    within, over = (step(LLAMA_70B, micro_batch=8, tensor_parallel=degree) for degree in (8, 16))
    assert over.tensor > 2 * within.tensor
    assert over.total > within.total


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.name} on {run.workers}")
def test_published_runs_lie_within_the_stated_error(run: Published) -> None:
    error = predicted(run).tokens_per_second / run.tokens_per_second - 1
    assert abs(error) < 0.1


def test_every_run_of_llm_foundry_at_contexts_to_4096_lies_within_15_percent() -> None:
    runs = [run for run in llm_foundry() if run.model.context_length <= 4096]
    assert len(runs) == 35
    errors = [predicted(run).tokens_per_second / run.tokens_per_second - 1 for run in runs]
    assert max(map(abs, errors)) < 0.15


def test_pipelines_of_405b_are_near_the_published_ones() -> None:
    for *run, published in PIPELINES:
        assert predicted_405b(*run).mfu == pytest.approx(published, rel=0.15)
    published = SCHEDULES_OF_TORCHTITAN["interleaved"] / SCHEDULES_OF_TORCHTITAN["1f1b"]
    one, two = (predicted_torchtitan(schedule).total for schedule in SCHEDULES)
    assert one / two == pytest.approx(published, rel=0.05)


def test_a_device_without_known_links_is_refused() -> None:
    with pytest.raises(ValueError, match=r"H100 SXM.*TPU v5e"):
        StepTime(LLAMA_8B, Parallelism(), workers=8, micro_batch=1, batch_tokens=2**20, device="TPU v5e")
