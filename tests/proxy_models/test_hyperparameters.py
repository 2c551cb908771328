from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy_models.hyperparameters import Hyperparameters, Segment, branch, chain, stem
from proxy_models.schedule import Constant, Cooldown, CosineDecay, LinearDecay

BATCH = 512


def hyperparameters(**values: Any) -> Hyperparameters:
    return Hyperparameters(**{"learning_rate": 0.01, "batch_tokens": BATCH, **values})


def test_decay_is_resolved_from_its_timescale_and_told_back() -> None:
    recipe = hyperparameters(weight_decay_tau=0.25).resolve(100 * BATCH)
    # tau = B / (eta·lambda·D), so lambda = 512 / (0.01 · 0.25 · 51200) = 4
    assert recipe.weight_decay == pytest.approx(4)
    assert recipe.weight_decay_tau(100 * BATCH) == pytest.approx(0.25)
    assert recipe.weight_decay_tau(50 * BATCH) == pytest.approx(0.5)


def test_warmup_is_the_larger_of_fraction_and_floor_in_whole_batches() -> None:
    assert hyperparameters(warmup_fraction=0.1).resolve(100 * BATCH).warmup_tokens == 10 * BATCH
    floored = hyperparameters(warmup_fraction=0.1, warmup_floor_tokens=20 * BATCH + 1)
    assert floored.resolve(100 * BATCH).warmup_tokens == 20 * BATCH
    assert hyperparameters(warmup_fraction=0.0).resolve(100 * BATCH).warmup_tokens == BATCH


def test_whole_batches_are_the_nearest_and_at_least_one() -> None:
    assert [hyperparameters().whole_batches(n * BATCH) for n in (0.1, 1.4, 1.6, 7)] == [n * BATCH for n in (1, 1, 2, 7)]


@given(rung=st.integers(1, 10_000), fraction=st.floats(0.01, 0.9))
def test_the_run_planned_for_a_branch_s_length_leaves_its_stem_at_the_same_rung(rung: int, fraction: float) -> None:
    values = hyperparameters(cooldown_fraction=fraction)
    annealed = values.annealed_tokens(rung * BATCH)
    assert annealed > rung * BATCH
    assert values.stable_tokens(annealed) == rung * BATCH


def test_a_branch_has_the_segments_of_the_planned_run_under_the_same_recipe() -> None:
    values = hyperparameters()
    n_tokens = 100 * BATCH
    planned = chain(values, n_tokens)
    recipe = values.resolve(n_tokens)
    assert branch(recipe, values.stable_tokens(n_tokens), n_tokens) == planned
    early = branch(recipe, 34 * BATCH, values.annealed_tokens(34 * BATCH))
    assert early[0] == stem(recipe, 34 * BATCH)
    assert early[0].phase == planned[0].phase
    assert [early[0].rate_factor(step * BATCH) for step in range(34)] == [
        planned[0].rate_factor(step * BATCH) for step in range(34)
    ]


def test_a_wsd_run_warms_up_stays_and_cools_down() -> None:
    segments = chain(hyperparameters(warmup_fraction=0.1, cooldown_fraction=0.2), 100 * BATCH)
    assert [type(segment.phase) for segment in segments] == [Constant, Cooldown]
    assert [(segment.start, segment.end, segment.n_steps) for segment in segments] == [
        (0, 80 * BATCH, 80),
        (80 * BATCH, 100 * BATCH, 20),
    ]
    factors = [s.rate_factor(tokens) for s in segments for tokens in range(s.start, s.end, BATCH)]
    assert len(factors) == 100
    assert factors[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert set(factors[10:81]) == {1.0}
    assert factors[80:] == sorted(factors[80:], reverse=True)
    assert factors[-1] > 0


@pytest.mark.parametrize(("schedule", "kind"), [("linear", LinearDecay), ("cosine", CosineDecay)])
def test_schedules_that_know_their_horizon_are_one_segment(schedule: str, kind: type) -> None:
    (segment,) = chain(hyperparameters(schedule=schedule), 40 * BATCH)
    assert (segment.start, segment.end) == (0, 40 * BATCH)
    assert segment.phase == kind(warmup_tokens=2 * BATCH, end=40 * BATCH)


def test_the_shortest_run_still_cools_down() -> None:
    segments = chain(hyperparameters(warmup_fraction=0.0), 2 * BATCH)
    assert [segment.n_steps for segment in segments] == [1, 1]
    with pytest.raises(ValueError, match="does not fit"):
        chain(hyperparameters(warmup_fraction=0.0), BATCH)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be positive, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive, got nan"),
        ({"batch_tokens": -1}, "batch_tokens must be positive"),
        ({"weight_decay_tau": 0.0}, "weight_decay_tau must be positive"),
        ({"output_multiplier": 0.0}, "output_multiplier must be positive"),
        ({"beta2": 1.0}, r"beta2 must lie in \[0, 1\), got 1.0"),
        ({"warmup_fraction": -0.1}, "warmup_fraction must lie in"),
        ({"cooldown_fraction": 0.0}, r"cooldown_fraction must lie in \(0, 1\), got 0"),
        ({"warmup_floor_tokens": -1}, "warmup_floor_tokens must not be negative"),
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        hyperparameters(**change)


def test_a_warmup_longer_than_the_stable_part_is_refused() -> None:
    with pytest.raises(ValueError, match=f"a warmup of {9 * BATCH} tokens does not fit .* {10 * BATCH} tokens"):
        hyperparameters(warmup_floor_tokens=9 * BATCH).resolve(10 * BATCH)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (2, 1), (-1, 1), (0, 0.5), (0.5, 1)])
def test_a_segment_runs_over_whole_batches_to_a_later_end(start: float, end: float) -> None:
    recipe = hyperparameters().resolve(100 * BATCH)
    with pytest.raises(ValueError, match="whole batches of 512 tokens"):
        Segment(recipe=recipe, phase=Constant(warmup_tokens=0), start=int(start * BATCH), end=int(end * BATCH))
