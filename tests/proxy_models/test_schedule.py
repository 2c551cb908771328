from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy_models.schedule import (
    Constant,
    Cooldown,
    CosineDecay,
    LinearDecay,
    Phase,
    phase_from_dict,
    phase_to_dict,
    warmup_factor,
)

BATCH = 10
PHASES: list[Phase] = [
    Constant(warmup_tokens=50),
    Cooldown(start=200, end=300),
    LinearDecay(warmup_tokens=50, end=300),
    CosineDecay(warmup_tokens=50, end=300),
]


def test_warmup_wastes_no_step_and_ends_at_one() -> None:
    factors = [warmup_factor(tokens, BATCH, 50) for tokens in range(0, 80, BATCH)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1])
    assert warmup_factor(0, BATCH, 0) == 1


def test_the_constant_phase_stays_at_one_for_ever() -> None:
    assert Constant(warmup_tokens=50).factor(10**9, BATCH) == 1


def test_the_cooldown_starts_at_one_and_its_last_step_still_moves() -> None:
    cooldown = Cooldown(start=200, end=300)
    factors = [cooldown.factor(tokens, BATCH) for tokens in range(200, 310, BATCH)]
    assert factors[0] == 1
    assert factors[-2] == pytest.approx(1 - math.sqrt(0.9))
    assert factors[-1] == 0
    assert factors == sorted(factors, reverse=True)
    assert cooldown.factor(225, BATCH) == pytest.approx(0.5)


def test_linear_and_cosine_decay_pass_their_middle_and_their_end() -> None:
    linear, cosine = LinearDecay(warmup_tokens=100, end=300), CosineDecay(warmup_tokens=100, end=300)
    assert [linear.factor(tokens, BATCH) for tokens in (100, 200, 300)] == [1, 0.5, 0]
    assert [cosine.factor(tokens, BATCH) for tokens in (100, 200, 300)] == pytest.approx([1, 0.55, 0.1])
    for phase in (linear, cosine):
        assert phase.factor(0, BATCH) == pytest.approx(0.1)
        assert phase.factor(90, BATCH) == 1


@given(phase=st.sampled_from(PHASES), step=st.integers(20, 29))
def test_every_factor_is_a_share_of_the_peak_rate(phase: Phase, step: int) -> None:
    assert 0 < phase.factor(step * BATCH, BATCH) <= 1


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: type(phase).__name__)
def test_phases_survive_json(phase: Phase) -> None:
    assert phase_from_dict(json.loads(json.dumps(phase_to_dict(phase)))) == phase
