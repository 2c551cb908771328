"""Runs of one size: the law of tokens, its derivatives, its interval from few runs, what it refuses, and public runs held out."""

import json
import re
from functools import partial

import numpy as np
import pandas as pd
import pytest

from scaling import (
    Chinchilla,
    Limits,
    OneSize,
    ScalingError,
    ScalingFit,
    backtest,
    candidate_runs,
    decide,
    fit,
    next_runs,
)
from scaling.errors import TooFewRunsError
from scaling.fits.support import unsupported
from scaling.forms import forecast_form, form_named
from scaling.forms.one_size import PowerOfTokens
from scaling.forms.problem import Problem

SIZE = 1e8
NUMBERS = {"E": 2.2, "B": 30.0, "beta": 0.2, "D_0": 3e8}
PLANTED = OneSize().law(**NUMBERS)


def ladder(n_runs: int, *, noise: float = 0.004, seed: int = 0, sizes: tuple[float, ...] = (SIZE,)) -> pd.DataFrame:
    tokens = np.geomspace(1e8, 2e9, n_runs)
    rows = pd.DataFrame({"n_params": np.resize(sizes, n_runs), "n_tokens": tokens})
    error = noise * np.random.default_rng(seed).standard_normal(n_runs)
    return rows.assign(loss=PLANTED.loss(SIZE, tokens) * np.exp(error))


def fitted(n_runs: int = 8, *, seed: int = 0) -> ScalingFit:
    return fit(ladder(n_runs, seed=seed), n_params_convention="total", loss_unit="nats", n_bootstrap=40)


def test_derivatives_are_exact_and_coordinates_go_both_ways() -> None:
    problem = PowerOfTokens.at(np.array([1e8, 3e8, 1e9, 4e9]), np.log([3.5, 3.3, 3.1, 3.0]))
    theta = np.array([[1.0, 0.2, -1.0, -0.5], [0.9, 0.1, -0.7, 1.5]])
    value, jacobian = problem.linearise(theta)
    np.testing.assert_allclose(value, problem.log_loss(theta))
    for i, shift in enumerate(1e-6 * np.eye(4)):
        slope = (problem.log_loss(theta + shift) - problem.log_loss(theta - shift)) / 2e-6
        np.testing.assert_allclose(jacobian[..., i], slope, atol=1e-8)
    weights = np.random.default_rng(0).normal(size=(2, 4))
    exact, numeric = (
        curvature(theta, jacobian, weights)
        for curvature in (problem.curvature, lambda *a: Problem.curvature(problem, *a))
    )
    np.testing.assert_allclose(exact, numeric, atol=1e-8)
    numbers = dict(zip(OneSize.parameters, problem.natural(theta)[0], strict=True))
    np.testing.assert_allclose(problem.coordinates(numbers), theta[0])
    np.testing.assert_allclose(np.log(OneSize().law(**numbers).loss(SIZE, problem.x * problem.centre)), value[0])


def test_runs_of_one_size_get_the_law_of_tokens_which_says_so_and_is_read_back() -> None:
    found = fitted()
    assert isinstance(found.law.form, OneSize)
    assert found.law.form.tokens_only
    assert found.one_size == SIZE
    assert found.status == "ok"
    assert isinstance(forecast_form(found.law.form), OneSize)
    assert form_named("one size") == OneSize()
    again = ScalingFit.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again.law == found.law
    assert again.one_size == SIZE
    assert again.forecast(SIZE, 4e9) == found.forecast(SIZE, 4e9)
    assert "D_0" in str(again)


def test_a_law_of_sizes_has_no_one_size() -> None:
    law = Chinchilla().law(E=1.8, A=400.0, B=2000.0, alpha=0.34, beta=0.37)
    rows = pd.DataFrame([(n, d) for n in (1e7, 3e7, 1e8) for d in (1e9, 3e9, 9e9)], columns=["n_params", "n_tokens"])
    found = fit(rows.assign(loss=law.loss(**rows)), n_params_convention="total", n_bootstrap=2)
    assert found.one_size is None
    assert isinstance(found.law.form, Chinchilla)


