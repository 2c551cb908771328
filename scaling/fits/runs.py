"""Runs that a law is fitted to: a table or a file, its columns checked, with left-out rows, warnings and assumptions.

Every function that takes a ladder reads the ladder here, so that the same table means the same everywhere.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.checks import LEAVE_OUT, column_name, numbers, or_nan, positive, require_columns, require_filled, row_name
from scaling.fits.as_found import BYTES, NO_COLUMNS, NOTES, PER_BYTE, UNIT, as_found
from scaling.fits.checkpoints import SharedRuns, checkpoints
from scaling.fits.recipes import worse_recipes
from scaling.fits.support import MOST_NATS
from scaling.fits.unfinished import NO_LOSS, note_of, unfinished_states, without_loss
from scaling.fits.units import rows_in_bits
from scaling.forms.law import NATS, compute_flops
from scaling.forms.spending import UNIQUE

Table: TypeAlias = pd.DataFrame | Sequence[Mapping[str, Any]] | str | os.PathLike[str]
"""A table of runs, a list of dicts, or the path of one: Parquet, CSV, TSV or JSON Lines."""
BITS = "bits per token"
UNITS = {
    NATS: "nats nats/token nats_per_token nat/token nat",
    BITS: "bits bits/token bits_per_token bit/token bit",
    PER_BYTE: "bpb bits/byte bits_per_byte",
}
"""Other spellings of units."""
UNIT_ASSUMED = "the losses are nats per token, as no loss_unit was given: bits per token would not show in the numbers"
LEAST_COUNT = 1000.0
"""Smallest count of parameters or tokens; a smaller number is in millions or billions (assumed)."""
MOST_COUNT = 1e30
"""Largest count (assumed); the FLOPs of both at this bound are still finite."""
COUNTED = ("n_params", "n_tokens", UNIQUE)
"""Columns of counts."""
RATIO = (1e-2, 1e5)
"""Range of the median D/N; outside, N and D are taken to be in different units (assumed; public ladders: 4 to 185)."""
FLOPS_FACTOR = 3.0
"""Median factor between compute and 6·N·D, either way, that raises a warning: attention and embeddings explain less (assumed)."""
VOCABULARY = "vocab_size"
RUN_NAMES = ("run", "run_name", "run_id")
"""Columns that name the training run of a row if there is no `stem`."""
LEAST_LOSS = 1e-30
"""Smallest loss, far below any real one: a fit weighs rows by 1/loss², and sums of these weights have to fit into float64."""
UNANNEALED = "not annealed: a loss in mid-schedule lies on another surface"
MID_RUN = "in mid-schedule: a later row of the same run was kept"
OPTIONAL = ("stem", "regret", "annealed", "left_out", "noise", "compute_flops")
ASSUMED = {
    "annealed": "every loss is that of an annealed run (no column annealed)",
    "regret": "every run is tuned (no column regret)",
    "stem": "every row is a separate training run, except repeats of another in every column (no column stem)",
}
"""Assumption for each missing column."""
_MOST_REASONS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """Checked rows.

    Attributes:
        rows: rows to fit: n_params, n_tokens, further columns of the form, loss, noise (if given), stem; float64 except the
            stem, sorted by n_params, n_tokens and loss; the index is the caller's.
        left_out: the other rows, with a `reason`.
        compute_flops: compute of `rows` from the table's column, else 6·N·D.
        assumptions: assumptions about the runs that no column states.
    """

    rows: pd.DataFrame
    left_out: pd.DataFrame
    compute_flops: Array
    loss_unit: str
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def omitted(self) -> str:
        """The rows left out and their reasons, in words; empty if none were."""
        return omitted(self.left_out["reason"])


def omitted(reasons: pd.Series) -> str:
    """Return the number of rows left out, with the first reason of each kind, most frequent first; empty if none were."""
    if not len(reasons):
        return ""
    kinds = reasons.groupby(reasons.str.replace(r"[\d.,]+", "#", regex=True), sort=False)
    counts = sorted(((len(kind), kind.iloc[0]) for _, kind in kinds), key=lambda pair: -pair[0])
    named = [f"{n} because {why}" for n, why in counts[:_MOST_REASONS]]
    if rest := sum(n for n, _ in counts[_MOST_REASONS:]):
        named.append(f"{rest} for other reasons")
    return f"{len(reasons)} rows were left out: " + "; ".join(named)


def read_table(runs: Table) -> pd.DataFrame:
    """Return the table, or the contents of its file; raise ValueError if it can't be read or has no plain columns."""
    if isinstance(runs, pd.DataFrame):
        if (levels := runs.columns.nlevels) > 1:
            raise ValueError(
                f"the columns of runs must have one level of names, got {levels}, such as {runs.columns[0]!r}"
            )
        return runs
    if (
        isinstance(runs, Sequence)
        and not isinstance(runs, str)
        and runs
        and all(isinstance(run, Mapping) for run in runs)
    ):
        return pd.DataFrame([*runs])
    if not isinstance(runs, str | os.PathLike):
        raise ValueError(f"runs must be a DataFrame, a list of dicts or the path of a table, got {type(runs).__name__}")
    path = Path(runs)
    if path.suffix.lower() not in _READERS:
        raise ValueError(f"{path}: the file's name must end in {', '.join(_READERS)}, got {path.suffix or 'no suffix'}")
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    try:
        return _READERS[path.suffix.lower()](path)
    except Exception as error:  # readers raise errors of any class for a broken file
        raise ValueError(f"{path}: can't be read as a table: {str(error) or type(error).__name__}") from error


