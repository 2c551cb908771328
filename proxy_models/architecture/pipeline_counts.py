"""Micro-batches that each rank of a pipeline keeps, and the time for which it waits, by schedule. Plain numbers, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from proxy_models.architecture.member import Member
from proxy_models.architecture.stage_layout import (
    SPLIT_BACKWARD,
    PipelineSchedule,
    blocks_of_stages,
    micro_batches,
    n_stages,
    stages_of_rank,
)

MICRO_BATCHES_PER_RANK = 4
"""Micro-batches for each rank that a pipeline gets by default if its share of a batch allows it: 1F1B then waits for less than a
fifth of a step (Huang et al., arXiv 1811.06965, section 2.3)."""


@dataclass(frozen=True, kw_only=True)
class PipelineShare:
    """One pipeline of a run.

    Attributes:
        ranks: Ranks of the pipeline that have different stages.
        sequences: Sequences of a batch that the pipeline gets.
        doublings: Number of times that the batch doubles later.
    """

    schedule: PipelineSchedule
    ranks: int
    sequences: int
    doublings: int = 0

    @property
    def n_stages(self) -> int:
        """Number of stages on all ranks."""
        return n_stages(self.schedule, self.ranks)

    def micro_batches(self, most: int) -> int:
        """Return the number of micro-batches of at most so many sequences; raise ValueError if the schedule takes none such."""
        number = micro_batches(self.schedule, self.ranks, self.sequences, most=most)
        if number is None:
            raise ValueError(
                f'pipeline_schedule = "{self.schedule}" on {self.ranks} ranks needs equal micro-batches of at most {most} sequences, '
                f"at least one for each rank, got {self.sequences} sequences"
            )
        return number

    @property
    def sizes(self) -> list[int]:
        """Sizes of a micro-batch that every batch takes, ascending: those with 4 for each rank, or the smallest if there are too few.

        Raises:
            ValueError: If the share has no micro-batches for the schedule, or no size suits every batch.
        """
        self.micro_batches(self.sequences)  # raises
        sizes = [
            size
            for size in range(1, self.sequences // self.ranks + 1)
            if all(
                micro_batches(self.schedule, self.ranks, share, most=size) == share / size
                for share in (self.sequences << number for number in range(self.doublings + 1))
            )
        ]
        if not sizes:
            raise ValueError(
                f'pipeline_schedule = "{self.schedule}" on {self.ranks} ranks has no micro-batches of one size for {self.sequences} '
                f"sequences, doubled {self.doublings} times"
            )
        return [size for size in sizes if self.sequences // size >= MICRO_BATCHES_PER_RANK * self.ranks] or sizes[:1]


@cache
def blocks_of_ranks(member: Member, schedule: PipelineSchedule, ranks: int) -> tuple[tuple[range, ...], ...]:
    """Return the numbers of the blocks of each stage of each rank; raise ValueError if the model has too few."""
    stages = blocks_of_stages(member, n_stages(schedule, ranks))
    return tuple(tuple(stages[stage] for stage in stages_of_rank(schedule, rank, ranks)) for rank in range(ranks))


def has_last_stage(schedule: PipelineSchedule, rank: int, ranks: int) -> bool:
    """Whether a rank has the last stage, with the readout; rank 0 always has the first."""
    return n_stages(schedule, ranks) - 1 in stages_of_rank(schedule, rank, ranks)


class InFlight(NamedTuple):
    """A moment of a rank: the micro-batches of which each stage keeps activations, and whether it has gradients of its weights."""

    kept: tuple[int, ...]
    has_gradients: tuple[bool, ...]


@cache
def in_flight(schedule: PipelineSchedule, rank: int, ranks: int, number: int) -> tuple[InFlight, ...]:
    """Return the moments of a step of `number` micro-batches that may be the peak of a rank's memory.

    A micro-batch counts from the start of its forward pass to the end of its backward pass, the part for weights included. A stage
    has whole gradients from the end of its first backward pass to that of its last; under `SPLIT_BACKWARD` they are taken to be there
    from the start. The counts follow from the orders of torch.distributed.pipelining (torch 2.13), to which tests compare them.
    """
    # All forward passes; all backward passes of the second stage, whose gradients are then reduced; those of the first stage.
    if schedule == "looped_bfs":
        return (
            InFlight((number, number), (False, False)),
            InFlight((number, number - 1), (False, True)),
            InFlight((number - 1, 0), (True, False)),
        )
    if schedule in ("gpipe", "1f1b"):
        most = number if schedule == "gpipe" else min(number, ranks - rank)
        if most < number:
            return (InFlight((most,), (True,)),)
        return InFlight((most,), (False,)), InFlight((most - 1,), (True,))
    if schedule == "zero_bubble_v":
        first = 2 * ranks - rank
        counts = (min(number, first), min(number, rank)), (min(number, first - 1), min(number, rank + 1))
        return tuple(InFlight(count, (True, True)) for count in counts)
    if schedule == "dualpipe_v":
        return (InFlight((2 * ranks - rank, rank + 1), (True, True)),)
    return _in_rounds(schedule, rank, ranks, number)


def _in_rounds(schedule: PipelineSchedule, rank: int, ranks: int, number: int) -> tuple[InFlight, ...]:
    """Return the moments of schedules in rounds, in which a rank's stages alternate; gradients of weights may come later."""
    is_split = schedule in SPLIT_BACKWARD
    in_round, later = number // (number // ranks), rank if is_split else 0
    # forward passes before the first backward
    ahead = min(in_round + (1 if is_split else 2) * (ranks - 1 - rank), 2 * number)
    kept, done, found = [0, 0], [0, 0], set()
    for operation in range(min(4 * number, ahead + later + 3 * in_round)):  # the rest repeats
        if operation < 2 * number:
            kept[operation // in_round % 2] += 1
        found.add(InFlight((kept[0], kept[1]), (is_split or 0 < done[0] < number, is_split or 0 < done[1] < number)))
        if (backward := operation - ahead - later) >= 0:
            stage = 1 - backward // in_round % 2
            kept[stage] -= 1
            done[stage] += 1
    return tuple(sorted(found))


def idle_seconds(schedule: PipelineSchedule, forward: float, backward: float, weights: float) -> float:
    """Return the seconds that a rank adds to the fill and drain of the other ranks' pipeline, from a micro-batch on all its stages.

    GPipe and 1F1B wait for both passes, interleaved and looped breadth-first schedules for those of one of two stages (arXiv
    2104.04473, section 2.2; 2211.05953). Zero bubble computes gradients of weights meanwhile (arXiv 2401.10241, section 2). Its V
    saves the rest only if ranks may start their next step apart, which clipping by the norm of all ranks rules out. The bound for
    DualPipe's V is from simulating torch's order, whose forward and backward passes follow one another.

    Args:
        forward, backward: Seconds of the two passes.
        weights: Seconds of the backward pass that compute gradients of weights.
    """
    passes = len(stages_of_rank(schedule, 0, 2))
    if schedule not in SPLIT_BACKWARD:
        return (forward + backward) / passes
    uneven = max(0.0, backward - 2 * weights) if schedule == "dualpipe_v" else 0.0
    return (forward + backward - 2 * weights + uneven) / passes


def bubble_share(schedule: PipelineSchedule, ranks: int, number: int) -> float:
    """Return the share of a step of so many micro-batches that equal ranks wait; a backward pass takes twice a forward pass."""
    idle = (ranks - 1) * idle_seconds(schedule, 1.0, 2.0, 1.0)
    return idle / (3 * number + idle)
