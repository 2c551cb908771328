"""Rows that are checkpoints of one training run, in tables without a column `stem`.

Losses read before the end of a schedule lie above the law of finished runs, and rows of one run are no independent evidence.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.checks import FOUND_AS, plain, require_filled, row_name

RUNS = [
    "run",
    "run_name",
    "run_id",
    "runid",
    "run_path",
    "wandb_run_id",
    "id",
    "uid",
    "uuid",
    "trial_id",
]
"""Names of columns that hold one training run each."""
LABELS = ["name", "experiment", "experiment_name", "experiment_id", "exp", "exp_id", "trial", "job", "job_id"]
"""Names of columns that hold a training run, or a label of several runs."""
STEPS = ["step", "steps", "global_step", "iteration", "iterations", "iter", "train_step", "train_steps"]
LEAST_EVEN = 8
"""Fewest evenly spaced token counts of one size that are taken for a curve: separate runs are rarely so many or so even (assumed)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedRuns:
    """Rows that share training runs.

    Attributes:
        column: Column that distinguishes the runs.
        run: Training run of each row, [K].
        earlier: Rows with fewer tokens than the last of their run, [K].
        certain: The table shows curves: a column of runs, or a label and a column of steps.
    """

    column: Hashable
    run: pd.Series
    earlier: NDArray[np.bool_]
    certain: bool


def checkpoints(table: pd.DataFrame, n_params: pd.Series, n_tokens: pd.Series) -> SharedRuns | None:
    """Return the rows that share a training run; None if each row seems to be a separate run.

    A column of runs that the caller names decides alone. Where the names of another such column all differ, no label joins rows.

    Args:
        table: Rows as found.
        n_params, n_tokens: Checked columns of the same rows.

    Raises:
        ValueError: The caller names a column of runs, and a row has no run or a run has several sizes.
    """
    if "run" in table.attrs.get(FOUND_AS, {}):
        require_filled(table, "run")
        sizes = n_params.groupby(table["run"].to_numpy()).transform("nunique").to_numpy()
        if (sizes > 1).any():
            row = int(np.argmax(sizes > 1))
            raise ValueError(
                f"a run must have a single n_params, got {sizes[row]} in that of row {row_name(table, row)}"
            )
        return _shared("run", table["run"], n_tokens, certain=True) if table["run"].duplicated().any() else None
    called = short_names(table)
    steps = any(name in STEPS for name in called.values())
    unique = any(called[column] in RUNS and _is_unique(table[column]) for column in called)
    named = [
        column
        for names in ((RUNS,) if unique else (RUNS, LABELS))
        for name in names
        for column in called
        if called[column] == name and _is_run(table[column], n_params, n_tokens)
    ]
    if named:
        column, run = named[0], table[named[0]]
        certain = called[column] in RUNS or steps
    elif (steps or not unique) and _even(n_params, n_tokens):
        column, run, certain = "n_params", n_params, False
    else:
        return None
    return _shared(column, run, n_tokens, certain=certain)


def short_names(table: pd.DataFrame) -> dict[Hashable, str]:
    """Return the last part of each column's name, in small letters: `step` for wandb's "train/Step"."""
    return {column: plain(str(column).split("/")[-1]).strip("_") for column in table.columns}


def _shared(column: Hashable, run: pd.Series, n_tokens: pd.Series, *, certain: bool) -> SharedRuns:
    last = n_tokens.groupby(run.to_numpy()).transform("max")
    return SharedRuns(column=column, run=run, earlier=(n_tokens < last).to_numpy(), certain=certain)


def _is_unique(names: pd.Series) -> bool:
    """Whether every row has another name; numbers may only count the rows."""
    return bool(len(names) and all(isinstance(name, str) for name in names) and not names.duplicated().any())


def last_of_runs(table: pd.DataFrame) -> pd.DataFrame:
    """Return the longest row of each run, by n_tokens or compute, if the caller names a column of runs."""
    along = [name for name in ("n_tokens", "compute_flops") if name in table]
    if "run" not in table.attrs.get(FOUND_AS, {}) or not along:
        return table
    require_filled(table, "run")
    length = pd.to_numeric(table[along[0]], errors="coerce")
    last = length.groupby(table["run"].to_numpy()).transform("max")
    return table[~(length < last)]


def _is_run(names: pd.Series, n_params: pd.Series, n_tokens: pd.Series) -> bool:
    """Whether each name has one size, and at least one name has several lengths."""
    if names.isna().any() or not all(pd.api.types.is_hashable(name) for name in names):
        return False
    sizes, lengths = (values.groupby(names.to_numpy()).nunique() for values in (n_params, n_tokens))
    return bool((sizes == 1).all() and (lengths > 1).any())


def _even(n_params: pd.Series, n_tokens: pd.Series) -> bool:
    """Whether most rows are of sizes with many evenly spaced tokens."""
    curves = 0
    for _, tokens in n_tokens.groupby(n_params.to_numpy()):
        apart = np.diff(np.sort(tokens.to_numpy()))
        if len(tokens) >= LEAST_EVEN and apart.min() > 0 and apart.max() <= 1.01 * apart.min():
            curves += len(tokens)
    return curves > len(n_tokens) / 2
