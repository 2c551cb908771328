"""Selects runs and columns of the ledger by terms such as `loss<2`, which are never evaluated as code."""

from __future__ import annotations

import difflib
import itertools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from muscale.errors import RunSelectionError
from muscale.store.ledger import NESTED
from proxy_models.files import atomic_write

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_TERM = re.compile(r"\s*([\w.]+)\s*(==|!=|<=|>=|=|<|>)\s*(.*?)\s*", re.DOTALL)
_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_RULE = "a term is COLUMN, one of = != < <= > >=, and a value, such as loss<2 or purpose=ladder"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A selection of runs: those for which all terms hold, sorted, at most `limit`, with these columns.

    Attributes:
        where: Terms `column op value`; a text may join several with `and`, and values may be quoted.
        sort: Sort column, descending if written `-column`; None: order of time. Missing values come last.
        limit: Most rows; None: all.
        columns: Names in this order; empty: those of the ledger's table.
    """

    where: tuple[str, ...] = ()
    sort: str | None = None
    limit: int | None = None
    columns: tuple[str, ...] = ()

    def of(self, runs: pd.DataFrame) -> pd.DataFrame:
        """Select rows and columns of `Ledger.runs()`; hyperparameters can be named like columns.

        Raises:
            RunSelectionError: Naming the option, the rule and the value, and the nearest name for an unknown column.
        """
        plain = runs.drop(columns=[name for name in (*NESTED, "diverged_because") if name in runs])
        wide = widened(runs)
        for term in (term for text in self.where for term in _terms(text)):
            wide = wide[_holds(wide, term)]
        if self.sort is not None:
            name = self.sort.removeprefix("-")
            _require_column(name, wide, f"--sort {self.sort}")
            wide = wide.sort_values(name, ascending=not self.sort.startswith("-"), kind="stable", na_position="last")
        if self.limit is not None:
            if self.limit < 1:
                raise RunSelectionError(f"--limit: must be at least 1, got {self.limit}")
            wide = wide.head(self.limit)
        names = [name.strip() for text in self.columns for name in text.split(",") if name.strip()]
        for name in names:
            _require_column(name, wide, f"--columns {name}")
        return wide[names or list(plain.columns)]


def widened(runs: pd.DataFrame) -> pd.DataFrame:
    """The table of runs with a column for each hyperparameter that has none yet, and without nested columns."""
    plain = runs.drop(columns=[name for name in NESTED if name in runs])
    values = pd.DataFrame(list(runs["hyperparameters"]), index=runs.index) if len(runs) else pd.DataFrame()
    return plain.join(values[[name for name in values.columns if name not in plain]])


def one_run(runs: pd.DataFrame, prefix: str) -> pd.Series[Any]:
    """The run whose key begins with `prefix`; raises RunSelectionError if no run, or more than one, matches."""
    found = runs[runs["key"].str.startswith(prefix)] if prefix else runs.iloc[:0]
    found = found.drop_duplicates("key")  # a run that stages share has a row for each
    if len(found) == 1:
        return found.iloc[0]
    if found.empty:
        raise RunSelectionError(f"no run's key begins with {prefix!r}; `muscale runs` lists them")
    keys = ", ".join(found["key"].head(5))
    raise RunSelectionError(
        f"{prefix!r} begins the keys of {len(found)} runs ({keys}{', …' * (len(found) > 5)}): give a longer prefix"
    )


def save(runs: pd.DataFrame, path: Path) -> Path:
    """Write a table atomically as .csv or .parquet, and return the path; raise RunSelectionError for others or without a folder."""
    if path.suffix not in (".csv", ".parquet"):
        raise RunSelectionError(f"--export {path}: must end in .csv or .parquet")
    if not path.absolute().parent.is_dir():
        raise RunSelectionError(f"--export {path}: there is no folder {path.absolute().parent}")
    with atomic_write(path) as unfinished:
        if path.suffix == ".csv":
            runs.to_csv(unfinished, index=False)
        else:
            texts = {name: "string" for name in runs if runs[name].dtype == object}
            runs.astype(texts).to_parquet(unfinished, index=False)
    return path


def _terms(text: str) -> list[str]:
    """Split a text into terms, at ` and ` outside quotes."""
    blanked = _QUOTED.sub(lambda quoted: "'" * len(quoted.group()), text)
    ends = [(0, 0), *((found.start(), found.end()) for found in re.finditer(r"\s+and\s+", blanked)), (len(text), 0)]
    return [text[after:start] for (_, after), (start, _) in itertools.pairwise(ends)]


def _holds(runs: pd.DataFrame, term: str) -> pd.Series[bool]:
    """Rows for which a term holds; for missing values only `!=` does."""
    found = _TERM.fullmatch(term)
    if not found or not found.group(3):
        raise RunSelectionError(f"--where {term.strip()}: {_RULE}")
    name, sign, text = found.groups()
    _require_column(name, runs, f"--where {term.strip()}")
    column, compare = runs[name], _COMPARISONS[sign]
    value = text[1:-1] if _QUOTED.fullmatch(text) else text
    present = column.notna()
    if is_numeric_dtype(column) and not is_bool_dtype(column):
        try:
            number = float(value.replace("_", ""))
        except ValueError:
            raise RunSelectionError(f"--where {term.strip()}: {name} is a number, got {value!r}") from None
        holds = compare(column.astype(float), number)
    else:
        holds = compare(column.map(str), "True" if value == "true" else "False" if value == "false" else value)
    return holds & present if sign != "!=" else holds | ~present


def _require_column(name: str, runs: pd.DataFrame, where: str) -> None:
    if name not in runs:
        near = difflib.get_close_matches(name, list(runs.columns), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RunSelectionError(f"{where}: there is no column {name}; {hint}there are {', '.join(runs.columns)}")
