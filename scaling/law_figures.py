"""Figures of the loss law, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it with plotly."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scaling.figures import COLOURS, COMPUTE, LOSS, add_band
from scaling.forecast import Forecast, interval_factor, log_scale

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from scaling.backtest import Backtest
    from scaling.result import ScalingFit


def fit_data(fit: "ScalingFit") -> pd.DataFrame:
    """One row per fitted run: n_params, n_tokens, compute_flops, loss, predicted, residual (% of the prediction)."""
    table = fit.residuals()
    table["residual"] = 100 * np.expm1(table["log_residual"])
    return table[["n_params", "n_tokens", "compute_flops", "loss", "predicted", "residual"]].assign(series="run")


def draw_fit(data: pd.DataFrame) -> "go.Figure":
    """Actual against predicted loss, and the residuals against compute, coloured by log10 N."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(cols=2, subplot_titles=("actual against predicted", "residuals"))
    marker = {
        "color": np.log10(data["n_params"]),
        "colorscale": "Viridis",
        "colorbar": {"title": "log10 N"},
        "size": 6,
    }
    hover = [f"N {n:.3g}, D {d:.3g}" for n, d in zip(data["n_params"], data["n_tokens"], strict=True)]
    common = {"mode": "markers", "marker": marker, "text": hover, "showlegend": False}
    figure.add_trace(go.Scatter(x=data["predicted"], y=data["loss"], **common), row=1, col=1)
    ends = [data[["loss", "predicted"]].min().min(), data[["loss", "predicted"]].max().max()]
    diagonal = {"mode": "lines", "line": {"color": "grey", "dash": "dot"}, "showlegend": False, "hoverinfo": "skip"}
    figure.add_trace(go.Scatter(x=ends, y=ends, **diagonal), row=1, col=1)
    figure.add_trace(go.Scatter(x=data["compute_flops"], y=data["residual"], **common), row=1, col=2)
    figure.add_hline(y=0, line={"color": "grey", "dash": "dot"}, row=1, col=2)
    figure.update_xaxes(title="predicted " + LOSS, row=1, col=1)
    figure.update_yaxes(title="actual " + LOSS, row=1, col=1)
    figure.update_xaxes(title=COMPUTE, type="log", exponentformat="power", row=1, col=2)
    figure.update_yaxes(title="residual (% of the prediction)", row=1, col=2)
    return figure


def frontier_data(fit: "ScalingFit", target: Forecast | None = None, level: float = 0.9) -> pd.DataFrame:
    """Series run, frontier, forecast: compute_flops, n_params, n_tokens, loss, and low and high but for the runs.

    The frontier's sizes are the law's, its losses the forecasts there.
    """
    runs = fit.residuals()[["compute_flops", "n_params", "n_tokens", "loss"]].assign(series="run")
    low, high = fit.compute_range
    frontier = fit.law.frontier(np.geomspace(low, max(10 * high, target.compute_flops if target else 0), 64))
    at = frontier["n_params"], frontier["n_tokens"]
    loss, reach = np.exp(fit.ensemble.log_loss(*at)), np.exp(interval_factor(level) * log_scale(fit.ensemble, *at))
    frontier = frontier.assign(loss=loss, low=loss / reach, high=loss * reach, series="frontier")
    parts = [runs, frontier]
    if target is not None:
        columns = ("compute_flops", "n_params", "n_tokens", "loss", "low", "high")
        parts.append(pd.DataFrame([{column: getattr(target, column) for column in columns} | {"series": "forecast"}]))
    return pd.concat(parts, ignore_index=True)


def draw_frontier(data: pd.DataFrame) -> "go.Figure":
    """Loss against compute: runs, the best loss of each budget with its interval, the forecast."""
    import plotly.graph_objects as go

    runs, frontier, target = (data[data["series"] == name] for name in ("run", "frontier", "forecast"))
    figure = go.Figure()
    add_band(figure, frontier["compute_flops"], frontier["low"], frontier["high"])
    figure.add_scatter(
        x=frontier["compute_flops"], y=frontier["loss"], mode="lines", name="best N and D", line={"color": COLOURS[2]}
    )
    figure.add_scatter(
        x=runs["compute_flops"], y=runs["loss"], mode="markers", name="runs", marker={"color": "grey", "size": 5}
    )
    if len(target):
        bars = {"array": target["high"] - target["loss"], "arrayminus": target["loss"] - target["low"]}
        star = {"symbol": "star", "size": 12, "color": COLOURS[0]}
        figure.add_scatter(
            x=target["compute_flops"], y=target["loss"], error_y=bars, mode="markers", name="forecast", marker=star
        )
    figure.update_xaxes(title=COMPUTE, type="log", exponentformat="power")
    figure.update_yaxes(title=LOSS, type="log")
    return figure


def backtest_data(found: "Backtest", level: float = 0.9) -> pd.DataFrame:
    """One row per cut and held-out run of the default forecast: cut, n_params, n_tokens, compute_flops, loss, predicted.

    `low` and `high` are the interval's ends, `within` whether the loss lies between them.
    """
    from scaling.backtest import DEFAULT

    own = found.predictions[found.predictions["method"] == DEFAULT]
    names = {f"low_{level:g}": "low", f"high_{level:g}": "high"}
    kept = ["cut", "n_params", "n_tokens", "compute_flops", "loss", "predicted", "low", "high"]
    data = own.rename(columns=names)[kept]
    return data.assign(within=data["loss"].between(data["low"], data["high"]), series="held out")


def draw_backtest(data: pd.DataFrame) -> "go.Figure":
    """Measured over predicted loss against compute, with the interval, a colour for each cut."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (cut, part) in enumerate(data.groupby("cut")):
        off, low, high = (100 * (part[name] / part["predicted"] - 1) for name in ("loss", "low", "high"))
        figure.add_scatter(
            x=part["compute_flops"],
            y=off,
            mode="markers",
            name=f"fitted below 1/{cut:g} of the largest compute",
            marker={"color": COLOURS[2 * i % len(COLOURS)], "symbol": np.where(part["within"], "circle", "x")},
            error_y={"array": high - off, "arrayminus": off - low, "thickness": 0.5},
            text=[f"N {n:.3g}, D {d:.3g}" for n, d in zip(part["n_params"], part["n_tokens"], strict=True)],
        )
    figure.add_hline(y=0, line={"color": "grey", "dash": "dot"})
    figure.update_xaxes(title=COMPUTE, type="log", exponentformat="power")
    figure.update_yaxes(title="measured loss above its forecast (%)")
    return figure
