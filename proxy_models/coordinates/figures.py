"""The figure of a coordinate check: data by one function, drawing by another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    import plotly.graph_objects as go


def coordinates_data(measurements: pd.DataFrame) -> pd.DataFrame:
    """Sort `CoordinateCheck.measurements` so that each (axis, quantity, step, module) is a run of rows by size."""
    order = ["axis", "quantity", "step", "module", "width", "depth"]
    return measurements.sort_values(order, ascending=[False] + [True] * 5, ignore_index=True)


def draw_coordinates(lines: pd.DataFrame) -> go.Figure:
    """Figure of `coordinates_data`: rms against width and, below, depth, all logarithmic; size left and change right."""
    import plotly.graph_objects as go
    from plotly.colors import sample_colorscale
    from plotly.subplots import make_subplots

    titles = {"size": "size of the output", "change": "change since step 0"}
    labels = {"width": "width (d_model)", "depth": "depth (n_layers)"}
    axes, steps = list(lines["axis"].unique()), sorted(lines["step"].unique())
    figure = make_subplots(rows=len(axes), cols=len(titles), column_titles=list(titles.values()))
    colors = dict(zip(steps, sample_colorscale("Viridis", np.linspace(0, 1, len(steps)).tolist()), strict=True))
    drawn = lines.assign(is_readout=lines["kind"] == "readout")
    named: set[int] = set()
    for (axis, quantity, step, is_readout), part in drawn.groupby(
        ["axis", "quantity", "step", "is_readout"], sort=False
    ):
        # One trace for many modules, a gap after each: figures of a trace for each line are slow to make and to show.
        gapped = pd.concat([line.reindex([*line.index, -1]) for _, line in part.groupby("module", sort=False)])
        figure.add_trace(
            go.Scatter(
                x=gapped[axis],
                y=gapped["rms"],
                text=gapped["module"],
                mode="lines+markers",
                line={"color": colors[step], "dash": "dash" if is_readout else "solid"},
                name=f"step {step}",
                legendgroup=f"step {step}",
                legendrank=step,
                showlegend=step not in named,
                hovertemplate=f"%{{text}}, step {step}<br>{axis} %{{x}}: %{{y:.3g}}<extra></extra>",
            ),
            row=axes.index(axis) + 1,
            col=list(titles).index(quantity) + 1,
        )
        named.add(step)
    for row, axis in enumerate(axes, start=1):
        sizes = sorted(lines.loc[lines["axis"] == axis, axis].unique())
        figure.update_xaxes(type="log", title=labels[axis], tickvals=sizes, row=row)
    figure.update_yaxes(type="log", title="root mean square over batch and coordinates")
    return figure
