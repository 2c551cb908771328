"""The schedule of a stage that continues another run."""

from dataclasses import replace
from typing import Any

import pytest

from proxy_models.recipes.continued import ContinuedSchedule, amended, amended_recipe, continued
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import Segment, chain
from proxy_models.recipes.stages import HyperparameterStage

BATCH = 256
H = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH)
BEFORE = H.resolve(100 * BATCH)


def factors(segments: tuple[Segment, ...]) -> list[float]:
    return [segment.rate_factor(tokens) for segment in segments for tokens, _ in segment.steps()]


def test_the_rate_rises_linearly_over_the_rewarming_to_its_factor_and_then_cools_down() -> None:
    segments = continued(
        BEFORE, 20 * BATCH, learning_rate=0.003, rewarm_tokens=4 * BATCH, schedule="wsd_linear", cooldown_fraction=0.25
    )
    cooling = [1 - n / 5 for n in range(5)]
    assert factors(segments) == pytest.approx([0.25, 0.5, 0.75, 1.0, *[1.0] * 11, *cooling])
    assert [segment.start // BATCH for segment in segments] == [0, 15]
    recipe = segments[0].recipe
    assert recipe.learning_rate == 0.003
    assert recipe.learning_rate * recipe.weight_decay == pytest.approx(BEFORE.learning_rate * BEFORE.weight_decay)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_other_schedules_are_those_of_a_run_of_the_stage_s_length(schedule: ContinuedSchedule) -> None:
    segments = continued(BEFORE, 40 * BATCH, learning_rate=0.01, rewarm_tokens=2 * BATCH, schedule=schedule)
    fresh = chain(replace(H, schedule=schedule, warmup_fraction=0.05), 40 * BATCH)
    assert factors(segments) == factors(fresh)


def test_a_cooldown_of_the_whole_stage_and_a_stage_of_one_batch_begin_at_the_peak() -> None:
    whole = continued(BEFORE, 10 * BATCH, learning_rate=0.01, cooldown_fraction=1.0)
    branch = chain(replace(H, cooldown_fraction=0.5), 20 * BATCH)
    assert factors(whole) == factors(branch)[10:]
    assert factors(continued(BEFORE, 3, learning_rate=0.01)) == [1.0]


def test_nothing_changed_keeps_the_recipe_to_the_last_bit_and_a_swap_the_decay_s_timescale() -> None:
    (same,) = continued(BEFORE, 10 * BATCH, learning_rate=0.01, schedule="constant")
    assert same.recipe == replace(BEFORE, warmup_tokens=0)
    assert factors((same,)) == [1.0] * 10
    (swapped,) = continued(BEFORE, 10 * BATCH, learning_rate=0.001, schedule="constant", optimizer="lion")
    assert swapped.recipe.optimizer == "lion"
    assert 0.001 * swapped.recipe.weight_decay == pytest.approx(0.01 * BEFORE.weight_decay)


def test_a_rewarming_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rewarm_tokens: 2304"):
        continued(BEFORE, 10 * BATCH, learning_rate=0.01, rewarm_tokens=9 * BATCH, cooldown_fraction=0.1)
    with pytest.raises(ValueError, match="rewarm_tokens: 256"):
        continued(BEFORE, 10 * BATCH, learning_rate=0.01, rewarm_tokens=BATCH, cooldown_fraction=1.0)


RUN = chain(replace(H, cooldown_fraction=0.2), 100 * BATCH)  # cools down from batch 80


def test_nothing_changed_is_the_rest_of_the_parent_from_any_checkpoint() -> None:
    for after in (1, 40, 79, 80, 90, 99):
        child = amended(RUN, after * BATCH, {})
        assert factors(child) == factors(RUN)[after:]
        assert {segment.recipe for segment in child} == {replace(RUN[0].recipe, warmup_tokens=0)}
    again = amended(amended(RUN, 40 * BATCH, {}), 30 * BATCH, {}, before=40 * BATCH)
    assert factors(again) == factors(RUN)[70:]


def test_the_cooldown_begins_where_its_share_of_the_whole_run_says_or_at_once() -> None:
    child = amended(RUN, 50 * BATCH, {"cooldown_fraction": 0.4})
    assert factors(child) == factors(chain(replace(H, cooldown_fraction=0.4), 100 * BATCH))[50:]
    late = amended(RUN, 50 * BATCH, {"cooldown_fraction": 0.9})
    assert factors(late) == pytest.approx([1 - (n / 50) ** 0.5 for n in range(50)])


def test_more_tokens_keep_the_cooldown_s_share_and_the_kind_of_schedule() -> None:
    child = amended(RUN, 50 * BATCH, {}, n_tokens=200 * BATCH)
    assert factors(child) == factors(chain(replace(H, cooldown_fraction=0.2), 200 * BATCH))[50:]
    twice = amended(child, 10 * BATCH, {}, n_tokens=400 * BATCH, before=50 * BATCH)
    assert factors(twice) == factors(chain(replace(H, cooldown_fraction=0.2), 400 * BATCH))[60:]
    cosine = amended(chain(replace(H, schedule="cosine"), 100 * BATCH), 99 * BATCH, {}, n_tokens=150 * BATCH)
    reached = factors(chain(replace(H, schedule="cosine"), 100 * BATCH))[99]
    assert factors(cosine)[0] == pytest.approx(reached)
    assert factors(cosine)[-1] == pytest.approx(0.1, abs=1e-3)


def test_a_new_schedule_in_the_cooldown_begins_at_the_parent_s_rate_unless_it_is_rewarmed() -> None:
    reached = factors(RUN)[90]
    assert factors(amended(RUN, 90 * BATCH, {"schedule": "constant"})) == [reached] * 10
    linear = factors(amended(RUN, 90 * BATCH, {"schedule": "linear"}))
    assert linear == pytest.approx([reached * (1 - n / 10) for n in range(10)])
    warm = factors(amended(RUN, 90 * BATCH, {"schedule": "constant", "rewarm_tokens": 4 * BATCH}))
    assert warm == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 7])
    with pytest.raises(ValueError, match="^rewarm_tokens"):
        amended(RUN, 100 * BATCH, {}, n_tokens=150 * BATCH)
    with pytest.raises(ValueError, match="final_fraction"):
        amended(RUN, 99 * BATCH, {"schedule": "cosine", "final_fraction": 0.5})


