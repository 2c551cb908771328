"""The next run: the design's algebra against plain least squares, and choices that are known in advance."""

import itertools
import math
import re
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from scaling import Law, ScalingFit, candidate_runs, compute_flops, fit, next_runs
from scaling.decisions.design import MISFIT_PER_DECADE, Design
from scaling.fits.forecast import interval_factor
from scaling.fits.identification import LEAST_NOISE
from scaling.fits.law_prior import precision
from scaling.forms.powers import Joint, JointPowers
from scaling.forms.problem import Problem

TARGET = (2e9, 4e10)


@pytest.fixture(scope="module")
def fitted() -> ScalingFit:
    sizes, ratios = np.meshgrid(np.geomspace(1e7, 1e8, 4), [10.0, 20.0, 40.0, 80.0])
    n_params, n_tokens = sizes.ravel(), (sizes * ratios).ravel()
    noise = 0.003 * np.random.default_rng(1).standard_normal(n_params.size)
    loss = (1.8 + 400 / n_params**0.34 + 2000 / n_tokens**0.37) * np.exp(noise)
    return fit(
        pd.DataFrame({"n_params": n_params, "n_tokens": n_tokens, "loss": loss}),
        n_params_convention="total",
        n_bootstrap=20,
    )


@pytest.fixture(scope="module")
def design(fitted: ScalingFit) -> Design:
    return Design.of(fitted.ensemble, fitted.rows, *TARGET)


def numeric_gradient(fitted: ScalingFit, law: Problem, n_params: float, n_tokens: float) -> np.ndarray:
    """Gradient of the base fit's log loss in (e, a, b, log alpha, log beta, log g), by differences in its own formula."""
    assert isinstance(law, JointPowers)
    base = next(iter(fitted.ensemble.variants.values()))
    log_n, log_d = law.terms.centre

    def log_loss(theta: np.ndarray) -> float:
        alpha, beta, g = np.exp(theta[3:])
        a, b = math.exp(theta[1] + alpha * log_n), math.exp(theta[2] + beta * log_d)
        return float(
            np.log(Joint().law(E=math.exp(theta[0]), A=a, B=b, alpha=alpha, beta=beta, g=g).loss(n_params, n_tokens))
        )

    p = base.parameters
    theta = np.array(
        [
            math.log(p["E"]),
            math.log(p["A"]) - p["alpha"] * log_n,
            math.log(p["B"]) - p["beta"] * log_d,
            *np.log([p["alpha"], p["beta"], p["g"]]),
        ]
    )
    assert log_loss(theta) == pytest.approx(float(np.log(base.loss(n_params, n_tokens))), abs=1e-12)
    steps = 1e-6 * np.eye(6)
    return np.array([(log_loss(theta + s) - log_loss(theta - s)) / 2e-6 for s in steps])


def test_gradients_away_from_the_runs(fitted: ScalingFit, design: Design) -> None:
    assert design.target[0] == pytest.approx(numeric_gradient(fitted, design.law, *TARGET), abs=1e-7)


def test_variance_is_that_of_least_squares_with_a_prior(fitted: ScalingFit, design: Design) -> None:
    rows = fitted.rows
    jacobian = np.array(
        [numeric_gradient(fitted, design.law, n, d) for n, d in zip(rows["n_params"], rows["n_tokens"], strict=True)]
    )
    prior = precision()
    noise = max(fitted.ensemble.residual, LEAST_NOISE)
    decades = np.log10(compute_flops(*TARGET) / compute_flops(rows["n_params"], rows["n_tokens"]))
    variance = noise**2 + (MISFIT_PER_DECADE * decades) ** 2
    covariance = np.linalg.inv(jacobian.T @ np.diag(1 / variance) @ jacobian + prior)
    gradient = numeric_gradient(fitted, design.law, *TARGET)
    assert design.variance == pytest.approx(gradient @ covariance @ gradient, rel=1e-4)


def test_a_run_adds_its_information(fitted: ScalingFit, design: Design) -> None:
    """Sherman and Morrison's update against the inverse of the information with the run."""
    gradient, noise_variance = numeric_gradient(fitted, design.law, 5e8, 1e10), 2e-5
    after = design.with_run(gradient, noise_variance)
    information = np.linalg.inv(design.covariance) + np.outer(gradient, gradient) / noise_variance
    assert after.covariance == pytest.approx(np.linalg.inv(information), rel=1e-5, abs=1e-12)
    gain = design.gains(gradient[None], np.array([noise_variance]))[0]
    assert gain == pytest.approx(design.variance - after.variance, rel=1e-8)


