"""Means over items with standard errors that hold at scores of 0 and 1."""

from __future__ import annotations

import math

import pytest
from scipy.stats import binom

from proxy_models.evaluation.smooth_scores import mean, share_error


@pytest.mark.parametrize("n", [20, 50, 200, 1000])
@pytest.mark.parametrize("p", [0.5, 0.8, 0.95, 0.99, 0.999])
def test_two_errors_around_a_measured_share_hold_the_true_one(n: int, p: float) -> None:
    covered = sum(
        float(binom.pmf(count, n, p)) for count in range(n + 1) if abs(count / n - p) <= 2 * share_error(count / n, n)
    )
    assert covered > 0.88


def test_the_error_of_a_share_is_binomial_inside_and_not_0_at_the_ends() -> None:
    assert share_error(0.5, 10_000) == pytest.approx(0.005, rel=1e-3)
    for share in (0.0, 1.0):
        assert share_error(share, 100) == pytest.approx(math.sqrt(2 * 102 / 104**3))
    assert mean([1.0] * 100) == (1.0, share_error(1.0, 100))
    assert mean([0.0, 1.0, 1.0, 0.0]) == (0.5, share_error(0.5, 4))


def test_other_numbers_have_the_sample_s_error_and_one_item_has_none() -> None:
    value, error = mean([0.25, 0.75])
    assert (value, error) == (0.5, 0.25)
    assert mean([1.0]) == (1.0, None)
