"""A part of the report: prose, a result, figures with alternative text, a table, all as markup that stands alone."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

_LAYOUT = {
    "template": "none",
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": "#808488", "family": "system-ui, sans-serif"},
    "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
    "margin": {"l": 60, "r": 16, "b": 56},
    "autosize": True,
}
_GRID = {"gridcolor": "rgba(128,132,136,0.25)", "zerolinecolor": "rgba(128,132,136,0.4)", "automargin": True}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: prose, a result as it prints itself, figures with their alternative text, a table."""

    title: str
    command: str
    about: str
    result: str | None = None
    drawings: tuple[tuple[str, str], ...] = ()
    table: str | None = None

    @property
    def known(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.result or self.drawings or self.table)


def drawn(figure: go.Figure | None, alternative: str, *, wide: bool = False) -> tuple[tuple[str, str], ...]:
    """The figure as markup that needs the page's one copy of plotly.js, with its alternative text; nothing without one.

    One with panels side by side, or `wide`, keeps its width on a narrow page and is scrolled.
    """
    if figure is None:
        return ()
    if figure.layout.margin.t is None:  # else it holds a note above the panels
        figure.update_layout(margin={"t": 32})
    figure.update_layout(**_LAYOUT)
    figure.update_xaxes(**_GRID)
    figure.update_yaxes(**_GRID)
    markup = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"responsive": True, "displayModeBar": False},
        default_height="420px",
    )
    beside = any(axis.domain and axis.domain[1] - axis.domain[0] < 0.9 for axis in figure.select_xaxes())
    if wide or beside:
        markup = f'<div class="panels" tabindex="0"><div>{markup}</div></div>'
    return ((markup, alternative),)


def as_table(table: pd.DataFrame | None) -> str | None:
    """The table as markup; pandas escapes what it holds."""
    if table is None or table.empty:
        return None
    return str(table.to_html(index=False, border=0, na_rep="–", float_format=lambda value: f"{value:.4g}"))
