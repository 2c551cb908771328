"""Runs of a comparison, as checked rows: one loss per finished run, all in one unit, with notes on what was left out."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.checks import FOUND_AS, losses, names, numbers, plain, renamed, require_columns, require_distinct
from scaling.fits.as_found import BYTES, NOTES, PER_BYTE, UNIT, compute_unit
from scaling.fits.checkpoints import RUNS, STEPS, checkpoints, short_names
from scaling.fits.recipes import is_recipe
from scaling.fits.runs import MID_RUN, VOCABULARY, counts, omitted, to_nats, without_stated
from scaling.fits.unfinished import STATES, unfinished_states
from scaling.forms.law import NATS, compute_flops

_LEAST_SPAN = 1.5
"""Least ratio of the baseline's largest to its smallest compute at which a rise of its loss is no effect of D/N (assumed)."""
_MOST_RISE = 4.0
"""Largest rise of the baseline's log loss over its runs, in standard deviations of the noise, that counts as noise (assumed)."""
_OTHER_LENGTH = 1.5
"""Least ratio of neighbouring computes under one label of `size` at which they belong to runs of other lengths (assumed)."""
_OTHER_NAMES: dict[str, tuple[str, ...]] = {"variant": ("arm", "recipe", "method", "optimizer"), "size": (), "seed": ()}
"""Names of our columns in other tables, without capitals and punctuation."""
_TOKENIZERS = (VOCABULARY, "tokenizer")
"""Columns whose values distinguish tokenizers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VariantRuns:
    """Checked rows.

    Attributes:
        rows: the columns variant, size ("" without labels), flops, loss, and seed if there are any.
        unit: unit of the losses; empty if it was not stated.
        notes: how columns were read, and which rows were left out.
        warnings: reasons why the rows may hold something else.
    """

    rows: pd.DataFrame
    unit: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def variant_runs(rows: pd.DataFrame, baseline: str, unit: str) -> VariantRuns:
    """Check a table, leave out what `scaling.fit` leaves out, and convert losses of several tokenizers to bits per byte.

    Args:
        unit: unit of the losses; empty: the unit that the column's name states, if it states one.

    Raises:
        ValueError: a column is missing or breaks its rule, a finished run is listed twice, no row is left, or losses are per
            token of several tokenizers.
    """
    unit = unit or rows.attrs.get(UNIT, "")
    rows = _with_our_names(without_stated(rows))
    if not len(rows):
        raise ValueError(f"need at least one run, got none; {'; '.join(rows.attrs[NOTES])}")
    names(rows, "variant")
    flops = _flops(rows)
    earlier, doubts = _earlier(rows, flops)
    left_out = omitted(pd.Series([MID_RUN] * earlier.sum(), dtype=object))
    rows, flops = rows[~earlier], flops[~earlier]
    require_distinct(rows[rows["loss"].notna()])
    loss, found_unit = _in_one_unit(rows, unit)
    found = pd.DataFrame({"variant": names(rows, "variant"), "size": "", "flops": flops, "loss": loss})
    found["size"] = _labels(rows, found) if "size" in rows else _shapes(rows, found, baseline)
    found = found.assign(seed=rows["seed"].to_numpy()) if "seed" in rows else found
    _refuse_split(rows, found)
    converted = f"losses per token are converted to {PER_BYTE}, as {BYTES} differs" if found_unit != unit else ""
    return VariantRuns(
        rows=found,
        unit=found_unit,
        notes=(*rows.attrs.get(NOTES, ()), *filter(None, (left_out, converted))),
        warnings=(*doubts, *unfinished_states(rows)),
    )


def _with_our_names(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the table with its columns variant, size, seed and compute_flops (in FLOPs) under these names."""
    for column, others in _OTHER_NAMES.items():
        called = {name: plain(str(name)) for name in rows}
        own = [name for name in called if called[name] == column]
        named = own or [name for name in called if called[name] in others]
        if column not in rows and len(named) == 1:
            rows = renamed(rows, named[0], column)
    units = {name: unit for name in rows if (unit := compute_unit(str(name))) is not None}
    if "compute_flops" not in rows and len(units) == 1:
        ((name, unit),) = units.items()
        rows = renamed(rows, name, "compute_flops")
        rows["compute_flops"] = unit * numbers(rows, "compute_flops")
    require_columns(rows, ("variant", "loss"))
    return rows


