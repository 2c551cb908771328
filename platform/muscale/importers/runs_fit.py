"""The law of a ladder trained elsewhere: a table of runs, without a study."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from muscale.errors import refusing
from scaling import Decision, Limits, ScalingError, ScalingFit, decide, fit
from scaling.checks import or_nan, positive
from scaling.fits.as_found import NO_COLUMNS, UNIT
from scaling.fits.runs import read_runs, unit_name
from scaling.forms import form_named
from scaling.forms.law import NATS

_CLOSE = 2e-3
"""Relative spread within which another column counts as the loss in another unit: tables print four digits (assumed)."""
_PERPLEXITY = ("perplexity", "ppl", "val_ppl", "val_perplexity")


@dataclass(frozen=True, kw_only=True)
class RunsFit:
    """A fit, the decision for a budget, and warnings about the unit of its losses."""

    fit: ScalingFit
    decision: Decision | None
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        decided = self.decision.to_dict() if self.decision else None
        return {"fit": self.fit.to_dict(), "decision": decided, "warnings": list(self.warnings)}

    def __str__(self) -> str:
        lines = [str(self.fit), *([str(self.decision)] if self.decision else [])]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def fit_runs(
    path: Path,
    *,
    n_params_convention: str,
    loss_unit: str | None = None,
    compute_flops: float | None = None,
    form: str | None = None,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> RunsFit:
    """Fit a law to a table of finished, annealed, tuned runs: a CSV, Parquet or JSON Lines file with n_params, n_tokens, loss.

    Args:
        path: Path of the table; see `scaling.fit` for the columns.
        n_params_convention: Definition of n_params, such as "without embeddings".
        loss_unit: Unit of the losses; "bits per token" become nats; default nats per token.
        compute_flops: Budget for the best size and its forecast; if the runs do not determine the best D/N, at their own D/N, and if
            they have one size, at this size.
        form: Name of the form of the law (`scaling.forms`); by default that of `scaling.fit`.
        columns: Names of the table's columns, by our names, as for `scaling.fit`.

    Raises:
        StageError: If the table can't be fitted; the message names the file, the column, the rule and the value.
    """
    with refusing("fit", ScalingError, ValueError):
        if compute_flops is not None:
            positive("compute_flops", compute_flops)
        found = fit(
            path,
            n_params_convention=n_params_convention,
            loss_unit=loss_unit,
            form=form_named(form) if form else None,
            columns=columns,
        )
        doubt = None if compute_flops is None else found.unidentified(compute_flops)
        ratio = doubt.tokens_per_param if doubt else None
        limits = Limits(sizes=[found.one_size] if found.one_size else None)
        decision = (
            None if compute_flops is None else decide(found, compute_flops, tokens_per_param=ratio, limits=limits)
        )
    table = read_runs(path, columns)
    unit = table.attrs.get(UNIT, NATS) if loss_unit is None else unit_name(loss_unit)
    warnings = (*([str(doubt)] if doubt else []), *_unit_warnings(table, unit))
    return RunsFit(fit=found, decision=decision, warnings=warnings)


def _unit_warnings(table: pd.DataFrame, loss_unit: str) -> list[str]:
    """Return warnings if another column suggests that losses stated in nats are bits, or the reverse."""
    if loss_unit not in (NATS, "bits per token"):
        return []
    # Rows that the table itself leaves out may contain anything.
    in_nats = np.array([or_nan(value) for value in table["loss"]]) * (1.0 if loss_unit == NATS else math.log(2))
    found = []
    for name in table.columns:
        if name == "loss" or not pd.api.types.is_numeric_dtype(table[name]):
            continue
        other = table[name].to_numpy(dtype=float)
        positive = np.isfinite(other) & (other > 0) & np.isfinite(in_nats) & (in_nats > 0)
        if positive.sum() < 3:
            continue
        if str(name).lower() in _PERPLEXITY:
            ratio = in_nats[positive] / np.log(other[positive])
        elif "bits" in str(name).lower():
            ratio = in_nats[positive] / (other[positive] * math.log(2))
        elif "nats" in str(name).lower():
            ratio = in_nats[positive] / other[positive]
        else:
            continue
        typical = float(np.median(ratio))
        for factor, meant in ((1 / math.log(2), "bits per token"), (math.log(2), NATS)):
            if abs(typical / factor - 1) < _CLOSE:
                found.append(
                    f"by the column {name}, the losses are {factor:.4f} times what {loss_unit} would be: they seem to be {meant}, "
                    f'--loss-unit "{meant}"'
                )
    return found
