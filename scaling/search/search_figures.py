"""Figures of a search, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it with plotly."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.drawing import COLOURS, COMPUTE, EDGE, GREY, LOSS, Figure, add, blank, error_bars, log_axis
from scaling.optima.optimum import MAX_EXCESS
from scaling.search.search_box import SearchBox

SCALE = ["#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725"]
"""Colours of a surface, from best to worst: viridis, which is dark near the optimum, so that its white mark is visible."""
_N_GRID = 49
_STEP = 0.25  # per cent of the loss between contours


def importance_data(importance: pd.DataFrame) -> pd.DataFrame:
    """One row per hyperparameter, most important first: hyperparameter, share, low, high, noise; series significant, within noise."""
    table = importance.rename_axis("hyperparameter").reset_index()
    series = np.where(table["significant"], "significant", "within noise")
    return table[["hyperparameter", "share", "low", "high", "noise"]].assign(series=series)


def draw_importance(data: pd.DataFrame) -> Figure:
    """Draw bars with intervals, the most important on top; ticks mark the share that an irrelevant column reaches."""
    figure = blank()
    for name, colour in (("significant", COLOURS[2]), ("within noise", GREY)):
        part = data[data["series"] == name]
        if len(part):
            figure.add_bar(
                y=part["hyperparameter"],
                x=part["share"],
                error_x=error_bars(part, "share"),
                orientation="h",
                name=name,
                marker_color=colour,
            )
    tick = {"symbol": "line-ns-open", "size": 14, "color": EDGE}
    add(figure, data, "noise", "hyperparameter", mode="markers", marker=tick, name="a shuffled column's")
    figure.update_xaxes(title="share of the variance of log loss", tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(categoryorder="array", categoryarray=data["hyperparameter"].tolist()[::-1])
    return figure


def pareto_data(rows: pd.DataFrame, front: pd.DataFrame, cost: str = "compute_flops") -> pd.DataFrame:
    """Series run (every finished run) and front (cost ascending): cost, loss."""
    finished = rows[np.isfinite(rows["loss"].astype(float))]
    both = pd.concat([finished.assign(series="run"), front.assign(series="front")], ignore_index=True)
    return both[[cost, "loss", "series"]].rename(columns={cost: "cost"})


def draw_pareto(data: pd.DataFrame, cost: str = "compute_flops") -> Figure:
    """Draw loss against cost, logarithmic unless a run was free; the front is drawn as steps."""
    runs, front = (data[data["series"] == name] for name in ("run", "front"))
    figure = blank()
    add(figure, runs, "cost", "loss", mode="markers", name="runs", marker={"color": "grey", "size": 5})
    add(figure, front, "cost", "loss", mode="lines+markers", name="front", line={"color": COLOURS[2], "shape": "hv"})
    scale = log_axis(runs["cost"]) if (runs["cost"] > 0).all() else {}
    figure.update_xaxes(title=COMPUTE if cost == "compute_flops" else cost.replace("_", " "), **scale)
    figure.update_yaxes(title=LOSS)
    return figure


def response_data(
    box: SearchBox,
    predict: Callable[[pd.DataFrame], tuple[Array, Array]],
    best: Mapping[str, Any],
    intervals: Mapping[str, tuple[float, float]],
    runs: pd.DataFrame,
    *,
    scale: Mapping[str, float],
    over: tuple[str, str] | None = None,
    level: float = 0.9,
) -> pd.DataFrame:
    """Series surface (a grid), run, diverged, optimum at one scale: x_name, y_name, x, y, above, std, and bounds of intervals.

    `above` is log loss above the surface's optimum; it levels off at 5 %, beyond which losses are not distinguished. Coordinates
    that are not shown have the optimum's values on the grid, and their actual values in the runs. Of a scale with many runs, only
    the runs in the surface are shown.

    Args:
        predict: mean and standard deviation of log loss at points, as `ResponseSurface.predict`.
        intervals: intervals of the optimum's coordinates, at the level.
        runs: runs of the scale: coordinates, and `above` as in the surface.
        over: numeric coordinates for x and y; by default the box's first two.

    Raises:
        ValueError: `over` does not name two numeric coordinates of the box, or a scale is missing.
    """
    names = list(box.bounds)
    chosen = list(over) if over else names[:2]
    if len(chosen) != 2 or len(set(chosen)) < 2 or not set(chosen) <= set(names):
        numeric = ", ".join(names) or "none"
        raise ValueError(
            f"over must name two of the box's numeric coordinates ({numeric}), got {', '.join(chosen) or 'none'}"
        )
    x, y = chosen
    axes = [np.linspace(*box.bounds[name], _N_GRID) for name in chosen]
    grid = pd.DataFrame(dict(zip(chosen, (values.ravel() for values in np.meshgrid(*axes)), strict=True)))
    points = pd.concat([grid, pd.DataFrame([best])[[x, y]]], ignore_index=True)
    points = points.assign(
        **{name: [value] * len(points) for name, value in best.items() if name not in chosen}, **scale
    )
    mean, std = predict(points)
    table = points[[x, y]].rename(columns={x: "x", y: "y"}).assign(above=mean - mean[-1], std=std, series="surface")
    table.loc[table.index[-1], "series"] = "optimum"
    for name, (low, high) in intervals.items():
        if name in chosen:
            axis = "xy"[chosen.index(name)]
            table.loc[table.index[-1], [f"{axis}_low", f"{axis}_high"]] = low, high
    series = np.where(runs["above"] < MAX_EXCESS, "run", "diverged")
    shown = runs[[x, y, "above"]].rename(columns={x: "x", y: "y"})
    table = pd.concat([table, shown.assign(above=shown["above"] - mean[-1], series=series)], ignore_index=True)
    return table.assign(x_name=x, y_name=y, level=level)


def draw_response(data: pd.DataFrame, titles: Mapping[str, str] | None = None) -> Figure:
    """Draw contours of the loss over two hyperparameters, the runs, and the optimum with its intervals.

    `titles` are the axes' titles, with units, by coordinate; by default the coordinate's name.
    """
    surface, best = (data[data["series"] == name] for name in ("surface", "optimum"))
    z = 100 * surface.pivot_table(index="y", columns="x", values="above")
    figure = blank()
    figure.add_contour(
        x=z.columns,
        y=z.index,
        z=z,
        customdata=100 * surface.pivot_table(index="y", columns="x", values="std"),
        zmin=0,
        zmax=100 * MAX_EXCESS,
        contours={"start": _STEP, "end": 100 * MAX_EXCESS - _STEP, "size": _STEP},
        line={"width": 0.5, "color": "rgba(255, 255, 255, 0.5)"},
        colorscale=SCALE,
        colorbar={"title": {"text": "loss above the<br>optimum's (%)"}, "y": 0.4, "len": 0.8},
        hovertemplate="%{x:.4g}, %{y:.4g}<br>%{z:.2f} ± %{customdata:.2f} % above the optimum<extra></extra>",
    )
    for name, label, symbol in (("run", "runs", "circle"), ("diverged", "diverged runs", "x")):
        part = data[data["series"] == name]
        if len(part):
            edge = {"color": "white", "width": 0.7}
            marker = {"color": "grey", "size": 7, "symbol": symbol, "line": edge}
            text = [f"{100 * above:.2f} % above the optimum" for above in part["above"]] if name == "run" else label
            add(figure, part, "x", "y", mode="markers", name=label, marker=marker, text=text, hoverinfo="x+y+text")
    bars = {
        f"error_{axis}": {
            "array": best[f"{axis}_high"] - best[axis],
            "arrayminus": best[axis] - best[f"{axis}_low"],
            "color": "white",
        }
        for axis in ("x", "y")
    }
    star = {"symbol": "star", "size": 14, "color": "white", "line": {"color": "#444444", "width": 1}}
    name = f"optimum, {100 * best['level'].item():g} % intervals"
    add(figure, best, "x", "y", mode="markers", marker=star, name=name, **bars)
    for axis, update in (("x", figure.update_xaxes), ("y", figure.update_yaxes)):
        name = data[f"{axis}_name"].iloc[0]
        own = f"log2 of {name[5:]}" if name.startswith("log2_") else name
        low, high = data[axis].min(), data[axis].max()
        margin = 0.02 * (high - low)  # room for marks of runs on the bounds
        update(title=(titles or {}).get(name, own), range=[low - margin, high + margin])
    figure.update_layout(showlegend=True)
    return figure
