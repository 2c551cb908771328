"""Which blocks of a model each stage of a pipeline has, and the micro-batches that a schedule takes. Plain numbers, without torch.

A rank of a pipeline has one stage, or two under the schedules that go through the ranks twice: in a loop, from the first rank to
the last and again, or in a V, back from the last rank to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Literal

from proxy_models.architecture.member import Member

PipelineSchedule = Literal["gpipe", "1f1b", "looped_bfs", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe_v"]
"""GPipe (Huang et al., arXiv 1811.06965), 1F1B (Narayanan et al., arXiv 1806.03377), looped breadth-first (Lamy-Poirier,
arXiv 2211.05953), interleaved 1F1B (Narayanan et al., arXiv 2104.04473), zero bubble and its V (Qi et al., arXiv 2401.10241),
DualPipe's V (DeepSeek-V3, arXiv 2412.19437, and Qi et al., arXiv 2505.01142)."""
_ONE_STAGE: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b")
_IN_V: tuple[PipelineSchedule, ...] = ("zero_bubble_v", "dualpipe_v")
_IN_ROUNDS: tuple[PipelineSchedule, ...] = ("interleaved", "zero_bubble")
SPLIT_BACKWARD: tuple[PipelineSchedule, ...] = ("zero_bubble", *_IN_V)
"""Schedules that compute gradients of weights later than those of activations, for which torch can't use compiled blocks."""


def stages_of_rank(schedule: PipelineSchedule, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the numbers of the stages that a rank of a pipeline has, ascending."""
    if schedule in _ONE_STAGE:
        return (rank,)
    return (rank, 2 * ranks - 1 - rank) if schedule in _IN_V else (rank, rank + ranks)


def n_stages(schedule: PipelineSchedule, ranks: int) -> int:
    """Return the number of stages of a pipeline of so many ranks."""
    return ranks * len(stages_of_rank(schedule, 0, ranks))


def blocks_of_stages(member: Member, stages: int) -> list[range]:
    """Return the numbers of the blocks of each stage, balanced by the training FLOPs of a token.

    The last stage also has the readout, which counts as so many blocks as its products are worth; the first stage's look-ups cost
    nothing. Each stage has a block; among equally short stages a later one takes the next block, since it keeps fewer activations.
    Of unequal blocks, a stage then gives its first or last one to a neighbour as long as this makes the longer of the two shorter.

    Raises:
        ValueError: If the model has fewer blocks than stages.
    """
    if member.n_layers < stages:
        raise ValueError(f"a pipeline of {stages} stages needs a block for each, got n_layers={member.n_layers}")
    readout, of_blocks = 6.0 * member.vocab_size * member.d_model, member.block_flops
    block = sum(of_blocks) / member.n_layers
    costs = [block] * (stages - 1) + [block + readout]
    sizes = [1] * stages
    for _ in range(member.n_layers - stages):
        shortest = min(range(stages), key=lambda stage: (costs[stage], -stage))
        sizes[shortest] += 1
        costs[shortest] += block
    bounds = [sum(sizes[:stage]) for stage in range(stages + 1)]
    if len(set(of_blocks)) > 1:
        _even_out(bounds, of_blocks, readout)
    return [range(*ends) for ends in pairwise(bounds)]


def _even_out(bounds: list[int], of_blocks: Sequence[float], readout: float) -> None:
    """Move the bounds between stages, each of which has a block, until no move by one makes the longer of two neighbours shorter."""
    moved = True
    while moved:
        moved = False
        for stage, move in product(range(1, len(bounds) - 1), (-1, 1)):
            begin, bound, end = bounds[stage - 1 : stage + 2]
            at_end = readout if end == bounds[-1] else 0.0
            before, after = (
                max(sum(of_blocks[begin:cut]), sum(of_blocks[cut:end]) + at_end) for cut in (bound, bound + move)
            )
            if begin < bound + move < end and after < before:
                bounds[stage], moved = bound + move, True


def least_micro_batches(schedule: PipelineSchedule, ranks: int) -> int:
    """Return the least number of micro-batches that a schedule takes: that of the ranks, or for DualPipe's V that of the stages."""
    return n_stages(schedule, ranks) if schedule == "dualpipe_v" else ranks


def micro_batches(schedule: PipelineSchedule, ranks: int, sequences: int, *, most: int) -> int | None:
    """Return the least number of equal micro-batches of a rank's sequences, with at most `most` sequences each; None if none fits.

    Schedules in rounds need the same number in each round.
    """
    for number in range(least_micro_batches(schedule, ranks), sequences + 1):
        rounds = number // ranks if schedule in _IN_ROUNDS else 1
        if sequences % number == 0 and sequences // number <= most and number % rounds == 0:
            return number
    return None
