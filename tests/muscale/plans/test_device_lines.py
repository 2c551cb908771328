"""The gate's lines about devices: each passes, fails with what to do, or is unknown."""

from __future__ import annotations

from typing import Any

from muscale.plans.device_lines import (
    attention_line,
    communication_line,
    disk_line,
    evaluation_line,
    layout_line,
    memory_line,
)
from muscale.plans.layouts import fitting_layouts, propose_layout
from muscale.plans.step_time import StepTime
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder_memory import training_memory
from proxy_models.architecture.memory import MEMORY_SHARE

ESTIMATE = training_memory(ModelConfig(d_model=64, n_layers=2), micro_batch=4, sharding="full", world_size=2)


def test_the_estimate_must_fit_the_devices() -> None:
    limit = ESTIMATE.total / MEMORY_SHARE
    assert memory_line(ESTIMATE, memory_bytes=limit * 1.01, device="H200").status == "passed"
    full = memory_line(ESTIMATE, memory_bytes=limit * 0.99, device="H200")
    assert full.status == "failed"
    assert "on H200" in full.compared
    assert "smaller micro-batch" in full.advice
    shared = memory_line(ESTIMATE, memory_bytes=limit * 1.01, device="this machine", workers_on_it=2)
    assert shared.status == "failed"
    assert "for 2 workers" in shared.compared
    state = training_memory(ModelConfig(d_model=512, n_layers=8, context_length=16), micro_batch=1)
    for sharding, remedy in (("full", "more workers"), ("none", "promote.sharding"), ("hybrid", "promote.sharding")):
        lines = (
            memory_line(state, memory_bytes=1e6, device="H200", sharding=sharding),
            memory_line(None, memory_bytes=1e6, device="H200", at_least=1 << 30, sharding=sharding),
            evaluation_line(1e9, sequences=1, memory_bytes=1e6, device="H200", sharding=sharding),
        )
        assert all(remedy in line.advice for line in lines)
    unknown = memory_line(ESTIMATE, memory_bytes=None, device="a GPU")
    assert unknown.status == "unknown"
    assert "--smoke-test" in unknown.advice


def test_without_an_estimate_a_state_that_does_not_fit_is_refused_and_one_that_fits_is_unknown() -> None:
    for at_least, status in ((86, "failed"), (84, "unknown")):
        assert memory_line(None, memory_bytes=100, device="H200", at_least=at_least).status == status
    assert memory_line(None, memory_bytes=100, device="this machine", workers_on_it=2, at_least=43).status == "failed"
    assert memory_line(None, memory_bytes=None, device="a GPU", at_least=2**50).status == "unknown"


def test_shapes_divide_over_the_workers_and_a_batch_has_a_sequence_for_each_share() -> None:
    shapes = {"heads": 12, "columns of the MLP": 2048}
    line = layout_line(shapes, sequences=64, workers=16, parallelism=Parallelism(tensor_parallel=4))
    assert (line.status, line.compared) == (
        "passed",
        "64 sequences over 4 groups of 4 workers, 12 heads, 2048 columns of the MLP",
    )
    cases = [
        (9, Parallelism(), "9 ranks need a sequence of a batch for each share, got 8", "take 4 or 8 workers"),
        (18, Parallelism(tensor_parallel=2), "18 ranks in groups of tensor_parallel = 2 need", "take 8 or 16 workers"),
        (6, Parallelism(tensor_parallel=4), "tensor_parallel must divide the 6 ranks, got 4", "take 4 or 8 workers"),
        (6, Parallelism(sharding="hybrid", shard_ranks=4), "must divide the 6 ranks", "take 4 or 8 workers"),
    ]
    for workers, parallelism, compared, advice in cases:
        line = layout_line(shapes, sequences=8, workers=workers, parallelism=parallelism)
        assert line.status == "failed"
        assert compared in line.compared
        assert advice in line.advice


def test_a_model_that_can_not_be_laid_out_so_closes_the_gate() -> None:
    model, pipeline = ModelConfig(d_model=64, n_layers=2, tied=True), Parallelism(pipeline_parallel=4)
    errors = list(pipeline.layout_errors(model))
    assert len(errors) == 2  # too few blocks, and a tied table
    line = layout_line({}, sequences=64, workers=4, parallelism=pipeline, errors=errors)
    assert line.status == "failed"
    assert all(error in line.compared for error in errors)