def _flops(rows: pd.DataFrame) -> Array:
    if "compute_flops" in rows:
        return numbers(rows, "compute_flops")
    require_columns(rows, ("n_params", "n_tokens"))
    return np.asarray(compute_flops(counts(rows, "n_params"), counts(rows, "n_tokens")))


def _earlier(rows: pd.DataFrame, flops: Array) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    """Return the rows that are surely earlier checkpoints of a variant's run, [K], and a warning about other rows that seem so.

    A run has one size: one n_params or label, or one compute per step. Where none of these is known, or a label has one value for
    the whole variant, rows may be separate runs.
    """
    rows, short = rows.reset_index(drop=True), short_names(rows)
    named = "run" in rows.attrs.get(FOUND_AS, {})
    steps = [pd.to_numeric(rows[name], errors="coerce") for name in rows if short[name] in STEPS and not named]
    sizes = [rows[name] for name in ("n_params", "size") if name in rows and rows[name].notna().all()]
    sizes += [np.log(flops / step).round(2) for step in steps if (step > 0).all()]
    size = sizes[0] if sizes else pd.Series(0, rows.index)
    length = pd.to_numeric(rows["n_tokens"], errors="coerce") if "n_tokens" in rows else pd.Series(flops)
    length = length if length.notna().all() else pd.Series(flops)
    earlier, doubtful = np.zeros(len(rows), dtype=bool), dict[Hashable, None]()
    for at in rows.groupby("variant").indices.values():
        shared = checkpoints(rows.iloc[at], size.iloc[at], length.iloc[at])
        if shared is None or ("annealed" in rows and not named):
            continue
        is_variant = len(set(shared.run)) == 1 and short[shared.column] not in RUNS
        if named or (shared.certain and sizes and not is_variant):
            earlier[at[shared.earlier]] = True
        else:
            doubtful[shared.column] = None
    return earlier, tuple(
        f"rows of one {column} seem to be checkpoints of one training run, read in mid-schedule, yet count as separate runs: keep "
        "the last of each run, or name the column of runs as columns={'run': …}"
        for column in doubtful
    )


def _in_one_unit(rows: pd.DataFrame, unit: str) -> tuple[Array, str]:
    """Return losses (NaN: diverged) and their unit: bits per byte if the runs have several means of bytes per token.

    Raises:
        ValueError: a finished run has no mean, or there is no such column and the runs have several tokenizers.
    """
    loss = losses(rows)
    factor, of = to_nats(unit or NATS)
    finished = np.isfinite(loss)
    ended = rows[finished]
    if of != NATS:
        return loss, unit
    if BYTES in rows:
        if ended[BYTES].nunique(dropna=False) < 2:
            return loss, unit
        loss[finished] *= factor / (math.log(2) * numbers(ended, BYTES))
        return loss, PER_BYTE
    for column, short in short_names(rows).items():
        values = ended[column].dropna().astype(str).unique().tolist()
        if short in _TOKENIZERS and len(values) > 1:
            raise ValueError(
                f"column {column!r}: losses per token of several tokenizers can't be compared, got {values[:5]}; give losses in "
                f"{PER_BYTE}, add a column {BYTES} (of the held-out text), or drop the column if all runs have one tokenizer"
            )
    return loss, unit


