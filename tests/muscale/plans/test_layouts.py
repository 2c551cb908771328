"""The proposed layout fits, is the fastest by the prediction, and no more complicated than that needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from muscale.plans.layouts import SCHEDULES, Choices, Layout, _candidates, fitting_layouts, propose_layout
from muscale.plans.step_time import LINKS, StepTime
from muscale.settings.parallelism import Parallelism
from muscale.settings.promote import PromoteSettings
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder_family import DecoderFamily
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import MEMORY_SHARE
from proxy_models.architecture.pipeline_counts import PipelineShare
from proxy_models.training.traced_memory import estimated_memory
from scaling import accelerator
from tests.benchmarks.step_time import LLAMA_8B, LLAMA_70B
from tests.gpu_free.cases import SHAPES

TINY = ModelConfig(d_model=512, n_layers=8, head_dim=64, vocab_size=32_000, context_length=2048)


def step(model: Member, workers: int, batch_tokens: int, **links: float) -> StepTime:
    changed = replace(LINKS["H100 SXM"], **links)  # type: ignore[arg-type]
    conditions: dict[str, Any] = {
        "workers": workers,
        "batch_tokens": batch_tokens,
        "device": "H100 SXM",
        "links": changed,
    }
    return StepTime(model, Parallelism(), micro_batch=1, **conditions)


def layouts(model: ModelConfig, workers: int, **links: float) -> list[Layout]:
    return fitting_layouts(step(model, workers, 2**22, **links))


def test_a_tiny_model_is_not_cut_within_its_blocks() -> None:
    proposed = propose_layout(layouts(TINY, 8))
    assert proposed is not None
    assert proposed.parallelism.sharding in ("none", "zero2")
    assert (proposed.parallelism.tensor_parallel, proposed.parallelism.checkpointing) == (1, "none")


def test_a_proposed_pipeline_takes_every_batch_of_a_ramp() -> None:
    n, context = 7, TINY.context_length  # 14 micro-batches of one sequence do not fit 4 ranks, but 7 and 28 do
    found = fitting_layouts(
        step(TINY, 4, 4 * n * context),
        smallest_batch_tokens=n * context,
        micro_batch=1,
        choices=Choices(schedules=("interleaved",)),
    )
    at_launch = [one.parallelism.unfit(4, sequences=n, doublings=2, micro_batch=1) for one in found]
    assert found
    assert not any(any(reasons) for reasons in at_launch)


def test_70b_does_not_fit_on_eight_devices_of_80_gb_and_is_cut_and_checkpointed_on_64() -> None:
    assert propose_layout(layouts(LLAMA_70B, 8)) is None
    proposed = propose_layout(layouts(LLAMA_70B, 64))
    assert proposed is not None
    assert proposed.parallelism.sharding == "full"
    assert proposed.parallelism.checkpointing != "none"


def test_what_is_proposed_fits_and_lies_within_two_percent_of_the_fastest() -> None:
    for workers in (8, 64, 512):
        found = layouts(LLAMA_8B, workers)
        proposed = propose_layout(found)
        assert proposed is not None
        assert proposed.step.total <= 1.02 * min(layout.step.total for layout in found)
        limit = MEMORY_SHARE * accelerator("H100 SXM").memory_bytes
        assert all(layout.memory.total <= limit for layout in found)


def test_products_are_never_shared_over_nodes() -> None:
    for network in (5e9, 50e9):
        proposed = propose_layout(layouts(replace(LLAMA_70B, queries_per_kv=1), 256, network=network))
        assert proposed is not None
        assert proposed.parallelism.tensor_parallel <= 8


def test_layouts_have_stages_where_blocks_micro_batches_and_workers_allow_them() -> None:
    found = layouts(LLAMA_70B, 256)
    stages = {layout.parallelism.pipeline_parallel for layout in found}
    assert {1, 4, 8, 16} <= stages
    assert max(stages) <= 80, "a block for each stage"
    assert {layout.parallelism.pipeline_schedule for layout in found} == {"1f1b", "interleaved"}
    limit = MEMORY_SHARE * accelerator("H100 SXM").memory_bytes
    for layout in found:
        of = layout.parallelism
        share = 2**22 // 8192 // of.data_ranks(256)
        if (pipeline := of.pipeline(share)) is not None:
            number = pipeline.micro_batches(layout.micro_batch)
            assert number * layout.micro_batch == share
            assert number >= min(share, 4 * of.pipeline_parallel)
        assert layout.memory.total <= limit
    assert not {layout.parallelism.pipeline_parallel for layout in layouts(replace(LLAMA_70B, tied=True), 256)} - {1}


def test_a_pipeline_is_proposed_where_a_slow_network_makes_full_sharding_wait() -> None:
    slow = propose_layout(layouts(LLAMA_70B, 256, network=5e9))
    fast = propose_layout(layouts(LLAMA_70B, 256))
    assert slow is not None
    assert fast is not None
    assert fast.parallelism.pipeline_parallel == 1
    assert slow.parallelism.pipeline_parallel > 1
    assert slow.keys["pipeline_parallel"] == slow.parallelism.pipeline_parallel
    assert slow.keys["pipeline_schedule"] == slow.parallelism.pipeline_schedule
    assert "pipeline_schedule" not in fast.keys


def test_stages_of_a_family_without_an_estimate_of_memory_are_not_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecoderFamily, "training_memory", lambda *_, **__: None)
    with pytest.raises(ValueError, match="pipeline_parallel = 2"):
        estimated_memory(TINY, micro_batch=1, pipeline=PipelineShare(schedule="1f1b", ranks=2, sequences=8))
    found = _candidates(TINY, 8, 512, 8, Choices())
    assert {parallelism.pipeline_parallel for parallelism in found} == {1}


def test_stages_are_considered_with_every_optimizer_and_have_the_memory_of_its_state() -> None:
    fitting = partial(fitting_layouts, step(TINY, 2, 2**20), choices=Choices(schedules=("1f1b",)))
    optimizer_bytes = {
        name: {
            one.parallelism.sharding: one.memory.optimizer
            for one in fitting(optimizer=name)
            if one.parallelism.pipeline_parallel == 2
        }
        for name in ("adamw", "soap")
    }
    of_adamw, of_soap = optimizer_bytes.values()
    assert of_adamw.keys() == of_soap.keys()
    d, d_ff, blocks, table = TINY.d_model, TINY.d_ff, 6, TINY.vocab_size * TINY.d_model  # of the first stage
    entries, factors = 4 * d * d + 3 * d * d_ff, 4 * 2 * d**2 + 3 * (d**2 + d_ff**2)
    assert of_adamw["none"] == pytest.approx(4 * 2 * (blocks * entries + table), rel=0.01)
    assert of_soap["none"] == pytest.approx(4 * 2 * (blocks * (entries + factors) + table), rel=0.01)


def test_an_open_pipeline_keeps_a_stated_schedule() -> None:
    assert Choices.of(PromoteSettings(pipeline_parallel="auto")).schedules == SCHEDULES
    stated = Choices.of(PromoteSettings(pipeline_parallel="auto", pipeline_schedule="zero_bubble", sharding="auto"))
    assert stated.schedules == ("zero_bubble",)
    staged = [one for one in _candidates(TINY, 2, 512, 8, stated) if one.pipeline_parallel > 1]
    assert {(one.sharding, one.checkpointing) for one in staged} == {("none", "none"), ("zero2", "none")}
    assert Choices.of(PromoteSettings(pipeline_parallel=2)).schedules == ("1f1b",)


def test_ranks_share_a_sequence_only_where_no_other_layout_fits() -> None:
    """Four sequences of a million tokens on 64 devices; the heads of keys allow tensor parallelism of 8."""
    model = replace(LLAMA_8B, context_length=2**20)
    assert propose_layout(layouts(model, 64)) is None
    long = propose_layout(fitting_layouts(step(model, 64, 2**22), choices=Choices(contexts=(1, 2, 4, 8, 16))))
    assert long is not None
    assert (long.parallelism.pipeline_parallel, long.keys["context_parallel"]) == (1, long.parallelism.context_parallel)
    assert long.parallelism.context_parallel > 1
    few = Choices(contexts=(1, 2, 4))
    short = propose_layout(fitting_layouts(step(TINY, 8, 2**20), choices=few))
    assert short is not None
    assert short.parallelism.context_parallel == 1


def test_experts_are_shared_out_where_slow_links_make_their_gathers_wait() -> None:
    def chosen(experts: Sequence[int], **links: float) -> Layout:
        choices = Choices(experts=experts, schedules=())
        found = fitting_layouts(step(SHAPES["64x16B"], 8, 2**15, **links), choices=choices)
        proposed = propose_layout(found)
        assert proposed is not None
        assert proposed.step.total <= 1.02 * found[0].step.total
        return proposed

    every, slow = Choices.of(PromoteSettings(workers=8, expert_parallel="auto")).experts, {"node": 5e10}
    whole, shared = chosen((1,), **slow), chosen(every, **slow)
    assert whole.keys["expert_parallel"] == 1
    assert shared.keys["expert_parallel"] in (2, 4, 8)
    assert shared.step.total < 0.5 * whole.step.total
    assert (shared.parallelism.tensor_parallel, shared.parallelism.pipeline_parallel) == (1, 1)
    assert chosen((4,)).keys["expert_parallel"] == 4
    assert chosen(every).keys["expert_parallel"] == 1, (
        "gathers over fast links take less than what compiled blocks save"
    )


def test_experts_are_shared_out_only_where_blocks_need_not_be_compiled() -> None:
    def experts(**settings: Any) -> list[int]:
        return list(Choices.of(PromoteSettings(workers=4, **settings)).experts)

    assert experts(expert_parallel="auto") == [1, 2, 4]
    assert experts(expert_parallel="auto", compile=True) == [1]
    assert experts(expert_parallel=2) == [2]
    dense = _candidates(TINY, 8, 512, 8, Choices(schedules=(), experts=(1, 2)))
    assert {one.expert_parallel for one in dense} == {1}
