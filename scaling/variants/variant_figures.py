"""Figures of variants: multiplier and loss against compute, probability look by look."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from scaling.drawing import COLOURS, EDGE, Figure, add, add_band, blank, log_axis, stacked


def draw_variants(band: pd.DataFrame, measured: pd.DataFrame, level: float) -> Figure:
    """Draw each variant's multiplier against compute: one panel per variant, with its sizes and its band up to the target.

    Args:
        band, measured: variant, compute_flops, multiplier, low, high.
        level: probability of the intervals.
    """
    names = list(band["variant"].unique())
    if not names:
        return blank()
    figure = stacked(len(names), subplot_titles=names, shared_xaxes=True)
    for row, name in enumerate(names, start=1):
        place: dict[str, Any] = {"row": row, "col": 1, "showlegend": row == 1}
        line, sizes = band[band["variant"] == name], measured[measured["variant"] == name]
        add_band(figure, line["compute_flops"], line["low"], line["high"], f"{level:.0%} interval", **place)
        median = {"mode": "lines", "line": {"color": COLOURS[2]}, "name": "median", **place}
        add(figure, line, "compute_flops", "multiplier", **median)
        marks = {"mode": "markers", "marker": {"color": COLOURS[0], "size": 8}, "name": "one size", **place}
        add(figure, sizes, "compute_flops", "multiplier", "y", **marks)
        figure.add_hline(y=1, line={"color": EDGE, "dash": "dot"}, row=row, col=1)
    figure.update_xaxes(type="log", exponentformat="power")
    figure.update_xaxes(title="compute of the variant (FLOPs)", row=len(names), col=1)
    return figure.update_yaxes(title="multiplier")


def draw_changes(measured: pd.DataFrame, baseline: str, unit: str) -> Figure:
    """Loss of each variant at each of its sizes, in % of the baseline's at the same compute.

    Args:
        measured: variant, compute_flops, change (log ratio).
        baseline: name of the variant that all others are compared with.
        unit: unit of the losses, or empty.
    """
    figure = _lines(measured.assign(percent=100 * np.expm1(measured["change"])), "compute_flops", "percent")
    figure.add_hline(y=0, line={"color": EDGE, "dash": "dot"})
    figure.update_xaxes(title="compute of the variant (FLOPs)", **log_axis(measured["compute_flops"]))
    return figure.update_yaxes(title=f"loss{f' in {unit}' if unit else ''} above {baseline}'s (%)")


def draw_looks(looks: pd.DataFrame) -> Figure:
    """Probability that each variant is better at the target, by look; a line ends where the variant was decided.

    Args:
        looks: look, variant, p_better.
    """
    figure = _lines(looks, "look", "p_better")
    figure.update_xaxes(title="look", dtick=1)
    return figure.update_yaxes(title="P(better at the target)", range=[-0.02, 1.02])


def _lines(table: pd.DataFrame, x: str, y: str) -> Figure:
    """Draw a line for each variant; hovering shows its `verdict` if the table has this column."""
    figure = blank()
    for i, (name, part) in enumerate(table.groupby("variant", sort=False)):
        marker = {"color": COLOURS[i % len(COLOURS)], "size": 8}
        add(figure, part, x, y, text=part.get("verdict"), mode="lines+markers", marker=marker, name=str(name))
    return figure
