"""Caveats of a fit that do not rule out its forecasts: rows far off the law, and best D/N outside the runs' range."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from scaling.fits.identification import Unidentified
from scaling.forms.law import Law
from scaling.presentation import span

FAR_DEVIATIONS, FAR_SHARE = 12.0, 0.03
"""Standard deviations (by the median) and share of the loss beyond which a row is named. Two of 15 public ladders have such rows
(their smallest models); a mistyped loss lies far beyond."""
MAX_NAMED = 3
MOST_E = 2.7
"""Largest E in nats per token: 12 public ladders of finished runs have .9 to 2.6 (measured), five of them more than 2.7 in bits."""


def caveats(law: Law | None, residuals: pd.DataFrame, unidentified: Unidentified | None) -> tuple[str, ...]:
    """Return the caveats as sentences; none if nothing stands out.

    Args:
        law: the law that decides budgets; None if the runs are too few for one.
        residuals: the table of `ScalingFit.residuals`.
        unidentified: why the runs do not identify the best D/N, or None.
    """
    of_best = f"not identified: {unidentified}" if unidentified else _off_centre(law, residuals)
    return tuple(filter(None, [_far_rows(residuals), of_best]))


def high_floor(law: Law) -> Iterator[str]:
    """Caveat if E is above any seen in nats: losses assumed to be in nats may be in bits."""
    if (E := law.parameters.get("E", 0.0)) > MOST_E:
        yield (
            f"E = {E:.3g} nats per token is above {MOST_E:g}, more than public ladders have: if the losses are in bits, "
            "set loss_unit='bits'; if they are in nats, set loss_unit='nats'"
        )


def _far_rows(residuals: pd.DataFrame) -> str:
    off = np.expm1(residuals["log_residual"].to_numpy())
    deviation = 1.4826 * float(np.median(np.abs(off)))
    far = np.flatnonzero((np.abs(off) > FAR_DEVIATIONS * deviation) & (np.abs(off) > FAR_SHARE))
    if not far.size:
        return ""
    worst = far[np.argsort(-np.abs(off[far]))][:MAX_NAMED]
    named = ", ".join(
        f"row {residuals.index[i]} (N {residuals['n_params'].iloc[i]:.3g}, D {residuals['n_tokens'].iloc[i]:.3g}) {off[i]:+.1%}"
        for i in worst
    )
    count = f"{far.size} rows lie" if far.size > 1 else "1 row lies"
    return f"{count} far off the law, where half of all are within {deviation / 1.4826:.2%}: {named}"


def _off_centre(law: Law | None, rows: pd.DataFrame) -> str:
    """Caveat if the law's best D/N lies outside the runs' D/N at every compute: the form alone places the optimum."""
    if law is None or {*law.form.columns} != {"n_params", "n_tokens"}:
        return ""
    ratio, flops = rows["n_tokens"] / rows["n_params"], rows["compute_flops"]
    low, high = ratio.min(), ratio.max()
    best = [law.allocate(end).tokens_per_param for end in (flops.min(), flops.max())]
    if max(best) >= low and min(best) <= high:
        return ""
    return f"off-centre: the law's best D/N at the runs' compute, {span(min(best), max(best))}, lies outside theirs, {span(low, high)}"