@pytest.mark.parametrize("start", [1e6, 3e8, 1e10])
def test_a_planted_law_is_forecast_whatever_its_start_is_worth(start: float) -> None:
    tokens = np.geomspace(1e8, 2e9, 8)
    law = OneSize().law(**{**NUMBERS, "D_0": start})
    rows = pd.DataFrame({"n_params": SIZE, "n_tokens": tokens, "loss": law.loss(SIZE, tokens)})
    forecast = fit(rows, n_params_convention="total", n_bootstrap=2).forecast(SIZE, 8e9)
    truth = float(law.loss(SIZE, 8e9))
    assert forecast.supported
    assert abs(np.log(forecast.loss / truth)) < 0.01
    assert forecast.low < truth < forecast.high


def test_intervals_hold_with_few_runs_and_three_are_not_exact() -> None:
    truth, held, widths = float(PLANTED.loss(SIZE, 4e9)), 0, []
    for seed in range(10):
        found = fitted(3, seed=seed)
        forecast = found.forecast(SIZE, 4e9)
        held += forecast.low <= truth <= forecast.high
        widths.append(forecast.high / forecast.low - 1)
        assert not forecast.supported  # the prior alone determines the law
    assert held >= 8
    assert min(widths) > 0.03
    intervals = found.intervals()
    assert (intervals["high"] / intervals["low"] > 1.1).all()
    assert fitted(4).forecast(SIZE, 4e9).supported


def test_both_searches_and_any_order_of_rows_find_one_law() -> None:
    rows = ladder(6)
    found = partial(fit, n_params_convention="total", n_bootstrap=2)
    laws = [
        found(rows).law,
        found(rows, method="multistart").law,
        found(rows.sample(frac=1, random_state=1)).law,
    ]
    for law in laws[1:]:
        np.testing.assert_allclose([*law.parameters.values()], [*laws[0].parameters.values()], rtol=1e-3)


def test_two_lengths_two_sizes_and_the_wrong_form_are_refused() -> None:
    fitted = partial(fit, n_params_convention="total")
    with pytest.raises(TooFewRunsError, match="n_tokens"):
        fitted(ladder(2))
    with pytest.raises(TooFewRunsError, match="n_params"):
        fitted(ladder(8, sizes=(1e8, 2e8)))
    with pytest.raises(TooFewRunsError, match="n_params"):
        fitted(ladder(8, sizes=(1e8, 2e8, 4e8)), form=OneSize())
    with pytest.raises(TooFewRunsError, match="n_params"):
        fitted(ladder(8), form=Chinchilla())


def test_support_is_of_the_size_and_of_lengths_near_the_runs() -> None:
    found = fitted()
    assert found.unsupported_reasons(SIZE, 7.9e9) == ()
    for target in ((2 * SIZE, 4e9), (SIZE, 9e9), (SIZE, 1e8)):
        assert len(found.unsupported_reasons(*target)) == 1
    with pytest.raises(ScalingError, match=re.escape(f"{2 * SIZE:.4g}")):
        found.forecast(2 * SIZE, 4e9)


DOUBLINGS = 2.0 ** np.arange(5)


@pytest.mark.parametrize(
    "losses",
    [
        2.5 * DOUBLINGS**0.01,
        2.5 * DOUBLINGS**0.01 * np.exp(0.002 * np.random.default_rng(0).standard_normal(5)),
        np.array([2.6, 2.5, 2.45, 2.5, 2.6]),
        np.array([2.6, 2.5, 2.45, 2.44, 2.5]),
    ],
)
def test_losses_that_rise_towards_the_longest_runs_support_no_forecast(losses: np.ndarray) -> None:
    rows = pd.DataFrame({"n_params": SIZE, "n_tokens": 1e9 * DOUBLINGS, "loss": losses})
    found = fit(rows, n_params_convention="total", n_bootstrap=2)
    assert "rising" in unsupported(found.rows, found.ensemble, SIZE, 6.4e10)
    assert not found.forecast(SIZE, 6.4e10).supported


