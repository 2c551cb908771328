"""The data of each figure of the law says what the law says, and every axis has a title."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest

from scaling import (
    Chinchilla,
    Form,
    Joint,
    Kaplan,
    Law,
    Limits,
    RepeatedData,
    ScalingFit,
    TiedChinchilla,
    compute_flops,
    decide,
    fit,
)
from scaling.fits.allocation_figures import allocation_data, best_sizes, contours_data
from scaling.fits.size_figures import sizes_data
from scaling.fits.spread_figures import parameters_data, variants_data
from scaling.forms.spending import Spending
from tests.scaling.conftest import planted_ladder


class Unnamed(Form):
    """Chinchilla's without its formula for the optimum."""

    name, formula, source = "unnamed", "E + A/N^alpha + B/D^beta", "the test's own"
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {
        "E": (0.5, 4.0),
        "A": (1.0, 1e6),
        "B": (1.0, 1e6),
        "alpha": (0.05, 2.0),
        "beta": (0.05, 2.0),
    }

    def loss(self, values: Any, rows: Mapping[str, Any]) -> Any:
        return Chinchilla().loss(values, rows)


class Repeated(Unnamed):
    """The same with a column of its own."""

    name, formula = "repeated", "E + A/N^alpha + B/D^beta + c·epochs"
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {**Unnamed.parameters, "c": (1e-4, 1.0)}
    columns = ("n_params", "n_tokens", "epochs")

    def loss(self, values: Any, rows: Mapping[str, Any]) -> Any:
        return Chinchilla().loss(values, rows) + values["c"] * rows["epochs"]


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    return planted_ladder(0.003)


@pytest.fixture(scope="module")
def result(runs: pd.DataFrame) -> ScalingFit:
    return fit(runs, n_params_convention="total", n_bootstrap=200)


@pytest.fixture(scope="module")
def without_powers(runs: pd.DataFrame) -> ScalingFit:
    return fit(runs, n_params_convention="total", n_bootstrap=4, form=Unnamed())


def axis_titles(figure: Any) -> list[str | None]:
    return [figure.layout[name].title.text for name in sorted(figure.layout) if name.startswith(("xaxis", "yaxis"))]


def of(data: pd.DataFrame, series: str) -> pd.DataFrame:
    return data[data["series"] == series]


def test_contours_lie_on_the_law(result: ScalingFit) -> None:
    target = result.forecast(1e9, 2e10)
    data = contours_data(result.residuals(), result.best_law, target)
    contour = of(data, "contour")
    np.testing.assert_allclose(result.best_law.loss(contour["n_params"], contour["n_tokens"]), contour["loss"])
    alone = of(contours_data(result.residuals(), result.law, target), "contour")
    np.testing.assert_allclose(result.predict(alone["n_params"], alone["n_tokens"]), alone["loss"])
    assert contour["loss"].nunique() >= 5
    for _, line in contour.groupby("loss"):
        assert line["n_params"].is_monotonic_increasing
        assert line["n_tokens"].is_monotonic_decreasing
    for series in ("isoflop", "frontier", "contour", "run"):
        part = of(data, series)
        np.testing.assert_allclose(compute_flops(part["n_params"], part["n_tokens"]), part["compute_flops"])
    assert of(data, "isoflop")["compute_flops"].unique().tolist() == [1e16, 1e17, 1e18, 1e19, 1e20]
    assert len(of(data, "run")) == result.n_rows
    assert of(data, "target")["loss"].tolist() == [target.loss]


def test_the_frontier_is_the_least_loss_of_its_isoflop(result: ScalingFit) -> None:
    data = contours_data(result.residuals(), result.best_law)
    for flops, line in of(data, "isoflop").groupby("compute_flops"):
        assert line["loss"].min() >= result.best_law.allocate(float(str(flops))).loss
    assert of(data, "frontier")["compute_flops"].max() == pytest.approx(10 * result.compute_range[1])


