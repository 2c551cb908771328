"""Figures of approaches 1 and 2 show what the powers were read off."""

import json

import numpy as np
import pandas as pd
import pytest

from scaling import Chinchilla, ComputePowers, fit_envelope, fit_isoflops
from scaling.approaches.approach_figures import envelope_data, isoflops_data

EVEN = Chinchilla().law(E=1.7, A=400.0, B=1200.0, alpha=0.35, beta=0.35)
BUDGETS = (1e18, 3e18, 1e19, 3e19, 1e20)


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    """Seven sizes a budget, two octaves to each side of the best, and one budget whose sizes are all too large."""
    rng, parts = np.random.default_rng(0), []
    for budget in (*BUDGETS, 3e20):
        off = 3.0 if budget == 3e20 else 0.0
        n_params = EVEN.allocate(budget).n_params * 2 ** (off + np.linspace(-2, 2, 7))
        n_tokens = budget / 6 / n_params
        loss = EVEN.loss(n_params, n_tokens) * np.exp(0.001 * rng.standard_normal(7))
        parts.append(pd.DataFrame({"n_params": n_params, "n_tokens": n_tokens, "loss": loss}))
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="module")
def parabolas(runs: pd.DataFrame) -> ComputePowers:
    return fit_isoflops(runs, n_params_convention="total", n_bootstrap=200)


@pytest.fixture(scope="module")
def envelope() -> ComputePowers:
    parts = []
    for run, n_params in enumerate(np.geomspace(1e7, 2e9, 12)):
        n_tokens = np.geomspace(n_params, 3000 * n_params, 80)
        loss = EVEN.loss(n_params, n_tokens)
        parts.append(pd.DataFrame({"run": f"run {run}", "n_params": n_params, "n_tokens": n_tokens, "loss": loss}))
    return fit_envelope(pd.concat(parts), n_params_convention="without embeddings", n_bootstrap=60)


def of(data: pd.DataFrame, series: str) -> pd.DataFrame:
    return data[data["series"] == series]


def test_a_vertex_is_the_minimum_of_its_parabola(parabolas: ComputePowers) -> None:
    data = isoflops_data(parabolas.rows, parabolas.points)
    for _, own in data[data["compute_flops"] < 2e20].groupby("compute_flops"):
        parabola, vertex = of(own, "parabola"), of(own, "vertex").iloc[0]
        curvature, slope, level = np.polyfit(np.log(parabola["n_params"] / vertex["n_params"]), parabola["loss"], 2)
        assert curvature > 0
        assert slope == pytest.approx(0, abs=1e-9)
        assert level == pytest.approx(vertex["loss"])
        assert parabola["loss"].min() >= vertex["loss"]


def test_a_parabola_is_the_least_squares_of_its_runs(parabolas: ComputePowers) -> None:
    data = isoflops_data(parabolas.rows, parabolas.points)
    for _, own in data[data["compute_flops"] < 2e20].groupby("compute_flops"):
        run, parabola = of(own, "run"), of(own, "parabola")
        fitted = np.polyfit(np.log(run["n_params"]), run["loss"], 2)
        np.testing.assert_allclose(np.polyval(fitted, np.log(parabola["n_params"])), parabola["loss"], rtol=1e-6)
        ends = parabola["n_params"].iloc[[0, -1]].tolist()
        assert ends == pytest.approx([run["n_params"].min(), run["n_params"].max()])


def test_a_budget_without_a_minimum_is_shown_without_a_parabola(runs: pd.DataFrame, parabolas: ComputePowers) -> None:
    data = isoflops_data(parabolas.rows, parabolas.points)
    assert len(of(data, "run")) == len(runs)
    last = data[data["compute_flops"] > 2e20]
    assert last["series"].unique().tolist() == ["run"]
    figure = parabolas.plot()
    stars = [text for trace in figure.data if trace.text is not None for text in trace.text]
    assert stars[0] == "1·10<sup>18</sup>"
    assert len(stars) == len(BUDGETS)
    title = figure.layout.title.text.replace("<br>", " ")
    assert "doubtful: 3e+20 FLOPs: no minimum among the sizes" in title
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == (
        "parameters N (total)",
        "loss (nats per token)",
    )


def test_the_figure_shows_the_bias(runs: pd.DataFrame) -> None:
    uneven = Chinchilla().law(E=1.7, A=4e4, B=900.0, alpha=0.62, beta=0.32)
    loss = uneven.loss(runs["n_params"], runs["n_tokens"])
    result = fit_isoflops(runs.assign(loss=loss), n_params_convention="total", n_bootstrap=20)
    title = result.plot().layout.title.text
    assert "parabola bias: on noise-free losses" in title.replace("<br>", " ")
    assert max(map(len, title.split("<br>"))) <= 58


def test_the_envelope_lies_on_or_below_every_curve(envelope: ComputePowers) -> None:
    data = envelope_data(envelope.rows, envelope.points)
    lowest, crossings = of(data, "envelope"), of(data, "crossing")
    log_compute = np.log(lowest["compute_flops"])
    curves = [
        np.interp(log_compute, np.log(curve["compute_flops"]), curve["loss"], left=np.inf, right=np.inf)
        for _, curve in of(data, "curve").groupby("run")
    ]
    assert (lowest["loss"].to_numpy() <= np.array(curves) + 1e-12).all()
    np.testing.assert_allclose(np.min(curves, axis=0), lowest["loss"])
    at = np.interp(np.log(crossings["compute_flops"]), log_compute, lowest["loss"])
    np.testing.assert_allclose(crossings["loss"], at, rtol=2e-4)
    assert lowest["n_params"].is_monotonic_increasing, "the larger the budget, the larger the best size"


def test_the_envelope_is_drawn(envelope: ComputePowers) -> None:
    figure = envelope.plot()
    assert figure.layout.xaxis.title.text == "training compute 6·N·D (FLOPs)"
    assert figure.layout.yaxis.title.text == "loss (nats per token)"
    named = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert named == ["curves of runs", "envelope", "crossings, N* and D* there"]
    assert figure.data[-1].marker.colorbar.title.text == "log10 N<br>(without<br>embeddings)"
    assert sum(trace.legendgroup == "curves" for trace in figure.data) == 12


@pytest.mark.parametrize("approach", ["isoflops", "envelope"])
def test_a_restored_result_draws_the_same(approach: str, parabolas: ComputePowers, envelope: ComputePowers) -> None:
    result = parabolas if approach == "isoflops" else envelope
    restored = ComputePowers.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert restored.plot().to_json() == result.plot().to_json()
