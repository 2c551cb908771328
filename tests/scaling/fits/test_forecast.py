"""Forecast intervals: the measured formula, its coverage where the form is true, and what it is estimated from."""

import math
from collections.abc import Callable

import pandas as pd
import pytest

from scaling import Law, ScalingFit, fit
from scaling.fits.forecast import interval_factor

Ladder = Callable[..., pd.DataFrame]


@pytest.fixture
def result(ladder: Ladder) -> ScalingFit:
    return fit(ladder(noise=0.003), n_params_convention="total", n_bootstrap=100)


def test_factor_goes_through_the_measured_values() -> None:
    assert interval_factor(0.90) == pytest.approx(1.860, abs=0.001)
    assert interval_factor(0.95) == pytest.approx(2.306, abs=0.001)
    for level in (0, 1):
        with pytest.raises(ValueError, match=f"level .*got {level}"):
            interval_factor(level)


def test_scale_of_a_noise_free_fit_is_its_floor(ladder: Ladder) -> None:
    """Without noise r = p = 0, so s² = .004² · 20/17 for twenty runs, wherever the target lies."""
    exact = fit(ladder(), n_params_convention="total", n_bootstrap=20)
    inside, beyond = exact.forecast(1e8, 2e9), exact.forecast(1e9, 2e10)
    for found in (inside, beyond):
        assert found.log_scale == pytest.approx(0.004 * math.sqrt(20 / 17), rel=1e-3)
    assert beyond.high / beyond.loss == pytest.approx(math.exp(interval_factor(0.9) * beyond.log_scale))
    assert beyond.loss / beyond.low == pytest.approx(math.exp(interval_factor(0.9) * beyond.log_scale))


def test_every_term_of_the_scale_has_its_measured_coefficient(result: ScalingFit) -> None:
    """s² = (.004² + r² + p²) · n/(n − 3), with noise and above the largest run."""
    target = 1e9, 1e11
    terms = [0.004**2, result.ensemble.residual**2, float(result.ensemble.draw_spread(*target)) ** 2]
    assert result.forecast(*target).log_scale == pytest.approx(math.sqrt(sum(terms) * 20 / 17), rel=1e-9)
    assert min(terms) > 1e-4 * sum(terms)  # none is lost in the others


def test_intervals_grow_with_level_and_distance(result: ScalingFit) -> None:
    near, far = result.forecast(3e8, 6e9), result.forecast(2e9, 4e10)
    assert far.log_scale > near.log_scale
    assert result.forecast(3e8, 6e9, level=0.95).high > near.high
    assert far.extrapolation == pytest.approx(far.compute_flops / result.compute_range[1])


def test_coverage_where_the_form_is_true(ladder: Ladder, planted: Law) -> None:
    """The measured scale allows for misfit, so it must cover a true surface more often than its nominal 90 %."""
    target = 1e9, 2e10
    hits = 0
    for seed in range(30):
        forecast = fit(ladder(0.003, seed), n_params_convention="total", n_bootstrap=50).forecast(*target)
        hits += forecast.low <= float(planted.loss(*target)) <= forecast.high
    assert hits >= 27


def test_held_out_decade_of_the_reference_problem(reference: pd.DataFrame) -> None:
    """Fitted to C < Cmax/10, the 90 % interval holds most of the losses above, and the mean error is below 1 %."""
    compute = reference["n_params"] * reference["n_tokens"]
    held_out = reference[compute > compute.max() / 10]
    result = fit(reference.drop(held_out.index), n_params_convention="total")
    forecasts = [result.forecast(row.n_params, row.n_tokens) for row in held_out.itertuples()]
    error = [abs(f.loss / loss - 1) for f, loss in zip(forecasts, held_out["loss"], strict=True)]
    covered = [f.low <= loss <= f.high for f, loss in zip(forecasts, held_out["loss"], strict=True)]
    assert sum(error) / len(error) < 0.01
    assert sum(covered) / len(covered) > 0.8, "one ladder's targets share one error"


def test_bad_target(result: ScalingFit) -> None:
    with pytest.raises(ValueError, match="n_tokens .*got 0"):
        result.forecast(1e9, 0)
    with pytest.raises(ValueError, match="n_params .*got '7B'"):
        result.forecast("7B", 1e11)  # type: ignore[arg-type]
