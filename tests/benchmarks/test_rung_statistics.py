"""The replay of rungs, on planted numbers."""

from itertools import combinations, permutations

import numpy as np
import pytest

from tests.benchmarks.rung_statistics import (
    random_search_regret,
    rank_correlation,
    reported,
    successive_halving,
    telling_error,
)

FINAL = np.array([1.0, 1.1, 1.3, 1.6])
RATIOS = np.array([1.5, 1.2])  # of a rung's loss over the final one
SIGNALS = FINAL[:, None] * RATIOS
COSTS = (0.25, 0.25, 0.5)


def test_rank_correlation_of_a_monotone_signal_is_one_and_a_divergence_ranks_last() -> None:
    assert rank_correlation(FINAL**3, FINAL) == pytest.approx(1)
    assert rank_correlation(-FINAL, FINAL) == pytest.approx(-1)
    assert rank_correlation(np.array([1.0, 2.0, 3.0, np.nan]), np.array([1.0, 2.0, 3.0, np.nan])) == pytest.approx(1)
    assert rank_correlation(np.array([np.nan, 1.0, 2.0, 3.0]), FINAL) == pytest.approx(-0.2)  # ranks 4, 1, 2, 3


def test_one_worker_promotes_the_better_half_of_those_that_arrived() -> None:
    replay = successive_halving(SIGNALS, COSTS, [2, 3, 0, 1], reduction=2, workers=1)
    # 2 continues from (2, 3), 0 from (0, 2, 3) and then from (0, 2) to the end, 1 from (0, 1, 2, 3)
    assert replay.reached.tolist() == [2, 1, 1, 0]
    assert replay.spent == pytest.approx(2.25)
    replay = successive_halving(SIGNALS, COSTS, [0, 1, 2, 3], reduction=2, workers=1)
    assert replay.reached.tolist() == [2, 1, 0, 0]
    assert replay.regret(FINAL) == 0


def test_a_true_signal_loses_nothing_in_any_order_and_a_reversed_one_loses() -> None:
    for order in permutations(range(4)):
        for workers in (1, 3):
            assert successive_halving(SIGNALS, COSTS, order, reduction=2, workers=workers).regret(FINAL) == 0
    reversed_signal = successive_halving(SIGNALS[::-1], COSTS, [3, 2, 1, 0], reduction=2, workers=1)
    assert reversed_signal.regret(FINAL) == pytest.approx(0.6)


def test_nothing_begins_once_the_budget_is_spent_and_a_divergence_ends_a_trial() -> None:
    replay = successive_halving(SIGNALS, COSTS, [3, 2, 1, 0], reduction=2, workers=1, budget=1.0)
    assert replay.reached.tolist() == [-1, 2, 1, 0], "the last one to begin still comes to its end"
    assert replay.spent == pytest.approx(1.75)
    diverging = SIGNALS.copy()
    diverging[0] = np.nan
    assert successive_halving(diverging, COSTS, [0, 1, 2, 3], reduction=2, workers=1).reached[0] == 0


def test_random_search_is_the_mean_over_all_draws() -> None:
    for n in (1, 2, 3, 4):
        mean = np.mean([min(draw) for draw in combinations(FINAL, n)])
        assert random_search_regret(FINAL, n) == pytest.approx(mean - 1.0)
    halfway = (random_search_regret(FINAL, 2) + random_search_regret(FINAL, 3)) / 2
    assert random_search_regret(FINAL, 2.5) == pytest.approx(halfway)
    with pytest.raises(ValueError, match="between 1 and the 4 trials"):
        random_search_regret(FINAL, 5)


REACHED = np.array([2, 2, 1, 0])


def test_the_correction_finds_a_planted_offset_exactly() -> None:
    unseen = np.where(REACHED == 2, FINAL, np.nan)  # what the sweep doesn't know can't be used
    for way in ("corrected", "chained"):
        values = reported(way, SIGNALS, unseen, REACHED)
        np.testing.assert_allclose(values, np.log(FINAL), rtol=1e-12)
        assert telling_error(values, FINAL, REACHED).rmse < 1e-12


def test_each_way_reports_its_values() -> None:
    as_it_is = reported("rung", SIGNALS, FINAL, REACHED)
    np.testing.assert_allclose(np.exp(as_it_is), [1.0, 1.1, 1.3 * 1.2, 1.6 * 1.5])
    error = telling_error(as_it_is, FINAL, REACHED)
    assert error.bias == pytest.approx((np.log(1.2) + np.log(1.5)) / 2)
    np.testing.assert_allclose(np.exp(reported("worst", SIGNALS, FINAL, REACHED))[2:], 1.1 * 1.01)


def test_the_chain_takes_its_first_step_from_all_that_went_on() -> None:
    signals = SIGNALS.copy()
    signals[0, 0] *= 1.1  # between 0, 1 and 2 the median of the first step stays
    values = reported("chained", signals, FINAL, REACHED)
    assert np.exp(values[3]) == pytest.approx(1.6)
    direct = reported("corrected", signals, FINAL, REACHED)
    assert np.exp(direct[3]) == pytest.approx(1.6 / np.sqrt(1.1))  # two that ended: their mean
