"""Stages: what changes from points of a run's stable part on; runs without any are unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy_models.hashing import content_key
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import Constant, ScheduleName
from proxy_models.recipes.segments import chain
from proxy_models.recipes.stages import CHANGEABLE, HyperparameterStage

BATCH = 128
STAGES = (
    HyperparameterStage(after=0.4, learning_rate=0.5, beta2=0.98),
    HyperparameterStage(after=0.8, learning_rate=2.0, weight_decay_tau=0.25),
)


def staged(**values: Any) -> Hyperparameters:
    return Hyperparameters(**{"learning_rate": 0.01, "batch_tokens": BATCH, "stages": STAGES, **values})


def test_each_stage_begins_at_its_share_of_the_stable_part_and_the_cooldown_keeps_the_last() -> None:
    segments = chain(staged(), 100 * BATCH)
    assert [(s.start // BATCH, s.end // BATCH) for s in segments] == [(0, 34), (34, 68), (68, 85), (85, 100)]
    recipes = [segment.recipe for segment in segments]
    assert [recipe.learning_rate for recipe in recipes] == [0.01, 0.005, 0.02, 0.02]
    assert [recipe.beta2 for recipe in recipes] == [0.95, 0.98, 0.98, 0.98]
    # The timescale is of the decay at the stage's own rate: B / (eta·lambda·D)
    assert [r.weight_decay_tau(100 * BATCH) for r in recipes] == pytest.approx([0.5, 0.5, 0.25, 0.25])
    assert all(isinstance(s.phase, Constant) for s in segments[:3])
    assert [s.rate_factor(s.start) for s in segments[1:]] == [1, 1, 1]


@pytest.mark.parametrize("schedule", ["wsd", "wsd_linear", "inverse_sqrt"])
def test_a_schedule_with_stages_has_the_factors_of_the_one_without(schedule: ScheduleName) -> None:
    plain, changed = (
        [s.rate_factor(tokens) for s in chain(h, 60 * BATCH) for tokens, _ in s.steps()]
        for h in (staged(schedule=schedule, stages=()), staged(schedule=schedule))
    )
    assert changed == plain


def test_the_rate_s_course_scales_with_the_run_s_own_rate_and_length() -> None:
    short, long = chain(staged(), 100 * BATCH), chain(staged(learning_rate=0.004), 1000 * BATCH)
    assert [s.recipe.learning_rate / 0.01 for s in short] == [s.recipe.learning_rate / 0.004 for s in long]
    assert [s.end / 100 for s in short] == [s.end / 1000 for s in long]


def test_stages_survive_json_and_none_leave_the_keys_as_they_were() -> None:
    values = staged()
    assert Hyperparameters.from_dict(json.loads(json.dumps(values.to_dict()))) == values
    assert values.to_dict()["stages"][0] == {"after": 0.4, "learning_rate": 0.5, "beta2": 0.98}
    # The key that these had before there were stages.
    assert content_key(staged(stages=()).to_dict()) == "786e39a570df0f57"


def test_a_stage_lists_its_changes() -> None:
    assert str(STAGES[0]) == "after 40%: learning_rate × 0.5, beta2 = 0.98"
    assert staged().set_by_stages == {"beta2", "weight_decay_tau"}


@pytest.mark.parametrize("name", CHANGEABLE)
def test_whatever_may_change_changes_the_recipe_from_there_on(name: str) -> None:
    change: Any = {name: 0.7}
    before, after, cooldown = (
        segment.recipe for segment in chain(staged(stages=(HyperparameterStage(after=0.5, **change),)), 100 * BATCH)
    )
    assert after == cooldown
    changed = {key for key, value in after.to_dict().items() if value != before.to_dict()[key]}
    expected = {"learning_rate": {"learning_rate", "weight_decay"}, "weight_decay_tau": {"weight_decay"}}
    assert changed == expected.get(name, {name})


def test_a_run_too_short_for_its_stages_is_refused() -> None:
    with pytest.raises(ValueError, match=f"stages: {3 * BATCH}.*{BATCH}, "):
        chain(
            staged(stages=(HyperparameterStage(after=0.4, beta1=0.8), HyperparameterStage(after=0.45, beta1=0.7))),
            4 * BATCH,
        )
    assert [segment.start // BATCH for segment in chain(staged(), 4 * BATCH)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"stages": (STAGES[1], STAGES[0])}, r"got \[0.8, 0.4\]"),
        ({"stages": (STAGES[0], STAGES[0])}, r"one after the other, got \[0.4, 0.4\]"),
        ({"schedule": "linear"}, 'stages is a setting of wsd and .*: schedule "linear" would ignore'),
        ({"stages": (HyperparameterStage(after=0.5, beta2=1.5),)}, r"stages: beta2 must lie in \[0, 1\), got 1.5"),
        (
            {"stages": (HyperparameterStage(after=0.5, learning_rate=-1.0),)},
            "stages: learning_rate must be positive, got -0.01",
        ),
        ({"optimizer": "adafactor"}, 'stages: beta2 is .*: optimizer "adafactor" would ignore 0.98'),
        (
            {"swap_optimizer": "lion", "swap_fraction": 0.5, "swap_learning_rate": 0.001},
            "stages .* swap_optimizer, got 'lion'",
        ),
    ],
)
def test_stages_that_can_not_be_followed_are_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        staged(**change)


@pytest.mark.parametrize("after", [0.0, 1.0, -0.5, float("nan")])
def test_a_stage_begins_within_the_stable_part_and_changes_something(after: float) -> None:
    with pytest.raises(ValueError, match=f"after must .* got {after}"):
        HyperparameterStage(after=after, beta1=0.8)
    with pytest.raises(ValueError, match=r"0.5.*learning_rate, "):
        HyperparameterStage(after=0.5)
