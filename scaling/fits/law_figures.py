"""Figures of the loss law, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it with plotly."""

import numpy as np
import pandas as pd

from scaling.drawing import (
    COLOURS,
    COMPUTE,
    EDGE,
    STAR,
    Figure,
    add,
    add_band,
    blank,
    log_axis,
    loss_title,
    size_colours,
    stacked,
)
from scaling.fits.ensemble import Ensemble
from scaling.fits.forecast import DEFAULT, Forecast, interval_factor, log_scale
from scaling.fits.support import has_one_size
from scaling.forms.law import NATS, compute_flops


def fit_data(residuals: pd.DataFrame) -> pd.DataFrame:
    """One row per fitted run: n_params, n_tokens, compute_flops, loss, predicted, residual (% of the prediction)."""
    table = residuals.assign(residual=100 * np.expm1(residuals["log_residual"]), series="run")
    return table[["n_params", "n_tokens", "compute_flops", "loss", "predicted", "residual", "series"]]


def draw_fit(data: pd.DataFrame, n_params_convention: str, loss_unit: str = NATS) -> Figure:
    """Draw actual against predicted loss, and the residuals against compute, coloured by log10 N."""
    figure = stacked(2)
    marker = size_colours(data["n_params"], n_params_convention) | {"size": 6}
    hover = [f"N {n:.3g}, D {d:.3g}" for n, d in zip(data["n_params"], data["n_tokens"], strict=True)]
    common = {"mode": "markers", "marker": marker, "text": hover, "showlegend": False}
    add(figure, data, "predicted", "loss", row=1, col=1, **common)
    ends = [data[["loss", "predicted"]].min().min(), data[["loss", "predicted"]].max().max()]
    diagonal = {"mode": "lines", "line": {"color": "grey", "dash": "dot"}, "showlegend": False, "hoverinfo": "skip"}
    figure.add_scatter(x=ends, y=ends, row=1, col=1, **diagonal)
    add(figure, data, "compute_flops", "residual", row=2, col=1, **common)
    figure.add_hline(y=0, line={"color": "grey", "dash": "dot"}, row=2, col=1)
    figure.update_xaxes(title="predicted " + loss_title(loss_unit), row=1, col=1)
    figure.update_yaxes(title="actual " + loss_title(loss_unit), row=1, col=1)
    figure.update_xaxes(title=COMPUTE, **log_axis(data["compute_flops"]), row=2, col=1)
    figure.update_yaxes(title="residual (% of the prediction)", row=2, col=1)
    return figure


def frontier_data(
    runs: pd.DataFrame, ensemble: Ensemble, target: Forecast | None = None, level: float = 0.9, **columns: float
) -> pd.DataFrame:
    """Series run, frontier, forecast: compute_flops, n_params, n_tokens, loss, and low and high except for runs.

    The frontier is that of the forecast's fits, with the interval of the forecasts along it; at one size it is this size on more
    and more tokens.

    Args:
        runs: the fitted runs, with these columns.
        target: a forecast to show; the figure extends to its compute, and to 10 times the largest run's.
    """
    low, high = runs["compute_flops"].min(), runs["compute_flops"].max()
    flops = np.geomspace(low, max(10 * high, target.compute_flops if target else 0), 64)
    if ensemble.form.tokens_only:
        size = runs["n_params"].iloc[0]
        frontier = pd.DataFrame(
            {"compute_flops": flops, "n_params": size, "n_tokens": flops / compute_flops(size, 1.0)}
        )
    else:
        frontier = ensemble.law.frontier(flops, **columns)
    at = {"n_params": frontier["n_params"], "n_tokens": frontier["n_tokens"], **columns}
    loss, reach = np.exp(ensemble.log_loss(**at)), np.exp(interval_factor(level) * log_scale(ensemble, **at))
    frontier = frontier.assign(loss=loss, low=loss / reach, high=loss * reach, series="frontier")
    parts = [runs[["compute_flops", "n_params", "n_tokens", "loss"]].assign(series="run"), frontier]
    if target is not None:
        shown = ("compute_flops", "n_params", "n_tokens", "loss", "low", "high")
        parts.append(pd.DataFrame([{column: getattr(target, column) for column in shown} | {"series": "forecast"}]))
    return pd.concat(parts, ignore_index=True)


