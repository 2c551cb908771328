"""The figure of a coordinate check: one function computes the data, another draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    import plotly.graph_objects as go


def coordinates_data(measurements: pd.DataFrame) -> pd.DataFrame:
    """Sort `CoordinateCheck.measurements` so that each (axis, quantity, step, module) has consecutive rows by size."""
    order = ["axis", "quantity", "step", "module", "width", "depth"]
    return measurements.sort_values(order, ascending=[False] + [True] * 5, ignore_index=True)


def draw_coordinates(lines: pd.DataFrame) -> go.Figure:
    """Draw `coordinates_data`: rms against width and, below, depth and matrices' norms against width, all axes logarithmic.

    Sizes and initial norms are on the left, changes and updates on the right.
    """
    import plotly.graph_objects as go
    from plotly.colors import sample_colorscale
    from plotly.subplots import make_subplots

    labels = {"width": "width (d_model)", "depth": "depth (n_layers)"}
    column = {"size": 1, "norm": 1, "change": 2, "update": 2}
    lines = lines.assign(
        is_readout=lines["kind"].str.startswith("readout"),
        row=lines["axis"].where(~lines["kind"].str.endswith("matrix"), "matrices"),
    )
    rows, steps = list(lines["row"].unique()), sorted(lines["step"].unique())
    rows.sort(key=["width", "depth", "matrices"].index)
    titles = {"matrices": ["norm over √(fan_out / fan_in)", "the same of its first change"]}
    shown = [titles.get(row, ["size of the output", "change since step 0"]) for row in rows]
    titled = [title for pair in shown for title in pair]
    height = 90 + 270 * len(rows)
    figure = make_subplots(rows=len(rows), cols=2, subplot_titles=titled, vertical_spacing=115 / height)
    colors = dict(zip(steps, sample_colorscale("Viridis", np.linspace(0, 1, len(steps)).tolist()), strict=True))
    named: set[int] = set()
    for (row, axis, quantity, step, is_readout), part in lines.groupby(
        ["row", "axis", "quantity", "step", "is_readout"], sort=False
    ):
        # One trace holds many modules, with a gap after each: a figure with a trace per line is slow to make and to show.
        gapped = pd.concat([line.reindex([*line.index, -1]) for _, line in part.groupby("module", sort=False)])
        figure.add_trace(
            go.Scatter(
                x=gapped[axis],
                y=gapped["rms"],
                text=gapped["module"] + (f", {quantity}" if row == "matrices" else ""),
                mode="lines+markers",
                line={"color": colors[step], "dash": "dash" if is_readout else "solid"},
                name=f"step {step}",
                legendgroup=f"step {step}",
                legendrank=step,
                showlegend=step not in named,
                hovertemplate=f"%{{text}}, step {step}<br>{axis} %{{x}}: %{{y:.3g}}<extra></extra>",
            ),
            row=rows.index(row) + 1,
            col=column[str(quantity).partition(" ")[0]],
        )
        named.add(step)
    for number, row in enumerate(rows, start=1):
        axis = "depth" if row == "depth" else "width"
        sizes = sorted(lines.loc[lines["row"] == row, axis].unique())
        figure.update_xaxes(type="log", title=labels[axis], tickvals=sizes, row=number)
        figure.update_yaxes(title="norm" if row == "matrices" else "root mean square", row=number)
    figure.update_yaxes(type="log", dtick="D2")
    return figure.update_layout(height=height)
