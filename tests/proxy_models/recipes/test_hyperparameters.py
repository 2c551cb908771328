from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.schedule import (
    Constant,
    Cooldown,
    CosineCycle,
    CosineDecay,
    ExponentialDecay,
    InverseSqrt,
    LinearCooldown,
    LinearDecay,
    Rewarmed,
    ScheduleName,
    StepDecay,
)
from proxy_models.recipes.segments import Segment, branch, chain, stem

BATCH = 512


def hyperparameters(**values: Any) -> Hyperparameters:
    return Hyperparameters(**{"learning_rate": 0.01, "batch_tokens": BATCH, **values})


def test_decay_is_resolved_from_its_timescale_and_back() -> None:
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


def test_settings_of_a_schedule_reach_its_phase() -> None:
    (cosine,) = chain(hyperparameters(schedule="cosine", final_fraction=0.0), 40 * BATCH)
    assert cosine.phase == CosineDecay(warmup_tokens=2 * BATCH, end=40 * BATCH, final_fraction=0.0)
    (exponential,) = chain(hyperparameters(schedule="exponential", final_fraction=0.02), 40 * BATCH)
    assert exponential.phase == ExponentialDecay(warmup_tokens=2 * BATCH, end=40 * BATCH, final_fraction=0.02)
    (step,) = chain(hyperparameters(schedule="step", milestones=(0.5, 0.75), step_factor=0.5), 40 * BATCH)
    milestones = (20 * BATCH, 30 * BATCH)
    assert step.phase == StepDecay(warmup_tokens=2 * BATCH, end=40 * BATCH, milestones=milestones, step_factor=0.5)
    (constant,) = chain(hyperparameters(schedule="constant"), 40 * BATCH)
    assert constant.phase == Constant(warmup_tokens=2 * BATCH)


def test_schedules_with_a_cooldown_have_a_stem_that_lengths_share() -> None:
    for schedule, kind in (("wsd_linear", Constant), ("inverse_sqrt", InverseSqrt)):
        values = hyperparameters(schedule=schedule)
        start, cooldown = chain(values, 40 * BATCH)
        assert start.phase == kind(warmup_tokens=2 * BATCH)
        assert isinstance(cooldown.phase, LinearCooldown)
        assert (start.end, cooldown.end) == (34 * BATCH, 40 * BATCH)
        # The rate does not jump where the cooldown begins, and its last step still moves.
        assert cooldown.rate_factor(34 * BATCH) == start.rate_factor(34 * BATCH)
        assert 0 < cooldown.rate_factor(39 * BATCH) < 0.2
    with pytest.raises(ValueError, match='is branched under "wsd", "wsd_linear" or "inverse_sqrt", got "cosine"'):
        branch(values.resolve(40 * BATCH), 34 * BATCH, 40 * BATCH, "cosine")


def test_a_warmup_ends_before_the_cooldown_begins() -> None:
    values = hyperparameters(warmup_floor_tokens=34 * BATCH)
    message = (
        f"a warmup of {34 * BATCH} tokens does not fit into the first {34 * BATCH} of a run of {40 * BATCH} tokens"
    )
    with pytest.raises(ValueError, match=message):
        values.resolve(40 * BATCH)
    assert values.resolve(42 * BATCH).warmup_tokens == 34 * BATCH


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "exponential", "step"])
def test_without_a_cooldown_a_warmup_ends_before_the_run_does(schedule: ScheduleName) -> None:
    values = hyperparameters(schedule=schedule, warmup_floor_tokens=36 * BATCH)
    assert chain(values, 40 * BATCH)[0].recipe.warmup_tokens == 36 * BATCH
    with pytest.raises(ValueError, match=str(36 * BATCH)):
        chain(values, 36 * BATCH)


