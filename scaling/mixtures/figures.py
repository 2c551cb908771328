"""Figures of mixtures: which domain's data lowers which loss, and the best mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scaling.drawing import COLOURS, EDGE, error_bars

if TYPE_CHECKING:
    import plotly.graph_objects as go

_ROW, _AROUND = 24, 160


def draw_effects(effects: pd.DataFrame) -> go.Figure:
    """Map of the relative change of each loss (rows) by each domain's data (columns)."""
    import plotly.graph_objects as go

    largest = 100 * float(np.abs(effects.to_numpy()).max())
    figure = go.Figure(
        go.Heatmap(
            z=100 * effects.to_numpy(),
            x=list(effects.columns),
            y=list(effects.index),
            zmid=0,
            zmin=-largest,
            zmax=largest,
            colorscale="RdBu_r",
            colorbar={
                "title": {"text": "change of the loss (%)", "side": "top"},
                "orientation": "h",
                "thickness": 14,
                "y": 1.0,
                "yanchor": "bottom",
            },
            hovertemplate="%{y} by %{x}: %{z:.2f} %<extra></extra>",
        )
    )
    figure.update_yaxes(title="loss on", autorange="reversed", automargin=True)
    figure.update_xaxes(title="with .1 more from", automargin=True)
    return figure.update_layout(height=_AROUND + 60 + _ROW * len(effects))  # the colour bar lies above


def draw_best(table: pd.DataFrame, level: float) -> go.Figure:
    """Weight of each domain with its interval, largest first, and its limits where it has some.

    Args:
        table: domain, weight, low, high, least, most.
        level: of the intervals.
    """
    import plotly.graph_objects as go

    rows = table.sort_values("weight", kind="stable")
    figure = go.Figure()
    figure.add_scatter(
        x=rows["weight"],
        y=rows["domain"],
        error_x=error_bars(rows, "weight"),
        mode="markers",
        marker={"color": COLOURS[2], "size": 8},
        name=f"weight, {level:.0%} interval",
    )
    limited = rows[(rows["most"] < 1) | (rows["least"] > 0)]
    for side, symbol in (("least", "line-ns"), ("most", "line-ns")):
        figure.add_scatter(
            x=limited[side],
            y=limited["domain"],
            mode="markers",
            marker={"symbol": symbol, "size": 12, "line": {"color": EDGE, "width": 2}},
            name="limit",
            showlegend=side == "most" and len(limited) > 0,
        )
    figure.update_xaxes(title="weight in the mixture", rangemode="tozero")
    figure.update_yaxes(automargin=True, dtick=1)
    return figure.update_layout(height=_AROUND + _ROW * len(rows))
