"""Parts of all figures: colours that are visible on light and dark pages, bands and error bars, panels, titles."""

import textwrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from scaling.forms.law import NATS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as Figure
else:

    class Figure:
        """plotly's figure; plotly is imported when the first one is drawn."""


LOSS = f"loss ({NATS})"
COMPUTE = "training compute 6·N·D (FLOPs)"
COLOURS = ("#a45cc0", "#5f7fd0", "#2a788e", "#22a884", "#63b53b", "#c9a50c")
"""Colours of lines and marks: each at least 2.3 to 1 against white and against nearly black."""
EDGE = "#808488"
GREY = "#bbbbbb"
BAND = "rgba(42, 120, 142, 0.28)"
STAR = {"symbol": "star", "size": 13, "color": COLOURS[5], "line": {"color": EDGE, "width": 1}}
_PANEL, _AROUND = 230, 140
"""Pixels of height of a panel, and of the titles and the legend around all panels."""
_FEW_DECADES = 3.5
ALONE, _LINE = 420, 14
"""Pixels of height of a figure with one panel, and of a line of a note."""
_NOTE_WIDTH = 58
"""Characters in a line of a note, so that the line fits on a telephone."""


def add_band(
    figure: Figure,
    x: "pd.Series[float]",
    low: "pd.Series[float]",
    high: "pd.Series[float]",
    name: str = "90 % interval",
    **place: Any,
) -> None:
    """Shade the area between two lines; `place` is the panel (row, col) and whether the legend shows the band."""
    figure.add_scatter(
        x=pd.concat([x, x[::-1]]),
        y=pd.concat([high, low[::-1]]),
        fill="toself",
        fillcolor=BAND,
        line={"width": 0},
        name=name,
        hoverinfo="skip",
        **place,
    )


def blank() -> Figure:
    import plotly.graph_objects as go

    return go.Figure()


def add(figure: Figure, table: pd.DataFrame, x: str, y: str, bars: Literal["", "x", "y"] = "", /, **looks: Any) -> None:
    """Draw two columns of a table, with `error_bars` along an axis if `bars` names one; looks and place are plotly's."""
    if bars:
        looks[f"error_{bars}"] = error_bars(table, x if bars == "x" else y)
    figure.add_scatter(x=table[x], y=table[y], **looks)


def error_bars(part: pd.DataFrame, name: str) -> dict[str, "pd.Series[float]"]:
    """Error bars from a value to the columns `low` and `high`; none for an unknown bound."""
    ends = {"array": part["high"] - part[name], "arrayminus": part[name] - part["low"]}
    return {side: length.where(np.isfinite(length)) for side, length in ends.items()}


def stacked(n_panels: int, **options: Any) -> Figure:
    """Figure with panels below each other: side by side, a telephone has no room for their titles."""
    from plotly.subplots import make_subplots

    gap = {"vertical_spacing": 0.06 if options.get("shared_xaxes") else 0.34 / n_panels}
    figure = make_subplots(rows=n_panels, **(gap | options))
    figure.update_annotations(font_size=12)  # the panels' titles
    return figure.update_layout(height=_AROUND + _PANEL * n_panels)


def add_note(figure: Figure, text: str) -> None:
    """Write a note above the panels, in lines that fit on a telephone; the figure grows by these lines."""
    note = [line for part in text.split("\n") for line in textwrap.wrap(part, _NOTE_WIDTH)]
    # No automargin: with a title of several lines plotly 6 leaves the axes' ticks where they were before the widening.
    place = {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top"}
    title = {"text": "<br>".join(note), "font": {"size": 11}, "pad": {"l": 8, "t": 8}, **place}
    above = _LINE * len(note)
    figure.update_layout(title=title, margin={"t": above + 20}, height=(figure.layout.height or ALONE) + above)


def loss_title(loss_unit: str) -> str:
    """Title of an axis of loss."""
    return f"loss ({loss_unit})"


def params_title(n_params_convention: str, width: int = 34) -> str:
    """Title of an axis of N, in lines of `width` characters: a telephone has room for 34, one panel of several for 24."""
    return "<br>".join(textwrap.wrap(f"parameters N ({n_params_convention})", width))


def log_axis(values: "pd.Series[float]") -> dict[str, Any]:
    """Layout of an axis that shows these values, with ticks at powers of ten, and if these are few at twice and five times them.

    Within one power of ten plotly draws one and a half times `nticks` ticks; four leave room for their labels on a telephone.
    """
    decades = float(np.log10(values.max() / values.min()))
    steps: dict[str, Any] = {"nticks": 4} if decades < 1 else {"dtick": "D2" if decades <= _FEW_DECADES else 1}
    return {"type": "log", "exponentformat": "power", **steps}


def parameter_title(name: str, loss_unit: str) -> str:
    """Title of an axis of a law's parameter, or of another quantity that `ScalingFit.profile` accepts."""
    exponents = {"params_exponent": "exponent a of N* ∝ C^a", "tokens_exponent": "exponent b of D* ∝ C^b"}
    return {"E": f"E ({loss_unit})", "loss": loss_title(loss_unit), **exponents}.get(name, name)


def size_colours(n_params: "pd.Series[float]", n_params_convention: str) -> dict[str, Any]:
    """Look of markers that show the logarithm of N by colour, with a colour bar."""
    counted = "<br>".join(textwrap.wrap(f"({n_params_convention})", 12, break_long_words=False))
    return {
        "color": np.log10(n_params),
        "colorscale": list(COLOURS),
        "colorbar": {"title": {"text": f"log10 N<br>{counted}"}, "thickness": 14},
    }
