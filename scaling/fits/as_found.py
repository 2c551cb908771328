"""Tables of runs as users have them: other names, counts in millions or as "1.3B" or "47,557,632", compute instead of tokens.

Unambiguous columns are converted, with a note. Other columns stay unchanged for the later checks, which name column, row and value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from scaling.checks import COLUMNS, FOUND_AS, OTHER_NAMES, or_nan, plain, renamed, row_name
from scaling.forms.law import FLOPS_PER_PARAM_TOKEN

NOTES = "notes"
"""Key of `DataFrame.attrs` of the notes on how columns were read."""
UNIT = "loss_unit"
"""Key of `DataFrame.attrs` of the loss unit that the name of the loss column states."""
PER_BYTE = "bits per byte"
BYTES = "bytes_per_token"
"""Column that converts bits per byte to nats per token."""
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
TOTAL = "n_params_total total_params n_total_params total_parameters n_total"
"""Names of columns with all parameters, without capitals and punctuation."""
_PF_DAYS = re.compile(r"(?:.*_)?(?:pf|pflops?|petaflops?)(?:_s)?_?days?_*")
_RATIO = ("tokens_per_param", "tokens_per_parameter", "d_n")
_PREFIXES = ["", *"kmgtpezy", "kilo", "mega", "giga", "tera", "peta", "exa", "zetta", "yotta"]
_PREFIX = dict(zip(_PREFIXES, [1.0, *(1000.0**k for k in range(1, 9)), *(1000.0**k for k in range(1, 9))], strict=True))
_OF_RUN = "total|cumulative|training|pretraining|compute"
_COMPUTE = re.compile(
    rf"((?:(?:{_OF_RUN}|train|c|in)_)*?)(?:({'|'.join(_PREFIX)})flops?|compute|c)(?:_({_OF_RUN}|used))?"
    r"(?:_(?:x_)?(?:1?e_?|10_)(\d+)(?:_flops?)?)?"
)
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})


def as_found(table: pd.DataFrame, columns: Mapping[str, str] = NO_COLUMNS) -> pd.DataFrame:
    """Return the table with plain columns n_params, n_tokens, loss as far as they can be derived, and notes in its `attrs`.

    Args:
        columns: The caller's names of columns, by ours: `{"loss": "c4_loss"}`.

    Raises:
        ValueError: a cell states a unit although its column's name states one, or a column that the caller names is missing.
    """
    table, notes = table.copy(deep=False), [*table.attrs.get(NOTES, ())]
    if levels := [name for name in table.index.names if name is not None and name not in table]:
        table = table.reset_index(levels)  # a groupby leaves such levels
    table.attrs[COLUMNS] = [*map(str, table.columns)]
    table = _as_stated(table, columns, notes)
    for column in (*COUNTS, "loss"):
        if column in table:
            continue
        named = [(name, factor) for name in table.columns if (factor := _factor(str(name), column)) is not None]
        if len(named) == 1:
            name, factor = named[0]
            if column == "n_params":
                _require_no_total(table, str(name))
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
        if column in table and (cells := read_counts(table[column])) is not None:
            first = next(cell for cell in table[column] if isinstance(cell, str))
            notes.append(f"{column} is text such as {first!r}, read as counts")
            table[column] = cells
    known = [name for name in (*COUNTS, "loss") if name in table]
    if len(known) > 1 and (empty := table[known].isna().all(axis=1)).any() and not empty.all():
        table = table[~empty]
        notes.append(f"{empty.sum()} rows without {', '.join(known)} were skipped")
    _counts_of_others(table, notes)
    if (
        BYTES not in table
        and len(found := [name for name in table.columns if plain(str(name)).strip("_") == BYTES]) == 1
    ):
        table = renamed(table, found[0], BYTES)
    table.attrs[NOTES] = tuple(notes)
    return table


def _require_no_total(table: pd.DataFrame, name: str) -> None:
    """Raise ValueError if the column leaves embeddings out, and another has the count that includes them."""
    totals = [each for each in table.columns if plain(str(each)).strip("_") in TOTAL.split()]
    if "embedding" in plain(name) and totals:
        raise ValueError(
            f"n_params may be column {name} or {totals[0]}: name the one that n_params_convention means, as "
            f"columns={{'n_params': {name!r}}} or --params {name}"
        )


def compute_unit(name: str) -> float | None:
    """Return the unit of a column of a run's compute, in FLOPs; None if the column holds no compute.

    A bare "TFLOPs" does not count as compute, as it is often a speed.
    """
    if _PF_DAYS.fullmatch(plain(name).strip("_")):
        return PF_DAY
    found = _COMPUTE.fullmatch(plain(re.split(r"[/.]", name)[-1] or name).strip("_"))
    if found is None:
        return None
    words, prefix, after, power = found.groups()
    if prefix and not re.search(_OF_RUN, f"{words}{after}") and _PREFIX[prefix] < _PREFIX["exa"]:
        return None
    return float(_PREFIX[prefix or ""] * 10.0 ** int(power or 0))


def _as_stated(table: pd.DataFrame, columns: Mapping[str, str], notes: list[str]) -> pd.DataFrame:
    """Return the table with the caller's columns under our names; drop other columns of these names."""
    for column, name in columns.items():
        if (times := int((table.columns == name).sum())) != 1:
            raise ValueError(
                f"{column} must be a column that occurs once in the table, got {name!r}, which it has {times} times; "
                f"the columns are {', '.join(map(str, table.columns))}"
            )
    if len({*columns.values()}) < len(columns):
        raise ValueError(
            f"columns must differ, got {', '.join(f'{name} for {column}' for column, name in columns.items())}"
        )
    aside = {*columns, *(("stem",) if "run" in columns else ())} - {*columns.values()}
    table = table.drop(columns=[name for name in table.columns if name in aside])
    table = table.rename(columns={name: column for column, name in columns.items()})
    table.attrs[FOUND_AS] = {**table.attrs.get(FOUND_AS, {}), **columns}
    for column, name in columns.items():
        of_unit = _HEADER.fullmatch(plain(str(name))) if column in COUNTS and name != column else None
        factor = _FACTORS[of_unit[2]] if of_unit else 1.0
        if column in COUNTS:
            table[column] = _scaled(table, column, str(name), factor)
        if column == "loss" and _BITS_PER_BYTE.fullmatch(plain(str(name))):
            table.attrs[UNIT] = PER_BYTE
        if name != column:
            notes.append(f"{column} is column {name}" + (f", in units of {factor:.0e}" if factor != 1 else ""))
    return table


