"""The figure of a full run: its data, and its drawing."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from scaling.drawing import loss_title
from scaling.forms.law import NATS

_BAND = "rgba(42,111,151,0.22)"
_TRAINING, _HELD_OUT, _OUTSIDE, _FORECAST = "#9aa0a6", "#2a6f97", "#d1495b", "#c8991b"
_CURVE_POINTS = 500  # a longer curve is averaged to 500 to 1,000 points
_MOST_EPOCHS = 12  # marks of each source; of more epochs, every n-th is marked
_SHOWN_FROM = 0.05  # share of the run; the steep fall before it would flatten the rest


def curve_data(metrics: pd.DataFrame) -> pd.DataFrame:
    """The training loss by step (columns tokens, train_loss), averaged over equal numbers of steps if there are many."""
    steps = max(1, len(metrics) // _CURVE_POINTS)
    groups = metrics[["tokens", "train_loss"]].groupby(metrics.index // steps)
    return groups.agg({"tokens": "last", "train_loss": "mean"})


def draw_curve(
    data: pd.DataFrame,
    forecast: dict[str, float],
    measured: float | None,
    *,
    end: float | None = None,
    band: pd.DataFrame | None = None,
    evaluations: pd.DataFrame | None = None,
    epochs: pd.DataFrame | None = None,
    loss_unit: str = NATS,
) -> go.Figure:
    """Draw training loss along the full run, its band, the forecast with its interval, and the measured loss.

    Args:
        forecast: loss, low, high, level.
        measured: Held-out loss at the end, or None before it.
        end: Tokens of the complete run; default: those of the last step.
        band: Table of `Band.to_frame`.
        evaluations: Columns tokens, loss, place, as in `RunStatus.evaluations`.
        epochs: Columns source, epoch, tokens, as in `SeenData.epoch_starts`.
        loss_unit: Unit of all losses.
    """
    end = data["tokens"].iloc[-1] if end is None else end
    figure = go.Figure()
    if band is not None and len(band) > 1:
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        figure.add_scatter(x=band["tokens"], y=band["low"], showlegend=False, **edge)
        figure.add_scatter(
            x=band["tokens"], y=band["high"], fill="tonexty", fillcolor=_BAND, name="band, held-out", **edge
        )
        dotted = {"dash": "dot", "width": 1, "color": _HELD_OUT}
        figure.add_scatter(x=band["tokens"], y=band["expected"], mode="lines", line=dotted, name="expected")
    if len(data):
        figure.add_scatter(
            x=data["tokens"], y=data["train_loss"], name="training loss", line={"width": 1, "color": _TRAINING}
        )
    if epochs is not None:
        _mark_epochs(figure, data, epochs)
    if evaluations is not None:
        for places, name, color in (
            (("inside", "before the band"), "held-out loss", _HELD_OUT),
            (("above", "below"), "outside the band", _OUTSIDE),
        ):
            shown = evaluations[evaluations["place"].isin(places)]
            if len(shown):
                marker = {"color": color, "size": 6}
                figure.add_scatter(x=shown["tokens"], y=shown["loss"], mode="markers", marker=marker, name=name)
    spread = {"array": [forecast["high"] - forecast["loss"]], "arrayminus": [forecast["loss"] - forecast["low"]]}
    name = f"forecast, {forecast['level']:.0%} interval"
    figure.add_scatter(
        x=[end],
        y=[forecast["loss"]],
        error_y=spread,
        mode="markers",
        marker={"color": _FORECAST, "symbol": "diamond", "size": 10},
        name=name,
    )
    if measured is not None:
        marker = {"symbol": "x", "size": 10, "color": _OUTSIDE}
        figure.add_scatter(x=[end], y=[measured], mode="markers", marker=marker, name="measured, held-out")
    figure.update_xaxes(title="training tokens")
    figure.update_yaxes(title=loss_title(loss_unit), range=_shown(data, forecast, measured, end))
    return figure


def draw_expert_loads(loads: list[list[float]]) -> go.Figure:
    """Draw the load of each expert over the mean of its block, each block's experts from the most loaded to the least.

    Args:
        loads: [block with experts][expert].
    """
    ordered = np.argsort(-np.array(loads), axis=1, kind="stable")
    figure = go.Figure(
        go.Heatmap(
            z=np.take_along_axis(np.array(loads), ordered, axis=1),
            customdata=ordered,
            zmin=0,
            zmax=max(2.0, float(np.max(loads))),
            colorscale="Blues",
            colorbar={"title": "load / mean"},
            hovertemplate="block %{y}, expert %{customdata}: %{z:.2f} of the mean<extra></extra>",
        )
    )
    figure.update_xaxes(title="experts, by load", showticklabels=False)
    figure.update_yaxes(title="block with experts", dtick=max(1, len(loads) // 10))
    return figure


def _mark_epochs(figure: go.Figure, data: pd.DataFrame, epochs: pd.DataFrame) -> None:
    """Mark on the training loss where each source begins another epoch."""
    marks = epoch_marks(data, epochs)
    for source, part in marks.groupby("source", sort=False):
        figure.add_scatter(
            x=part["tokens"],
            y=part["train_loss"],
            mode="markers",
            marker={"symbol": "line-ns-open", "size": 14, "line": {"width": 2}},
            name=f"{source}: epoch begins",
            text=[f"{source}: epoch {epoch} begins" for epoch in part["epoch"]],
        )


def epoch_marks(data: pd.DataFrame, epochs: pd.DataFrame) -> pd.DataFrame:
    """Return the starts of epochs that the curve has reached, at most `_MOST_EPOCHS` of a source, with the training loss there."""
    reached = epochs[epochs["tokens"] <= data["tokens"].max()]
    every = -(-reached.groupby("source")["epoch"].transform("size") // _MOST_EPOCHS)
    shown = reached[reached.groupby("source").cumcount() % every == 0]
    losses = np.interp(shown["tokens"], data["tokens"], data["train_loss"]) if len(shown) else []
    return shown.assign(train_loss=losses)


def _shown(data: pd.DataFrame, forecast: dict[str, float], measured: float | None, end: float) -> list[float] | None:
    """Range of the loss axis without the run's first steps; None while there are only first steps."""
    later = data.loc[data["tokens"] >= _SHOWN_FROM * end, "train_loss"]
    if later.empty:
        return None
    values = [*later, forecast["low"], forecast["high"], *([] if measured is None else [measured])]
    room = 0.05 * (max(values) - min(values))
    return [min(values) - room, max(values) + room]
