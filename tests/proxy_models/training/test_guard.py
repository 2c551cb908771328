from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from proxy_models.training.guard import Divergence, Guard, Spike, Verdict, judge_evaluation, robust_limit
from proxy_models.training.guard_settings import GuardSettings

SETTINGS = GuardSettings(window=16, threshold=8.0, max_spikes=2)


def guard_of(memory: Tensor | None = None) -> Guard:
    return Guard(SETTINGS, torch.device("cpu"), memory)


def judged(guard: Guard, step: int, loss: float, norm: float) -> Verdict | None:
    """The verdict on one step, read at once."""
    taken = guard.judge(step, torch.tensor(loss, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64))
    verdict = guard.read().get(step)
    assert bool(taken) == (verdict is None)
    return verdict


def quiet(guard: Guard, steps: range, seed: int = 0) -> None:
    """Steps with the noise of ordinary batches; none of them is a spike."""
    noise = np.random.default_rng(seed).normal(size=(len(steps), 2))
    for step, (a, b) in zip(steps, noise, strict=True):
        assert judged(guard, step, 3 + 0.05 * float(a), 1 + 0.1 * float(b)) is None


@pytest.mark.parametrize(
    ("loss", "norm", "quantity", "value"), [(6.0, 1.0, "loss", 6.0), (3.0, 9.0, "gradient norm", 9.0)]
)
def test_a_jump_of_loss_or_gradient_is_a_spike(loss: float, norm: float, quantity: str, value: float) -> None:
    guard = guard_of()
    quiet(guard, range(30))
    spike = judged(guard, 30, loss, norm)
    assert isinstance(spike, Spike)
    assert (spike.step, spike.quantity, spike.value, spike.action) == (30, quantity, value, "skip")
    assert spike.limit < value
    assert str(spike).startswith(f"step 30: {quantity} {value:g} above ")


def test_a_falling_loss_and_an_early_jump_are_none() -> None:
    guard = guard_of()
    for step in range(200):
        assert judged(guard, step, 6 * 0.98**step, 1.0) is None
    assert judged(guard_of(), 0, 1e6, 1e6) is None


def test_a_spike_does_not_move_what_is_ordinary() -> None:
    guard = guard_of()
    quiet(guard, range(30))
    before = guard.memory[:2]
    assert isinstance(judged(guard, 30, 6.0, 1.0), Spike)
    np.testing.assert_array_equal(guard.memory[:2], before)


def test_after_a_change_of_the_data_another_level_of_the_loss_is_ordinary() -> None:
    guard = guard_of()
    quiet(guard, range(30))
    assert isinstance(judged(guard, 30, 6.0, 1.0), Spike)
    guard.forget()
    for step in range(31, 60):
        assert judged(guard, step, 6.0 + 0.01 * (step % 3), 1.0) is None
    assert isinstance(judged(guard, 60, 12.0, 1.0), Spike)
    before = guard_of(guard.memory)
    assert isinstance(judged(before, 61, 12.0, 1.0), Spike), "it is kept in the state"


def test_repeated_spikes_end_the_run_and_rare_ones_do_not() -> None:
    guard = guard_of()
    quiet(guard, range(20))
    for step in (20, 40, 60, 80, 81):
        assert isinstance(judged(guard, step, 6.0, 1.0), Spike)
        quiet(guard, range(step + 1, step + 1), seed=step)
    verdict = judged(guard, 82, 6.0, 1.0)
    assert isinstance(verdict, Divergence)
    assert verdict.step == 82
    assert verdict.reason.startswith("3 spikes within 16 steps, the last at step 82: loss 6 above")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_ends_the_run_from_the_first_step_on(value: float) -> None:
    assert judged(guard_of(), 0, value, 1.0) == Divergence(step=0, reason=f"the training loss is {value} at step 0")
    assert judged(guard_of(), 0, 1.0, value) == Divergence(step=0, reason=f"the gradient norm is {value} at step 0")


def limit(values: NDArray[np.float64], threshold: float = 4) -> float:
    return float(robust_limit(torch.from_numpy(values)[None], threshold))


def test_the_limit_is_robust_and_has_a_floor() -> None:
    values = np.random.default_rng(0).normal(5, 1, size=10_000)
    assert limit(values) == pytest.approx(9, abs=0.1)
    values[:1000] = 1e9
    assert limit(values) < 11
    assert limit(np.full(10, 5.0)) == pytest.approx(5.2)


@given(values=st.lists(st.floats(-100, 100), min_size=1, max_size=20), missing=st.integers(0, 5))
def test_the_limit_is_numpy_s_to_the_bit_whatever_is_missing(values: list[float], missing: int) -> None:
    median = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(np.array(values) - median)))
    assert limit(np.array([math.nan] * missing + values)) == median + 4 * max(deviation, 0.01 * abs(median))


def test_verdicts_read_late_are_those_read_at_once() -> None:
    late, once = guard_of(), guard_of()
    generator = np.random.default_rng(0)
    steps = [(3 + 0.05 * float(a), 1 + 0.1 * float(b)) for a, b in generator.normal(size=(40, 2))]
    steps[20], steps[30], steps[31], steps[32] = (9.0, 1.0), (3.0, math.inf), (3.0, 9.0), (9.0, 1.0)
    found = {}
    for step, (loss, norm) in enumerate(steps):
        late.judge(step, torch.tensor(loss), torch.tensor(norm))
        if verdict := judged(once, step, float(np.float32(loss)), float(np.float32(norm))):
            found[step] = verdict
    assert late.read() == found
    assert [type(found[step]) for step in (20, 30, 31, 32)] == [Spike, Divergence, Spike, Divergence]
    torch.testing.assert_close(late.memory, once.memory, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"action": "ignore"}, "action must be"),
        ({"window": 4}, "window must be at least 8 steps"),
        ({"threshold": 0.0}, "threshold must be positive"),
        ({"max_spikes": -1}, "max_spikes must not be negative"),
        ({"snapshot_every": 0}, "snapshot_every be positive"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        GuardSettings(**change)


UNIFORM = math.log(256)


@pytest.mark.parametrize(
    ("loss", "norm", "is_warm", "diverged"),
    [
        (math.nan, 1.0, False, True),
        (10.1 * UNIFORM, 1.0, True, True),
        (10.1 * UNIFORM, 1.0, False, False),  # a large readout at its start
        (9.9 * UNIFORM, 1.0, True, False),
        (UNIFORM, 0.0, True, True),
        (UNIFORM, 0.0, False, False),  # before the first step of a readout of zeros
        (UNIFORM, 0.1, True, False),  # it still learns
        (0.99 * UNIFORM, 0.0, True, False),
        (9.9 * UNIFORM, 0.0, True, True),
    ],
)
def test_an_evaluation_tells_of_a_divergence(loss: float, norm: float, is_warm: bool, diverged: bool) -> None:
    found = judge_evaluation(loss, norm, vocab_size=256, step=7, is_warm=is_warm)
    assert (found is not None) == diverged
    assert found is None or found.step == 7
