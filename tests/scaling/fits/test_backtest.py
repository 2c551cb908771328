"""A backtest sees only what lies below its cut, and counts what its intervals hold."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from scaling import Chinchilla, Joint, Kaplan, Law, RepeatedData, ScalingError, backtest, fit
from scaling.fits.forecast import DEFAULT
from scaling.fits.law_figures import backtest_data

Ladder = Callable[..., pd.DataFrame]


@pytest.fixture
def runs(ladder: Ladder) -> pd.DataFrame:
    return ladder(noise=0.004)


def test_runs_above_the_cut_do_not_enter_the_fit(runs: pd.DataFrame) -> None:
    flops = runs["n_params"] * runs["n_tokens"]
    above = flops >= flops.max() / 10
    wild = runs.assign(loss=np.where(above, 3.0, runs["loss"]))
    tables = [backtest(rows, n_params_convention="total", cuts=[10]).predictions for rows in (runs, wild)]
    np.testing.assert_array_equal(tables[0]["predicted"], tables[1]["predicted"])
    assert set(tables[0]["n_params"] * tables[0]["n_tokens"]) == set(flops[above])


def test_it_equals_the_forecast_of_a_fit_below_the_cut(runs: pd.DataFrame) -> None:
    found = backtest(runs, n_params_convention="total", cuts=[10], forms=[Chinchilla()])
    flops = runs["n_params"] * runs["n_tokens"]
    below = fit(runs[flops < flops.max() / 10], n_params_convention="total")
    for row in found.predictions.to_dict("records"):
        target = row["n_params"], row["n_tokens"]
        if row["method"] == DEFAULT:
            forecast = below.forecast(*target)
            assert row["predicted"] == pytest.approx(forecast.loss, rel=1e-9)
            assert (row["low_0.9"], row["high_0.9"]) == pytest.approx((forecast.low, forecast.high), rel=1e-9)
            assert row["supported"] == forecast.supported
        else:
            assert row["predicted"] == pytest.approx(float(below.predict(*target)), rel=1e-9)


def test_the_table_counts(runs: pd.DataFrame) -> None:
    found = backtest(runs, n_params_convention="total", cuts=[10], forms=[Kaplan()])
    table = found.table().set_index("method")
    part = found.predictions[found.predictions["method"] == "kaplan"]
    error = np.abs(np.log(part["predicted"] / part["loss"]))
    assert table.loc["kaplan", "mean_error"] == pytest.approx(100 * error.mean())
    top = part["compute_flops"] >= part["compute_flops"].max() / 2
    assert table.loc["kaplan", "top_error"] == pytest.approx(100 * error[top].mean())
    inside = (part["low_0.95"] <= part["loss"]) & (part["loss"] <= part["high_0.95"])
    assert table.loc["kaplan", "coverage_0.95"] == pytest.approx(inside.mean())
    assert table.loc["kaplan", "bias"] == pytest.approx(100 * np.log(part["predicted"] / part["loss"]).mean())
    assert table.loc["kaplan", "width_0.9"] == pytest.approx(100 * np.median(part["high_0.9"] / part["low_0.9"] - 1))
    of_default = found.predictions[found.predictions["method"] == DEFAULT]
    assert table.loc[DEFAULT, "supported"] == pytest.approx(sum(of_default["supported"]) / len(of_default))
    some = np.arange(len(found.predictions)) % 3 == 0
    mixed = replace(found, predictions=found.predictions.assign(supported=some)).table().set_index("method")
    assert mixed.loc[DEFAULT, "supported"] == pytest.approx(some[found.predictions["method"] == DEFAULT].mean())
    inside = part["loss"].between(part["low_0.9"], part["high_0.9"])
    assert table.loc["kaplan", "coverage_0.9"] == pytest.approx(sum(inside) / len(inside))
    # Of a form alone the ends are a normal distribution's: 90 % lie within 1.645 standard deviations, 95 % within 1.960.
    reach = np.log(part["high_0.95"] / part["low_0.95"]) / np.log(part["high_0.9"] / part["low_0.9"])
    np.testing.assert_allclose(reach, 1.959964 / 1.644854, rtol=1e-6)
    assert table.loc[DEFAULT, "mean_error"] < table.loc["kaplan", "mean_error"]
    assert "kaplan" in str(found)


def test_a_true_form_is_covered_near_its_level(ladder: Ladder, planted: Law) -> None:
    found = [
        backtest(ladder(0.004, seed), n_params_convention="total", cuts=[10], forms=[Chinchilla()]).predictions
        for seed in range(8)
    ]
    pooled = pd.concat(found)
    covered = pooled["loss"].between(pooled["low_0.9"], pooled["high_0.9"]).groupby(pooled["method"]).mean()
    assert covered[DEFAULT] > 0.9
    assert covered["chinchilla"] > 0.7


def test_a_cut_that_leaves_too_few_is_reported(runs: pd.DataFrame) -> None:
    found = backtest(runs, n_params_convention="total", cuts=[10, 1000])
    assert set(found.too_few) == {1000}
    assert "need at least" in found.too_few[1000]
    assert "C < Cmax/1000: need at least" in str(found)
    with pytest.raises(ValueError, match="cuts .*got"):
        backtest(runs, n_params_convention="total", cuts=[0.5])


def test_a_form_with_more_variables_is_compared_where_the_runs_have_them(runs: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="missing column unique_tokens"):
        backtest(runs, n_params_convention="total", cuts=[10], forms=[RepeatedData()])
    repeated = runs.assign(unique_tokens=runs["n_tokens"])
    found = backtest(repeated, n_params_convention="total", cuts=[5], forms=[RepeatedData(), Chinchilla()])
    alone = backtest(runs, n_params_convention="total", cuts=[5], forms=Chinchilla()).predictions
    of = {method: part["predicted"].to_numpy() for method, part in found.predictions.groupby("method")}
    for method, part in alone.groupby("method"):
        np.testing.assert_allclose(of[str(method)], part["predicted"])
    assert np.abs(np.log(of["repeated"] / of["chinchilla"])).max() < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": Joint()}, r"backtest has no option form: pass forms as forms=\[…\]"),
        ({"n_bootstrap": 10}, "backtest has no option n_bootstrap"),
        (
            {"forms": [Joint]},
            r"form .*got <class .*Joint\(\) is meant",
        ),
    ],
)
def test_options_that_are_none_are_named(runs: pd.DataFrame, options: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        backtest(runs, n_params_convention="total", **options)  # type: ignore[arg-type]


class Broken(Kaplan):
    """A form with a fault of its own."""

    name = "broken"

    def loss(self, values: Any, rows: Any) -> Any:
        raise ValueError("a fault of the form's own")


def test_only_too_few_runs_are_listed_by_cut(runs: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="a fault of the form's own"):
        backtest(runs, n_params_convention="total", cuts=[10], forms=[Broken()])
    with pytest.raises(ValueError, match="cut"):
        backtest(runs, n_params_convention="total", cuts=[10, 0.5])


def test_without_a_cut_there_is_no_figure(runs: pd.DataFrame) -> None:
    with pytest.raises(ScalingError, match="nothing to draw"):
        backtest(runs, n_params_convention="total", cuts=[1000]).plot()


def test_figure(runs: pd.DataFrame) -> None:
    figure = backtest(runs, n_params_convention="total", cuts=[5, 10], forms=[]).plot()
    shown = {(trace.name, trace.yaxis) for trace in figure.data}
    assert {("90 % interval", "y"), ("90 % interval", "y2")} <= shown
    assert figure.layout.yaxis.title.text == "measured above<br>forecast (%)"


def test_figure_s_runs_are_within_where_they_lie_between_the_ends(runs: pd.DataFrame) -> None:
    runs = runs.copy()
    runs.loc[runs.index[-1], "loss"] *= 1.2
    found = backtest(runs, n_params_convention="total", cuts=[5], forms=[])
    data = backtest_data(found.predictions)
    assert (data["within"] == data["error"].between(data["error_low"], data["error_high"])).all()
    np.testing.assert_allclose(data["predicted"] * (1 + data["error"] / 100), data["loss"])
    (outside,) = (trace for trace in found.plot().data if trace.name == "outside")
    assert outside.y.max() == pytest.approx(data["error"].max())
    assert data["error"].max() > 10, "the run that was made a fifth worse"


def test_a_form_is_as_unsure_as_its_refits_whose_parameters_compensate_each_other(runs: pd.DataFrame) -> None:
    """Parameters that were moved apart one by one would give the joint form intervals of some tens of percent."""
    found = backtest(runs, n_params_convention="total", cuts=[10], forms=[Joint()]).predictions
    own = found[found["method"] == "joint"]
    assert ((own["high_0.9"] - own["low_0.9"]) / own["predicted"]).max() < 0.12
    fitted = fit(runs, n_params_convention="total", form=Joint(), n_bootstrap=50)
    amid = {name: float(np.exp(np.log(runs[name]).mean())) for name in ("n_params", "n_tokens")}
    spread = np.log(Joint().loss(dict(zip(fitted.law.parameters, fitted.refits.T, strict=True)), amid)).std()
    assert fitted.widening * spread < 0.004
