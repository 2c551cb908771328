"""Runs along one line of D/N do not tell the best one: that is said, with the two runs that would tell it."""

import math

import numpy as np
import pandas as pd
import pytest

from scaling import Chinchilla, Law, Limits, ScalingError, ScalingFit, decide, fit
from scaling.fits.identification import MOST_FACTOR, unidentified
from scaling.fits.law_prior import PRIOR
from scaling.forms.law import compute_flops

LAW = Chinchilla().law(E=1.82, A=482.0, B=2085.0, alpha=0.35, beta=0.35)


def runs(scatter: float, *, seed: int = 0, count: int = 24, noise: float = 0.003, law: Law = LAW) -> pd.DataFrame:
    """Sizes over 1.7 decades, D/N within e^±scatter of 20."""
    generator = np.random.default_rng(seed)
    n_params = np.geomspace(2e7, 1e9, count)
    table = pd.DataFrame(
        {"n_params": n_params, "n_tokens": 20 * n_params * np.exp(generator.uniform(-scatter, scatter, count))}
    )
    return with_losses(table, noise, seed, law)


def with_losses(table: pd.DataFrame, noise: float, seed: int = 0, law: Law = LAW) -> pd.DataFrame:
    error = noise * np.random.default_rng(1000 + seed).standard_normal(len(table))
    return table.assign(loss=law.loss(table["n_params"], table["n_tokens"]) * np.exp(error))


def fitted(table: pd.DataFrame) -> ScalingFit:
    return fit(table, n_params_convention="total", n_bootstrap=2)


@pytest.fixture(scope="module")
def line() -> ScalingFit:
    """Twenty-four runs at 19.6 to 20.4 tokens per parameter."""
    return fitted(runs(0.02))


def test_one_ratio_is_refused_and_the_two_runs_named_settle_it(line: ScalingFit) -> None:
    line = line
    with pytest.raises(ScalingError, match=r"tokens_per_param=20"):
        decide(line, 1e22)
    doubt = line.unidentified(1e22)
    assert doubt is not None
    assert doubt.factor_then <= MOST_FACTOR < doubt.factor
    np.testing.assert_allclose(
        doubt.runs["compute_flops"], compute_flops(doubt.runs["n_params"], doubt.runs["n_tokens"])
    )
    assert doubt.runs["compute_flops"].max() <= line.compute_range[1] * (1 + 1e-9), "no larger than the ladder's own"
    named = with_losses(doubt.runs[["n_params", "n_tokens"]], 0.003)
    more = pd.concat([runs(0.02), named], ignore_index=True)
    decision = decide(fitted(more), 1e22)
    best = LAW.allocate(1e22)
    assert abs(math.log(decision.tokens_per_param / best.tokens_per_param)) < math.log(MOST_FACTOR)
    assert LAW.loss(decision.n_params, decision.n_tokens) < 1.03 * best.loss


@pytest.mark.parametrize("scatter", [0.0, 0.005])
def test_without_scatter_nothing_is_known(scatter: float) -> None:
    doubt = unidentified(runs(scatter), 0.003, 1e22)
    assert doubt is not None
    assert doubt.factor > 1e3
    assert doubt.factor_then <= MOST_FACTOR


def test_the_forecast_on_the_line_stays_and_the_ratio_can_be_stated(line: ScalingFit) -> None:
    decision = decide(line, 1e22, tokens_per_param=20)
    assert decision.tokens_per_param == pytest.approx(20)
    assert decision.forecast is not None
    assert decision.forecast.low < LAW.loss(decision.n_params, decision.n_tokens) < decision.forecast.high
    assert (decision.stated_ratio, decision.size_by_fit) == (20, None)
    assert "D/N was given, 20, not decided" in str(decision)
    assert "not identified" in line.caveats[0]


@pytest.mark.parametrize("law", [LAW, Chinchilla().law(E=1.7, A=1500.0, B=400.0, alpha=0.42, beta=0.28)])
def test_ladders_over_a_factor_of_two_are_not_refused(law: Law) -> None:
    for seed in range(8):
        ladder = fitted(runs(math.log(2), seed=seed, law=law))
        assert ladder.unidentified(1e22) is None, seed


def test_the_deviation_is_that_of_the_formula() -> None:
    """At the runs' compute, of many runs: what they scatter and how noisy they are decides, not the prior."""
    table, noise = runs(0.1, count=4000, noise=0.003), 0.03
    doubt = unidentified(table, noise, float(np.median(compute_flops(table["n_params"], table["n_tokens"]))))
    scatter = float(np.log(table["n_tokens"] / table["n_params"]).std())
    share, alpha, beta, g = (PRIOR[name][0] for name in ("E", "alpha", "beta", "g"))
    loss, E = float(np.exp(np.log(table["loss"]).mean())), share * table["loss"].min()
    expected = 4 * g * noise * loss / (math.sqrt(4000) * scatter * alpha * beta * (loss - E))
    assert doubt is None
    doubt = unidentified(table, 5 * noise, float(np.median(compute_flops(table["n_params"], table["n_tokens"]))))
    assert doubt is not None
    assert math.log(doubt.factor) / 1.645 == pytest.approx(5 * expected, rel=0.2)


def test_one_size_leaves_nothing_to_identify(line: ScalingFit) -> None:
    line = line
    assert decide(line, 1e22, limits=Limits(sizes=[5e9])).n_params == 5e9
    nearest = decide(line, 1e22, tokens_per_param=20, limits=Limits(sizes=[1e9, 8e9, 4e10]))
    assert nearest.n_params == 8e9
    served = decide(line, 1e22, tokens_per_param=20, served_tokens=1e12)
    assert served.tokens_per_param == pytest.approx(20)
    assert served.total_flops == pytest.approx(1e22)
    with pytest.raises(ValueError, match="tokens_per_param is for a budget"):
        decide(line, loss=2.2, tokens_per_param=20)


def test_off_centre_is_said_by_the_law_that_decides() -> None:
    table = runs(math.log(2)).assign(n_tokens=lambda t: 60 * t["n_tokens"])
    found = fitted(with_losses(table, 0.002))
    low, _ = found.tokens_per_param_range
    ratios = [found.best_law.allocate(flops).tokens_per_param for flops in found.compute_range]
    assert max(ratios) < low
    assert f"the law's best D/N at the runs' compute, {min(ratios):.3g} to {max(ratios):.3g}" in found.caveats[0]