@pytest.mark.parametrize("noise", [0.002, 0.004, 0.007])
@pytest.mark.parametrize("start", [1e6, 3e8, 1e10])
def test_falling_losses_with_noise_are_hardly_ever_called_rising(start: float, noise: float) -> None:
    law, generator = OneSize().law(**{**NUMBERS, "D_0": start}), np.random.default_rng(0)
    called = 0
    for n_runs in np.resize([3, 4, 5, 8], 200):
        tokens = np.geomspace(1e8, 2e9, n_runs)
        losses = law.loss(SIZE, tokens) * np.exp(noise * generator.standard_normal(n_runs))
        rows = pd.DataFrame({"n_params": SIZE, "n_tokens": tokens, "stem": np.arange(n_runs), "loss": losses})
        called += "rising" in unsupported(rows, None, SIZE, 4e9)
    assert called <= 10


def test_a_planned_run_takes_no_part_in_whether_losses_rise() -> None:
    rows = pd.DataFrame(
        {"n_params": SIZE, "n_tokens": 1e9 * DOUBLINGS, "stem": range(5), "loss": 2.5 * DOUBLINGS**0.01}
    )
    planned = pd.concat([rows, rows.tail(1).assign(n_tokens=3.2e10, stem=5, loss=np.nan)], ignore_index=True)
    assert "rising" in unsupported(planned, None, SIZE, 6.4e10)
    assert "rising" not in unsupported(planned.assign(loss=np.nan), None, SIZE, 6.4e10)


def test_no_size_is_chosen() -> None:
    found = fitted()
    for call in (
        lambda: found.law.allocate(1e19),
        lambda: decide(found, 1e19),
        lambda: decide(found.law, 1e19, limits=Limits(sizes=[SIZE])),
        lambda: decide(found, 1e19, limits=Limits(sizes=[SIZE, 2 * SIZE])),
        lambda: found.plot_sizes([1e19]),
        found.plot_contours,
        found.plot_allocation,
        lambda: found.profile("E"),
    ):
        with pytest.raises(ScalingError):
            call()
    assert found.unidentified(1e19) is None
    assert found.caveats == ()


def test_at_its_own_size_a_budget_or_a_loss_decides_the_tokens() -> None:
    found, limits = fitted(), Limits(sizes=[SIZE])
    decision = decide(found, 6 * SIZE * 6e9, limits=limits)
    assert decision.n_params == SIZE
    assert decision.n_tokens == pytest.approx(6e9)
    assert decision.forecast == found.forecast(SIZE, decision.n_tokens)
    served = decide(found, 6 * SIZE * 6e9, limits=limits, served_tokens=3e9)
    assert served.n_tokens == pytest.approx(5e9)
    assert decide(found, loss=decision.loss, limits=limits).n_tokens == pytest.approx(6e9, rel=1e-3)


def test_next_runs_have_this_size_and_narrow_the_interval() -> None:
    found = fitted()
    candidates = candidate_runs(found, SIZE, 1.6e10, affordable_flops=6e18)
    assert set(candidates["n_params"]) == {SIZE}
    following = next_runs(found, SIZE, 1.6e10, affordable_flops=6e18)
    assert following.now.reasons
    assert following.reasons == ()
    assert following.width_then < following.width_now
    with pytest.raises(ValueError, match="n_params"):
        next_runs(found, SIZE, 4e9, affordable_flops=6e18, candidates=candidates.assign(n_params=2 * SIZE))


def test_a_backtest_cuts_the_tokens_and_figures_are_drawn() -> None:
    tested = backtest(ladder(8), n_params_convention="total", loss_unit="nats")
    assert set(tested.predictions["cut"]) == {2, 4}
    assert set(tested.predictions["method"]) == {"forecast", "one size"}
    own = tested.predictions[tested.predictions["method"] == "forecast"]
    assert own["log_error"].abs().max() < 0.03
    found = fitted()
    target = found.forecast(SIZE, 4e9)
    figures = (
        tested.plot(),
        found.plot(),
        found.plot_frontier(target),
        found.plot_variants(target),
        found.plot_parameters(),
    )
    assert all(figure.data for figure in figures)
