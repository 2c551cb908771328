from __future__ import annotations

import torch

from proxy_models.training.averaging import Tail
from proxy_models.training.running_average import RunningAverage

BATCH = 10


def averaged(values: list[float], *, start: int = 0) -> float:
    """The average at the end of one weight that has these values after each step."""
    parameter = torch.zeros(1, dtype=torch.float64)
    running = RunningAverage([parameter], begins=Tail().begins(start + BATCH * len(values), BATCH))
    for number, value in enumerate(values):
        parameter.fill_(value)
        running.add(start + number * BATCH)
    running.write()
    return float(parameter)


def test_the_tail_is_the_mean_over_the_last_share_of_all_tokens() -> None:
    assert averaged(list(range(1, 21))) == 19  # 15 % of 20 steps: 18, 19, 20
    assert averaged([1.0, 2.0, 3.0], start=17 * BATCH) == 2


def test_the_tail_begins_with_the_first_step_that_it_needs() -> None:
    assert Tail().begins(20 * BATCH, BATCH) == 170
    steps = range(0, 20 * BATCH, BATCH)
    assert averaged([float(tokens < 170) for tokens in steps]) == 0
    assert averaged([float(tokens <= 170) for tokens in steps]) > 0