def test_a_pipeline_s_line_has_its_stages_micro_batches_and_bubble() -> None:
    pipeline = Parallelism(pipeline_parallel=4, tensor_parallel=2)
    line = layout_line({"heads": 12}, sequences=64, workers=16, parallelism=pipeline, micro_batch=4)
    assert (line.status, line.compared) == (
        "passed",
        "64 sequences over 2 groups of 8 workers, 4 stages under 1f1b: 8 micro-batches of 4, bubble 27% of a step, 12 heads",
    )
    looped = Parallelism(pipeline_parallel=4, pipeline_schedule="interleaved")
    assert "8 stages under interleaved: 16 micro-batches of 1, bubble 9%" in (
        layout_line({}, sequences=16, workers=4, parallelism=looped).compared
    )
    cases = [
        (16, 6, pipeline, 1, "pipeline_parallel must divide the 6 ranks, got 8", "take 8 or 16 workers"),
        (6, 8, looped, 1, "got 6 sequences", "take 4 workers"),
        (14, 4, looped, 1, "got 14 sequences, and micro_batch = 1", "another promote.micro_batch"),
    ]
    for sequences, workers, parallelism, size, compared, advice in cases:
        failed = layout_line({}, sequences=sequences, workers=workers, parallelism=parallelism, micro_batch=size)
        assert failed.status == "failed"
        assert compared in failed.compared
        assert advice in failed.advice


def test_every_batch_of_a_ramp_is_cut_into_the_stated_micro_batches() -> None:
    looped = Parallelism(pipeline_parallel=4, pipeline_schedule="interleaved")
    # 7 micro-batches of one sequence are one round of the schedule; 14 would be 3 rounds of different numbers.
    cases = [(7, 0, 1, "passed"), (7, 1, 1, "failed"), (14, 1, 1, "failed"), (7, 1, 2, "passed"), (8, 3, 1, "passed")]
    for sequences, doublings, size, status in cases:
        stated: dict[str, Any] = {"sequences": sequences, "doublings": doublings, "micro_batch": size}
        assert layout_line({}, workers=4, parallelism=looped, **stated).status == status
        assert any(looped.unfit(4, **stated)) == (status == "failed"), "at launch"


def test_uneven_shares_of_a_batch_are_reported_and_do_not_block() -> None:
    line = layout_line({}, sequences=8, workers=3, parallelism=Parallelism())
    assert line.status == "passed"
    assert (
        line.compared
        == "8 sequences over 3 workers, 3 for 2 of them and 2 for the others, which wait: 11% of the speed"
    )
    assert line.advice == "2 or 4 workers would share it evenly"


def test_an_evaluation_must_fit_beside_the_state() -> None:
    fits = evaluation_line(60 * 2**30, sequences=4, memory_bytes=80e9, device="H100 SXM")
    assert fits.status == "passed"
    fails = evaluation_line(0.86 * 80e9, sequences=64, memory_bytes=80e9, device="H100 SXM")
    assert fails.status == "failed"
    assert "64 sequences" in fails.compared
    shared = evaluation_line(0.5 * 80e9, sequences=4, memory_bytes=80e9, device="H100 SXM", workers_on_it=2)
    assert shared.status == "failed"
    assert evaluation_line(1.0, sequences=64, memory_bytes=None, device="a GPU").status == "unknown"


def test_attention_weights_are_never_kept_unnoticed() -> None:
    fused = attention_line("flash", n_heads=2, head_dim=128, weight_bytes=2**40)
    assert fused.status == "passed"
    assert "2 heads of 128" in fused.compared
    kept = attention_line("math", n_heads=2, head_dim=20, weight_bytes=2**34)
    assert kept.status == "failed"
    assert "16 GiB" in kept.compared


def test_a_much_faster_layout_and_long_waits_are_reported_and_do_not_block() -> None:
    model = ModelConfig(d_model=1024, n_layers=16, head_dim=64, vocab_size=32_000, context_length=2048)
    step = StepTime(model, Parallelism(), workers=64, micro_batch=1, batch_tokens=2**20, device="H100 SXM")
    layouts = fitting_layouts(step)
    best = propose_layout(layouts)
    assert best is not None
    assert not communication_line(best.step, best).advice
    slow = communication_line(layouts[-1].step, best)
    assert slow.status == "passed"
    assert str(best) in slow.advice
    assert "fewer workers" in communication_line(layouts[-1].step, layouts[-1]).advice
    assert communication_line(None, None).status == "unknown"


def test_checkpoints_must_fit_the_disk() -> None:
    assert disk_line(3 * 2**30, 4 * 2**30, kept=3, place="/data").status == "passed"
    full = disk_line(3 * 2**30, 2 * 2**30, kept=3, place="/data")
    assert (full.status, full.compared) == ("failed", "3 GiB for 3 checkpoints, 2 GiB free in /data")
    assert "`muscale gc`" in full.advice
