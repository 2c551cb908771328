"""Tables of runs as they are found: other names, counts in millions or as "1.3B" or "47,557,632", compute for tokens.

What is unambiguous is read and noted; what is not stays as it is, for the checks that name a column, its row and its value.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from scaling.checks import OTHER_NAMES, or_nan, plain, row_name
from scaling.forms.law import FLOPS_PER_PARAM_TOKEN

NOTES = "notes"
"""Key of `DataFrame.attrs` under which a table carries what was read how."""
PF_DAY = 1e15 * 86400
"""FLOPs of a petaFLOP/s-day (Kaplan et al. 2001.08361, sec. 1.3)."""
COUNTS = ("n_params", "n_tokens")
_FACTORS = {
    "k": 1e3,
    "thousand": 1e3,
    "m": 1e6,
    "million": 1e6,
    "b": 1e9,
    "g": 1e9,
    "billion": 1e9,
    "t": 1e12,
    "trillion": 1e12,
}
_COUNT = re.compile(r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d[\d_]*(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-z]*)", re.IGNORECASE)
_HEADER = re.compile(r"(?:(.+?)_(?:in_)?)(k|m|b|g|t|thousand|million|billion|trillion)s?_*")
_PF_DAYS = re.compile(r"(?:.*_)?(?:pf|pflops?|petaflops?)(?:_s)?_?days?_*")
_COMPUTE = ("compute_flops", "flops", "total_flops", "train_flops", "training_flops", "compute", "c")


def as_found(table: pd.DataFrame) -> pd.DataFrame:
    """The table with plain columns n_params, n_tokens, loss where they can be derived, and notes on how in its `attrs`.

    Raises:
        ValueError: a column in millions, say, holds a value with a unit of its own.
    """
    table, notes = table.copy(deep=False), []
    for column in (*COUNTS, "loss"):
        if column in table:
            continue
        found = [(name, factor) for name in table.columns if (factor := _factor(str(name), column)) is not None]
        if len(found) == 1:
            name, factor = found[0]
            table = table.rename(columns={name: column})
            notes.append(f"{column} is column {name}" + (f", in units of {factor:.0e}" if factor != 1 else ""))
            if column in COUNTS:
                table[column] = _scaled(table, column, str(name), factor)
    for column in COUNTS:
        if column in table and (cells := _read(table[column])) is not None:
            first = next(cell for cell in table[column] if isinstance(cell, str))
            notes.append(f"{column} is text such as {first!r}, read as counts")
            table[column] = cells
    if "n_params" in table and "n_tokens" not in table:
        _tokens_of_compute(table, notes)
    table.attrs[NOTES] = tuple(notes)
    return table


def _factor(name: str, column: str) -> float | None:
    """The unit of a column that is another name of one of ours; None if it is none."""
    own = {column, *OTHER_NAMES[column].split()}
    if plain(name).strip("_") in own:
        return 1.0
    of_unit = _HEADER.fullmatch(plain(name)) if column in COUNTS else None
    return _FACTORS[of_unit[2]] if of_unit and of_unit[1].strip("_") in own else None


def _scaled(table: pd.DataFrame, column: str, name: str, factor: float) -> pd.Series:
    if factor == 1:
        return table[column]
    for number, cell in enumerate(table[column]):
        if isinstance(cell, str) and np.isnan(or_nan(cell.replace(",", ""))):
            raise ValueError(f"{name} must hold numbers, got {cell!r} in row {row_name(table, number)}")
    return factor * pd.Series([or_nan(str(cell).replace(",", "")) for cell in table[column]], index=table.index)


def _read(cells: pd.Series) -> list[object] | None:
    """Cells with text that is a count as its number; None where no cell is such text."""
    found = [_COUNT.fullmatch(cell.strip()) if isinstance(cell, str) else None for cell in cells]
    factors = [_FACTORS.get(match[2].lower().removesuffix("s") or "") if match and match[2] else 1.0 for match in found]
    read = [match is not None and factor is not None for match, factor in zip(found, factors, strict=True)]
    if not any(read):
        return None
    return [
        float(match[1].replace(",", "").replace("_", "")) * factor if match and factor else cell
        for match, factor, cell in zip(found, factors, cells, strict=True)
    ]


def _tokens_of_compute(table: pd.DataFrame, notes: list[str]) -> None:
    """Tokens from the one column of compute, in FLOPs or PF-days."""
    names = {name: plain(str(name)).strip("_") for name in table.columns}
    by_unit = {name: PF_DAY for name, text in names.items() if _PF_DAYS.fullmatch(text)}
    by_unit |= {name: 1.0 for name, text in names.items() if text in _COMPUTE}
    if len(by_unit) != 1:
        return
    ((name, unit),) = by_unit.items()
    flops = unit * np.array([or_nan(cell) for cell in table[name]])
    params = np.array([or_nan(cell) for cell in table["n_params"]])
    with np.errstate(all="ignore"):
        table["n_tokens"] = flops / (FLOPS_PER_PARAM_TOKEN * params)
    in_days = ", a PF-day of 8.64e19 FLOPs" if unit == PF_DAY else ""
    notes.append(f"n_tokens is {name} / (6·n_params), as no column has it: C = 6·N·D is taken for granted{in_days}")
