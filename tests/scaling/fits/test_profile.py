"""Profile likelihood: exact points of the profile, intervals that cover, and what has no bound said to have none."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize

from scaling import Joint, Law, ScalingError, ScalingFit, TiedChinchilla, fit
from scaling.minimizers.newton import huber
from tests.quick import quick_and_soak

Ladder = Callable[..., pd.DataFrame]
TARGET = {"n_params": 1e9, "n_tokens": 2e10}


def fitted(runs: pd.DataFrame, **options: object) -> ScalingFit:
    return fit(runs, n_params_convention="total", n_bootstrap=2, **options)  # type: ignore[arg-type]


def test_points_lie_on_the_profile(ladder: Ladder) -> None:
    """At fixed alpha scipy finds no lower objective in the four other parameters."""
    result = fitted(ladder(0.003), delta=0.01)
    table = result.profile("alpha").table
    log_n, log_d = np.log(result.rows["n_params"]), np.log(result.rows["n_tokens"])
    log_loss = np.log(result.rows["loss"])

    def objective(theta: np.ndarray, alpha: float) -> float:
        e, a, b, beta = theta
        loss = np.exp(e) + np.exp(a - alpha * (log_n - 18)) + np.exp(b - beta * (log_d - 21))
        return 1e6 * float(huber(np.log(loss) - log_loss, 0.01).sum())

    for _, row in table.iloc[[0, 4, -1]].iterrows():
        theta = [
            math.log(row["E"]),
            math.log(row["A"]) - 18 * row["alpha"],
            math.log(row["B"]) - 21 * row["beta"],
            row["beta"],
        ]
        assert objective(np.array(theta), row["alpha"]) == pytest.approx(1e6 * row["objective"], rel=1e-8)
        best = minimize(objective, theta, args=(row["alpha"],), method="Nelder-Mead", options={"xatol": 1e-7})
        assert best.fun == pytest.approx(1e6 * row["objective"], rel=1e-5)


@pytest.mark.parametrize("name", ["E", "A", "B", "alpha", "beta", "params_exponent", "tokens_exponent", "loss"])
def test_the_estimate_lies_inside_and_levels_are_nested(ladder: Ladder, name: str) -> None:
    result = fitted(ladder(0.003))
    at = TARGET if name == "loss" else None
    half, most = (result.profile(name, level=level, at=at) for level in (0.5, 0.9))
    assert most.low < half.low < half.estimate < half.high < most.high
    if name == "loss":
        assert half.estimate == pytest.approx(float(result.predict(**TARGET)), rel=1e-6)
    elif name in result.law.parameters:
        assert half.estimate == pytest.approx(result.law[name], rel=1e-4)
    assert (most.table["value"].diff().dropna() > 0).all()
    assert most.table["root"].iloc[0] < 0 < most.table["root"].iloc[-1]


@pytest.mark.parametrize("repeats", quick_and_soak((1, 4), 4))
def test_intervals_cover_what_was_planted(ladder: Ladder, planted: Law, repeats: int) -> None:
    """Rows of one run share its noise: four to a run are hardly better than one, and the interval shows it."""
    exponent = planted["beta"] / (planted["alpha"] + planted["beta"])
    covered = []
    for seed in range(12):
        runs = pd.concat([ladder(0.003, seed).assign(stem=np.arange(20))] * repeats, ignore_index=True)
        rng = np.random.default_rng(seed)
        runs["loss"] *= np.exp(0.0005 * rng.standard_normal(len(runs)))
        result = fitted(runs)
        truths = {"params_exponent": exponent, "loss": float(planted.loss(**TARGET))}
        for name, truth in truths.items():
            interval = result.profile(name, at=TARGET if name == "loss" else None)
            covered.append(interval.low < truth < interval.high)
    assert 0.75 <= np.mean(covered) <= 1


def test_for_squares_the_scale_is_the_variance_of_the_residuals(ladder: Ladder) -> None:
    ratios = []
    for seed in range(12):
        result = fitted(ladder(0.003, seed), delta=np.inf)
        ratios.append(result.profile("alpha").scale / result.residual_std**2)
    assert np.mean(ratios) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("form", [TiedChinchilla(), Joint()], ids=lambda form: form.name)
def test_other_forms(ladder: Ladder, form: TiedChinchilla | Joint) -> None:
    result = fitted(ladder(0.003), form=form)
    interval = result.profile("loss", at=TARGET)
    assert interval.low < float(result.predict(**TARGET)) < interval.high


def test_what_the_runs_do_not_bound_is_open(ladder: Ladder) -> None:
    """With no irreducible loss in the runs E can be anything below the least loss: its lower end is open."""
    runs = ladder()
    error = np.exp(0.003 * np.random.default_rng(0).standard_normal(len(runs)))
    runs["loss"] = (30 * runs["n_params"] ** -0.1 + 40 * runs["n_tokens"] ** -0.12) * error
    interval = fitted(runs).profile("E")
    assert interval.low == 0
    assert interval.estimate < interval.high < runs["loss"].min(), "though every refit lies next to E's bound"
    assert interval.is_open
    assert "open: the runs do not bound it" in str(interval)
    assert not replace(interval, low=0.1).is_open
    assert replace(interval, low=0.1, high=np.inf).is_open


def test_what_goes_to_tokens_is_what_does_not_go_to_parameters(ladder: Ladder) -> None:
    result = fitted(ladder(0.003))
    a, b = result.profile("params_exponent"), result.profile("tokens_exponent")
    assert b.estimate == pytest.approx(1 - a.estimate, rel=1e-6)
    assert (b.low, b.high) == pytest.approx((1 - a.high, 1 - a.low), rel=0.01)


def test_bad_names_and_too_few_runs(ladder: Ladder) -> None:
    result = fitted(ladder(0.003))
    with pytest.raises(ValueError, match="name.*E, A, B.*params_exponent.*got 'gamma'"):
        result.profile("gamma")
    with pytest.raises(ValueError, match="at .*got n_params"):
        result.profile("loss", at={"n_params": 1e9})
    with pytest.raises(ValueError, match="at .*got it with 'alpha'"):
        result.profile("alpha", at=TARGET)
    with pytest.raises(ValueError, match="level .*got 90"):
        result.profile("alpha", level=90)
    with pytest.raises(ScalingError, match="got 5 runs for 5 parameters"):
        fitted(ladder(0.003).assign(stem=lambda t: t.index % 5)).profile("alpha")
