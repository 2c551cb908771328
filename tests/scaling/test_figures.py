"""The data of each figure says what it should, and the drawing names its axes with their units."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from scaling import ScalingFit, fit, fit_batch_law, fit_horizon_law, fit_transfer, fit_verdict
from scaling.fits.law_figures import fit_data, frontier_data
from scaling.optima.optimum_figures import tokens_law_data, transfer_data


@pytest.fixture
def result(ladder: Callable[..., pd.DataFrame]) -> ScalingFit:
    return fit(ladder(noise=0.003), n_params_convention="total", n_bootstrap=20)


@pytest.fixture
def grids() -> pd.DataFrame:
    rows = [
        (width, n_tokens, 2.0**x, math.exp(1 - width / 1e3 + 0.02 * (x + 7) ** 2 + 0.001 * math.cos(5 * x)))
        for width in (32, 64, 128)
        for n_tokens in (1e9, 2e9, 4e9)
        for x in range(-10, -3)
    ]
    return pd.DataFrame(rows, columns=["width", "n_tokens", "rate", "loss"])


def axis_titles(figure: Any) -> set[str]:
    return {figure.layout[name].title.text for name in figure.layout if name.startswith(("xaxis", "yaxis"))}


def test_fit(result: ScalingFit) -> None:
    data = fit_data(result.residuals())
    np.testing.assert_allclose(data["loss"], data["predicted"] * (1 + data["residual"] / 100))
    assert axis_titles(result.plot()) == {
        "predicted loss (nats per token)",
        "actual loss (nats per token)",
        "training compute 6·N·D (FLOPs)",
        "residual (% of the prediction)",
    }


def test_frontier(result: ScalingFit) -> None:
    target = result.forecast(1e9, 2e10)
    data = frontier_data(result.residuals(), result.ensemble, target).set_index("series")
    frontier = data.loc["frontier"]
    assert (frontier["low"] < frontier["loss"]).all()
    assert frontier["loss"].is_monotonic_decreasing
    assert frontier["compute_flops"].max() >= target.compute_flops
    np.testing.assert_allclose(frontier["compute_flops"], 6 * frontier["n_params"] * frontier["n_tokens"])
    assert data.loc["forecast", "high"] == target.high
    figure = result.plot_frontier(target)
    assert {trace.name for trace in figure.data} == {"90 % interval", "best N and D", "runs", "forecast"}
    assert "forecast" not in {trace.name for trace in result.plot_frontier().data}
    assert axis_titles(figure) == {"training compute 6·N·D (FLOPs)", "loss (nats per token)"}


def test_transfer(grids: pd.DataFrame) -> None:
    rows = grids.query("n_tokens == 1e9").reset_index(drop=True)
    rows.loc[6, "loss"] = np.nan
    transfer = fit_transfer(rows)
    data = transfer_data(transfer.rows, transfer.optima)
    assert data["series"].value_counts()[["run", "optimum"]].tolist() == [20, 3]
    parabola = data.query("series == 'parabola' and width == 64")
    assert parabola["loss"].min() == pytest.approx(transfer.optima[64].loss, rel=1e-3)
    figure = transfer.plot()
    assert [t.name for t in figure.data if t.name] == ["width 32", "width 64", "width 128"]
    assert axis_titles(figure) == {"log2 of the learning rate at the base shape", "loss (nats per token)"}


def test_another_scale_and_hyperparameter_are_named_on_the_axis(grids: pd.DataFrame) -> None:
    rows = grids.query("n_tokens == 1e9").rename(columns={"width": "depth", "rate": "init_scale"})
    figure = fit_transfer(rows, along="depth", over="init_scale").plot()
    assert [t.name for t in figure.data if t.name] == ["depth 32", "depth 64", "depth 128"]
    assert axis_titles(figure) == {"log2 of init_scale at the base shape", "loss (nats per token)"}


def test_drifts(grids: pd.DataFrame) -> None:
    rows = grids.rename(columns={"width": "size", "rate": "value"}).assign(along="width", over="rate")
    verdict = fit_verdict(rows)
    figure = verdict.plot_drifts()
    assert list(figure.data[0].y) == ["rate along width"]
    assert figure.data[0].x[0] == verdict.drift_octaves
    assert figure.data[0].error_x.array[0] > 0
    title = "drift of the optimum (octaves),<br>from the smallest size to the largest"
    assert axis_titles(figure) == {title, None}, "the labels of the other axis say what they are"


def test_batch(grids: pd.DataFrame) -> None:
    batches = [
        grids.query("width == 64").assign(
            batch_tokens=2.0**x, loss=lambda t, x=x: t["loss"] * math.exp(0.003 * (x - 16.3) ** 2)
        )
        for x in range(14, 20)
    ]
    law = fit_batch_law(pd.concat(batches))
    data = tokens_law_data(law, "batch_tokens")
    line = data[data["series"] == "law"]
    np.testing.assert_allclose(line["batch_tokens"], law.batch_tokens(line["n_tokens"]))
    assert ((line["low"] < line["batch_tokens"]) & (line["batch_tokens"] < line["high"])).all()
    np.testing.assert_allclose(data.loc[data["series"] == "optimum", "batch_tokens"], 2**16.3)
    assert axis_titles(law.plot()) == {"training tokens D", "best batch (tokens)"}


def test_horizon(grids: pd.DataFrame) -> None:
    law = fit_horizon_law(grids)
    data = tokens_law_data(law, "rate")
    line = data[data["series"] == "law"]
    np.testing.assert_allclose(line["rate"], law.rate(line["n_tokens"]))
    assert ((line["low"] < line["rate"]) & (line["rate"] < line["high"])).all()
    assert len(data) - len(line) == 9
    assert axis_titles(law.plot()) == {"training tokens D", "best learning rate at the base shape"}