def test_noise_grows_with_the_decades_below_the_target(fitted: ScalingFit, design: Design) -> None:
    target = compute_flops(*TARGET)
    noise = fitted.ensemble.residual
    assert design.noise_variance([target, 10 * target]) == pytest.approx([noise**2] * 2)
    assert design.noise_variance(target / 100) == pytest.approx(noise**2 + (2 * MISFIT_PER_DECADE) ** 2)
    assert design.noise_variance(target / 100, 4.0) == pytest.approx(noise**2 / 4 + (2 * MISFIT_PER_DECADE) ** 2)


def test_the_first_run_is_the_best_of_all_that_can_be_paid_for(fitted: ScalingFit, design: Design) -> None:
    candidates = candidate_runs(fitted, *TARGET, affordable_flops=3e19)
    found = next_runs(fitted, *TARGET, affordable_flops=3e19, candidates=candidates, n_runs=1)
    left = []
    for n, d in zip(candidates["n_params"], candidates["n_tokens"], strict=True):
        gradient = numeric_gradient(fitted, design.law, n, d)
        noise = float(design.noise_variance(compute_flops(n, d)))
        left.append(design.with_run(gradient, noise).variance / design.variance)
    assert found.runs["variance_left"].iloc[0] == pytest.approx(min(left), rel=1e-4)
    assert found.runs.index[0] == int(np.argmin(left))
    assert candidates["cost_flops"].max() <= 3e19


def test_information_per_flop_may_be_maximized(fitted: ScalingFit, design: Design) -> None:
    candidates = candidate_runs(fitted, *TARGET, affordable_flops=3e19)
    size, tokens, cost = (candidates[name].to_numpy() for name in ("n_params", "n_tokens", "cost_flops"))
    (most, _), (each, _) = (
        next(design.greedy(size, tokens, cost, 3e19, criterion)) for criterion in ("variance", "variance per FLOP")
    )
    gains = [
        design.variance
        - design.with_run(numeric_gradient(fitted, design.law, n, d), float(design.noise_variance(c))).variance
        for n, d, c in zip(size, tokens, compute_flops(size, tokens), strict=True)
    ]
    assert (most, each) == (int(np.argmax(gains)), int(np.argmax(gains / cost)))
    assert cost[each] < cost[most]


def test_candidates_are_as_dense_as_is_asked(fitted: ScalingFit) -> None:
    """From 1e7 to the target's 2e9 parameters, 2.3 decades, six sizes a decade and three ratios; the ratios from 10 to 160."""
    found = candidate_runs(fitted, *TARGET, affordable_flops=1e30)
    np.testing.assert_allclose(np.unique(found["n_params"].round(-2)), np.geomspace(1e7, 2e9, 15), rtol=1e-4)
    ratios = np.unique((found["n_tokens"] / found["n_params"]).round(6))
    np.testing.assert_allclose(ratios, np.geomspace(10, 160, 5), rtol=1e-5)


def test_a_run_shrinks_the_spread_of_the_forecast_as_the_deviation_it_leaves(fitted: ScalingFit) -> None:
    """The width that is expected is that of the forecast's own formula with a run more, its spread times the root of the share.

    That run is the largest, so the error of the form grows over a shorter distance too.
    """
    found = next_runs(fitted, *TARGET, affordable_flops=3e19, n_runs=1)
    ensemble, share = fitted.ensemble, float(found.runs["variance_left"].iloc[0])
    largest = max(fitted.compute_range[1], float(compute_flops(*found.runs[["n_params", "n_tokens"]].iloc[0])))
    decades = max(1.0, math.log10(float(compute_flops(*TARGET)) / largest))
    form = (0.004**2 + ensemble.residual**2) * decades**4
    variance = form + share * float(ensemble.draw_spread(*TARGET)) ** 2
    n_runs = ensemble.n_runs + 1
    scale = math.sqrt(variance * n_runs / (n_runs - 3))
    assert found.width_then == pytest.approx(2 * math.sinh(interval_factor(0.9) * scale), rel=1e-9)
    assert largest > fitted.compute_range[1]


def test_batches_keep_within_what_is_affordable_and_shrink_the_interval(fitted: ScalingFit) -> None:
    found = next_runs(fitted, *TARGET, affordable_flops=2e19, n_runs=5)
    assert 2 <= len(found.runs) <= 5
    assert found.cost_flops <= 2e19
    assert found.runs["spent_flops"].tolist() == pytest.approx(found.runs["cost_flops"].cumsum().tolist())
    shares = [1, *found.runs["variance_left"]]
    assert all(b < a for a, b in itertools.pairwise(shares))
    assert found.width_now == (found.now.high - found.now.low) / found.now.loss
    assert found.width_then < found.width_now
    assert found.runs.index.is_unique
    text = str(found)
    assert "2e+09 parameters (total), 4e+10 tokens" in text
    assert f"{found.width_then:.2%} expected after {len(found.runs)} more runs" in text