def test_contours_are_drawn(result: ScalingFit, without_powers: ScalingFit) -> None:
    for one in (result, without_powers):
        figure = one.plot_contours(one.forecast(1e9, 2e10))
        assert axis_titles(figure) == ["parameters N (total)", "training tokens D"]
        named = [trace.name for trace in figure.data if trace.showlegend is not False and trace.name]
        assert named == ["equal compute (FLOPs)", "equal loss (nats per token)", "best N and D", "runs", "target"]
    assert "target" not in {trace.name for trace in result.plot_contours().data}


def test_allocation_is_what_is_decided(result: ScalingFit) -> None:
    data = allocation_data(result.best_law, result.ensemble, result.compute_range).query("quantity == 'n_params'")
    for _, row in data.iloc[[0, 20, -1]].iterrows():
        decided = decide(result, row["compute_flops"]).intervals
        assert decided is not None
        expected = decided.loc["n_params", ["estimate", "low", "high"]].tolist()
        assert row[["value", "low", "high"]].tolist() == pytest.approx(expected, rel=0.01)


def test_allocation_alone_is_the_law_s_within_the_draws_interval(result: ScalingFit) -> None:
    data = allocation_data(result.law, result.draws, result.compute_range)
    params, tokens, ratio = (part.reset_index() for _, part in data.groupby("quantity", sort=False))
    best = result.law.frontier(params["compute_flops"])
    np.testing.assert_allclose(params["value"], best["n_params"])
    np.testing.assert_allclose(tokens["value"], best["n_tokens"])
    np.testing.assert_allclose(ratio["value"], tokens["value"] / params["value"])
    assert ((data["low"] < data["value"]) & (data["value"] < data["high"])).all()
    largest = params["compute_flops"].iloc[-1]
    drawn = [Law(form=Chinchilla(), parameters=dict(zip(result.law.parameters, d, strict=True))) for d in result.draws]
    ends = np.quantile([law.allocate(largest).n_params for law in drawn], [0.05, 0.95])
    np.testing.assert_allclose(params[["low", "high"]].iloc[-1], ends)
    assert (of(params, "fitted")["compute_flops"] <= result.compute_range[1] * (1 + 1e-9)).all()
    assert axis_titles(result.plot_allocation()) == [
        *(None, None, "training compute 6·N·D (FLOPs)"),
        *("parameters N (total)", "training tokens D", "tokens per parameter D/N"),
    ]
    with pytest.raises(ValueError, match="level .*got 90"):
        result.plot_allocation(level=90)


def test_best_sizes_without_a_formula_are_those_with_one(result: ScalingFit, without_powers: ScalingFit) -> None:
    flops = np.array([1e18, 1e20])
    draws = dict(zip(result.law.parameters, result.draws.T[:, :, None], strict=True))
    exact = best_sizes(Chinchilla(), draws, flops, {})
    assert exact.shape == (200, 2)
    np.testing.assert_allclose(best_sizes(Unnamed(), draws, flops, {}), exact, rtol=1e-6)
    assert len(without_powers.plot_allocation().data) == 9


def test_one_exponent_keeps_the_ratio(runs: pd.DataFrame) -> None:
    tied = fit(runs, n_params_convention="total", n_bootstrap=20, form=TiedChinchilla())
    data = allocation_data(tied.law, tied.draws, tied.compute_range).query("quantity == 'tokens_per_param'")
    np.testing.assert_allclose(data["value"], data["value"].iloc[0])


def test_the_band_ends_where_the_loss_is_the_share_above_the_best(result: ScalingFit) -> None:
    data = sizes_data(result.law, [1e18, 1e20], within=0.01)
    for flops, part in data.groupby("compute_flops"):
        best = result.law.allocate(float(str(flops)))
        assert of(part, "best")["n_params"].tolist() == pytest.approx([best.n_params])
        band = of(part, "band")
        assert band["above"].iloc[[0, -1]].tolist() == pytest.approx([0.01, 0.01])
        assert band["above"].between(-1e-12, 0.01 + 1e-9).all()
        assert band["n_params"].iloc[0] < best.n_params < band["n_params"].iloc[-1]
        assert of(part, "size")["above"].iloc[[0, -1]].tolist() == pytest.approx([0.04, 0.04])
    np.testing.assert_allclose(data["loss"], result.predict(data["n_params"], data["n_tokens"]))
    np.testing.assert_allclose(compute_flops(data["n_params"], data["n_tokens"]), data["compute_flops"])