def test_rate_and_batch_keep_the_decay_s_timescale_and_stated_decay_is_of_the_whole_run() -> None:
    child = amended(RUN, 40 * BATCH, {"learning_rate_factor": 0.5, "batch_tokens": 2 * BATCH})
    before, after = RUN[0].recipe, child[0].recipe
    assert (after.learning_rate, after.batch_tokens) == (before.learning_rate / 2, 2 * BATCH)
    assert after.weight_decay_tau(100 * BATCH) == pytest.approx(before.weight_decay_tau(100 * BATCH))
    assert [segment.end // BATCH for segment in child] == [40, 60]
    stated = amended_recipe(before, {"weight_decay_tau": 0.1}, 100 * BATCH)
    assert stated.weight_decay_tau(100 * BATCH) == pytest.approx(0.1)
    ramp = amended_recipe(before, {"batch_tokens": 4 * BATCH, "batch_doublings": 2, "batch_ramp_tokens": 8 * BATCH})
    assert [ramp.ramp.batch_at(n * BATCH) // BATCH for n in (0, 4, 8)] == [1, 2, 4]


def test_later_stages_of_the_parent_keep_their_own_rates() -> None:
    staged = chain(replace(H, stages=(HyperparameterStage(after=0.5, learning_rate=0.25),)), 100 * BATCH)
    for change in ({"learning_rate_factor": 2.0}, {"learning_rate": 0.02}):
        rates = {segment.recipe.learning_rate for segment in amended(staged, 20 * BATCH, change)}
        assert rates == {0.02, 0.005}


def test_a_schedule_that_cannot_be_stretched_has_to_be_stated() -> None:
    steps = chain(replace(H, schedule="step"), 100 * BATCH)
    assert factors(amended(steps, 50 * BATCH, {"learning_rate_factor": 0.5})) == factors(steps)[50:]
    with pytest.raises(ValueError, match="^schedule"):
        amended(steps, 50 * BATCH, {}, n_tokens=200 * BATCH)
    with pytest.raises(ValueError, match="n_tokens: .* 12800"):
        amended(RUN, 50 * BATCH, {}, n_tokens=50 * BATCH)


def test_the_third_amendment_knows_the_schedule_of_the_first_run_and_a_cosine_its_end() -> None:
    twice = amended(amended(RUN, 20 * BATCH, {}), 20 * BATCH, {"clip_norm": 0.5}, before=20 * BATCH)
    third = amended(twice, 10 * BATCH, {}, n_tokens=200 * BATCH, before=40 * BATCH)
    assert factors(third) == factors(chain(replace(H, cooldown_fraction=0.2), 200 * BATCH))[50:]
    cosine = chain(replace(H, schedule="cosine"), 100 * BATCH)
    for before in (0, 80):
        cosine = amended(cosine, 80 * BATCH, {}, n_tokens=(before + 150) * BATCH, before=before * BATCH)
        assert factors(cosine)[-1] == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("after", "values", "key"),
    [
        (50, {"schedule": "cosine", "cooldown_fraction": 0.3}, "cooldown_fraction"),
        (50, {"schedule": "wsd", "final_fraction": 0.3}, "final_fraction"),
        (2, {"cooldown_fraction": 0.3}, "rewarm_tokens"),
        (50, {"rewarm_tokens": 60 * BATCH}, "rewarm_tokens"),
        (50, {"batch_doublings": 1, "batch_ramp_tokens": 60 * BATCH}, "batch_ramp_tokens"),
    ],
)
def test_what_the_rest_of_a_run_has_no_room_or_use_for_is_refused_with_its_key(
    after: int, values: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValueError, match=f"^{key}"):
        amended(RUN, after * BATCH, values)


def test_a_new_schedule_is_refused_while_the_parent_s_hyperparameters_still_change() -> None:
    staged = chain(replace(H, stages=(HyperparameterStage(after=0.5, learning_rate=0.25),)), 100 * BATCH)
    with pytest.raises(ValueError, match="^schedule"):
        amended(staged, 20 * BATCH, {}, n_tokens=200 * BATCH)
    assert amended(staged, 60 * BATCH, {}, n_tokens=200 * BATCH)[0].recipe.learning_rate == 0.25 * H.learning_rate


def test_a_rewarming_of_less_than_a_batch_is_one_of_a_batch() -> None:
    assert amended(RUN, 50 * BATCH, {"rewarm_tokens": 1})[0].recipe.warmup_tokens == BATCH