def test_it_stops_when_no_run_is_worth_it(fitted: ScalingFit) -> None:
    """A run amid those made, far below the target, says next to nothing new."""
    candidates = pd.DataFrame({"n_params": [1e9, 3e7], "n_tokens": [2e10, 9e8]})
    found = next_runs(fitted, *TARGET, affordable_flops=1e21, candidates=candidates)
    assert found.runs.index.tolist() == [0]
    assert found.stopped.startswith("no run that can still be paid for takes 2% off the interval's variance: ")


def test_it_stops_at_the_floor_of_the_interval(fitted: ScalingFit) -> None:
    """The part of the width due to residual, floor and distance stays: compute for a hundredth of the width is not advised."""
    target = (4e8, 8e9)
    found = next_runs(fitted, *target, affordable_flops=1e21, n_runs=8, width=1e-4)
    assert len(found.runs) < 8
    floor = float(re.findall(r"([\d.]+)% of its", found.stopped)[0]) / 100
    assert floor < found.width_then <= found.width_now
    dear = next_runs(fitted, *target, affordable_flops=1e23, n_runs=8, width=1e-4)
    assert dear.width_then == pytest.approx(found.width_then, rel=0.01)


def test_it_stops_when_narrow_enough_and_supported(fitted: ScalingFit) -> None:
    now = next_runs(fitted, *TARGET, affordable_flops=1e20, n_runs=1)
    already = next_runs(fitted, 2e8, 4e9, affordable_flops=1e19, width=10.0)
    assert len(already.runs) == 0
    assert already.width_then == already.width_now
    assert already.stopped == "the interval is at most 1000.00% wide and within what was tested"
    assert not len(next_runs(fitted, 2e8, 4e9, affordable_flops=1e19, width=1.01 * already.width_now).runs)
    assert len(next_runs(fitted, 2e8, 4e9, affordable_flops=1e19, width=0.99 * already.width_now).runs)
    wanted = (now.width_now + now.width_then) / 2
    found = next_runs(fitted, *TARGET, affordable_flops=1e20, n_runs=8, width=wanted)
    assert found.width_then <= wanted
    assert len(found.runs) < 8


def test_runs_that_bring_a_far_target_into_support(fitted: ScalingFit) -> None:
    far = (2e10, 4e11)
    found = next_runs(fitted, *far, affordable_flops=1e22, n_runs=3, width=10.0)
    assert "decades of compute above the second largest run" in found.now.reasons[0]
    assert found.reasons == ()
    assert found.stopped.startswith("the interval is at most")
    short = next_runs(fitted, *far, affordable_flops=1e18, n_runs=3, width=10.0)
    assert "decades of compute above the second largest run" in short.reasons[0]
    assert "still unsupported" in str(short)


def test_without_a_candidate_it_says_so(fitted: ScalingFit) -> None:
    """A target outside the support of the runs, and no run that can be paid for: a ladder of one size may have none left."""
    found = next_runs(
        fitted,
        2e12,
        4e10,
        affordable_flops=1e20,
        candidates=pd.DataFrame({"n_params": [], "n_tokens": []}, dtype=float),
    )
    assert not found.now.supported
    assert found.runs.empty
    assert found.reasons
    assert found.width_then == found.width_now


@pytest.mark.parametrize("target", [(2e10, 4e11), (2e9, 5e11)])
def test_runs_promised_to_bring_support_do(fitted: ScalingFit, planted: Law, target: tuple[float, float]) -> None:
    """Make the runs as planted, fit again: a target too far, or at a D/N too high, is supported then, as was said."""
    found = next_runs(fitted, *target, affordable_flops=1e23, n_runs=6, width=10.0)
    assert not found.now.supported
    assert found.reasons == ()
    made = found.runs[["n_params", "n_tokens"]].assign(stem=[f"made {i}" for i in range(len(found.runs))])
    noise = 0.003 * np.random.default_rng(3).standard_normal(len(made))
    made["loss"] = planted.loss(made["n_params"], made["n_tokens"]) * np.exp(noise)
    after = fit(pd.concat([fitted.rows, made], ignore_index=True), n_params_convention="total", n_bootstrap=2)
    assert after.forecast(*target).supported


def test_expected_widths_are_those_of_the_next_fit(fitted: ScalingFit, planted: Law) -> None:
    """Make the runs as planted, fit again: the interval is about as wide as was said."""
    found = next_runs(fitted, *TARGET, affordable_flops=2e20, n_runs=3)
    made = found.runs[["n_params", "n_tokens"]].assign(stem=["a", "b", "c"][: len(found.runs)])
    noise = 0.003 * np.random.default_rng(2).standard_normal(len(made))
    made["loss"] = planted.loss(made["n_params"], made["n_tokens"]) * np.exp(noise)
    after = fit(pd.concat([fitted.rows, made], ignore_index=True), n_params_convention="total", n_bootstrap=20)
    forecast = after.forecast(*TARGET)
    assert (forecast.high - forecast.low) / forecast.loss == pytest.approx(found.width_then, rel=0.35)


