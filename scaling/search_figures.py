"""Figures of a search, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it with plotly."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scaling.figures import COLOURS, COMPUTE, LOSS
from scaling.pareto import pareto_front

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from scaling.importance import Importance
    from scaling.leaders import Leaders

GREY = "#bbbbbb"


def leaders_data(leaders: "Leaders") -> pd.DataFrame:
    """One row per trial, best first: trial, loss, low, high (NaN if not known), p_best; series winner, near-tie, other."""
    table = leaders.trials.reset_index()[["trial", "loss", "low", "high", "p_best"]]
    series = np.select(
        [table["trial"] == leaders.winner, table["trial"].isin(leaders.near_tie)], ["winner", "near-tie"], "other"
    )
    return table.replace([-np.inf, np.inf], np.nan).assign(series=series)


def draw_leaders(data: pd.DataFrame) -> "go.Figure":
    """Each trial's loss with its interval; the text is the probability that it is the best."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, colour in (("winner", COLOURS[0]), ("near-tie", COLOURS[3]), ("other", GREY)):
        part = data[data["series"] == name]
        if not len(part):
            continue
        bars = {"array": part["high"] - part["loss"], "arrayminus": part["loss"] - part["low"]}
        figure.add_scatter(
            x=part["trial"].astype(str),
            y=part["loss"],
            error_y=bars,
            text=["" if np.isnan(p) else f"best: {p:.2f}" for p in part["p_best"]],
            textposition="middle right",
            mode="markers+text",
            name=name,
            marker={"color": colour, "size": 10},
        )
    order = data["trial"].astype(str).tolist()
    ends = [-0.5, len(order) - 0.5]  # else the last one's text is cut off
    figure.update_xaxes(title="trial", type="category", categoryorder="array", categoryarray=order, range=ends)
    figure.update_yaxes(title=LOSS)
    return figure


def importance_data(importance: "Importance") -> pd.DataFrame:
    """One row per hyperparameter, most important first: hyperparameter, share, low, high, noise; series told, not told."""
    table = importance.table.rename_axis("hyperparameter").reset_index()
    series = np.where(table["told"], "told", "not told")
    return table[["hyperparameter", "share", "low", "high", "noise"]].assign(series=series)


def draw_importance(data: pd.DataFrame) -> "go.Figure":
    """Bars with intervals, the most important on top; ticks mark what a column that means nothing reaches."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, label, colour in (("told", "told", COLOURS[2]), ("not told", "not told from noise", GREY)):
        part = data[data["series"] == name]
        if len(part):
            bars = {"array": part["high"] - part["share"], "arrayminus": part["share"] - part["low"]}
            figure.add_bar(
                y=part["hyperparameter"],
                x=part["share"],
                error_x=bars,
                orientation="h",
                name=label,
                marker_color=colour,
            )
    tick = {"symbol": "line-ns-open", "size": 14, "color": "black"}
    figure.add_scatter(
        y=data["hyperparameter"], x=data["noise"], mode="markers", marker=tick, name="a shuffled column's"
    )
    figure.update_xaxes(title="share of the variance of log loss over the box", tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(categoryorder="array", categoryarray=data["hyperparameter"].tolist()[::-1])
    return figure


def pareto_data(rows: pd.DataFrame, cost: str = "compute_flops", loss: str = "loss") -> pd.DataFrame:
    """Series run (every finished run) and front (cost ascending): cost, loss."""
    pick = {cost: "cost", loss: "loss"}
    front = pareto_front(rows, cost, loss)[[cost, loss]].rename(columns=pick).assign(series="front")
    runs = rows[[cost, loss]].rename(columns=pick).assign(series="run")
    return pd.concat([runs[np.isfinite(runs["loss"].astype(float))], front], ignore_index=True)


def draw_pareto(data: pd.DataFrame, cost: str = "compute_flops") -> "go.Figure":
    """Loss against cost, the cost logarithmic unless a run was free; the front is drawn as steps."""
    import plotly.graph_objects as go

    runs, front = (data[data["series"] == name] for name in ("run", "front"))
    figure = go.Figure()
    figure.add_scatter(x=runs["cost"], y=runs["loss"], mode="markers", name="runs", marker={"color": "grey", "size": 5})
    steps = {"color": COLOURS[2], "shape": "hv"}
    figure.add_scatter(x=front["cost"], y=front["loss"], mode="lines+markers", name="front", line=steps)
    scale = {"type": "log", "exponentformat": "power"} if (runs["cost"] > 0).all() else {}
    figure.update_xaxes(title=COMPUTE if cost == "compute_flops" else cost.replace("_", " "), **scale)
    figure.update_yaxes(title=LOSS)
    return figure
