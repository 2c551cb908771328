"""The application's own figures, each as data and as a drawing; those of the laws are in `scaling.figures`."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go


def curve_data(metrics: pd.DataFrame, every: int = 500) -> pd.DataFrame:
    """The full run's training loss, averaged over stretches so that at most `every` points remain: tokens, train_loss."""
    stretch = max(1, len(metrics) // every)
    groups = metrics[["tokens", "train_loss"]].groupby(metrics.index // stretch)
    return groups.agg({"tokens": "last", "train_loss": "mean"})


def draw_curve(data: pd.DataFrame, forecast: dict[str, float], measured: float | None) -> go.Figure:
    """Training loss along the full run, the forecast of its end with its interval, and what was measured there."""
    end = data["tokens"].iloc[-1]
    figure = go.Figure()
    figure.add_scatter(x=data["tokens"], y=data["train_loss"], name="training loss", line={"width": 1})
    spread = {"array": [forecast["high"] - forecast["loss"]], "arrayminus": [forecast["loss"] - forecast["low"]]}
    name = f"forecast, {forecast['level']:.0%} interval"
    figure.add_scatter(x=[end], y=[forecast["loss"]], error_y=spread, mode="markers", name=name)
    if measured is not None:
        marker = {"symbol": "x", "size": 10}
        figure.add_scatter(x=[end], y=[measured], mode="markers", marker=marker, name="measured, held-out")
    figure.update_xaxes(title="training tokens")
    figure.update_yaxes(title="loss, nats per token")
    return figure