def test_sizes_are_drawn(result: ScalingFit, without_powers: ScalingFit) -> None:
    for one in (result, without_powers):
        figure = one.plot_sizes([1e18, 1e20])
        assert axis_titles(figure) == [
            "parameters N (total)<br>tokens D are what the compute leaves",
            "loss (nats per token)",
        ]
        assert sum(trace.showlegend for trace in figure.data) == 2
    with pytest.raises(ValueError, match="at least one budget"):
        result.plot_sizes([])
    with pytest.raises(ValueError, match="within .*got 0"):
        result.plot_sizes([1e18], within=0.0)


def test_a_size_that_makes_no_difference_has_a_band_that_ends_where_it_is_not_looked_further() -> None:
    flat = Chinchilla().law(E=1.8, A=1e-9, B=1e-9, alpha=0.3, beta=0.3)
    band = of(sizes_data(flat, [1e18]), "band")
    ends = np.exp(Spending(form=flat.form).range(np.array(1e18)))
    np.testing.assert_allclose(band["n_params"].iloc[[0, -1]], ends)


@pytest.mark.parametrize("form", [Chinchilla(), Unnamed()])
def test_the_band_is_the_one_that_decide_gives(result: ScalingFit, form: Form) -> None:
    law = Law(form=form, parameters=result.law.parameters)
    for flops in (1e18, 1e21):
        near = decide(law, flops, tolerance=0.003).near["n_params"]
        data = sizes_data(law, [flops], within=0.003)
        np.testing.assert_allclose(of(data, "band")["n_params"].iloc[[0, -1]], near.iloc[[0, -1]])
        np.testing.assert_allclose(of(data, "best")["n_params"], near.iloc[1])


def test_the_drawn_band_is_the_one_that_a_fit_decides_by(result: ScalingFit) -> None:
    figure = result.plot_sizes([1e20])
    (band,) = (trace for trace in figure.data if trace.opacity == 0.4)
    assert [band.x[0], band.x[-1]] == pytest.approx(decide(result, 1e20).near["n_params"].iloc[[0, -1]].tolist())


def test_repeated_tokens_are_no_more_than_are_seen() -> None:
    """Small models see each of 2·10^10 unique tokens more than once, large ones only as many as they are trained on."""
    values = {"E": 1.8, "A": 400.0, "B": 2000.0, "alpha": 0.34, "beta": 0.37, "rd_star": 15.0, "rn_star": 5.0}
    law = Law(form=RepeatedData(), parameters={name: values[name] for name in RepeatedData.parameters})
    data = sizes_data(law, [1e20], unique_tokens=2e10)
    seen = np.minimum(data["n_tokens"], 2e10)
    assert (seen == 2e10).any()
    assert (seen < 2e10).any()
    np.testing.assert_allclose(law.loss(data["n_params"], data["n_tokens"], unique_tokens=seen), data["loss"])
    near = decide(law, 1e20, limits=Limits(unique_tokens=2e10)).near["n_params"]
    np.testing.assert_allclose(of(data, "band")["n_params"].iloc[[0, -1]], near.iloc[[0, -1]])