def test_cycles_follow_each_other_without_a_jump() -> None:
    segments = chain(hyperparameters(schedule="cosine_cycles", cycles=3, final_fraction=0.2), 41 * BATCH)
    assert [(s.start // BATCH, s.end // BATCH) for s in segments] == [(0, 13), (13, 27), (27, 41)]
    phases = [segment.phase for segment in segments]
    assert all(isinstance(phase, CosineCycle) for phase in phases)
    factors = [s.rate_factor(tokens) for s in segments for tokens in range(s.start, s.end, BATCH)]
    assert [factors[n] for n in (1, 14, 28)] == pytest.approx([1, 1, 1])
    assert [factors[n] for n in (0, 13, 27)] == pytest.approx([0.5, 0.6, 0.6])
    assert 0.2 < factors[-1] < 0.25
    with pytest.raises(ValueError, match="1024: lower warmup_fraction"):
        chain(hyperparameters(schedule="cosine_cycles", cycles=20), 40 * BATCH)
    with pytest.raises(ValueError, match="40.*100000000000 cycles"):
        chain(hyperparameters(schedule="cosine_cycles", cycles=10**11), 40 * BATCH)


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_every_schedule_is_a_chain_without_gaps_that_never_stands_still(schedule: ScheduleName) -> None:
    segments = chain(hyperparameters(schedule=schedule), 60 * BATCH)
    assert [segment.start for segment in segments] == [0, *(segment.end for segment in segments[:-1])]
    assert segments[-1].end == 60 * BATCH
    factors = [segment.rate_factor(tokens) for segment in segments for tokens, _ in segment.steps()]
    assert len(factors) == 60
    assert max(factors) == 1
    assert min(factors) > 0


def swapping(**values: Any) -> Hyperparameters:
    return hyperparameters(**{"swap_optimizer": "muon", "swap_fraction": 0.5, "swap_learning_rate": 0.02, **values})


def test_a_swap_cuts_the_run_and_warms_the_rest_of_the_schedule_up_again() -> None:
    plain = chain(hyperparameters(warmup_fraction=0.1), 100 * BATCH)
    segments = chain(swapping(warmup_fraction=0.1), 100 * BATCH)
    assert [(s.start // BATCH, s.end // BATCH) for s in segments] == [(0, 50), (50, 85), (85, 100)]
    assert [s.begins_with_swap for s in segments] == [False, True, False]
    before, after, cooldown = (segment.recipe for segment in segments)
    assert before == plain[0].recipe
    assert after == cooldown
    changed = {name for name, value in after.to_dict().items() if value != before.to_dict()[name]}
    assert changed == {"optimizer", "learning_rate", "weight_decay"}
    assert (after.optimizer, after.learning_rate) == ("muon", 0.02)
    assert after.weight_decay_tau(100 * BATCH) == pytest.approx(before.weight_decay_tau(100 * BATCH))
    factors, unswapped = ([s.rate_factor(tokens) for s in run for tokens, _ in s.steps()] for run in (segments, plain))
    assert factors[50:60] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert factors[:50] + factors[60:] == unswapped[:50] + unswapped[60:]


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_every_schedule_may_be_swapped_in(schedule: ScheduleName) -> None:
    for fraction in (0.1, 0.3, 0.9):
        segments = chain(swapping(schedule=schedule, swap_fraction=fraction), 60 * BATCH)
        swap = 60 * BATCH * fraction
        assert [segment.start for segment in segments] == [0, *(segment.end for segment in segments[:-1])]
        assert segments[-1].end == 60 * BATCH
        assert [s.recipe.optimizer for s in segments] == ["muon" if s.start >= swap else "adamw" for s in segments]
        assert [s.start for s in segments if s.begins_with_swap] == [swap]
        assert all(isinstance(segment.phase, Rewarmed) == (segment.start >= swap) for segment in segments)


def test_a_setting_of_the_optimizer_that_takes_over_is_kept() -> None:
    values = swapping(optimizer="adafactor", beta2=0.99, eps=1e-8)
    assert (chain(values, 100 * BATCH)[-1].recipe.beta2, values.eps) == (0.99, 1e-8)


def test_a_swap_where_a_warmup_has_no_room_is_refused() -> None:
    for fraction, swap in ((0.02, 2), (0.97, 97)):
        with pytest.raises(ValueError, match=f"a swap after {swap * BATCH} tokens leaves .* change swap_fraction"):
            chain(swapping(swap_fraction=fraction), 100 * BATCH)


def test_a_batch_ramp_is_resolved_into_whole_batches_and_leaves_the_segments_where_they_are() -> None:
    plain = chain(hyperparameters(), 100 * BATCH)
    ramped = chain(hyperparameters(batch_doublings=2, batch_ramp_tokens=11 * BATCH), 100 * BATCH)
    assert [(s.start, s.end) for s in ramped] == [(s.start, s.end) for s in plain]
    assert ramped[0].recipe.batch_ramp_tokens == 2 * 6 * BATCH
    assert [batch for _, batch in ramped[0].steps()][:37:12] == [BATCH // 4, BATCH // 4, BATCH // 2, BATCH]
    assert ramped[0].n_steps == 24 + 12 + 73
    # The same function of the tokens: both have warmed up when the step that ends at 5 batches is taken.
    assert ramped[0].rate_factor(5 * BATCH - BATCH // 4) == plain[0].rate_factor(4 * BATCH) == 1
    assert ramped[0].rate_factor(0) == pytest.approx(plain[0].rate_factor(0) / 4)


def test_hyperparameters_and_recipes_survive_json() -> None:
    values = hyperparameters(schedule="step", milestones=(0.5, 0.9), batch_doublings=1, batch_ramp_tokens=BATCH)
    assert Hyperparameters.from_dict(json.loads(json.dumps(values.to_dict()))) == values
    recipe = values.resolve(100 * BATCH)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


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
        ({"schedule": "triangle"}, "schedule must be one of wsd, wsd_linear, .*, got 'triangle'"),
        ({"final_fraction": 0.2}, 'final_fraction is a setting of cosine and .*: schedule "wsd" would ignore 0.2'),
        ({"schedule": "linear", "cycles": 3}, 'cycles is a setting of cosine_cycles: schedule "linear" would ignore 3'),
        ({"schedule": "cosine", "final_fraction": 1.0}, r"final_fraction must lie in \[0, 1\)"),
        ({"schedule": "exponential", "final_fraction": 0.0}, "above 0 for an exponential, got 0.0"),
        ({"schedule": "step", "milestones": (0.9, 0.8)}, "milestones must rise"),
        ({"schedule": "step", "milestones": (0.5, 1.0)}, r"milestones must .* lie in \(0, 1\)"),
        ({"schedule": "step", "step_factor": 1.0}, r"step_factor must lie in \(0, 1\), got 1.0"),
        ({"schedule": "cosine_cycles", "cycles": 0}, "cycles must be at least 1, got 0"),
        ({"optimizer": "adam", "weight_decay_tau": 0.3}, 'weight_decay_tau is .*: optimizer "adam" would ignore 0.3'),
        ({"optimizer": "lion", "eps": 1e-8}, 'eps is a setting of .*: optimizer "lion" would ignore 1e-08'),
        ({"optimizer": "adafactor", "eps": 1e-8}, 'optimizer "adafactor" would ignore 1e-08'),
        ({"optimizer": "adafactor", "beta1": 0.8}, 'beta1 is .*: optimizer "adafactor" would ignore 0.8'),
        ({"optimizer": "adafactor", "beta2": 0.8}, 'beta2 is .*: optimizer "adafactor" would ignore 0.8'),
        ({"swap_optimizer": "adamw"}, "swap_optimizer must differ from optimizer, got 'adamw' for both"),
        ({"swap_optimizer": "lion", "swap_fraction": 0.5}, "a swap needs .*, got 'lion', 0.5 and 0.0"),
        ({"swap_fraction": 0.5, "swap_learning_rate": 0.1}, "a swap needs swap_optimizer, .*, got None, 0.5 and 0.1"),
        ({"batch_doublings": 1}, "needs batch_doublings and batch_ramp_tokens, got 1 and 0"),
        ({"batch_doublings": 10, "batch_ramp_tokens": 1}, r"must be a multiple of 2\^10 .*got 512"),
        (
            {"batch_doublings": 10**11, "batch_ramp_tokens": 1},
            r"must be a multiple of 2\^100000000000",
        ),
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        hyperparameters(**change)


def test_a_warmup_longer_than_the_stable_part_is_refused() -> None:
    with pytest.raises(ValueError, match=f"{9 * BATCH}.*{10 * BATCH} tokens"):
        hyperparameters(warmup_floor_tokens=9 * BATCH).resolve(10 * BATCH)
    with pytest.raises(ValueError, match=f"{9 * BATCH}.*{10 * BATCH} tokens"):
        hyperparameters(batch_doublings=1, batch_ramp_tokens=9 * BATCH).resolve(10 * BATCH)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (2, 1), (-1, 1), (0, 0.5), (0.5, 1)])
def test_a_segment_runs_over_whole_batches_to_a_later_end(start: float, end: float) -> None:
    recipe = hyperparameters().resolve(100 * BATCH)
    with pytest.raises(ValueError, match="whole batches of 512 tokens"):
        Segment(recipe=recipe, phase=Constant(warmup_tokens=0), start=int(start * BATCH), end=int(end * BATCH))


def test_inside_a_ramp_a_segment_ends_where_a_step_does() -> None:
    recipe = hyperparameters(batch_doublings=1, batch_ramp_tokens=2 * BATCH).resolve(100 * BATCH)
    half = BATCH // 2
    segment = Segment(recipe=recipe, phase=Constant(warmup_tokens=0), start=half, end=3 * half)
    assert segment.n_steps == len(list(segment.steps())) == 2
    for end in (half + 1, 5 * half):
        with pytest.raises(ValueError, match=str(end)):
            replace(segment, end=end)
