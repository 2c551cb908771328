"""Approach 1: the lowest of many loss curves at each compute, and the sizes of the runs that reach it as powers of compute.

Each curve is one run's loss against its compute so far; at every level of compute the run with the lowest loss has the best
size (Hoffmann et al. 2203.15556, sec. 3.1). But sizes come in steps, the smallest and the largest size win at levels whose best size
lies beyond them, and another curve takes over where a curve ends. So only the crossings of two curves on the envelope are used:
the best size at a crossing is assumed to be the geometric mean of the two sizes. (Hoffmann et al. use every level.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.approaches.compute_powers import (
    MIN_POINTS,
    PARAMETERS,
    ComputePowers,
    Powers,
    powers_through,
    require_draws,
    resampled,
)
from scaling.approaches.loss_curves import COLUMNS, Curves, curves_of
from scaling.checks import names, numbers, require_columns
from scaling.errors import ScalingError
from scaling.fits.as_found import BYTES, NO_COLUMNS, NOTES, PER_BYTE, UNIT
from scaling.fits.runs import ASSUMED, Table, counts, naming, read_runs, require_convention, to_nats, without_stated
from scaling.fits.unfinished import finished
from scaling.forms.law import NATS, compute_flops

MAX_UNANSWERED = 0.05


def fit_envelope(
    curves: Table,
    *,
    n_params_convention: str,
    loss_unit: str | None = None,
    n_bootstrap: int = 400,
    seed: int = 0,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> ComputePowers:
    """Fit N* and D* as powers of compute through the envelope of loss curves.

    Args:
        curves: one row per evaluation, as a table or file (see `fit`): `run`, `n_params`, `n_tokens` (so far), `loss`
            (smoothed; a row without a loss, or with a reason in `left_out`, is left out, and named); optional `annealed`. A curve's
            losses should be final losses of runs of that length: annealed branches, or runs of several lengths; a cosine run has
            only one, at its end.
        loss_unit, columns: as for `fit`; `columns` may also name the column `run`.

    Returns:
        Powers, with `points` one row per crossing; its columns `smaller` and `larger` are the sizes between which N* lies.

    Raises:
        ValueError: a column is missing or breaks its rule, a run has no name or several sizes, or `n_bootstrap` is below 2.
        ScalingError: fewer than two crossings lie on the envelope.
    """
    require_convention(n_params_convention)
    require_draws(n_bootstrap)
    given = read_runs(curves, columns)
    with naming(curves):
        require_columns(given, ("run", "n_params", "n_tokens", "loss"))
        given = finished(without_stated(given, annealed=False), "loss")
        table, unit = _checked(given, loss_unit)
    interpolated = curves_of(table)
    everyone = np.arange(len(interpolated.n_params), dtype=np.int64)
    points = pd.DataFrame(interpolated.crossings(everyone), columns=list(COLUMNS))
    if len(points) < 2:
        raise ScalingError(
            f"need two crossings of curves on the envelope, got {len(points)} among {len(np.unique(interpolated.n_params))} sizes"
        )
    reference = float(np.exp(np.log(points["compute_flops"]).mean()))
    estimate = _powers(interpolated, everyone, reference)
    assert estimate is not None  # noqa: S101 - there are two points

    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(everyone), (n_bootstrap, len(everyone)))
    draws, unanswered = resampled(n_bootstrap, lambda i: _powers(interpolated, np.unique(picks[i]), reference))
    warnings = []
    if len(points) < MIN_POINTS:
        warnings.append(
            f"{len(points)} crossings on the envelope: at least {MIN_POINTS} are needed to see whether the power law is straight"
        )
    if "annealed" in given and not given["annealed"].isin([True]).all():
        warnings.append("losses in mid-schedule: the envelope compares runs before and after their decay")
    if unanswered > MAX_UNANSWERED:
        warnings.append(f"{unanswered:.0%} of the resamplings have fewer than two crossings")
    return ComputePowers(
        approach="envelope",
        **dict(zip(PARAMETERS, estimate, strict=True)),
        compute_ref=reference,
        n_params_convention=n_params_convention,
        loss_unit=unit,
        draws=draws,
        points=points,
        rows=table,
        bias={},
        warnings=tuple(warnings),
        assumptions=(*given.attrs[NOTES], *(() if "annealed" in given else (ASSUMED["annealed"],))),
    )


def _checked(curves: pd.DataFrame, loss_unit: str | None) -> tuple[pd.DataFrame, str]:
    """Checked columns n_params, n_tokens, loss, compute_flops, run, and the unit of the losses."""
    factor, unit = to_nats(loss_unit or curves.attrs.get(UNIT) or NATS)
    loss = factor * numbers(curves, "loss")
    if unit == PER_BYTE and BYTES in curves:
        loss, unit = math.log(2) * numbers(curves, BYTES) * loss, NATS
    found = {"n_params": counts(curves, "n_params"), "n_tokens": numbers(curves, "n_tokens")}
    found |= {"loss": loss, "compute_flops": compute_flops(*found.values())}
    table = pd.DataFrame({**found, "run": names(curves, "run")})
    if (several := table.groupby("run")["n_params"].nunique()).gt(1).any():
        raise ValueError(f"n_params must have one value per run, got {several.max()} in run {several.idxmax()}")
    return table, unit


def _powers(curves: Curves, chosen: NDArray[np.int64], reference: float) -> Powers | None:
    """Fit the powers through the crossings of the chosen runs; None for fewer than two."""
    points = curves.crossings(chosen)
    if len(np.unique(points[:, 0])) < 2:
        return None
    return powers_through(points[:, 0], points[:, 1], points[:, 2], reference)
