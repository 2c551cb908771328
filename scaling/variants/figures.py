"""Figure of variants: multiplier against compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