def test_the_ellipse_holds_its_share_of_the_refits(result: ScalingFit) -> None:
    """Refits of E that are spread over more than a factor of 2 lie on an axis of its logarithm."""
    draws = result.draws.copy()
    draws[:, 0] **= 30
    data = parameters_data(result.law, draws)
    assert [(x, y) for x, y in data[["x_name", "y_name"]].drop_duplicates().to_numpy()] == [
        ("E", "alpha"),
        ("E", "beta"),
        ("alpha", "beta"),
    ]
    for _, part in data.groupby("pair"):
        first = part.iloc[0]
        logs = [bool(first["x_log"]), bool(first["y_log"])]
        assert logs == [first["x_name"] == "E", False]
        points = {
            name: np.where(logs, np.log(of(part, name)[["x", "y"]]), of(part, name)[["x", "y"]])
            for name in ("draw", "ellipse")
        }
        to_circle = np.linalg.inv(np.linalg.cholesky(np.cov(points["draw"].T)))
        radius = {
            name: np.linalg.norm((p - points["draw"].mean(axis=0)) @ to_circle.T, axis=1) for name, p in points.items()
        }
        np.testing.assert_allclose(radius["ellipse"], radius["ellipse"][0])
        assert np.mean(radius["draw"] <= radius["ellipse"][0]) == pytest.approx(0.9, abs=0.01)
        assert of(part, "estimate")[["x", "y"]].to_numpy().tolist() == [[result.law[first[f"{a}_name"]] for a in "xy"]]


def test_parameters_are_drawn(runs: pd.DataFrame, result: ScalingFit) -> None:
    assert axis_titles(result.plot_parameters()) == [
        *("E (nats per token)", "E (nats per token)", "alpha", "alpha", "beta", "beta")
    ]
    for form, n_pairs in ((Kaplan(), 1), (Joint(), 6)):
        one = fit(runs, n_params_convention="total", n_bootstrap=2, form=form)
        assert len(one.plot_parameters().data) == 3 * n_pairs


def test_the_forecast_is_the_mean_of_the_variants_shown(result: ScalingFit) -> None:
    target = result.forecast(1e9, 2e10)
    data = variants_data(result.law, result.ensemble, target)
    assert np.exp(np.log(of(data, "variant")["loss"]).mean()) == pytest.approx(target.loss)
    assert of(data, "forecast")[["loss", "low", "high"]].to_numpy().tolist() == [[target.loss, target.low, target.high]]
    spread = np.log(of(data, "draw")["loss"]).std(ddof=0)
    assert spread == pytest.approx(float(result.ensemble.draw_spread(1e9, 2e10)))
    assert of(data, "law")["loss"].item() == pytest.approx(float(result.predict(1e9, 2e10)))


def test_variants_are_drawn(result: ScalingFit, without_powers: ScalingFit) -> None:
    for one in (result, without_powers):
        figure = one.plot_variants(one.forecast(1e9, 2e10))
        assert axis_titles(figure) == ["loss (nats per token)", None], "the names of the fits say what they are"
        assert len(figure.data) == 4


def test_a_further_column_is_held_at_the_value_given(runs: pd.DataFrame) -> None:
    epochs = np.tile([1.0, 2.0], 10)
    rows = runs.assign(loss=runs["loss"] + 0.03 * epochs, epochs=epochs)
    result = fit(rows, n_params_convention="total", n_bootstrap=4, form=Repeated())
    contour = of(contours_data(result.residuals(), result.best_law, epochs=2.0), "contour")
    np.testing.assert_allclose(result.predict(contour["n_params"], contour["n_tokens"], epochs=2.0), contour["loss"])
    once, twice = (of(sizes_data(result.law, [1e18], epochs=n), "best")["loss"].item() for n in (1.0, 2.0))
    assert twice - once == pytest.approx(result.law["c"])
    for figure in (result.plot_contours(epochs=1.0), result.plot_parameters()):
        assert None not in axis_titles(figure)
    assert "training compute 6·N·D (FLOPs)" in axis_titles(result.plot_allocation(epochs=1.0))


def test_exact_runs_whose_refits_are_all_alike_are_drawn(runs: pd.DataFrame) -> None:
    law = Chinchilla().law(E=1.8, A=400.0, B=2000.0, alpha=0.34, beta=0.37)
    exact = runs.assign(loss=law.loss(runs["n_params"], runs["n_tokens"]))
    figure = fit(exact, n_params_convention="total", n_bootstrap=3).plot_parameters()
    low, high = figure.layout.xaxis.range
    assert low < 1.8 < high
