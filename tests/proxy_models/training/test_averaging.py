from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxy_models.training.averaging import Average, ExponentialAverage, LastCheckpoints, Tail
from proxy_models.training.running_average import RunningAverage

BATCH = 10


def averaged(average: Average, values: list[float], *, start: int = 0) -> float:
    """Of one weight that has these values after each step."""
    parameter = torch.zeros(1, dtype=torch.float64)
    running = RunningAverage(average, [parameter], end=start + BATCH * len(values), batch_tokens=BATCH)
    for number, value in enumerate(values):
        parameter.fill_(value)
        running.add(start + number * BATCH, BATCH)
    running.write()
    return float(parameter)


def test_the_tail_is_the_mean_over_the_last_share_of_all_tokens() -> None:
    assert averaged(Tail(), list(range(1, 21))) == 19  # 15 % of 20 steps: 18, 19, 20
    assert averaged(Tail(), [1.0, 2.0, 3.0], start=17 * BATCH) == 2


@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=60), half_life=st.integers(BATCH, 3 * BATCH))
def test_the_exponential_average_is_the_usual_recursion(values: list[float], half_life: int) -> None:
    decay = 2 ** (-BATCH / half_life)
    total = weight = 0.0
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
    assert averaged(ExponentialAverage(half_life_tokens=half_life), values) == pytest.approx(
        total / weight, abs=10 * 2 * 2**-10
    )


def test_the_last_checkpoints_are_counted_back_from_the_end() -> None:
    values = [float(number) for number in range(1, 13)]
    assert averaged(LastCheckpoints(n=3, every_tokens=4 * BATCH), values) == (12 + 8 + 4) / 3
    assert averaged(LastCheckpoints(n=1, every_tokens=4 * BATCH), values) == 12
    assert averaged(LastCheckpoints(n=9, every_tokens=5 * BATCH), values) == (12 + 7 + 2) / 3


@pytest.mark.parametrize(
    ("average", "first"),
    [
        (Tail(), 170),
        (ExponentialAverage(half_life_tokens=10), 100),
        (LastCheckpoints(n=3, every_tokens=40), 110),
        (LastCheckpoints(n=30, every_tokens=40), 0),
    ],
    ids=str,
)
def test_an_average_gives_the_first_step_that_it_needs(average: Average, first: int) -> None:
    assert average.begins(20 * BATCH, BATCH) == first
    steps = range(0, 20 * BATCH, BATCH)
    values = [float(tokens < first) for tokens in steps]
    assert averaged(average, values) == 0
    if first:
        assert averaged(average, [float(tokens <= first) for tokens in steps]) > 0


@pytest.mark.parametrize("values", [{"n": 0, "every_tokens": 1}, {"n": 1, "every_tokens": 0}])
def test_averages_of_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        LastCheckpoints(**values)
    with pytest.raises(ValueError, match="half_life_tokens must be positive, got 0"):
        ExponentialAverage(half_life_tokens=0)
