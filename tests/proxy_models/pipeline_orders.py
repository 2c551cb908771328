"""Orders of torch's pipeline schedules, without processes, and how long ranks take that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from proxy_models.architecture.stage_layout import PipelineSchedule

CLASSES: dict[PipelineSchedule, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zero_bubble_v": schedules.ScheduleZBVZeroBubble,
    "dualpipe_v": schedules.ScheduleDualPipeV,
}
Order = list[tuple[str, int, int]]
"""Operations of a rank, as letter (F forward, B backward, I and W its parts for inputs and weights), stage and micro-batch."""


def orders(schedule: PipelineSchedule, ranks: int, number: int) -> list[Order]:
    """Return the order of each rank by torch's own classes, called on the few numbers that they read."""
    if schedule == "1f1b":  # torch's class has the order in the loop of a step
        return [_one_forward_one_backward(rank, ranks, number) for rank in range(ranks)]
    kind = CLASSES[schedule]
    numbers = SimpleNamespace(
        _n_microbatches=number,
        pp_group_size=ranks,
        n_local_stages=2,
        _stages=(None, None),
        _num_stages=ranks,
        num_stages=2 * ranks,
        microbatches_per_round=number // max(1, number // ranks),
    )
    if schedule == "gpipe":
        found = kind._get_pipeline_order(numbers)
    else:
        found = {rank: kind._calculate_single_rank_operations(numbers, rank) for rank in range(ranks)}
    return [_operations(found[rank]) for rank in range(ranks)]


def seconds(of_ranks: Sequence[Order], times: Sequence[dict[str, float]]) -> float:
    """Return how long ranks take if operations of stage s take times[s][letter], and passing on takes no time."""
    ends: dict[tuple[str, int, int], float] = {}
    clocks, waiting = [0.0] * len(of_ranks), [list(order) for order in of_ranks]
    while any(waiting):
        before = len(ends)
        for rank, order in enumerate(waiting):
            while order:
                letter, stage, part = order[0]
                needed = {
                    "F": ("F", stage - 1, part) if stage else None,
                    "W": None,
                }.get(letter, ("F", stage, part) if stage == len(times) - 1 else ("I", stage + 1, part))
                if needed and needed not in ends:
                    break
                took = times[stage]["I"] + times[stage]["W"] if letter == "B" else times[stage][letter]
                clocks[rank] = max(clocks[rank], ends[needed] if needed else 0.0) + took
                ends["I" if letter == "B" else letter, stage, part] = clocks[rank]
                order.pop(0)
        assert len(ends) > before, "the ranks wait for one another"
    return max(clocks)


def _operations(actions: Sequence[Any]) -> Order:
    """Return computations only, and those that overlap one after the other, as torch runs them."""
    single = (part for action in actions if action for part in action.sub_actions or (action,))
    computed = ("F", "B", "I", "W")
    found = ((str(one.computation_type.value), one.stage_index, one.microbatch_index) for one in single)
    return [operation for operation in found if operation[0] in computed]


def _one_forward_one_backward(rank: int, ranks: int, number: int) -> Order:
    ahead = min(number, ranks - rank)
    order: Order = [("F", rank, part) for part in range(ahead)]
    for part in range(number):
        order.append(("B", rank, part))
        if ahead + part < number:
            order.append(("F", rank, ahead + part))
    return order
