"""The schedule of a stage that continues another run."""

from dataclasses import replace

import pytest

from proxy_models.recipes.continued import ContinuedSchedule, continued
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import Segment, chain

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
    with pytest.raises(ValueError, match=r"re-warming of 2304.*2304"):
        continued(BEFORE, 10 * BATCH, learning_rate=0.01, rewarm_tokens=9 * BATCH, cooldown_fraction=0.1)
    with pytest.raises(ValueError, match="does not fit"):
        continued(BEFORE, 10 * BATCH, learning_rate=0.01, rewarm_tokens=BATCH, cooldown_fraction=1.0)