def draw_frontier(data: pd.DataFrame, loss_unit: str = NATS) -> Figure:
    """Draw loss against compute: runs, the best loss of each budget with its interval, the forecast."""
    runs, frontier, target = (data[data["series"] == name] for name in ("run", "frontier", "forecast"))
    figure, best = blank(), "one size" if has_one_size(frontier) else "best N and D"
    add_band(figure, frontier["compute_flops"], frontier["low"], frontier["high"])
    add(figure, frontier, "compute_flops", "loss", mode="lines", name=best, line={"color": COLOURS[2]})
    add(figure, runs, "compute_flops", "loss", mode="markers", name="runs", marker={"color": "grey", "size": 5})
    if len(target):
        add(figure, target, "compute_flops", "loss", "y", mode="markers", name="forecast", marker=STAR)
    figure.update_xaxes(title=COMPUTE, **log_axis(data["compute_flops"]))
    figure.update_yaxes(title=loss_title(loss_unit), type="log")
    return figure


def backtest_data(predictions: pd.DataFrame, level: float = 0.9) -> pd.DataFrame:
    """One row per cut and held-out run of the default forecast: cut, n_params, n_tokens, compute_flops, loss, predicted.

    `low` and `high` are the interval's bounds at the `level`, and `within` is True if the loss lies between them. `error`, `error_low`
    and `error_high` are the loss and these bounds in % above the forecast.
    """
    own = predictions[predictions["method"] == DEFAULT]
    names = {f"low_{level:g}": "low", f"high_{level:g}": "high"}
    kept = ["cut", "n_params", "n_tokens", "compute_flops", "loss", "predicted", "low", "high"]
    data = own.rename(columns=names)[kept]
    above = {
        column: 100 * (data[name] / data["predicted"] - 1)
        for column, name in (("error", "loss"), ("error_low", "low"), ("error_high", "high"))
    }
    within = data["loss"].between(data["low"], data["high"])
    return data.assign(**above, within=within, level=level, series="held out")


def draw_backtest(data: pd.DataFrame) -> Figure:
    """Draw the distance of the measured loss from its forecast, with the forecast's interval: a panel for each cut."""
    cuts = [part for _, part in data.groupby("cut")]
    titles = [f"fitted below 1/{part['cut'].iloc[0]:g} of the largest compute" for part in cuts]
    figure = stacked(
        max(1, len(cuts)), shared_xaxes="all", shared_yaxes="all", subplot_titles=titles, vertical_spacing=0.12
    )
    level = f"{100 * data['level'].iloc[0]:g} % interval" if len(data) else "interval"
    looks = {True: {"color": COLOURS[2], "symbol": "circle"}, False: {"color": COLOURS[5], "symbol": "x"}}
    shown: set[str] = set()
    for row, part in enumerate(cuts, start=1):
        ends = {"array": part["error_high"], "arrayminus": -part["error_low"]}
        ends |= {"thickness": 1, "width": 0, "color": EDGE}
        place = {"row": row, "col": 1, "mode": "markers"}
        none = {"symbol": "line-ns-open", "size": 8, "color": EDGE}
        x = part["compute_flops"]
        common = {"showlegend": row == 1, "hoverinfo": "skip", **place}
        figure.add_scatter(x=x, y=0 * x, error_y=ends, name=level, marker=none, **common)
        for within, marker in looks.items():
            own = part[part["within"] == within]
            if not len(own):
                continue
            text = [f"N {n:.3g}, D {d:.3g}" for n, d in zip(own["n_params"], own["n_tokens"], strict=True)]
            name = "within it" if within else "outside"
            common = {"name": name, "legendgroup": name, "showlegend": name not in shown, **place}
            add(figure, own, "compute_flops", "error", marker=marker, text=text, **common)
            shown.add(name)
        figure.add_hline(y=0, line={"color": "grey", "dash": "dot"}, row=row, col=1)
        figure.update_yaxes(title="measured above<br>forecast (%)", row=row, col=1)
    if len(cuts):
        figure.update_xaxes(**log_axis(data["compute_flops"]))
    figure.update_xaxes(title=COMPUTE, row=max(1, len(cuts)), col=1)
    return figure
