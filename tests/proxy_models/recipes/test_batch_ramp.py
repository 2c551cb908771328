from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy_models.recipes.batch_ramp import BatchRamp

BATCH = 64


@st.composite
def ramps(draw: st.DrawFn) -> BatchRamp:
    doublings = draw(st.integers(0, 4))
    return BatchRamp(batch_tokens=BATCH, doublings=doublings, ramp_tokens=doublings * draw(st.integers(1, 5)) * BATCH)


def test_the_batch_doubles_in_equal_stages() -> None:
    ramp = BatchRamp(batch_tokens=BATCH, doublings=2, ramp_tokens=4 * BATCH)
    steps = list(ramp.steps(0, 6 * BATCH))
    assert [batch for _, batch in steps] == [16] * 8 + [32] * 4 + [64] * 2
    assert (ramp.first_batch_tokens, ramp.batch_at(10**9)) == (16, BATCH)


@given(ramp=ramps(), n_batches=st.integers(1, 30))
def test_steps_leave_no_token_out_and_are_counted_by_position(ramp: BatchRamp, n_batches: int) -> None:
    steps = list(ramp.steps(0, n_batches * BATCH))
    position = 0
    for number, (tokens, batch) in enumerate(steps):
        assert (tokens, batch) == (position, ramp.batch_at(position))
        assert ramp.n_steps(tokens) == number
        position += batch
    assert position == n_batches * BATCH
    assert ramp.n_steps(position) == len(steps)


@given(ramp=ramps())
def test_only_at_the_ends_of_steps_does_a_step_end(ramp: BatchRamp) -> None:
    whole = 30 * BATCH
    ends = [tokens for tokens in range(whole) if ramp.ends_step(tokens)]
    assert ends == [tokens for tokens, _ in ramp.steps(0, whole)]


@given(ramp=ramps(), cut=st.integers(1, 19))
def test_every_multiple_of_the_final_batch_is_the_end_of_a_step(ramp: BatchRamp, cut: int) -> None:
    whole = list(ramp.steps(0, 20 * BATCH))
    assert list(ramp.steps(0, cut * BATCH)) + list(ramp.steps(cut * BATCH, 20 * BATCH)) == whole


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"doublings": 1}, "needs batch_doublings and batch_ramp_tokens, got 1 and 0"),
        ({"ramp_tokens": 64}, "needs batch_doublings and batch_ramp_tokens, got 0 and 64"),
        ({"doublings": 7, "ramp_tokens": 7 * 64}, r"must be a multiple of 2\^7 .*got 64"),
        ({"doublings": 10**11, "ramp_tokens": 64}, r"must be a multiple of 2\^100000000000 .*got 64"),
        ({"doublings": 2, "ramp_tokens": 64}, "each of the 2 parts .* whole batches of 64 tokens, got 64"),
    ],
)
def test_a_ramp_that_can_not_be_is_refused(values: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        BatchRamp(batch_tokens=64, **values)
