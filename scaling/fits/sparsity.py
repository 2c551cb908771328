"""Sparsity of the runs of mixtures of experts: total parameters over the parameters that one token uses, 1 for a dense model."""

from __future__ import annotations

import numpy as np
import pandas as pd

from scaling.checks import column_name, or_nan, plain, row_name
from scaling.fits.as_found import NOTES, TOTAL, read_counts
from scaling.forms.expert_law import SPARSITY

ACTIVE = (
    "n_params_active active_params n_active_params active_parameters n_active activated_params activated_parameters"
)
EXPERTS = "n_experts num_experts experts"
CHOSEN = "k top_k topk experts_per_token n_experts_per_token num_experts_per_tok"
"""Other names of columns, without capitals and punctuation."""


def active_params(n_params: float, n_params_total: float, *, n_experts: float, k: float) -> float:
    """Parameters that one token uses with k experts of each routed layer, from the parameters used with one expert.

    The total exceeds N by n_experts − 1 further experts of each layer, of which k − 1 are used too.
    """
    return n_params + (k - 1) * (n_params_total - n_params) / (n_experts - 1) if n_experts > 1 else n_params_total


def with_sparsity(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the table with active parameters in `n_params`, and the column `sparsity`; notes say how they were found.

    A column `n_params_total` gives the sparsity; an empty cell is a dense model. If a column such as `n_params_active` holds the
    active parameters, `n_params` holds the total. If rows differ only in k, N counts one expert per layer, and the others are added.

    Raises:
        ValueError: no column gives the sparsity, or it is below 1 in a row.
    """
    notes, table = [*runs.attrs.get(NOTES, ())], runs.copy(deep=False)
    active, total, experts, chosen = (_named(table, names) for names in (ACTIVE, TOTAL, EXPERTS, CHOSEN))
    if SPARSITY not in table:
        if active is not None:
            if total is None and "n_params" in table:
                table[total := "n_params_total"] = table["n_params"]
                notes.append(f"n_params is column {active}, the total parameters are those of n_params")
            table["n_params"] = table[active]
        if total is None or "n_params" not in table:
            raise ValueError(
                f"a law of experts needs a column {SPARSITY} (total over active parameters), or n_params_total next to n_params "
                f"(active), got {', '.join(map(str, runs.columns))}; a table of dense models needs no such law"
            )
        for name in ("n_params", total):
            if (cells := read_counts(table[name])) is not None:
                table[name] = cells
        n, every = (np.array([or_nan(cell) for cell in table[name]]) for name in ("n_params", total))
        every = np.where(table[total].isna(), n, every)
        if experts is not None and chosen is not None:
            e, k = (np.array([or_nan(cell) for cell in table[name]]) for name in (experts, chosen))
            cells = pd.DataFrame({"n": n, "total": every, "experts": e, "k": k})[e > 1].drop_duplicates()
            if cells[["n", "total", "experts"]].duplicated().any():
                n = np.array([active_params(*row, n_experts=m, k=j) for *row, m, j in zip(n, every, e, k, strict=True)])
                table["n_params"] = n
                notes.append(f"n_params counts one expert per layer: the parameters of {chosen} − 1 more were added")
        table[SPARSITY] = every / n
    below = np.array([or_nan(cell) for cell in table[SPARSITY]]) < 1 - 1e-6
    if below.any():
        first = int(np.argmax(below))
        raise ValueError(
            f"{column_name(table, SPARSITY)} must be total over active parameters, at least 1 and 1 for a dense model, got "
            f"{table[SPARSITY].iloc[first]!r} in row {row_name(table, first)}: is it a share, or are the two counts exchanged?"
        )
    table.attrs[NOTES] = tuple(notes)
    return table


def _named(table: pd.DataFrame, names: str) -> str | None:
    """Return the first column with one of these names; None if there is none."""
    return next((name for name in table.columns if plain(str(name)).strip("_") in names.split()), None)
