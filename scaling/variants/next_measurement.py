"""The measurement that would decide an undecided variant at the least compute."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from scaling.variants.posterior import Baseline, Gains, NormalMixture, normal_quantile

LIKELY = 0.5
"""Probability of deciding above which the cheapest next runs are advised."""
HARDLY = 0.05
"""Probability of deciding below which no runs are advised."""


def cheapest_next(
    gains: Gains,
    law: Baseline,
    now: NormalMixture,
    *,
    noise: float,
    target: float,
    worth: float,
    error: float,
    promotable: bool,
) -> dict[str, Any] | None:
    """Return the cheapest measurement that is likely to decide, else the most likely: its compute, seeds, cost and probability.

    Return None if every candidate costs more than the target or is unlikely to decide. A variant that is not `promotable`, because
    one of its runs diverged, can only be rejected.

    Candidates are the baseline's sizes and 2, 4 … times its largest, up to the target, with 1, 2 or 4 seeds each of variant and
    baseline. The posterior mean after a measurement is normal about the present mean; its variance is the variance that the
    measurement removes (Raiffa & Schlaifer 1961).
    """
    from scipy.special import ndtr

    mean, variance = now.moments()
    typical, edge = np.array([noise]), normal_quantile(1 - error)
    by_slope = gains.evidence(typical)[0]
    weights = np.exp(by_slope - by_slope.max())
    before = float(weights @ gains.predict(np.log([target]), typical)[1][0, :, 0])
    largest = float(law.x.max())
    further = [largest + math.log(2.0) * k for k in range(1, 12) if largest + math.log(2.0) * k <= math.log(target)]
    candidates: list[dict[str, Any]] = []
    for x in (*law.x, *further):
        for seeds in (1, 2, 4):
            # Variant and baseline both train: the variance of their difference in log loss, in units of log m.
            added = gains.with_runs(x, 2 / seeds / float(law.slope(np.array([x]))[0]) ** 2)
            after = float(weights @ added.predict(np.log([target]), typical)[1][0, :, 0]) / before * variance
            moves, left = math.sqrt(max(variance - after, 1e-18)), math.sqrt(after)
            promoted = ndtr((mean - edge * left) / moves) if promotable else 0.0
            rejected = ndtr((math.log1p(worth) - edge * left - mean) / moves)
            found = {"compute_flops": math.exp(x), "seeds": seeds, "cost": 2 * seeds * math.exp(x)}
            found["p_decided"] = min(float(promoted + rejected), 1.0)
            if found["cost"] <= target and found["p_decided"] >= HARDLY:
                candidates.append(found)
    if not candidates:
        return None
    likely = [found for found in candidates if found["p_decided"] >= LIKELY]
    return min(likely, key=lambda found: found["cost"]) if likely else max(candidates, key=lambda f: f["p_decided"])
