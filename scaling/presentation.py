"""Base class of results, and formats of numbers and ranges."""

import html
import math
from typing import Any


class Result:
    """Base of every result: a notebook and IPython's console show its `str()`."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))


def number(value: float, style: str = ".4g") -> str:
    """Format a number, a dash for one that is not known: NaN, or an infinite bound."""
    return f"{value:{style}}" if math.isfinite(value) else "–"


def span(low: float, high: float, digits: int = 3) -> str:
    """A range, e.g. `1.2e+08 to 3.4e+09`."""
    return f"{low:.{digits}g} to {high:.{digits}g}"


def counted(n_params_convention: str) -> str:
    """Describe what N counts."""
    return n_params_convention or "convention of N not given"


def lines(rows: dict[str, str]) -> str:
    """Format a label and a text per line, with aligned texts."""
    width = max(map(len, rows)) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in rows.items())
