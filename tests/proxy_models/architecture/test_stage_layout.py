"""Which blocks a stage of a pipeline has, and how a share of a batch is cut into micro-batches."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.stage_layout import (
    PipelineSchedule,
    blocks_of_stages,
    micro_batches,
    n_stages,
    stages_of_rank,
)


@pytest.mark.parametrize("schedule", get_args(PipelineSchedule))
def test_the_ranks_of_a_pipeline_have_every_stage_once(schedule: PipelineSchedule) -> None:
    of_ranks = [stages_of_rank(schedule, rank, 4) for rank in range(4)]
    assert sorted(stage for stages in of_ranks for stage in stages) == list(range(n_stages(schedule, 4)))


def test_a_v_returns_to_the_first_rank_and_a_loop_does_not() -> None:
    assert stages_of_rank("1f1b", 1, 4) == (1,)
    assert stages_of_rank("interleaved", 1, 4) == (1, 5)
    assert stages_of_rank("zero_bubble_v", 1, 4) == (1, 6)


@pytest.mark.parametrize(
    ("layers", "stages", "vocab_size"), [(5, 2, 256), (32, 8, 128_256), (126, 32, 128_256), (4, 4, 64)]
)
def test_stages_share_all_blocks_in_order_by_their_flops(layers: int, stages: int, vocab_size: int) -> None:
    model = ModelConfig(d_model=256, n_layers=layers, head_dim=64, vocab_size=vocab_size, context_length=64)
    found = blocks_of_stages(model, stages)
    assert [number for blocks in found for number in blocks] == list(range(layers))
    readout = 6.0 * vocab_size * model.d_model
    block = (model.train_flops_per_token - readout) / layers
    costs = [len(blocks) * block for blocks in found]
    costs[-1] += readout
    # No block could move to make the longest stage shorter: it has a single block, or each other would become as long.
    longest = max(costs)
    assert len(found[costs.index(longest)]) == 1 or all(cost + block >= longest for cost in costs if cost != longest)
    assert all(one.stop == other.start for one, other in pairwise(found))


def test_a_large_readout_takes_the_place_of_blocks() -> None:
    model = ModelConfig(d_model=4096, n_layers=32, head_dim=128, mlp_ratio=3.5, vocab_size=128_256, context_length=8192)
    assert [len(blocks) for blocks in blocks_of_stages(model, 4)] == [8, 8, 9, 7]


def test_a_stage_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="n_layers=3"):
        blocks_of_stages(ModelConfig(d_model=64, n_layers=3), 4)


@pytest.mark.parametrize(
    ("schedule", "ranks", "sequences", "most", "number"),
    [
        ("1f1b", 2, 8, 8, 2),
        ("1f1b", 2, 8, 1, 8),
        ("1f1b", 4, 12, 2, 6),
        ("1f1b", 4, 3, 3, None),  # fewer than ranks
        ("interleaved", 2, 5, 5, None),  # two rounds of two and a half
        ("interleaved", 2, 6, 2, 3),
        ("interleaved", 2, 6, 1, 6),
        ("dualpipe_v", 2, 8, 8, 4),  # as many as stages
        ("zero_bubble_v", 2, 8, 8, 2),
    ],
)
def test_micro_batches_are_equal_and_as_many_as_the_schedule_needs(
    schedule: PipelineSchedule, ranks: int, sequences: int, most: int, number: int | None
) -> None:
    assert micro_batches(schedule, ranks, sequences, most=most) == number
