"""Figures of a search, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it with plotly."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scaling.drawing import COLOURS, COMPUTE, EDGE, GREY, LOSS, add, blank, error_bars, log_axis

if TYPE_CHECKING:
    import plotly.graph_objects as go


def importance_data(importance: pd.DataFrame) -> pd.DataFrame:
    """One row per hyperparameter, most important first: hyperparameter, share, low, high, noise; series significant, within noise."""
    table = importance.rename_axis("hyperparameter").reset_index()
    series = np.where(table["significant"], "significant", "within noise")
    return table[["hyperparameter", "share", "low", "high", "noise"]].assign(series=series)


def draw_importance(data: pd.DataFrame) -> "go.Figure":
    """Bars with intervals, the most important on top; ticks mark what a column that means nothing reaches."""
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


def draw_pareto(data: pd.DataFrame, cost: str = "compute_flops") -> "go.Figure":
    """Loss against cost, the cost logarithmic unless a run was free; the front is drawn as steps."""
    runs, front = (data[data["series"] == name] for name in ("run", "front"))
    figure = blank()
    add(figure, runs, "cost", "loss", mode="markers", name="runs", marker={"color": "grey", "size": 5})
    add(figure, front, "cost", "loss", mode="lines+markers", name="front", line={"color": COLOURS[2], "shape": "hv"})
    scale = log_axis(runs["cost"]) if (runs["cost"] > 0).all() else {}
    figure.update_xaxes(title=COMPUTE if cost == "compute_flops" else cost.replace("_", " "), **scale)
    figure.update_yaxes(title=LOSS)
    return figure
