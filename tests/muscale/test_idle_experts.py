"""The warning about experts without tokens looks at a number of steps, not at one."""

import math

import numpy as np

from muscale.idle_experts import IDLE_STEPS, idle_experts


def test_experts_without_tokens_are_reported_only_if_every_recent_step_had_some() -> None:
    assert idle_experts([math.nan] * IDLE_STEPS) is None, "a model without experts"
    assert idle_experts(()) is None
    assert idle_experts([2.0] * IDLE_STEPS + [0.0]) is None
    found = idle_experts([0.0] + [3.0, 2.0] * (IDLE_STEPS // 2), least_steps=IDLE_STEPS)
    assert found is not None
    assert "at least 2 " in found


def test_a_short_segment_is_judged_by_the_steps_that_it_has() -> None:
    counts = np.array([2, 1, 3], dtype=np.float32)
    found = idle_experts(counts)
    assert found is not None
    assert "last 3 steps at least 1 " in found
    assert idle_experts(counts, least_steps=IDLE_STEPS) is None
    assert idle_experts(np.array([2, 0, 3], dtype=np.float32)) is None
