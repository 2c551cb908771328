"""Forecast intervals: the measured formula, its coverage where the form is true, and what it is estimated from."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from numpy.typing import ArrayLike

from scaling import Law, ScalingFit, compute_flops, fit
from scaling.arrays import Array
from scaling.fits.forecast import interval_factor
from tests.scaling.conftest import PLANTED

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


def test_scale_of_a_noise_free_fit_is_its_floor_within_a_decade(ladder: Ladder) -> None:
    """Without noise r = p = 0, so s² = .004² · 20/17 for twenty runs, below the largest run and .8 decades above it."""
    exact = fit(ladder(), n_params_convention="total", n_bootstrap=20)
    inside, beyond = exact.forecast(1e8, 2e9), exact.forecast(1e9, 2e10)
    for found in (inside, beyond):
        assert found.log_scale == pytest.approx(0.004 * math.sqrt(20 / 17), rel=1e-3)
    assert beyond.high / beyond.loss == pytest.approx(math.exp(interval_factor(0.9) * beyond.log_scale))
    assert beyond.loss / beyond.low == pytest.approx(math.exp(interval_factor(0.9) * beyond.log_scale))


def test_every_term_of_the_scale_has_its_measured_coefficient(result: ScalingFit) -> None:
    """s² = ((.004² + r²)·max(1, h)⁴ + p²) · n/(n − 3), with noise, h decades above the largest run."""
    for target, decades in (
        ((1e8, 2e9), 1.0),
        ((3e8, 6e10), 1.0),
        ((1e9, 1e11), math.log10(1e9 * 1e11 / (2e8 * 1.6e10))),
    ):
        terms = [0.004**2, result.ensemble.residual**2, float(result.ensemble.draw_spread(*target)) ** 2]
        terms[:2] = [term * decades**4 for term in terms[:2]]
        assert result.forecast(*target).log_scale == pytest.approx(math.sqrt(sum(terms) * 20 / 17), rel=1e-9)
        assert min(terms) > 1e-4 * sum(terms)  # none is lost in the others


def test_intervals_grow_with_level_and_distance(result: ScalingFit) -> None:
    near, far = result.forecast(3e8, 6e9), result.forecast(2e9, 4e10)
    assert far.log_scale > near.log_scale
    assert result.forecast(3e8, 6e9, level=0.95).high > near.high
    assert far.extrapolation == pytest.approx(far.compute_flops / result.compute_range[1])


TOP = 1e20
"""Compute of the largest run of a dense ladder, FLOPs."""


def drifting(n_params: ArrayLike, n_tokens: ArrayLike, drift: float) -> Array:
    """Loss of the planted law, its exponent of compute moved by `drift` per e-fold of compute."""
    moved = np.exp(-0.5 * drift * np.log(compute_flops(n_params, n_tokens) / TOP) ** 2)
    return np.asarray(1.8 + (PLANTED.loss(n_params, n_tokens) - 1.8) * moved)


def dense(drift: float, per_decade: int = 6, noise: float = 0.001) -> ScalingFit:
    """Fit of runs at 12 ratios D/N over two decades of compute below TOP."""
    compute, ratio = np.meshgrid(np.geomspace(TOP / 100, TOP, 2 * per_decade), np.geomspace(5.0, 80.0, 12))
    n_params = np.sqrt(compute / (6 * ratio)).ravel()
    n_tokens = n_params * ratio.ravel()
    error = noise * np.random.default_rng(0).standard_normal(n_params.size)
    loss = drifting(n_params, n_tokens, drift) * np.exp(error)
    runs = pd.DataFrame({"n_params": n_params, "n_tokens": n_tokens, "loss": loss})
    return fit(runs, n_params_convention="total", n_bootstrap=2)


def beyond(decades: float) -> tuple[float, float]:
    """N and D of a run at 20 tokens per parameter so far above TOP."""
    n_params = math.sqrt(TOP * 10**decades / 120)
    return n_params, 20 * n_params


@pytest.mark.parametrize("drift", [0.01, -0.01])
def test_dense_ladder_whose_exponent_drifts(drift: float) -> None:
    """144 runs on the law to .1 % leave nothing for their draws to show; its exponent moves by .01 per e-fold of compute."""
    result, missed = dense(drift), {}
    for decades in (0.5, 1.0, 1.5, 2.0, 2.4):
        target = beyond(decades)
        found, true = result.forecast(*target, level=0.95), float(drifting(*target, drift))
        assert found.supported
        assert found.low < true < found.high, decades
        terms = 0.004**2 + result.ensemble.residual**2 + float(result.ensemble.draw_spread(*target)) ** 2
        without = interval_factor(0.95) * math.sqrt(terms * 144 / 141)
        missed[decades] = abs(math.log(found.loss / true)) > without
    assert missed == {0.5: False, 1.0: False, 1.5: drift > 0, 2.0: True, 2.4: True}, "without the growth"


def test_width_grows_with_distance_however_many_runs_there_are() -> None:
    """The form's error does not shrink with runs: at two decades s is at least four times the floor, and grows all along."""
    few, many = dense(0.0, per_decade=2), dense(0.0, per_decade=18)
    for result in (few, many):
        scales = [result.forecast(*beyond(decades)).log_scale for decades in (0.0, 0.5, 1.0, 1.1, 1.25, 1.5, 2.0, 2.4)]
        assert scales == sorted(scales)
        assert scales[-2] > 4 * 0.004
        assert scales[2] < 1.3 * scales[0], "within a decade the form's error is what it was"
        assert scales[-1] > 1.3 * scales[-2]


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
