"""A section of the report: prose, a result, figures with alternative text and a table, as values for the page."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from itertools import groupby
from typing import Any

import jinja2
import markupsafe
import pandas as pd
import plotly.graph_objects as go

from muscale.plans.plan import format_decision, format_value

_LAYOUT = {
    "template": "none",
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": "#74787d", "family": "system-ui, sans-serif"},
    "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
    "margin": {"l": 60, "r": 26, "b": 56},
    "autosize": True,
}
_GRID = {"gridcolor": "rgba(128,132,136,0.25)", "zerolinecolor": "rgba(128,132,136,0.4)", "automargin": True}
MAX_ROWS = 1000
"""Limit on the rows of a table on the page: a hundred thousand take minutes to write, and no browser scrolls them."""
_PAIR = re.compile(r"([^'\"]{1,40}?)\s{2,}(.+)")  # a quoted sample of text is not a name
_LARGEST_COUNT = 1e9  # with gaps between; larger ones are shown as powers of ten
_HEIGHT = 420  # pixels, if a figure has no height


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure for the page.

    Attributes:
        data: Data and layout as JSON that is safe inside an element `script`.
        height: Height in pixels.
    """

    data: str
    alternative: str
    height: int


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page.

    Attributes:
        title: Heading.
        command: Command that produces its values.
        about: Description in a sentence.
        group: Heading in the page's contents.
        result: Printed result, without its tables.
        drawings: Figures.
        link: Address of a further page, and its description.
        missing: Reason why there is nothing to show, if the command alone would not help.
        template: Name of a separate template for the section, rendered with `values`.
    """

    title: str
    command: str
    about: str
    group: str = "The study"
    result: str | None = None
    drawings: tuple[Drawing, ...] = ()
    table: str | None = None
    link: tuple[str, str] | None = None
    missing: str | None = None
    template: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.result or self.drawings or self.table or self.template)

    @property
    def lines(self) -> list[tuple[str, list[list[str]]]]:
        """Runs of the result's lines by kind: "pairs" of name and value, "items" of a list, "sentences".

        A result prints a pair as a name, two or more spaces, and a value; an item of a list starts with a dash.
        """
        printed = [line.strip() for line in (self.result or "").splitlines() if line.strip()]
        return [(kind, [parts for _, parts in run]) for kind, run in groupby(map(_line, printed), lambda line: line[0])]

    @property
    def ident(self) -> str:
        """Anchor for links."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @cached_property
    def markup(self) -> str:
        """Escaped markup of the whole section."""
        return templates().get_template(self.template or "section.html.jinja").render(section=self, **self.values)

    @cached_property
    def hash(self) -> str:
        """Hash of the markup."""
        return hashlib.sha256(self.markup.encode()).hexdigest()[:16]


def _line(printed: str) -> tuple[str, list[str]]:
    if printed.startswith("- "):
        return "items", [printed[2:]]
    pair = _PAIR.fullmatch(printed)
    return ("pairs", list(pair.groups())) if pair else ("sentences", [printed])


@cache
def templates() -> jinja2.Environment:
    """Return the page's templates; values are escaped, and an unknown name is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(page_file), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "format_value": format_value,
        "format_decision": format_decision,
        "moment": moment,
        "count": count,
        "with_code": with_code,
    }
    return environment


def with_code(text: str) -> str:
    """Return a sentence as escaped markup, with the text between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text)))


def page_file(name: str) -> str:
    """Return the text of a file that belongs to the page."""
    return (resources.files("muscale.pages") / "templates" / name).read_text()


def drawn(figure: go.Figure | None, alternative: str) -> tuple[Drawing, ...]:
    """Return the figure for the page, with its alternative text; nothing without a figure."""
    if figure is None:
        return ()
    if figure.layout.margin.t is None:  # a top margin holds a note above the panels
        figure.update_layout(margin={"t": 32})
    height = int(figure.layout.height or _HEIGHT)
    figure.update_layout(**_LAYOUT, height=height)
    figure.update_xaxes(**_GRID)
    figure.update_yaxes(**_GRID)
    return (Drawing(data=escaped(figure.to_json()), alternative=alternative, height=height),)


def escaped(json: str) -> str:
    """Escape JSON so that it can't end its element `script`: the escaped characters occur in JSON strings only."""
    return json.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def as_table(table: pd.DataFrame | None) -> str | None:
    """Return the table's first rows as markup, with dashes for unknown and unbounded values; pandas escapes the contents."""
    if table is None or table.empty:
        return None
    if len(table) > MAX_ROWS:
        return f"{as_table(table.head(MAX_ROWS))}<p>{MAX_ROWS:,} of {len(table):,} rows</p>"
    whole = [name for name, column in table.items() if _counts(column)]
    known = table.replace([math.inf, -math.inf], math.nan)
    markup = str(
        known.where(known.notna(), math.nan).to_html(  # pandas writes a None as its name
            index=False,
            border=0,
            na_rep="–",
            float_format=lambda value: f"{value:.4g}",
            formatters=dict.fromkeys(whole, lambda value: f"{value:,.0f}" if not math.isnan(value) else "–"),
        )
    )
    return markup.replace(' style="text-align: right;"', "")  # the page's style sheet sets this


def _counts(column: pd.Series[Any]) -> bool:
    """Whether a column has whole numbers, or counts and gaps, for which pandas has floats."""
    if not pd.api.types.is_float_dtype(column):
        return bool(pd.api.types.is_integer_dtype(column))
    known = column.dropna()
    return len(known) < len(column) and bool((known.mod(1).eq(0) & known.between(1, _LARGEST_COUNT)).all())


def grouped(sections: list[Section]) -> Iterator[tuple[str, list[Section]]]:
    """Generate the groups in order of appearance, each with its sections."""
    for group in dict.fromkeys(section.group for section in sections):
        yield group, [section for section in sections if section.group == group]


def moment(stamp: str) -> str:
    """Format a time of the ledger for reading, to the second."""
    return f"{stamp[:10]} {stamp[11:19]} UTC"


def count(value: float) -> str:
    """Format a large number in a few characters: 1.31 M, or 3.6e+15 beyond the named units."""
    value = float(f"{value:.3g}")  # 999,600 is 1 M
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if unit <= value < 1000 * unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.3g}"
