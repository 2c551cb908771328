"""Runs of several mixtures: weights, losses per domain, size and length, checked by name and row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.checks import numbers, require_columns, require_distinct, row_name
from scaling.errors import TooFewRunsError
from scaling.fits.as_found import NO_COLUMNS, NOTES
from scaling.fits.checkpoints import last_of_runs
from scaling.fits.recipes import is_recipe
from scaling.fits.runs import LEAST_LOSS, MOST_COUNT, Table, naming, read_runs, without_stated
from scaling.fits.unfinished import finished

WEIGHT, LOSS = "weight_", "loss_"
"""Prefixes of the columns' names."""
SCALES = ("n_params", "n_tokens")
TOLERANCE = 0.01
"""Largest distance of a mixture's sum of weights from 1: 17 weights rounded to .001 are up to .0085 off."""
SPAN = 1e3
"""Highest ratio of a target's largest to smallest loss: no mixture has a larger effect (assumed; RegMix's losses lie within 3.6)."""
SPLIT = 0.75
"""Share of the variance left by the mixture; a further column that explains more splits the losses (assumed)."""
LEAST_RUNS = 5
"""Fewest runs that distinguish noise from the mixture's effect (assumed)."""

_NO_NAMES = ("loss_scale",)
"""Columns other than hyperparameters that begin with a prefix by chance."""

