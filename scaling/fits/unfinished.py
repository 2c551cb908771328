"""Rows without a loss (of crashed, diverged or unfinished runs), which every table of runs leaves out and names."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.checks import plain, require_columns, row_name
from scaling.fits.as_found import NOTES

NO_LOSS = "no loss: the run crashed, diverged or has not ended"
MOST_WITHOUT_LOSS = 0.5
"""Share of rows without a loss above which the column is taken to be the wrong one (assumed)."""
_UNFINISHED = ("crashed", "failed", "killed", "running", "preempting", "preempted")
"""States of runs that did not end as planned, as W&B and others write them."""
STATES = ("state", "status")
"""Names of columns of such states, without capitals and punctuation."""
MOST_NAMED = 5
"""Most rows that a note names."""


def finished(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Return the rows that have a loss in each of these columns; a note in the table's `attrs` names the others.

    Raises:
        ValueError: a column is missing, or more than MOST_WITHOUT_LOSS of the rows have no loss in it.
    """
    require_columns(rows, columns)
    without = np.unique(np.concatenate([without_loss(rows, column) for column in columns]))
    kept = rows.iloc[np.setdiff1d(np.arange(len(rows)), without)]
    kept.attrs = {**rows.attrs, NOTES: (*rows.attrs.get(NOTES, ()), *note_of(rows, without))}
    return kept


def without_loss(rows: pd.DataFrame, column: str = "loss", among: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """Numbers of the rows whose cell is empty, NaN or infinite; losses of crashed runs are exported like that.

    Args:
        among: mask [K] of the rows to check; by default all.

    Raises:
        ValueError: more than MOST_WITHOUT_LOSS of the checked rows have no loss.
    """
    empty = np.array([_is_empty(cell) for cell in rows[column]], dtype=bool)
    asked = np.ones(len(rows), dtype=bool) if among is None else among
    without = np.flatnonzero(asked & empty)
    if len(without) > MOST_WITHOUT_LOSS * (given := int(asked.sum())):
        raise ValueError(
            f"{column} must be a number in at least {MOST_WITHOUT_LOSS:.0%} of the rows, {len(without)} of {given} have none, the "
            f"first is row {row_name(rows, int(without[0]))}: name the right column {column}, or drop runs that have not ended"
        )
    return without


def note_of(rows: pd.DataFrame, without: NDArray[np.intp]) -> tuple[str, ...]:
    """Return a sentence that names the rows without a loss; none if there are no such rows."""
    if not without.size:
        return ()
    named = ", ".join(row_name(rows, number) for number in without[:MOST_NAMED])
    more = f" and {len(without) - MOST_NAMED} more" if len(without) > MOST_NAMED else ""
    return (f"rows without a loss ({named}{more}) are of runs that crashed, diverged or have not ended: left out",)


def unfinished_states(rows: pd.DataFrame) -> tuple[str, ...]:
    """Return a warning if some of the rows have a state, as W&B exports it, of runs that did not finish."""
    for column in rows.columns:
        if plain(str(column)).strip("_") in STATES:
            stated = rows[column].astype(str).str.lower()
            broken = stated.isin(_UNFINISHED)
            if broken.any() and not broken.all():
                first = int(broken.to_numpy().argmax())
                return (
                    f"{broken.sum()} of {len(rows)} runs have the {column} {rows[column].iloc[first]} (row {row_name(rows, first)}): "
                    "their losses may be those of unfinished runs; drop them, or give the reason in a column left_out",
                )
    return ()


def _is_empty(loss: object) -> bool:
    if isinstance(loss, str):
        return loss.strip().lower() in ("", "nan", "inf", "infinity")  # wandb writes them so into JSON
    return pd.api.types.is_scalar(loss) and (pd.isna(loss) or loss == math.inf)
