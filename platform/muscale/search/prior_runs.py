"""Prior runs of a sweep: annealed runs at other sizes and lengths, of this study and of others like it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from muscale.errors import StudyDirectoryError, one_line, refusing
from muscale.store.read_only import open_read_only
from muscale.store.statements import find_runs, runs_table
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.recipe import Recipe
from proxy_models.training.numerics import Numerics
from search_spaces import Fixed, Space

_UNUSED = ("seconds",)  # columns that no reader of another study's runs needs
_LONGEST = 60  # characters of a value in a message
_KINDS: dict[str, Any] = {
    "key": str,
    "purpose": str,
    "n_params": int,
    "n_tokens": int,
    "loss": float | int | None,
    "hyperparameters": dict,
    "numerics": dict,
    "segment": dict,
}
"""Types that the columns of another study's runs must have: SQLite keeps any value in any column."""
SHAPE = ("model", "seed", "run_tokens")
"""Fields in which runs of one family may differ; their rates are all given at the family's base shape."""


def differs_in(row: Mapping[str, Any], defaults: Hyperparameters, space: Space, numerics: Numerics) -> str:
    """Difference between a run of the ledger and a study beyond what is searched, "" if none; what the space fixes counts."""
    fixed: dict[str, Any] = {name: d.value for name, d in space.items() if isinstance(d, Fixed)}
    active = {*space.active({**defaults.to_dict(), **fixed, **row["hyperparameters"]})}
    unlike = {"learning_rate", *space.searched, *(fixed.keys() - active)}
    for found, wanted, free in (
        (row["hyperparameters"], defaults.to_dict() | fixed, unlike),
        (row["numerics"], numerics.to_dict(), {*SHAPE}),
    ):
        plain = json.loads(json.dumps(wanted))
        for name in {**plain, **found}:  # what is not set may be left out
            if name not in free and found.get(name) != plain.get(name):
                if name == "stages":
                    return "its stages differ from the study's"
                return f"its {name} is {found.get(name)!r}, the study's is {plain.get(name)!r}"
    return ""


def values_of(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The searched values of a run: as given at the base shape, but the decay's timescale as it came out for its length."""
    h = row["hyperparameters"]
    values = {name: h[name] for name in names}
    if "weight_decay_tau" in values and (recipe := Recipe(**row["segment"]["recipe"])).weight_decay:
        values["weight_decay_tau"] = recipe.weight_decay_tau(row["n_tokens"])
    return values


def usable_runs(runs: pd.DataFrame, defaults: Hyperparameters, space: Space, numerics: Numerics) -> pd.DataFrame:
    """Runs that locate the optimum: a column for each searched hyperparameter, n_params, n_tokens, loss (NaN: diverged).

    Args:
        defaults: What is not searched; a run with another value tells nothing.
        space: What is searched; a run without one of its hyperparameters tells nothing.
        numerics: The sweep's; runs of another corpus, parametrization or base shape tell nothing.

    Raises:
        StudyDirectoryError: If a run that tells something says what no run does.
    """
    rows = []
    for row in runs.to_dict("records"):
        of_stages = row["purpose"] == "ladder" and row["numerics"].get("run_tokens") not in (None, row["n_tokens"])
        if row["purpose"] != "full" and not of_stages and not _differs(row, defaults, space, numerics):
            try:
                values = values_of(row, space.searched)
            except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # somebody else wrote the ledger
                raise StudyDirectoryError(
                    f"{runs.attrs.get('ledger', 'the ledger')}: run {row['key']}: can't be read as a run: "
                    f"{type(error).__name__}: {one_line(error)}"
                ) from error
            active = space.active({**row["hyperparameters"], **values})
            values = {name: value if name in active else None for name, value in values.items()}
            rows.append({**values, "n_params": row["n_params"], "n_tokens": row["n_tokens"], "loss": row["loss"]})
    table = pd.DataFrame(rows, columns=[*space.searched, "n_params", "n_tokens", "loss"])
    return table.drop_duplicates(ignore_index=True)


def _differs(row: Mapping[str, Any], defaults: Hyperparameters, space: Space, numerics: Numerics) -> str:
    """Difference as in `differs_in`, and in the learning rate if the space doesn't search it."""
    rate, given = row["hyperparameters"].get("learning_rate"), space.get("learning_rate")
    wanted = given.value if isinstance(given, Fixed) else defaults.learning_rate
    if "learning_rate" not in space.searched and rate != wanted:
        return f"its learning_rate is {rate!r}, the study's is {wanted!r}, and it is not searched"
    return differs_in(row, defaults, space, numerics)


def describe_prior_runs(source: Path, defaults: Hyperparameters, space: Space, numerics: Numerics) -> str:
    """Message with the number of another study's runs that a sweep uses, and if none, why most are left out.

    Args:
        source: The study's file or directory, or its ledger.

    Raises:
        StudyDirectoryError: As `runs_of`.
    """
    rows = [row for row in runs_of(source).to_dict("records") if row["purpose"] != "full"]
    reasons = Counter(_differs(row, defaults, space, numerics) for row in rows)
    used = reasons.pop("", 0)
    message = f"using {used} of {len(rows)} runs from {source}"
    return message if used or not rows else f"warning: {message}: {reasons.most_common(1)[0][0]}"


def runs_of(source: Path) -> pd.DataFrame:
    """The runs of another study's ledger, which is only read; raises StudyDirectoryError if there is none of this schema."""
    with open_read_only(source) as (name, read):
        rule = f"{name}: runs: n_params, n_tokens and loss must be numbers"
        with refusing(rule, TypeError, ValueError, raising=StudyDirectoryError):
            table = runs_table(read(partial(find_runs, without=_UNUSED)), _UNUSED)
        for number, row in enumerate(table.to_dict("records"), 1):
            for column, kind in _KINDS.items():
                if not isinstance(row[column], kind):
                    raise StudyDirectoryError(
                        f"{name}: runs, row {number}, {column}: can't be read as a run, got {str(row[column])[:_LONGEST]!r}"
                    )
        table.attrs["ledger"] = name  # which a message names
        return table
