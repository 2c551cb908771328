from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy_models.training.guard import Divergence, Guard, GuardSettings, Spike, robust_limit

SETTINGS = GuardSettings(window=16, threshold=8.0, max_spikes=2)


def quiet(guard: Guard, steps: range, seed: int = 0) -> None:
    """Steps with the noise of ordinary batches; none of them is a spike."""
    noise = np.random.default_rng(seed).normal(size=(len(steps), 2))
    for step, (a, b) in zip(steps, noise, strict=True):
        assert guard.judge(step, 3 + 0.05 * float(a), 1 + 0.1 * float(b)) is None


@pytest.mark.parametrize(
    ("loss", "norm", "quantity", "value"), [(6.0, 1.0, "loss", 6.0), (3.0, 9.0, "gradient norm", 9.0)]
)
def test_a_jump_of_loss_or_gradient_is_a_spike(loss: float, norm: float, quantity: str, value: float) -> None:
    guard = Guard(SETTINGS)
    quiet(guard, range(30))
    spike = guard.judge(30, loss, norm)
    assert isinstance(spike, Spike)
    assert (spike.step, spike.quantity, spike.value, spike.action) == (30, quantity, value, "skip")
    assert spike.limit < value
    assert str(spike).startswith(f"step 30: {quantity} {value:g} above ")


def test_a_falling_loss_and_an_early_jump_are_none() -> None:
    guard = Guard(SETTINGS)
    for step in range(200):
        assert guard.judge(step, 6 * 0.98**step, 1.0) is None
    assert Guard(SETTINGS).judge(0, 1e6, 1e6) is None


def test_a_spike_does_not_move_what_is_ordinary() -> None:
    guard = Guard(SETTINGS)
    quiet(guard, range(30))
    before = guard.memory[:2]
    assert isinstance(guard.judge(30, 6.0, 1.0), Spike)
    np.testing.assert_array_equal(guard.memory[:2], before)


def test_repeated_spikes_end_the_run_and_rare_ones_do_not() -> None:
    guard = Guard(SETTINGS)
    quiet(guard, range(20))
    for step in (20, 40, 60, 80, 81):
        assert isinstance(guard.judge(step, 6.0, 1.0), Spike)
        quiet(guard, range(step + 1, step + 1), seed=step)
    verdict = guard.judge(82, 6.0, 1.0)
    assert isinstance(verdict, Divergence)
    assert verdict.step == 82
    assert verdict.reason.startswith("3 spikes within 16 steps, the last at step 82: loss 6 above")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_ends_the_run_from_the_first_step_on(value: float) -> None:
    assert Guard(SETTINGS).judge(0, value, 1.0) == Divergence(step=0, reason=f"the training loss is {value} at step 0")
    assert Guard(SETTINGS).judge(0, 1.0, value) == Divergence(step=0, reason=f"the gradient norm is {value} at step 0")


@given(n=st.integers(0, 40))
def test_a_guard_resumes_from_its_state(n: int) -> None:
    guard = Guard(SETTINGS)
    quiet(guard, range(n))
    guard.judge(n, 6.0, 1.0)
    other = Guard(SETTINGS, guard.memory)
    np.testing.assert_array_equal(other.memory, guard.memory)
    assert [other.judge(n + k, 6.0, 1.0) for k in (1, 2)] == [guard.judge(n + k, 6.0, 1.0) for k in (1, 2)]


def test_the_limit_is_robust_and_has_a_floor() -> None:
    values = np.random.default_rng(0).normal(5, 1, size=10_000)
    assert robust_limit(values, 4) == pytest.approx(9, abs=0.1)
    values[:1000] = 1e9
    assert robust_limit(values, 4) < 11
    assert robust_limit(np.full(10, 5.0), 4) == pytest.approx(5.2)


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
