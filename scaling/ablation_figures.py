"""The figure of an ablation: data by one function, drawing by another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scaling.figures import COLOURS, error_bars

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from scaling.ablation import Ablation

_ROW, _AROUND = 28, 110  # pixels


def ablation_data(found: Ablation) -> pd.DataFrame:
    """One row for each variant that came to an end: name, change, low, high in % of the loss, the dearest last."""
    told = found.table[found.table["change"].notna()].iloc[::-1]
    names = told["component"] + " " + told["value"]
    ends = {name: 100 * np.expm1(told[name].to_numpy()) for name in ("change", "low", "high")}
    return pd.DataFrame({"name": names.to_numpy(), **ends})


def draw_ablation(data: pd.DataFrame, level: float) -> go.Figure:
    """Change of the loss by each variant, with its interval."""
    import plotly.graph_objects as go

    figure = go.Figure()
    known = bool(len(data)) and bool(np.isfinite(data[["low", "high"]]).all(axis=None))
    figure.add_scatter(
        x=data["change"],
        y=data["name"],
        error_x=error_bars(data, "change") if known else None,
        mode="markers",
        marker={"color": COLOURS[2], "size": 8},
        name=f"{level:.0%} interval" if known else "one seed",
        showlegend=False,
    )
    figure.add_vline(x=0, line={"color": "grey", "dash": "dot"})
    figure.update_xaxes(title="loss above the model as it is (%)")
    figure.update_yaxes(automargin=True)
    return figure.update_layout(height=_AROUND + _ROW * max(3, len(data)))
