from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import (
    Constant,
    Cooldown,
    CosineCycle,
    CosineDecay,
    ExponentialDecay,
    InverseSqrt,
    LinearCooldown,
    LinearDecay,
    Phase,
    Rewarmed,
    StepDecay,
    warmup_factor,
)
from proxy_models.recipes.segments import Segment

BATCH = 10
PHASES: list[Phase] = [
    Constant(warmup_tokens=50),
    Cooldown(start=200, end=300),
    LinearDecay(warmup_tokens=50, end=300),
    CosineDecay(warmup_tokens=50, end=300),
    LinearCooldown(start=200, end=300, start_factor=0.5),
    ExponentialDecay(warmup_tokens=50, end=300, final_fraction=0.01),
    StepDecay(warmup_tokens=50, end=300, milestones=(210, 250), step_factor=0.3),
    InverseSqrt(warmup_tokens=50),
    CosineCycle(start=200, end=300, warmup_tokens=30, start_factor=0.1, final_fraction=0.1),
    Rewarmed(
        phase=StepDecay(warmup_tokens=50, end=300, milestones=(250,), step_factor=0.3), start=200, warmup_tokens=30
    ),
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


def test_exponential_decay_loses_the_same_share_in_equal_tokens() -> None:
    phase = ExponentialDecay(warmup_tokens=100, end=300, final_fraction=0.01)
    assert [phase.factor(tokens, BATCH) for tokens in (90, 100, 200, 300)] == pytest.approx([1, 1, 0.1, 0.01])


def test_step_decay_falls_with_the_step_that_starts_at_a_milestone() -> None:
    phase = StepDecay(warmup_tokens=100, end=300, milestones=(200, 250), step_factor=0.1)
    factors = [phase.factor(tokens, BATCH) for tokens in (0, 100, 190, 200, 240, 250, 290)]
    assert factors == pytest.approx([0.1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_the_inverse_square_root_peaks_at_the_end_of_its_warmup_and_halves_at_four_warmups() -> None:
    phase = InverseSqrt(warmup_tokens=100)
    assert [phase.factor(end - BATCH, BATCH) for end in (50, 100, 400, 1600)] == pytest.approx([0.5, 1, 0.5, 0.25])
    with pytest.raises(ValueError, match="warmup_tokens .* got 0"):
        InverseSqrt(warmup_tokens=0)


def test_a_linear_cooldown_starts_where_the_phase_before_it_was() -> None:
    phase = LinearCooldown(start=200, end=300, start_factor=0.4)
    assert [phase.factor(tokens, BATCH) for tokens in (200, 250, 300)] == pytest.approx([0.4, 0.2, 0])


def test_a_later_cycle_warms_up_from_where_the_one_before_it_ended() -> None:
    first = CosineCycle(start=0, end=200, warmup_tokens=40, start_factor=0.0, final_fraction=0.1)
    assert [first.factor(tokens, BATCH) for tokens in range(0, 200, BATCH)] == [
        CosineDecay(warmup_tokens=40, end=200).factor(tokens, BATCH) for tokens in range(0, 200, BATCH)
    ]
    second = CosineCycle(start=200, end=400, warmup_tokens=40, start_factor=0.1, final_fraction=0.1)
    factors = [second.factor(tokens, BATCH) for tokens in (200, 230, 240, 320, 400)]
    assert factors == pytest.approx([0.325, 1, 1, 0.55, 0.1])


def test_a_rewarmed_phase_is_what_is_left_of_it_times_a_warmup() -> None:
    linear = LinearDecay(warmup_tokens=100, end=300)
    phase = Rewarmed(phase=linear, start=200, warmup_tokens=40)
    ratios = [phase.factor(tokens, BATCH) / linear.factor(tokens, BATCH) for tokens in (200, 210, 220, 230, 240, 290)]
    assert ratios == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert phase.end == 300
    assert Rewarmed(phase=Constant(warmup_tokens=50), start=200, warmup_tokens=40).end is None


@given(phase=st.sampled_from(PHASES), step=st.integers(20, 29))
def test_every_factor_is_a_share_of_the_peak_rate(phase: Phase, step: int) -> None:
    assert 0 < phase.factor(step * BATCH, BATCH) <= 1


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: type(phase).__name__)
def test_phases_survive_json(phase: Phase) -> None:
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH).resolve(400)
    segment = Segment(recipe=recipe, phase=phase, start=200, end=300)
    plain = json.loads(json.dumps(segment.to_dict()))
    assert plain["phase"]["kind"] == type(phase).__name__
    assert Segment.from_dict(plain) == segment
