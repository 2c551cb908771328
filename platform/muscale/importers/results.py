"""Known results from outside the study: tables of hyperparameters with losses.

The results inform a sweep's searcher. They never become runs of the ledger, so no fit, table or figure includes them. The ledger
records with the sweep that they were used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from muscale.errors import StageError, refusing
from muscale.importers.imported_space import place_of
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.lineage import input_key
from scaling.fits.as_found import NO_COLUMNS
from scaling.fits.checkpoints import last_of_runs
from scaling.fits.runs import read_runs
from search_spaces import Choice, Distribution, Fixed, Integer, LogUniform, Ordinal, Space, Uniform

TABLES = (".csv", ".tsv", ".parquet", ".jsonl")
_SCALES = ("n_params", "n_tokens")


def is_outside(source: Path) -> bool:
    """Whether a path holds such results, a table or an Optuna storage with or without "#name", rather than a study."""
    if source.suffix.lower() in TABLES:
        return True
    plain = Path(place_of(str(source))[0])
    if plain.suffix == ".toml" or plain.is_dir():
        return False
    from muscale.importers.optuna_study import is_optuna

    return is_optuna(plain)


def outside_results(
    source: Path, space: Space, *, n_params: int, n_tokens: int, columns: Mapping[str, str] = NO_COLUMNS
) -> pd.DataFrame:
    """Return a row for each result: every searched hyperparameter, n_params, n_tokens, loss (nats per token; NaN: diverged).

    Args:
        source: A table with these columns, or an Optuna storage; other columns are ignored. Without n_params or n_tokens the
            losses are assumed to be at the sweep's own scale.
        n_params, n_tokens: Scale of the sweep: its proxy's size and the tokens of its last rung.
        columns: Names of the table's columns, by our names; of rows that share a `run` the last one counts.

    Raises:
        StageError: If the results can't be used; the message names the file, the column, the rule and the value.
    """
    table = _read(source, columns)
    missing = [name for name in (*space.searched, "loss") if name not in table.columns]
    if missing:
        raise StageError(
            f"sweep: {source}: no column {', '.join(missing)}; results need loss and every searched hyperparameter, "
            f"got {', '.join(map(str, table.columns))}"
        )
    fixed = {name: each.value for name, each in space.items() if isinstance(each, Fixed)}
    active = [space.active(fixed | row) for row in table.to_dict("records")]
    found = pd.DataFrame(
        {
            name: _values(source, table, name, space[name], [name in names for names in active])
            for name in space.searched
        }
    )
    for name, own in zip(_SCALES, (n_params, n_tokens), strict=True):
        found[name] = _positive(source, table, name) if name in table.columns else float(own)
    found["loss"] = _positive(source, table, "loss", or_nan=True)
    return found


def describe_results(source: Path, table: pd.DataFrame) -> str:
    """Describe the number of results and their use, in a line."""
    return f"{len(table)} results of {source} inform the searcher as reported by the user; no law is fitted to them" + (
        "" if len(table) else ": it is empty"
    )


def record_results(ledger: Ledger, sweep: str, source: Path, table: pd.DataFrame) -> None:
    """Record once that the results informed a sweep, as reported from outside and not verified."""
    payload: dict[str, Any] = {"sweep": sweep, "source": str(source), "n_results": len(table), "asserted": True}
    payload["sha256"] = sha256(table.to_csv(index=False).encode()).hexdigest()
    ledger.record_result(ResultKind.OUTSIDE_RESULTS, input_key(sweep, payload["source"], payload["sha256"]), payload)


def _read(source: Path, columns: Mapping[str, str]) -> pd.DataFrame:
    if source.suffix.lower() in TABLES:
        with refusing("sweep"):
            return last_of_runs(read_runs(source, columns))
    from muscale.importers.optuna_study import open_study, results_of

    study = open_study(str(source))
    if study.maximises:
        raise StageError(
            f"sweep: {source}: results must be losses, where lower is better; the study {study.name!r} maximises; "
            f"write its trials to a table with a column loss"
        )
    return results_of(study)


def _values(
    source: Path, table: pd.DataFrame, name: str, distribution: Distribution, active: Sequence[bool]
) -> list[Any]:
    """Return a hyperparameter's values; they are None in rows in which it is inactive, whose cells are not checked."""
    values: list[Any] = table[name].tolist()
    # numbers are text in a column with a dash where the hyperparameter is inactive
    with suppress(ValueError, TypeError):
        numbers = iter(pd.to_numeric(table[name][list(active)]).tolist())
        values = [next(numbers) if there else None for there in active]
    rules: Mapping[type[Distribution], Any] = {
        Uniform: lambda v: isinstance(v, int | float),
        LogUniform: lambda v: isinstance(v, int | float) and v > 0,
        Integer: lambda v: isinstance(v, int | float) and float(v).is_integer(),
        Choice: lambda v: v in distribution.values,  # type: ignore[attr-defined]
        Ordinal: lambda v: _listed(v, distribution.values) is not None,  # type: ignore[attr-defined]
    }
    rule = rules.get(type(distribution))
    if rule is None:
        raise StageError(f"sweep: {source}: {name}: results over a {distribution.kind} can't be read from outside")
    for row, value in enumerate(values):
        if not active[row]:
            continue
        if isinstance(value, bool) and not isinstance(distribution, Choice):
            value = str(value)
        if (isinstance(value, float) and not np.isfinite(value)) or not rule(value):
            raise StageError(
                f"sweep: {source}: {name}: must be a value for {distribution.kind} {distribution}, though it may lie "
                f"beyond its bounds; got {value!r} in row {row}"
            )
    read: Callable[[Any], Any] = round if isinstance(distribution, Integer) else lambda value: value
    if isinstance(distribution, Ordinal):
        read = partial(_listed, offered=distribution.values)
    return [read(value) if there else None for value, there in zip(values, active, strict=True)]


def _listed(value: Any, offered: Sequence[Any]) -> Any:
    """Return the offered value that this one is, whatever its last digits; None if there is none."""
    if value in offered or not isinstance(value, int | float):
        return value if value in offered else None
    numbers = (one for one in offered if isinstance(one, int | float))
    return next((one for one in numbers if math.isclose(one, value, rel_tol=1e-9)), None)


def _positive(source: Path, table: pd.DataFrame, name: str, *, or_nan: bool = False) -> np.ndarray[Any, Any]:
    values = pd.to_numeric(table[name], errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    unread = np.isnan(values) & table[name].notna().to_numpy()
    values = np.where(np.isfinite(values), values, np.nan)
    bad = unread | (values <= 0) | (np.isnan(values) & (not or_nan))
    if bad.any():
        row = int(np.argmax(bad))
        rule = "above 0" + (", or empty if the run diverged" if or_nan else "")
        raise StageError(
            f"sweep: {source}: {name}: must be a number {rule}, got {table[name].iloc[row]!r} in row {row}"
        )
    return values