Weights: TypeAlias = "Mapping[str, float] | pd.DataFrame | Array"
"""Mixtures: weights of one by domain, a table with a column for each domain, or an array [mixtures, domains] in the law's order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixtures:
    """Checked runs; domains and targets in alphabetical order, so that the order of the columns changes nothing.

    Attributes:
        domains: names of the weights, m.
        targets: names of the losses, k.
        weights: [n, m], each row summing to 1.
        losses: [n, k], finite and above 0.
        scales: n_params, n_tokens as far as the table has them; the caller's order of rows.
        rows: the caller's names of the rows, n.
        notes: notes on rows that were left out, and on columns that were read under another name.
    """

    domains: tuple[str, ...]
    targets: tuple[str, ...]
    weights: Array
    losses: Array
    scales: pd.DataFrame
    rows: tuple[str, ...]
    notes: tuple[str, ...]


def read_mixtures(
    runs: Table, weight_prefix: str = WEIGHT, loss_prefix: str = LOSS, columns: Mapping[str, str] = NO_COLUMNS
) -> Mixtures:
    """Read the runs of a table that have every loss.

    Raises:
        ValueError: no column begins with a prefix, or a weight, loss, size or sum breaks its rule.
        TooFewRunsError: there are fewer than `LEAST_RUNS` runs, or all have the same mixture or loss.
    """
    rows = read_runs(runs, columns)
    with naming(runs):
        rows = last_of_runs(_prefixed(_prefixed(without_stated(rows), weight_prefix), loss_prefix))
        if "loss" in columns:  # the only target
            others = [name for name in rows if str(name).startswith(loss_prefix)]
            rows = rows.drop(columns=others).rename(
                columns={"loss": loss_prefix + columns["loss"].removeprefix(loss_prefix)}
            )
        domains, targets = (_named(rows, prefix) for prefix in (weight_prefix, loss_prefix))
        rows = finished(rows, *(loss_prefix + name for name in targets))
        require_distinct(rows)
        weights = mixtures_of(rows, domains, weight_prefix)
        measured = np.column_stack([numbers(rows, loss_prefix + name) for name in targets])
        scales = {name: numbers(rows, name) for name in SCALES if name in rows}
        if len(rows) < LEAST_RUNS:
            raise TooFewRunsError(f"a law of mixtures needs {LEAST_RUNS} runs or more, got {len(rows)}")
        for name, values in scales.items():
            _require_within(name, values, 0.0, MOST_COUNT)
        for name, loss in zip(targets, measured.T, strict=True):
            _require_within(loss_prefix + name, loss, max(LEAST_LOSS, loss.max() / SPAN), 1 / LEAST_LOSS)
            if loss.min() == loss.max():
                raise TooFewRunsError(
                    f"{loss_prefix}{name} must differ between runs, got {loss[0]:g} in all {len(rows)}"
                )
        if (weights == weights[0]).all():
            raise TooFewRunsError(f"the mixture must differ between runs, got the same in all {len(rows)}")
        known = [*(weight_prefix + name for name in domains), *(loss_prefix + name for name in targets), *scales]
        _refuse_split(rows.drop(columns=known), weights, np.log(measured), pd.DataFrame(scales, index=rows.index))
    return Mixtures(
        domains=domains,
        targets=targets,
        weights=weights,
        losses=measured,
        scales=pd.DataFrame(scales, index=range(len(rows))),
        rows=tuple(row_name(rows, number) for number in range(len(rows))),
        notes=tuple(rows.attrs[NOTES]),
    )


def mixtures_of(rows: pd.DataFrame, domains: tuple[str, ...], prefix: str = "") -> Array:
    """Weights of each row, [n, m], divided by their sum near 1; raises ValueError if a column is missing or a weight is invalid."""
    require_columns(rows, tuple(prefix + name for name in domains))
    weights = np.column_stack([numbers(rows, prefix + name, minimum=0, inclusive=True) for name in domains])
    total = weights.sum(axis=1)
    off = np.abs(total - 1) > TOLERANCE
    if off.any():
        first = int(np.argmax(off))
        raise ValueError(
            f"the weights {', '.join(prefix + name for name in domains)} must sum to 1 within {TOLERANCE:g}, "
            f"got {total[first]:.4g} in row {row_name(rows, first)} ({off.sum()} of {len(rows)} rows break this rule)"
            + (": divide percentages by 100" if np.abs(total[first] - 100) <= 100 * TOLERANCE else "")
        )
    return np.asarray(weights / total[:, None])


def as_weights(weights: Weights, domains: tuple[str, ...], prefix: str = WEIGHT) -> Array:
    """Convert mixtures to an array in the law's order of domains, [mixtures, m]; raise ValueError like `mixtures_of`.

    The columns of a table have this prefix, or else any one that all domains have.
    """
    if isinstance(weights, pd.DataFrame):
        named = [str(name) for name in weights]
        prefixes = dict.fromkeys(name.removesuffix(domains[0]) for name in named if name.endswith(domains[0]))
        complete = [each for each in prefixes if {each + domain for domain in domains} <= {*named}]
        if prefix in complete or not complete:
            complete = [prefix if any(name.startswith(prefix) for name in named) else ""]
        if len(complete) > 1:
            several = ", ".join(each + domains[0] for each in complete)
            raise ValueError(f"the mixtures must have one column of weights for each domain, got {several}")
        return mixtures_of(weights, domains, complete[0])
    if isinstance(weights, Mapping):
        require_known("weights", weights, domains)
        return mixtures_of(pd.DataFrame([dict.fromkeys(domains, 0.0) | dict(weights)]), domains)
    array = np.atleast_2d(np.asarray(weights, np.float64))
    if array.ndim != 2 or array.shape[1] != len(domains):
        raise ValueError(f"weights must have the shape [mixtures, {len(domains)}], got {list(array.shape)}")
    return mixtures_of(pd.DataFrame(array, columns=list(domains)), domains)


def require_known(what: str, given: Mapping[str, object], known: tuple[str, ...]) -> None:
    """Raise ValueError if a name is not in `known`."""
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{what}: no domain {unknown[0]!r}; there are {', '.join(known)}")


def _require_within(name: str, values: Array, least: float, most: float) -> None:
    if values.min() < least or values.max() > most:
        raise ValueError(
            f"{name} must lie from {least:g} to {most:g}, losses within a factor of {SPAN:g}; got {values.min():g} to {values.max():g}"
        )


def _prefixed(rows: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """Rename columns such as `Loss_arxiv` to `loss_arxiv`, with a note; if no column begins so, also `arxiv_loss` or `loss/arxiv`."""
    word = re.escape(prefix.strip("_"))
    if not word:
        return rows
    names = [str(name) for name in rows if not (is_recipe(name) or str(name).lower() in _NO_NAMES)]
    begins = any(name.lower().startswith(prefix.lower()) for name in names)
    form = re.compile(rf"{re.escape(prefix)}(.+)" if begins else rf"(.+)[_/. -]{word}|{word}[/. -](.+)", re.IGNORECASE)
    matches = {name: match for name in names if not name.startswith(prefix) and (match := form.fullmatch(name))}
    found = {name: prefix + match[match.lastindex or 0] for name, match in matches.items()}
    if not found or len({*rows.columns, *found.values()}) < len({*rows.columns}) + len(found):
        return rows
    rows = rows.rename(columns=found)
    first, ours = next(iter(found.items()))
    rows.attrs[NOTES] = (
        *rows.attrs.get(NOTES, ()),
        f"{ours} is column {first}, and {len(found) - 1} more in the same way",
    )
    return rows


def _refuse_split(others: pd.DataFrame, weights: Array, y: Array, scales: pd.DataFrame) -> None:
    """Raise ValueError if a further column, such as a size, explains most of the log losses [n, k] that the mixture leaves."""
    n = len(y)
    base = np.column_stack(
        [np.ones(n), np.sqrt(weights), *(pd.get_dummies(scales[name]).to_numpy(np.float64) for name in scales)]
    )
    for column in others:
        values = others[column].astype(str)
        if not 1 < values.nunique() <= n / 2:  # values of an identifier or another metric do not recur
            continue
        unexplained = []
        for design in (base, np.column_stack([base, pd.get_dummies(values).to_numpy(np.float64)])):
            left = y - design @ np.linalg.lstsq(design, y)[0]
            unexplained.append((left**2).sum() / max(n - np.linalg.matrix_rank(design), 1))
        if unexplained[1] < (1 - SPLIT) * unexplained[0]:
            raise ValueError(
                f"column {column!r} separates the losses, but the law would pool its values {sorted(set(values))[:5]}: if it is "
                "the size or length of the runs, name it n_params or n_tokens, as numbers; else keep one value, or drop the column"
            )


def _named(rows: pd.DataFrame, prefix: str) -> tuple[str, ...]:
    """Names after the prefix; a column such as weight_decay has none."""
    prefixed = [str(name) for name in rows if str(name).startswith(prefix)]
    found = sorted(name.removeprefix(prefix) for name in prefixed if name not in _NO_NAMES and not is_recipe(name))
    if not found:
        raise ValueError(f"need columns {prefix}DOMAIN, got {', '.join(map(str, rows.columns))}")
    return tuple(found)
