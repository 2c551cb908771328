from __future__ import annotations

import torch

from proxy_models.training.averaging import averaging_begins
from proxy_models.training.running_average import RunningAverage

BATCH = 10


def averaged(values: list[float], *, start: int = 0) -> float:
    """Of one weight that has these values after each step."""
    parameter = torch.zeros(1, dtype=torch.float64)
    running = RunningAverage([parameter], end=start + BATCH * len(values), batch_tokens=BATCH)
    for number, value in enumerate(values):
        parameter.fill_(value)
        running.add(start + number * BATCH)
    running.write()
    return float(parameter)


def test_the_average_is_the_mean_over_the_last_share_of_all_tokens() -> None:
    assert averaged([float(value) for value in range(1, 21)]) == 19  # 15 % of 20 steps: 18, 19, 20
    assert averaged([1.0, 2.0, 3.0], start=17 * BATCH) == 2


def test_it_begins_with_the_first_step_that_counts() -> None:
    first = averaging_begins(20 * BATCH, BATCH)
    assert first == 170
    steps = range(0, 20 * BATCH, BATCH)
    assert averaged([float(tokens < first) for tokens in steps]) == 0
    assert averaged([float(tokens <= first) for tokens in steps]) > 0
