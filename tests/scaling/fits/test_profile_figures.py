"""A profile's figure crosses its threshold at the interval's ends, and says which end is open."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from scaling import Profile, ScalingFit, fit
from scaling.fits.profile_figures import draw_profile
from tests.scaling.conftest import planted_ladder

TARGET = {"n_params": 1e9, "n_tokens": 2e10}


@pytest.fixture(scope="module")
def result() -> ScalingFit:
    return fit(planted_ladder(0.003), n_params_convention="total", n_bootstrap=20)


@pytest.fixture(params=["alpha", "E", "params_exponent", "loss"])
def profile(request: pytest.FixtureRequest, result: ScalingFit) -> Profile:
    return result.profile(request.param, at=TARGET if request.param == "loss" else None)


def of(data: pd.DataFrame, series: str) -> pd.DataFrame:
    return data[data["series"] == series]


def test_the_curve_crosses_the_threshold_at_the_ends(profile: Profile) -> None:
    data = profile.curve()
    curve, (level, _) = of(data, "curve"), of(data, "threshold")["rise"]
    assert of(data, "end")["value"].tolist() == pytest.approx([profile.low, profile.high])
    for end in (profile.low, profile.high):
        assert np.interp(end, curve["value"], curve["rise"]) == pytest.approx(level)
    inside = curve["value"].between(profile.low * (1 + 1e-9), profile.high * (1 - 1e-9))
    assert (curve.loc[inside, "rise"] < level).all()
    assert (curve.loc[~inside, "rise"] >= level * (1 - 1e-9)).all()
    lowest = curve.loc[curve["rise"].idxmin()]
    assert lowest["value"] == pytest.approx(profile.estimate)


def test_the_rise_is_of_the_objective_of_the_fit(result: ScalingFit) -> None:
    """Each fit's rise is worked out again from its parameters and the rows."""
    profile = result.profile("beta")
    fits = of(profile.curve(), "fit")
    rows = {name: result.rows[name].to_numpy() for name in ("n_params", "n_tokens")}
    log_loss = np.log(result.rows["loss"].to_numpy())
    residuals = [
        log_loss - np.log(result.law.form.loss(row, rows))
        for row in profile.table[list(result.law.parameters)].to_dict("records")
    ]
    sizes = np.abs(np.array(residuals))
    huber = np.where(sizes <= result.delta, sizes**2 / 2, result.delta * (sizes - result.delta / 2)).sum(axis=1)
    np.testing.assert_allclose(fits["rise"], 2 * (huber - huber.min()) / profile.scale, atol=1e-6)


def test_it_is_drawn(profile: Profile) -> None:
    figure = profile.plot()
    titles = {"E": "E (nats per token)", "loss": "loss (nats per token)", "params_exponent": "exponent a of N* ∝ C^a"}
    assert figure.layout.xaxis.title.text == titles.get(profile.name, profile.name)
    assert figure.layout.yaxis.title.text == "rise of the objective, 2·ΔQ / scale"
    assert f"{profile.low:.4g} to {profile.high:.4g}" in figure.layout.title.text.replace("<br>", " ")
    assert ("n_params 1e+09" in figure.layout.title.text) == (profile.name == "loss")


def test_an_open_end_is_reported_and_has_no_crossing(ladder: Callable[..., pd.DataFrame]) -> None:
    """With no irreducible loss in the runs E can be anything below the least loss."""
    runs = ladder()
    error = np.exp(0.003 * np.random.default_rng(0).standard_normal(len(runs)))
    runs["loss"] = (30 * runs["n_params"] ** -0.1 + 40 * runs["n_tokens"] ** -0.12) * error
    profile = fit(runs, n_params_convention="total", n_bootstrap=20).profile("E")
    data = profile.curve()
    assert profile.low == 0
    assert of(data, "end")["value"].tolist() == [end for end in (profile.low, profile.high) if 0 < end < math.inf]
    below = of(data, "curve")["value"] < profile.estimate
    assert (of(data, "curve").loc[below, "rise"] < profile.threshold).all()
    for one in (draw_profile(profile.curve()), Profile.from_dict(profile.to_dict()).plot()):
        assert "open" in one.layout.title.text
        assert "do not bound it" in one.layout.title.text.replace("<br>", " ")