def _factor(name: str, column: str) -> float | None:
    """Return the unit of a column whose name means our `column`; None if it does not."""
    own = {column, *OTHER_NAMES[column].split()}
    if column in COUNTS:
        name = re.split(r"[/.]", name)[-1] or name  # wandb's "train/tokens_seen" and "model.n_params"
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


def read_counts(cells: pd.Series) -> list[object] | None:
    """Return the cells with counts in text as numbers; None if no cell is such text."""
    found = [_COUNT.fullmatch(cell.strip()) if isinstance(cell, str) else None for cell in cells]
    factors = [_FACTORS.get(match[2].lower().removesuffix("s") or "") if match and match[2] else 1.0 for match in found]
    read = [match is not None and factor is not None for match, factor in zip(found, factors, strict=True)]
    if not any(read):
        return None
    return [
        float(match[1].replace(",", "").replace("_", "")) * factor if match and factor else cell
        for match, factor, cell in zip(found, factors, cells, strict=True)
    ]


def _counts_of_others(table: pd.DataFrame, notes: list[str]) -> None:
    """Fill in missing N or D from the other one and the only column of compute (FLOPs or PF-days) or of D/N."""
    units = {name: unit for name in table.columns if (unit := compute_unit(str(name))) is not None}
    ratios = [name for name in table.columns if plain(str(name)).strip("_") in _RATIO]
    if len(units) + len(ratios) != 1:
        return
    name, unit = next(iter(units.items()), (*ratios, 1.0))
    by = np.array([or_nan(cell) for cell in table[name]])
    for column, other in (("n_tokens", "n_params"), ("n_params", "n_tokens")):
        without = table[column].isna() if column in table else pd.Series(True, table.index)
        if other not in table or not without.any():
            continue
        known = np.array([or_nan(cell) for cell in table[other]])
        with np.errstate(all="ignore"):
            if units:
                counts, note = unit * by / (FLOPS_PER_PARAM_TOKEN * known), f"{name} / (6·{other})"
                note += ": C = 6·N·D is assumed"
                note += (
                    ", a PF-day of 8.64e19 FLOPs" if unit == PF_DAY else f", in units of {unit:.0e} FLOPs" * (unit != 1)
                )
            elif column == "n_tokens":
                counts, note = known * by, f"{name} · {other}"
            else:
                counts, note = known / by, f"{other} / {name}"
        if column in table:
            table[column] = table[column].astype(object).where(~without, counts)
            notes.append(f"{column} of {without.sum()} rows that have none is {note}")
        else:
            table[column] = counts
            notes.append(f"{column} is {note}; no column has it")
