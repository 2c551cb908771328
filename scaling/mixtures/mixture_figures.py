"""Figures of mixtures: which domain's data lowers which loss, and the best mixture."""

from __future__ import annotations

import numpy as np
import pandas as pd

from scaling.drawing import COLOURS, EDGE, Figure, add, blank

_ROW, _AROUND = 24, 160


def draw_effects(effects: pd.DataFrame) -> Figure:
    """Draw a map of the relative change of each loss (rows) by each domain's data (columns)."""
    largest = 100 * float(np.abs(effects.to_numpy()).max())
    figure = blank()
    figure.add_heatmap(
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
    figure.update_yaxes(title="loss on", autorange="reversed", automargin=True)
    figure.update_xaxes(title="with .1 more from", automargin=True)
    return figure.update_layout(height=_AROUND + 60 + _ROW * len(effects))  # the colour bar lies above


def draw_best(table: pd.DataFrame, level: float) -> Figure:
    """Draw the weight of each domain with its interval, largest first, and its limits if it has any.

    Args:
        table: domain, weight, low, high, least, most.
        level: probability of the intervals.
    """
    rows = table.sort_values("weight", kind="stable")
    figure = blank()
    weight = {"marker": {"color": COLOURS[2], "size": 8}, "name": f"weight, {level:.0%} interval"}
    add(figure, rows, "weight", "domain", "x", mode="markers", **weight)
    limited = rows[(rows["most"] < 1) | (rows["least"] > 0)]
    marker = {"symbol": "line-ns", "size": 12, "line": {"color": EDGE, "width": 2}}
    for side in ("least", "most"):
        in_legend = side == "most" and len(limited) > 0
        add(figure, limited, side, "domain", mode="markers", marker=marker, name="limit", showlegend=in_legend)
    figure.update_xaxes(title="weight in the mixture", rangemode="tozero")
    figure.update_yaxes(automargin=True, dtick=1)
    return figure.update_layout(height=_AROUND + _ROW * len(rows))