def test_costs_given_are_what_is_paid(fitted: ScalingFit) -> None:
    candidates = pd.DataFrame(
        {"n_params": [2e8, 4e8], "n_tokens": [4e9, 8e9], "cost_flops": [1.0, 5.0], "name": ["small", "medium"]},
        index=["x", "y"],
    )
    cheap = next_runs(fitted, *TARGET, affordable_flops=4.0, candidates=candidates)
    assert cheap.runs.index.tolist() == ["x"]
    assert "small" in str(cheap)
    assert cheap.stopped == "no affordable candidate is left"
    assert next_runs(fitted, *TARGET, affordable_flops=5.0, candidates=candidates).runs.index.tolist() == ["y"]


def test_candidates_may_have_columns_of_our_names(fitted: ScalingFit) -> None:
    """A width is a candidate's own; an earlier result's columns are replaced."""
    candidates = pd.DataFrame({"n_params": [2e8, 4e8], "n_tokens": [4e9, 8e9], "width": [512, 768]})
    found = next_runs(fitted, *TARGET, affordable_flops=2e19, candidates=candidates)
    assert found.runs["width"].tolist() == [768]
    assert found.runs["interval"].tolist() == [found.width_then]
    assert "768" in str(found)
    again = next_runs(fitted, *TARGET, affordable_flops=2e19, candidates=found.runs.assign(interval=7.0))
    assert again.runs.columns.tolist() == found.runs.columns.tolist()
    assert again.width_then == found.width_then
    assert str(again) == str(found)


@pytest.mark.parametrize("column", ["n_params", "n_tokens"])
def test_candidates_in_millions_are_refused(fitted: ScalingFit, column: str) -> None:
    candidates = pd.DataFrame({"n_params": [2e8, 4e8], "n_tokens": [4e9, 8e9]})
    candidates[column] = [200.0, 400.0]
    with pytest.raises(ValueError, match=f"{column} .*got 200"):
        next_runs(fitted, *TARGET, affordable_flops=1e21, candidates=candidates)


def test_errors_name_the_rule_and_the_value(fitted: ScalingFit, ladder: Callable[..., pd.DataFrame]) -> None:
    with pytest.raises(ValueError, match="affordable_flops .*got 0"):
        next_runs(fitted, *TARGET, affordable_flops=0)
    with pytest.raises(ValueError, match="n_runs .*got 0"):
        next_runs(fitted, *TARGET, affordable_flops=1e19, n_runs=0)
    with pytest.raises(ValueError, match="width .*got -1"):
        next_runs(fitted, *TARGET, affordable_flops=1e19, width=-1)
    with pytest.raises(ValueError, match="missing column n_tokens"):
        next_runs(fitted, *TARGET, affordable_flops=1e19, candidates=pd.DataFrame({"n_params": [1e8]}))
    with pytest.raises(ValueError, match="n_params .*got -1"):
        next_runs(fitted, -1, 1e9, affordable_flops=1e19)


def test_it_does_not_stop_short_of_support(ladder: Callable[..., pd.DataFrame]) -> None:
    """Eight runs want two more to be supported: they are chosen even where none of them is informative."""
    fitted = fit(ladder(noise=0.002).iloc[[0, 3, 5, 9, 10, 14, 16, 19]], n_params_convention="total", n_bootstrap=2)
    found = next_runs(fitted, 1e9, 2e10, affordable_flops=1e20, n_runs=12)
    assert len(found.runs) >= 2
    assert not found.reasons


def test_candidates_keep_to_ratios_and_sizes_that_are_known(ladder: Callable[..., pd.DataFrame]) -> None:
    runs = ladder(noise=0.002)
    runs["n_tokens"] *= np.tile([0.05, 1, 1, 30], 5)
    fitted = fit(runs, n_params_convention="total", n_bootstrap=2)
    found = candidate_runs(fitted, 1e9, 2e10, affordable_flops=1e20)
    ratio = found["n_tokens"] / found["n_params"]
    assert ratio.min() >= 2 * (1 - 1e-9)
    assert ratio.max() <= 500 * (1 + 1e-9)
    assert found["cost_flops"].min() >= fitted.compute_range[0]
    out = candidate_runs(fitted, 1e9, 1e12, affordable_flops=1e22)
    assert (out["n_tokens"] / out["n_params"]).max() == pytest.approx(1000), "the target lies there"
