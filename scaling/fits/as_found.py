"""Tables of runs as they are found: other names, counts in millions or as "1.3B" or "47,557,632", compute for tokens.

What is unambiguous is read and noted; what is not stays as it is, for the checks that name a column, its row and its value.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from scaling.checks import OTHER_NAMES, or_nan, plain, renamed, row_name
from scaling.forms.law import FLOPS_PER_PARAM_TOKEN

NOTES = "notes"
"""Key of `DataFrame.attrs` under which a table carries what was read how."""
UNIT = "loss_unit"
"""Key of `DataFrame.attrs` of the unit that the name of the column of losses states."""
PER_BYTE = "bits per byte"
BYTES = "bytes_per_token"
"""Column by which bits per byte become nats per token."""
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
_BITS_PER_BYTE = re.compile(r"(?:(?:final|val|validation|eval|test)_)?(?:bpb|bits_per_byte)_*")
_COUNT = re.compile(
    r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d[\d_]*(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-z]*?)(?:\s*\b(?:tokens|tok|params|parameters))?",
    re.IGNORECASE,
)
_HEADER = re.compile(r"(?:(.+?)_(?:in_)?)(k|m|b|g|t|thousand|million|billion|trillion)s?_*")
_PF_DAYS = re.compile(r"(?:.*_)?(?:pf|pflops?|petaflops?)(?:_s)?_?days?_*")
_RATIO = ("tokens_per_param", "tokens_per_parameter", "d_n")
COMPUTE = ("compute_flops", "flops", "total_flops", "train_flops", "training_flops", "compute", "c")


def as_found(table: pd.DataFrame) -> pd.DataFrame:
    """The table with plain columns n_params, n_tokens, loss where they can be derived, and notes on how in its `attrs`.

    Raises:
        ValueError: a column in millions, say, holds a value with a unit of its own.
    """
    table, notes = table.copy(deep=False), [*table.attrs.get(NOTES, ())]
    if levels := [name for name in table.index.names if name is not None and name not in table]:
        table = table.reset_index(levels)  # such as a groupby leaves
    for column in (*COUNTS, "loss"):
        if column in table:
            continue
        named = [(name, factor) for name in table.columns if (factor := _factor(str(name), column)) is not None]
        if len(named) == 1:
            name, factor = named[0]
            table = renamed(table, name, column)
            notes.append(f"{column} is column {name}" + (f", in units of {factor:.0e}" if factor != 1 else ""))
            if column in COUNTS:
                table[column] = _scaled(table, column, str(name), factor)
    if (
        "loss" not in table
        and len(found := [name for name in table.columns if _BITS_PER_BYTE.fullmatch(plain(str(name)))]) == 1
    ):
        table = renamed(table, found[0], "loss")
        table.attrs[UNIT] = PER_BYTE
        notes.append(f"loss is column {found[0]}, in {PER_BYTE}")
    for column in COUNTS:
        if column in table and (cells := _read(table[column])) is not None:
            first = next(cell for cell in table[column] if isinstance(cell, str))
            notes.append(f"{column} is text such as {first!r}, read as counts")
            table[column] = cells
    known = [name for name in (*COUNTS, "loss") if name in table]
    if len(known) > 1 and (empty := table[known].isna().all(axis=1)).any() and not empty.all():
        table = table[~empty]
        notes.append(f"{empty.sum()} rows without {', '.join(known)} were skipped")
    if "n_params" in table:
        _tokens_of_others(table, notes)
    if (
        BYTES not in table
        and len(found := [name for name in table.columns if plain(str(name)).strip("_") == BYTES]) == 1
    ):
        table = renamed(table, found[0], BYTES)
    table.attrs[NOTES] = tuple(notes)
    return table


def _factor(name: str, column: str) -> float | None:
    """The unit of a column that is another name of one of ours; None if it is none."""
    own = {column, *OTHER_NAMES[column].split()}
    if column in COUNTS:
        name = re.split(r"[/.]", name)[-1] or name  # of wandb's "train/tokens_seen" and "model.n_params"
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


def _tokens_of_others(table: pd.DataFrame, notes: list[str]) -> None:
    """Tokens where a row has none, from the one column of compute, in FLOPs or PF-days, or of D/N."""
    without = table["n_tokens"].isna() if "n_tokens" in table else pd.Series(True, table.index)
    names = {name: plain(str(name)).strip("_") for name in table.columns}
    by_unit = {name: PF_DAY for name, text in names.items() if _PF_DAYS.fullmatch(text)}
    by_unit |= {name: 1.0 for name, text in names.items() if text in COMPUTE}
    ratios = [name for name, text in names.items() if text in _RATIO]
    if not without.any() or len(by_unit) + len(ratios) != 1:
        return
    params = np.array([or_nan(cell) for cell in table["n_params"]])
    if ratios:
        (name,) = ratios
        tokens, note = params * np.array([or_nan(cell) for cell in table[name]]), f"{name} · n_params"
    else:
        ((name, unit),) = by_unit.items()
        with np.errstate(all="ignore"):
            tokens = unit * np.array([or_nan(cell) for cell in table[name]]) / (FLOPS_PER_PARAM_TOKEN * params)
        in_days = ", a PF-day of 8.64e19 FLOPs" if unit == PF_DAY else ""
        note = f"{name} / (6·n_params): C = 6·N·D is taken for granted{in_days}"
    if "n_tokens" in table:
        table["n_tokens"] = table["n_tokens"].astype(object).where(~without, tokens)
        notes.append(f"n_tokens of {without.sum()} rows that have none is {note}")
    else:
        table["n_tokens"] = tokens
        notes.append(f"n_tokens is {note}; no column has it")
