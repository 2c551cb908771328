"""Figures of variants: multiplier and loss against compute, probability look by look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scaling.drawing import COLOURS, EDGE, add_band, error_bars, stacked

if TYPE_CHECKING:
    import plotly.graph_objects as go


def draw_variants(band: pd.DataFrame, measured: pd.DataFrame, level: float) -> go.Figure:
    """Compute multiplier of each variant against compute: a panel for each, its sizes, and its band up to the target.

    Args:
        band, measured: variant, compute_flops, multiplier, low, high.
        level: of the intervals.
    """
    names = list(band["variant"].unique())
    figure = stacked(len(names), subplot_titles=names, shared_xaxes=True)
    for row, name in enumerate(names, start=1):
        place: dict[str, Any] = {"row": row, "col": 1, "showlegend": row == 1}
        line, sizes = band[band["variant"] == name], measured[measured["variant"] == name]
        add_band(figure, line["compute_flops"], line["low"], line["high"], f"{level:.0%} interval", **place)
        figure.add_scatter(
            x=line["compute_flops"],
            y=line["multiplier"],
            mode="lines",
            line={"color": COLOURS[2]},
            name="median",
            **place,
        )
        figure.add_scatter(
            x=sizes["compute_flops"],
            y=sizes["multiplier"],
            error_y=error_bars(sizes, "multiplier"),
            mode="markers",
            marker={"color": COLOURS[0], "size": 8},
            name="one size",
            **place,
        )
        figure.add_hline(y=1, line={"color": EDGE, "dash": "dot"}, row=row, col=1)
    figure.update_xaxes(type="log", exponentformat="power")
    figure.update_xaxes(title="compute of the variant (FLOPs)", row=len(names), col=1)
    return figure.update_yaxes(title="multiplier")


def draw_changes(measured: pd.DataFrame, baseline: str) -> go.Figure:
    """Loss of each variant at each of its sizes, in % of the baseline's at the same compute.

    Args:
        measured: variant, compute_flops, change (log ratio).
        baseline: name of the variant that all are held against.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (name, part) in enumerate(measured.groupby("variant", sort=False)):
        figure.add_scatter(
            x=part["compute_flops"],
            y=100 * np.expm1(part["change"]),
            mode="lines+markers",
            marker={"color": COLOURS[i % len(COLOURS)], "size": 8},
            name=str(name),
        )
    figure.add_hline(y=0, line={"color": EDGE, "dash": "dot"})
    figure.update_xaxes(title="compute of the variant (FLOPs)", type="log", exponentformat="power")
    return figure.update_yaxes(title=f"loss above {baseline}'s (%)")


def draw_looks(looks: pd.DataFrame) -> go.Figure:
    """Probability that each variant is better at the target, by look; a line ends where the variant was decided.

    Args:
        looks: look, variant, p_better.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (name, part) in enumerate(looks.groupby("variant", sort=False)):
        figure.add_scatter(
            x=part["look"],
            y=part["p_better"],
            text=part["verdict"],
            mode="lines+markers",
            marker={"color": COLOURS[i % len(COLOURS)], "size": 8},
            name=str(name),
        )
    figure.update_xaxes(title="look", dtick=1)
    return figure.update_yaxes(title="P(better at the target)", range=[-0.02, 1.02])
