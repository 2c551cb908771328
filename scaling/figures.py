"""Figures, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it with plotly.

Every table has a column `series` that says what a row is, so that it can be drawn with other means as well.
"""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scaling.forecast import Forecast, interval_factor, log_scale

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from scaling.horizon import HorizonLaw
    from scaling.result import ScalingFit
    from scaling.transfer import Transfer

LOSS = "loss (nats per token)"
COMPUTE = "training compute 6·N·D (FLOPs)"
COLOURS = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#d8c219")
BAND = "rgba(42, 120, 142, 0.2)"


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
    """Series run, frontier, forecast: compute_flops, n_params, n_tokens, loss, and low and high but for the runs."""
    runs = fit.residuals()[["compute_flops", "n_params", "n_tokens", "loss"]].assign(series="run")
    low, high = fit.compute_range
    frontier = fit.surface.frontier(np.geomspace(low, max(10 * high, target.compute_flops if target else 0), 64))
    reach = np.exp(interval_factor(level) * log_scale(fit, frontier["n_params"], frontier["n_tokens"]))
    frontier = frontier.assign(low=frontier["loss"] / reach, high=frontier["loss"] * reach, series="frontier")
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
    _add_band(figure, frontier["compute_flops"], frontier["low"], frontier["high"])
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


def transfer_data(transfer: "Transfer") -> pd.DataFrame:
    """Series run (mean over seeds), parabola, optimum: width, log2_rate, loss.

    `low` and `high` are the range over seeds of a run's loss, and an optimum's log2_rate ± its standard error.
    """
    mean = (
        transfer.rows.dropna(subset="loss").groupby(["width", "rate"])["loss"].agg(["mean", "min", "max"]).reset_index()
    )
    runs = mean.rename(columns={"mean": "loss", "min": "low", "max": "high"}).assign(
        log2_rate=np.log2(mean["rate"]), series="run"
    )
    parts = [runs.drop(columns="rate")]
    for width, optimum in transfer.optima.items():
        x = np.linspace(*optimum.used, 33)
        parabola = optimum.loss * (1 + optimum.regret(2**x))
        parts.append(pd.DataFrame({"width": width, "log2_rate": x, "loss": parabola, "series": "parabola"}))
        ends = (optimum.log2_rate - optimum.stderr, optimum.log2_rate + optimum.stderr)
        point = {"width": width, "log2_rate": optimum.log2_rate, "loss": optimum.loss, "low": ends[0], "high": ends[1]}
        parts.append(pd.DataFrame([point | {"series": "optimum"}]))
    return pd.concat(parts, ignore_index=True)


def draw_transfer(data: pd.DataFrame) -> "go.Figure":
    """Loss against log2 rate, one colour per width; stars mark the optima."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (width, part) in enumerate(data.groupby("width")):
        colour, group = COLOURS[i % len(COLOURS)], f"width {width:g}"
        runs, parabola, optimum = (part[part["series"] == name] for name in ("run", "parabola", "optimum"))
        bars = {"array": runs["high"] - runs["loss"], "arrayminus": runs["loss"] - runs["low"]}
        common = {"legendgroup": group, "marker": {"color": colour}}
        dotted = {"color": colour, "dash": "dot"}
        figure.add_scatter(
            x=runs["log2_rate"], y=runs["loss"], error_y=bars, mode="markers+lines", name=group, line=dotted, **common
        )
        solid = {"color": colour}
        figure.add_scatter(
            x=parabola["log2_rate"], y=parabola["loss"], mode="lines", showlegend=False, line=solid, **common
        )
        error = optimum["high"] - optimum["log2_rate"]
        star = {"symbol": "star", "size": 13, "color": colour}
        figure.add_scatter(
            x=optimum["log2_rate"],
            y=optimum["loss"],
            error_x={"array": error.where(np.isfinite(error))},
            mode="markers",
            marker=star,
            showlegend=False,
            legendgroup=group,
        )
    figure.update_xaxes(title="log2 of the learning rate at the base shape")
    figure.update_yaxes(title=LOSS, type="log")
    return figure


def horizon_data(law: "HorizonLaw", level: float = 0.9) -> pd.DataFrame:
    """Series optimum (of each group and budget) and law: group, n_tokens, rate, low, high (± stderr; the interval)."""
    used = law.optima[law.optima["used"]]
    ends = {name: 2 ** (used["log2_rate"] + sign * used["stderr"]) for name, sign in (("low", -1), ("high", 1))}
    optima = used[["group", "n_tokens"]].assign(rate=2 ** used["log2_rate"], series="optimum", **ends)
    tokens = np.geomspace(law.n_tokens_range[0], law.supported_range[1], 64)
    intervals = np.array([law.interval(n, level) for n in tokens])
    line = pd.DataFrame({"n_tokens": tokens, "rate": law.rate(tokens), "low": intervals[:, 0], "high": intervals[:, 1]})
    return pd.concat([optima, line.assign(series="law")], ignore_index=True)


def draw_horizon(data: pd.DataFrame) -> "go.Figure":
    """The best learning rate against training tokens, both logarithmic."""
    import plotly.graph_objects as go

    law = data[data["series"] == "law"]
    figure = go.Figure()
    _add_band(figure, law["n_tokens"], law["low"], law["high"])
    figure.add_scatter(x=law["n_tokens"], y=law["rate"], mode="lines", name="law", line={"color": COLOURS[2]})
    for i, (group, part) in enumerate(data[data["series"] == "optimum"].groupby("group")):
        bars = {"array": part["high"] - part["rate"], "arrayminus": part["rate"] - part["low"]}
        marker = {"color": COLOURS[i % len(COLOURS)], "size": 9}
        figure.add_scatter(
            x=part["n_tokens"], y=part["rate"], error_y=bars, mode="markers", name=str(group), marker=marker
        )
    figure.update_xaxes(title="training tokens D", type="log")
    figure.update_yaxes(title="best learning rate at the base shape", type="log")
    return figure


def _add_band(figure: "go.Figure", x: "pd.Series[float]", low: "pd.Series[float]", high: "pd.Series[float]") -> None:
    figure.add_scatter(
        x=pd.concat([x, x[::-1]]),
        y=pd.concat([high, low[::-1]]),
        fill="toself",
        fillcolor=BAND,
        line={"width": 0},
        name="90 % interval",
        hoverinfo="skip",
    )