def read_runs(runs: Table, columns: Mapping[str, str] = NO_COLUMNS) -> pd.DataFrame:
    """Return the table with columns renamed to ours (`scaling.fits.as_found`).

    Args:
        columns: The caller's names of columns, by ours.

    Raises:
        ValueError: for the reasons of `read_table` and `as_found`.
    """
    table = read_table(runs)
    with naming(runs):
        return as_found(table, columns)


def _json_lines(path: Path) -> pd.DataFrame:
    # pandas' reader guesses dates, rounds floats and refuses integers above 2^64.
    with path.open(encoding="utf-8") as lines:
        return pd.DataFrame([json.loads(line) for line in lines if line.strip()])


def _separated(path: Path) -> pd.DataFrame:
    """Read a table with the separator that its header has most of; with semicolons, a comma may be the decimal point.

    A first line `sep=;`, as Excel understands it, states the separator instead.
    """
    with path.open(encoding="utf-8-sig") as lines:
        header = next((line for line in lines if line.strip()), "")
        stated = re.fullmatch(r'"?sep=(.)"?[,;\s]*', header.rstrip("\n"), re.IGNORECASE)
        separator = stated[1] if stated else max(",;\t", key=header.count)
        if not stated:
            lines.seek(0)
        table = pd.read_csv(lines, sep=separator, decimal="," if separator == ";" else ".")
    return table.apply(_with_points) if separator == ";" else table


