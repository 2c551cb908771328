"""The data of each figure of the law says what the law says, and every axis has a title."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest

from scaling import Chinchilla, Form, Law, ScalingFit, TiedChinchilla, compute_flops, fit
from scaling.allocation_figures import allocation_data, best_sizes, contours_data


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


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    sizes, ratios = np.meshgrid(np.geomspace(1e7, 2e8, 5), [10.0, 20.0, 40.0, 80.0])
    n_params, n_tokens = sizes.ravel(), (sizes * ratios).ravel()
    loss = 1.8 + 400 / n_params**0.34 + 2000 / n_tokens**0.37
    noise = np.exp(0.003 * np.random.default_rng(0).standard_normal(loss.size))
    return pd.DataFrame({"n_params": n_params, "n_tokens": n_tokens, "loss": loss * noise})


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
    data = contours_data(result, target)
    contour = of(data, "contour")
    np.testing.assert_allclose(result.predict(contour["n_params"], contour["n_tokens"]), contour["loss"])
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
    data = contours_data(result)
    for flops, line in of(data, "isoflop").groupby("compute_flops"):
        assert line["loss"].min() >= result.law.allocate(float(str(flops))).loss
    assert of(data, "frontier")["compute_flops"].max() == pytest.approx(10 * result.compute_range[1])


def test_contours_are_drawn(result: ScalingFit, without_powers: ScalingFit) -> None:
    for one in (result, without_powers):
        figure = one.plot_contours(one.forecast(1e9, 2e10))
        assert axis_titles(figure) == ["parameters N", "training tokens D"]
        named = [trace.name for trace in figure.data if trace.showlegend is not False and trace.name]
        assert named == ["equal compute (FLOPs)", "equal loss (nats per token)", "best N and D", "runs", "target"]
    assert "target" not in {trace.name for trace in result.plot_contours().data}


def test_allocation_is_the_law_s_within_the_draws_interval(result: ScalingFit) -> None:
    data = allocation_data(result)
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
        *3 * ["training compute 6·N·D (FLOPs)"],
        *("parameters N", "training tokens D", "tokens per parameter D/N"),
    ]
    with pytest.raises(ValueError, match="level must lie between 0 and 1, got 90"):
        allocation_data(result, level=90)


def test_best_sizes_without_a_formula_are_those_with_one(result: ScalingFit, without_powers: ScalingFit) -> None:
    flops = np.array([1e18, 1e20])
    draws = dict(zip(result.law.parameters, result.draws.T[:, :, None], strict=True))
    around = result.law.frontier(flops)["n_params"].to_numpy() * np.array([0.1, 10])
    exact = best_sizes(Chinchilla(), draws, flops, around)
    assert exact.shape == (200, 2)
    np.testing.assert_allclose(best_sizes(Unnamed(), draws, flops, around), exact, rtol=1e-6)
    assert len(without_powers.plot_allocation().data) == 9


def test_one_exponent_keeps_the_ratio(runs: pd.DataFrame) -> None:
    tied = fit(runs, n_params_convention="total", n_bootstrap=20, form=TiedChinchilla())
    data = allocation_data(tied).query("quantity == 'tokens_per_param'")
    np.testing.assert_allclose(data["value"], data["value"].iloc[0])
