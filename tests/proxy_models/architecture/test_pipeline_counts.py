"""Micro-batches in flight and the bubble of each schedule, against the orders of torch's own classes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from operator import mul
from typing import get_args

import pytest

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder_memory import training_memory
from proxy_models.architecture.pipeline_counts import (
    PipelineShare,
    blocks_of_ranks,
    bubble_share,
    has_last_stage,
    idle_seconds,
    in_flight,
)
from proxy_models.architecture.stage_layout import (
    SPLIT_BACKWARD,
    PipelineSchedule,
    micro_batches,
    n_stages,
    stages_of_rank,
)
from tests.proxy_models.pipeline_orders import orders, seconds

SIZES = [(2, 4), (2, 7), (3, 6), (4, 4), (4, 8), (4, 10), (4, 32), (8, 16), (8, 20)]
"""Ranks and micro-batches."""
BYTES_KEPT = [(1.0, 1.0), (1.0, 1.25), (1.25, 1.0), (0.0, 1.0)]
"""Of a micro-batch, by stage."""
BYTES_OF_GRADIENTS = [(0.0, 0.0), (0.5, 0.5), (2.5, 1.0), (4.0, 8.0)]
"""Of each stage."""


@pytest.mark.parametrize("schedule", get_args(PipelineSchedule))
def test_micro_batches_in_flight_are_those_of_the_order_that_torch_runs(schedule: PipelineSchedule) -> None:
    for ranks, number in SIZES:
        if micro_batches(schedule, ranks, number, most=1) is None:
            continue  # the schedule does not take so many
        for rank, order in enumerate(orders(schedule, ranks, number)):
            stages = stages_of_rank(schedule, rank, ranks)
            for weights, gradients in product(BYTES_KEPT, BYTES_OF_GRADIENTS):
                kept, done, peak = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0), 0.0
                for letter, stage, _ in order:
                    kept[stage] += {"F": 1, "I": 0}.get(letter, -1)
                    done[stage] += letter in "BW"
                    graded = [0 < n < number for n in done.values()]
                    peak = max(peak, sum(map(mul, kept.values(), weights)) + sum(map(mul, graded, gradients)))
                found = max(
                    sum(map(mul, moment.kept, weights)) + sum(map(mul, moment.has_gradients, gradients))
                    for moment in in_flight(schedule, rank, ranks, number)
                )
                if schedule in SPLIT_BACKWARD:  # as if gradients were always there
                    assert peak <= found <= peak + sum(gradients)
                else:
                    assert found == peak


@pytest.mark.parametrize("schedule", get_args(PipelineSchedule))
def test_a_step_lasts_as_long_as_the_order_that_torch_runs(schedule: PipelineSchedule) -> None:
    for forward, inputs, weights in [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.5, 1.0)]:
        for ranks, number in ((2, 4), (4, 8), (4, 32), (8, 32)):
            stages = n_stages(schedule, ranks)
            times = [{"F": forward, "I": inputs, "W": weights}] * stages
            exact = seconds(orders(schedule, ranks, number), times)
            passes = stages // ranks
            idle = (ranks - 1) * idle_seconds(schedule, passes * forward, passes * (inputs + weights), passes * weights)
            ideal = number * passes * (forward + inputs + weights)
            if schedule == "dualpipe_v" and inputs > weights:
                assert ideal < exact <= ideal + idle < 1.1 * exact, "a bound"
            else:
                assert exact == pytest.approx(ideal + idle)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_slowest_of_unequal_stages_sets_the_pace(schedule: PipelineSchedule) -> None:
    for slowest in range(4):
        scales = [2.0 if stage == slowest else 1.0 for stage in range(4)]
        exact = seconds(orders(schedule, 4, 8), [{"F": scale, "I": scale, "W": scale} for scale in scales])
        others = [idle_seconds(schedule, scale, 2 * scale, scale) for scale in scales if scale == 1.0]
        pace = 8 * 3 * 2.0
        assert pace < exact <= pace + sum(others) + 1e-9 < 1.15 * exact, (
            "a bound, since slow ranks may hide the others' waits"
        )


def test_the_bubble_is_the_published_share_of_a_step() -> None:
    assert bubble_share("gpipe", 4, 8) == bubble_share("1f1b", 4, 8) == pytest.approx(3 / (8 + 3))
    assert bubble_share("interleaved", 4, 8) == bubble_share("looped_bfs", 4, 8) == pytest.approx(3 / (2 * 8 + 3))
    for schedule in SPLIT_BACKWARD:
        assert bubble_share(schedule, 4, 8) == pytest.approx(1 / (2 * 8 + 1)), "a third of interleaved 1F1B's"


def test_a_share_is_cut_into_several_micro_batches_for_each_rank_if_it_is_large_enough() -> None:
    assert PipelineShare(schedule="1f1b", ranks=4, sequences=64).sizes == [1, 2, 4]
    assert PipelineShare(schedule="1f1b", ranks=4, sequences=8).sizes == [1], "8 micro-batches are the most"
    assert PipelineShare(schedule="interleaved", ranks=4, sequences=14).sizes == [2], "14 are not 3 equal rounds"
    assert PipelineShare(schedule="interleaved", ranks=4, sequences=7).sizes == [1]
    with pytest.raises(ValueError, match="7 sequences"):
        _ = PipelineShare(schedule="interleaved", ranks=4, sequences=7, doublings=1).sizes
    share = PipelineShare(schedule="1f1b", ranks=4, sequences=64)
    assert [share.micro_batches(most) for most in (1, 3, 4, 64)] == [64, 32, 16, 4]
    with pytest.raises(ValueError, match="4 ranks.* at most 2 sequences.* got 6 sequences"):
        PipelineShare(schedule="dualpipe_v", ranks=4, sequences=6).micro_batches(2)


def test_the_rank_of_the_last_stage_has_fewer_blocks() -> None:
    model = ModelConfig(d_model=64, n_layers=12, vocab_size=2048)
    for schedule in get_args(PipelineSchedule):
        blocks = [sum(map(len, stages)) for stages in blocks_of_ranks(model, schedule, 2)]
        assert sum(blocks) == 12
        (last,) = [rank for rank in range(2) if has_last_stage(schedule, rank, 2)]
        assert last == (0 if schedule.endswith("_v") else 1)
        assert blocks[last] < blocks[1 - last]


def test_a_stage_may_have_fewer_blocks_than_lie_between_global_ones() -> None:
    model = ModelConfig(d_model=64, n_layers=12, context_length=64, attention_window=16, global_attention_every=6)
    pipeline = PipelineShare(schedule="1f1b", ranks=4, sequences=8)
    local = replace(model, attention_window=None, global_attention_every=None)
    alike = [training_memory(one, micro_batch=1, pipeline=pipeline) for one in (model, local)]
    assert alike[0] == alike[1]