def _refuse_split(rows: pd.DataFrame, found: pd.DataFrame) -> None:
    """Raise ValueError if a column, such as an evaluation set, differs between runs of one variant, size and seed."""
    finished = found["loss"].notna().to_numpy()
    rows, found = rows[finished].reset_index(drop=True), found[finished].reset_index(drop=True)
    same = ["variant", "size", "flops"]
    cell = found.groupby(same).ngroup()
    repeats = found.groupby([*same, "seed"], dropna=False).ngroup() if "seed" in found else cell
    for column in rows.columns.difference([*_MEASURED, *STATES], sort=False):
        values = rows[column].astype(str)
        tuned = is_recipe(column)  # runs with different rates are no repeats
        within = values.groupby(cell if tuned else repeats).transform("nunique") > 1
        recurs = cell.groupby(values).nunique().median() > 1  # a run identifier or another metric does not
        if within.any() and (tuned or recurs):
            name = found.loc[within, "variant"].iloc[0]
            raise ValueError(
                f"column {column!r}: runs of one variant and size must be repeats; got {name!r} at one size with "
                f"several of {sorted(set(values[within]))[:5]}; keep one value, or name the column seed if they are repeats"
            )


_MEASURED = ("variant", "size", "compute_flops", "n_params", "n_tokens", "loss", "seed")


def refuse_rising(own: pd.DataFrame, baseline: str, noise: float) -> None:
    """Raise ValueError if the baseline's metric rises with compute by more than the noise: such a metric is no loss."""
    own = own[own["loss"].notna()]
    x, y = np.log(own["flops"].to_numpy()), np.log(own["loss"].to_numpy())
    if len(own) < 2 or np.ptp(x) < math.log(_LEAST_SPAN):
        return
    rise = float(np.polyfit(x, y, 1)[0] * np.ptp(x))
    if rise > _MOST_RISE * noise:
        raise ValueError(
            f"loss must fall with compute; that of {baseline!r} rises by {math.expm1(rise):.1%} from {math.exp(x.min()):.2g} to "
            f"{math.exp(x.max()):.2g} FLOPs; if higher is better, pass the distance from the best value, such as 1 - accuracy"
        )


def _labels(rows: pd.DataFrame, found: pd.DataFrame) -> pd.Series[str]:
    """Return the label of each row; where a label has several lengths, with the number of the length."""
    label = pd.Series(rows["size"].astype(str).to_numpy(), index=found.index)
    ordered = np.log(found["flops"]).groupby(label).apply(pd.Series.sort_values).droplevel(0)
    steps = (ordered.groupby(label[ordered.index]).diff() > math.log(_OTHER_LENGTH)).groupby(label[ordered.index])
    lengths = steps.cumsum().reindex(found.index)
    several = lengths.groupby(label).transform("max") > 0
    return label.where(~several, label + " at length " + lengths.astype(str))


def _shapes(rows: pd.DataFrame, found: pd.DataFrame, baseline: str) -> pd.Series[str]:
    """Return N and D as a label of each row at a size of the baseline, "" for other rows.

    Runs of equal 6ND but unequal N and D have different losses, so they must not be averaged or paired. A row without one of the two
    has no label; a table without one of them has the other as labels if the baseline has a single compute at each.
    """
    named = [column for column in ("n_params", "n_tokens") if column in rows]
    computes, is_baseline = found["flops"].map("{:.3g}".format), found["variant"] == baseline
    if not named:
        return pd.Series("", found.index)
    counts = pd.DataFrame(
        {column: pd.to_numeric(rows[column], errors="coerce").to_numpy() for column in named}, found.index
    )
    shape = counts.map("{:g}".format).agg(" ".join, axis=1).where(np.isfinite(counts).all(axis=1), "")
    if len(named) == 1 and computes[is_baseline].groupby(shape[is_baseline]).nunique().max() > 1:
        return pd.Series("", found.index)
    own = shape[is_baseline & (shape != "")]
    shared = own.groupby(computes).nunique().max() > 1
    strays = found.loc[~shape.isin(own), "variant"]
    if shared and len(strays):
        raise ValueError(
            f"{baseline!r} has several n_params and n_tokens at one compute, so each variant must have runs at the "
            f"baseline's n_params and n_tokens; got others for {strays.iloc[0]!r}; add a column size that pairs the runs"
        )
    return shape.where(shape.isin(own), "")
