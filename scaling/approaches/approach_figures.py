"""Figures of approaches 1 and 2, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it with plotly.

The fit's warnings are shown above its panels, since approach 2 has a bias.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from scaling.approaches.loss_curves import curves_of
from scaling.drawing import (
    COLOURS,
    COMPUTE,
    EDGE,
    STAR,
    Figure,
    add,
    add_note,
    blank,
    error_bars,
    log_axis,
    loss_title,
    params_title,
    size_colours,
)
from scaling.forms.law import NATS

_N_POINTS = 49


def isoflops_data(rows: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    """Series run, parabola, vertex of each budget: compute_flops, n_params, loss, and for the vertex low and high.

    A parabola extends from the smallest to the largest size of its budget, and is left out if it has no minimum among them. `low`
    and `high` are the 90 % interval of the vertex's N, from the runs of its budget.
    """
    parts = [rows[["compute_flops", "n_params", "loss"]].assign(series="run")]
    for point in points.itertuples():
        sizes = rows.loc[rows["compute_flops"] == point.compute_flops, "n_params"]
        n_params = np.geomspace(sizes.min(), sizes.max(), _N_POINTS)
        loss = point.loss + point.curvature / 2 * np.log(n_params / point.n_params) ** 2
        part = pd.DataFrame({"n_params": n_params, "loss": loss})
        parts.append(part.assign(compute_flops=point.compute_flops, series="parabola"))
    names = {"n_params_low": "low", "n_params_high": "high"}
    vertices = points.rename(columns=names)[["compute_flops", "n_params", "loss", "low", "high"]]
    return pd.concat([*parts, vertices.assign(series="vertex")], ignore_index=True)


def draw_isoflops(
    data: pd.DataFrame, n_params_convention: str, warnings: Sequence[str] = (), loss_unit: str = NATS
) -> Figure:
    """Draw loss over N, a colour for each budget: the runs, their parabola, and its vertex with the interval of its N."""
    from plotly.colors import sample_colorscale

    figure = blank()
    budgets = np.sort(data["compute_flops"].unique())
    shades = sample_colorscale(list(COLOURS), np.linspace(0, 1, max(2, len(budgets))))
    for i, flops in enumerate(budgets):
        own, first = data[data["compute_flops"] == flops], i == 0
        run, parabola, vertex = (own[own["series"] == name] for name in ("run", "parabola", "vertex"))
        colour = shades[i] if len(vertex) else "grey"
        common = {"hovertemplate": f"{flops:.3g} FLOPs<br>N %{{x:.3g}}, loss %{{y:.4f}}<extra></extra>"}
        dots = {"color": colour, "size": 5}
        _trace(figure, run, "runs of a budget (FLOPs)", first, mode="markers", marker=dots, **common)
        if not len(vertex):
            continue
        _trace(figure, parabola, "their parabola", first, mode="lines", line={"color": colour}, **common)
        bars = error_bars(vertex, "n_params") | {"color": EDGE}
        star = STAR | {"color": colour}
        text = {"text": [_flops(flops)], "textposition": "bottom center", "textfont": {"size": 10, "color": EDGE}}
        looks = {"mode": "markers+text", "marker": star, "error_x": bars, **text, **common}
        _trace(figure, vertex, "vertex, 90 % interval", first, **looks)
    figure.update_xaxes(title=params_title(n_params_convention), **log_axis(data["n_params"]))
    figure.update_yaxes(title=loss_title(loss_unit))
    _warn(figure, warnings)
    return figure


def envelope_data(rows: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    """Series curve, envelope, crossing: run, n_params, compute_flops, loss; the envelope's is the least of all curves.

    At a crossing the envelope passes from one size to another; the powers go through the crossings.
    """
    curves = curves_of(rows)
    lowest = pd.DataFrame({"compute_flops": curves.compute, "loss": curves.loss.min(axis=0)})
    lowest["n_params"] = curves.n_params[curves.loss.argmin(axis=0)]
    crossings = points[["compute_flops", "n_params", "loss"]]
    parts = [
        rows[["run", "n_params", "compute_flops", "loss"]].sort_values(["run", "compute_flops"]).assign(series="curve"),
        lowest[np.isfinite(lowest["loss"])].assign(series="envelope"),
        crossings.assign(series="crossing"),
    ]
    return pd.concat(parts, ignore_index=True)


def draw_envelope(
    data: pd.DataFrame, n_params_convention: str, warnings: Sequence[str] = (), loss_unit: str = NATS
) -> Figure:
    """Draw loss against compute: every curve in the colour of its size, the envelope below them, and its crossings."""
    from plotly.colors import sample_colorscale

    figure = blank()
    curves, envelope, crossings = (data[data["series"] == name] for name in ("curve", "envelope", "crossing"))
    low, high = np.log([curves["n_params"].min(), curves["n_params"].max()])
    for i, (run, curve) in enumerate(curves.groupby("run")):
        size = curve["n_params"].iloc[0]
        (colour,) = sample_colorscale(list(COLOURS), [(math.log(size) - low) / max(high - low, 1e-9)])
        group = {"name": "curves of runs", "legendgroup": "curves", "showlegend": i == 0}
        hover = f"{run}, N {size:.3g}<br>%{{x:.3g}} FLOPs, loss %{{y:.4f}}<extra></extra>"
        line = {"color": colour, "width": 1}
        add(figure, curve, "compute_flops", "loss", mode="lines", line=line, hovertemplate=hover, **group)
    text, line = [f"N {size:.3g}" for size in envelope["n_params"]], {"color": EDGE, "width": 5}
    add(figure, envelope, "compute_flops", "loss", mode="lines", line=line, opacity=0.5, name="envelope", text=text)
    marker = STAR | size_colours(crossings["n_params"], n_params_convention)
    marker |= {"cmin": low / math.log(10), "cmax": high / math.log(10)}
    text, name = [f"N* {size:.3g}" for size in crossings["n_params"]], "crossings, N* and D* there"
    add(figure, crossings, "compute_flops", "loss", mode="markers", name=name, marker=marker, text=text)
    figure.update_xaxes(title=COMPUTE, **log_axis(data["compute_flops"]))
    figure.update_yaxes(title=loss_title(loss_unit), type="log")
    _warn(figure, warnings)
    return figure


def _warn(figure: Figure, warnings: Sequence[str]) -> None:
    if warnings:
        add_note(figure, "\n".join(f"doubtful: {warning}" for warning in warnings))


def _flops(value: float) -> str:
    """Format a budget, with a power of ten."""
    exponent = math.floor(math.log10(value))
    return f"{value / 10**exponent:.2g}·10<sup>{exponent}</sup>"


def _trace(figure: Figure, part: pd.DataFrame, name: str, first: bool, **looks: Any) -> None:
    common = {"name": name, "legendgroup": name, "showlegend": first}
    add(figure, part, "n_params", "loss", **common, **looks)