def _with_points(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return the column as numbers if it has numbers with decimal points, else unchanged."""
    try:
        return pd.to_numeric(column)
    except (ValueError, TypeError):
        return column


_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".parquet": pd.read_parquet,
    ".csv": _separated,
    ".tsv": _separated,
    ".jsonl": _json_lines,
}


@contextmanager
def naming(runs: Table) -> Iterator[None]:
    """Prefix errors about a table with its file name, if the table is a file."""
    try:
        yield
    except ValueError as error:
        if not isinstance(runs, str | os.PathLike):
            raise
        raise ValueError(f"{os.fspath(runs)}: {error}") from error


def require_convention(n_params_convention: str) -> None:
    """Raise ValueError unless the caller states what N counts."""
    if not (isinstance(n_params_convention, str) and n_params_convention.strip()):
        raise ValueError(
            "n_params_convention must say what n_params counts, e.g. 'total' or 'without embeddings', "
            f"got {n_params_convention!r}"
        )


def to_nats(loss_unit: str) -> tuple[float, str]:
    """Return the factor on losses and their resulting unit: bits per token become nats; any other unit stays."""
    if not loss_unit.strip():
        raise ValueError(f"loss_unit must name the unit of the losses, e.g. {NATS!r}, got {loss_unit!r}")
    unit = unit_name(loss_unit)
    return (math.log(2), NATS) if unit == BITS else (1.0, unit)


def unit_name(loss_unit: str) -> str:
    """Return the full name of a unit in another spelling; an unknown unit stays."""
    text = loss_unit.strip().lower()
    return next((unit for unit, others in UNITS.items() if text == unit or text in others.split()), loss_unit)


def counts(rows: pd.DataFrame, column: str) -> Array:
    """The column of parameters or tokens in float64; raises ValueError if a value is no finite number of a count's size."""
    values = numbers(rows, column, remedy=LEAVE_OUT)
    if (many := values > MOST_COUNT).any():
        first = int(np.argmax(many))
        raise ValueError(
            f"{column_name(rows, column)} must be at most {MOST_COUNT:g}, got {values[first]:g} in row {row_name(rows, first)}"
        )
    if (few := values < LEAST_COUNT).any():
        first = int(np.argmax(few))
        raise ValueError(
            f"{column_name(rows, column)} must be a plain count of at least {LEAST_COUNT:g}, got {values[first]:g} "
            f"in row {row_name(rows, first)} ({few.sum()} of {len(rows)} rows break this rule): is it in millions or billions?"
        )
    return values


def require_count(name: str, value: float) -> None:
    """Raise ValueError unless the value is a finite number of a count's size."""
    if not LEAST_COUNT <= positive(name, value) <= MOST_COUNT:
        raise ValueError(
            f"{name} must be a plain count from {LEAST_COUNT:g} to {MOST_COUNT:g}, got {value:g}: is it in millions or billions?"
        )


def check_runs(runs: pd.DataFrame, columns: tuple[str, ...], *, max_regret: float, loss_unit: str | None) -> Runs:
    """Check a ladder, and leave out what cannot inform the law (its columns: see `fitting.fit`).

    Without a `loss_unit` the losses count as nats per token, which the assumptions state.

    Raises:
        ValueError: a column is missing or breaks its rule.
    """
    needed = tuple(dict.fromkeys(("n_params", "n_tokens", *columns, "loss")))
    require_columns(runs, (*needed, *(name for name in OPTIONAL if name in runs)))
    loss_unit = runs.attrs.get(UNIT) if loss_unit is None else loss_unit
    factor, unit = to_nats(NATS if loss_unit is None else loss_unit)
    reason = stated_reasons(runs)
    without = without_loss(runs, among=reason == "")
    reason[without] = NO_LOSS
    notes = (*runs.attrs.get(NOTES, ()), *note_of(runs, without))
    open_ = reason == ""
    table = {name: _floats(runs, open_, name) for name in (*needed, *(("noise",) if "noise" in runs else ()))}
    table["loss"] *= factor
    if unit == PER_BYTE and BYTES in runs:
        table["loss"] *= math.log(2) * _floats(runs, open_, BYTES)
        unit = NATS
    if (small := open_ & (table["loss"] < LEAST_LOSS)).any():
        first = int(np.argmax(small))
        raise ValueError(
            f"loss must be at least {LEAST_LOSS:g}, got {table['loss'][first]:g} in row {row_name(runs, first)}"
        )
    rows = pd.DataFrame({**table, "stem": _stems(runs, runs[open_]).array}, index=runs.index)

    if "regret" in runs:
        regret = _floats(runs, open_, "regret", inclusive=True)
        for i in np.flatnonzero(open_ & (regret > max_regret)):
            reason[i] = f"predicted regret {regret[i]:.3%} is above {max_regret:.3%}"
    if "annealed" in runs:
        reason[np.flatnonzero(open_)[unannealed(runs["annealed"][open_])]] = UNANNEALED
    unfinished = unfinished_states(runs[reason == ""])
    shared, mid_run = (None, ()) if "stem" in runs else _leave_out_mid_run(runs, rows, reason)
    worse = () if "regret" in runs else _leave_out_worse_recipes(runs, rows, reason, needed)

    stated = {"annealed": False, "regret": bool(worse), "stem": bool(shared)}  # of several recipes the best is tuned
    kept = np.flatnonzero(reason == "")
    left_out = rows[reason != ""].assign(reason=pd.array(reason[reason != ""], dtype="str"))
    kept = kept[np.lexsort([table[name][kept] for name in ("loss", "n_tokens", "n_params")])]
    rows, runs = rows.iloc[kept], runs.iloc[kept]
    flops = compute_flops(rows["n_params"], rows["n_tokens"])
    return Runs(
        rows=rows,
        left_out=left_out,
        compute_flops=numbers(runs, "compute_flops") if "compute_flops" in runs else flops,
        loss_unit=unit,
        warnings=(*_doubts(shared), *unfinished, *_warnings(runs, rows, flops, unit, shared)) if len(rows) else (),
        assumptions=(
            *((UNIT_ASSUMED,) if loss_unit is None else ()),
            *notes,
            *mid_run,
            *worse,
            *(text for column, text in ASSUMED.items() if column not in runs and not stated[column]),
        ),
    )


def _floats(runs: pd.DataFrame, open_: NDArray[np.bool_], name: str, *, inclusive: bool = False) -> Array:
    """A column, [K]; open rows must keep its rule, others may hold anything."""
    values = np.array([or_nan(value) for value in runs[name]])
    considered = runs[open_]
    values[open_] = (
        counts(considered, name)
        if name in COUNTED
        else numbers(considered, name, inclusive=inclusive, remedy=LEAVE_OUT)
    )
    return np.asarray(values)


def _leave_out_mid_run(
    runs: pd.DataFrame, rows: pd.DataFrame, reason: NDArray[np.object_]
) -> tuple[SharedRuns | None, tuple[str, ...]]:
    """Give rows that share a training run one stem, leave out those before its last if this is certain, and note this."""
    open_rows = np.flatnonzero(reason == "")
    shared = checkpoints(runs.iloc[open_rows], rows["n_params"].iloc[open_rows], rows["n_tokens"].iloc[open_rows])
    if shared is None:
        return None, ()
    stems = rows["stem"].to_numpy(copy=True)
    stems[open_rows] = len(rows) + pd.factorize(shared.run)[0]  # differs from the numbers of the other rows
    rows["stem"] = stems
    if not shared.certain or "annealed" in runs:
        return shared, ()
    reason[open_rows[shared.earlier]] = MID_RUN
    n = shared.earlier.sum()
    return shared, (f"{n} rows before the last of their run (column {shared.column}) are left out",)


def _leave_out_worse_recipes(
    runs: pd.DataFrame, rows: pd.DataFrame, reason: NDArray[np.object_], needed: Sequence[str]
) -> tuple[str, ...]:
    """Leave out all but the best of several recipes at one N and D, and note this."""
    open_rows = np.flatnonzero(reason == "")
    cells = rows[[name for name in needed if name != "loss"]].iloc[open_rows]
    varying, worse = worse_recipes(runs.iloc[open_rows], cells, rows["loss"].iloc[open_rows])
    if not worse.any():
        return ()
    names = ", ".join(map(str, varying))
    reason[open_rows[worse]] = f"not the best {names} of its n_params and n_tokens"
    return (f"{worse.sum()} of {len(worse)} rows are not the best {names} of their n_params and n_tokens: left out",)


def _stems(runs: pd.DataFrame, considered: pd.DataFrame) -> pd.Series:
    """Training run of each row, [K]; without `stem` each row is a separate run, except repeats of another in every column."""
    if "stem" not in runs:
        return pd.Series(pd.factorize(runs.astype(str).apply(tuple, axis=1))[0])
    if odd := [name for name in runs["stem"] if not pd.api.types.is_hashable(name)]:
        raise ValueError(f"stem must be the name of a training run, got {odd[0]!r}")
    require_filled(considered, "stem")
    return runs["stem"]


def unannealed(annealed: pd.Series) -> NDArray[np.bool_]:
    """Whether each run ended before its schedule did, [K]."""
    sound = all(pd.api.types.is_hashable(value) for value in annealed)
    if not sound or not annealed.isin([True, False]).all():
        raise ValueError(
            f"annealed must be True or False in every row, got {annealed.astype(str).unique().tolist()[:5]}"
        )
    return np.asarray(~annealed.isin([True]))


def stated_reasons(runs: pd.DataFrame) -> NDArray[np.object_]:
    """Reasons why the table itself leaves rows out, "" for the other rows, [K]."""
    if "left_out" not in runs:
        return np.full(len(runs), "", dtype=object)
    reasons = ["" if pd.api.types.is_scalar(reason) and pd.isna(reason) else reason for reason in runs["left_out"]]
    if strange := [reason for reason in reasons if not isinstance(reason, str)]:
        raise ValueError(f"left_out must hold the reason why a row is left out, or nothing, got {strange[0]!r}")
    return np.array(reasons, dtype=object)


def without_stated(table: pd.DataFrame, *, annealed: bool = True) -> pd.DataFrame:
    """Return the rows that the table itself does not leave out; a note in the table's `attrs` gives the reasons of the others.

    Args:
        annealed: whether rows that the column `annealed` denies are left out, too.
    """
    reason = stated_reasons(table)
    if annealed and "annealed" in table:
        open_ = np.flatnonzero(reason == "")
        reason[open_[unannealed(table["annealed"].iloc[open_])]] = UNANNEALED
    kept, note = table[reason == ""], omitted(pd.Series(reason[reason != ""], dtype=object))
    kept.attrs = {**table.attrs, NOTES: (*table.attrs.get(NOTES, ()), *filter(None, (note,)))}
    return kept


def _doubts(shared: SharedRuns | None) -> tuple[str, ...]:
    """Warning that rows seem to share training runs, if they may also be separate runs."""
    if shared is None or shared.certain:
        return ()
    return (
        f"rows of one {shared.column} seem to be checkpoints of one training run, read in mid-schedule, and count as one run: "
        "keep the last of each run, or name the run of each row in a column stem",
    )


def _warnings(
    runs: pd.DataFrame, rows: pd.DataFrame, flops: Array, unit: str, shared: SharedRuns | None
) -> Iterator[str]:
    """Warnings about columns that seem to hold something else than their name, from the kept rows as given and as checked."""
    values = np.stack([rows[name].to_numpy() for name in ("n_params", "n_tokens", "loss")])
    ratio = float(np.median(values[1] / values[0]))
    if not RATIO[0] <= ratio <= RATIO[1]:
        yield f"{ratio:.2g} tokens per parameter in the median: n_params and n_tokens seem to be in different units"
    if unit == NATS and (most := float(values[2].max())) > MOST_NATS:
        yield f"a loss of {most:.4g} nats per token is worse than a uniform guess among a million: is it a perplexity?"
    elif unit == NATS and VOCABULARY in runs:
        sizes = np.array([or_nan(size) for size in runs[VOCABULARY]])
        above = values[2] > np.log(np.where(sizes > 0, sizes, np.inf))
        if above.any():
            first = int(np.argmax(above))
            yield (
                f"a loss of {values[2][first]:.4g} nats per token in row {row_name(rows, first)} is worse than a uniform guess "
                f"among its vocabulary: are the losses {BITS}?"
            )
    if unit == NATS and (in_bits := rows_in_bits(*values)) is not None:
        first_name = row_name(rows, int(np.argmax(in_bits)))
        yield (
            f"{in_bits.sum()} of {len(rows)} rows, the first of them {first_name}, lie above the others by "
            f"the factor {1 / math.log(2):.4f} of bits over nats: are their losses bits?"
        )
    if "compute_flops" in runs:
        above = float(np.median(numbers(runs, "compute_flops") / flops))
        if not 1 / FLOPS_FACTOR <= above <= FLOPS_FACTOR:
            yield f"compute_flops is {above:.3g} times 6·N·D in the median: N's convention or a unit may differ"
    same = (values[:, 1:] == values[:, :-1]).all(axis=0)  # the rows are in order, so equal ones are neighbours
    alike = np.append(same, False) | np.append(False, same)
    if repeated := int(runs[alike].astype(str).duplicated().sum()):
        found = "1 row repeats" if repeated == 1 else f"{repeated} rows repeat"
        yield f"{found} another in every column; rows that are equal count as one run"
    with np.errstate(over="ignore"):  # a loss may be near the largest float64
        precise = alike & (np.round(values[2], 3) != values[2])  # rounded losses of two seeds may well be equal
    if (copies := int(rows[precise].duplicated(["n_params", "n_tokens", "loss"]).sum())) > repeated:
        yield f"{copies - repeated} rows have N, D and loss of another under another name: the same run twice, as further evidence?"
    if "stem" not in runs and shared is None:
        for name in (name for name in RUN_NAMES if name in runs and runs[name].duplicated().any()):
            yield f"rows share a run by column {name}, yet each counts as a separate run: rename {name} to stem"
