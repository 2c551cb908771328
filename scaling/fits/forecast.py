"""Forecast of the loss of a future run: value, interval, and whether such intervals have been validated.

The point estimate is the mean log loss of the variants of `scaling.fits.ensemble`. The interval is exp(log point ± k·s), with k
Student's t for 8 degrees of freedom:

    s² = ((.004² + r²) · max(1, h)⁴ + p²) · n / (n − 3)

    r  recency-weighted rms of the log residuals (rows with 2 ≤ D/N ≤ 500)
    h  decades of compute above the largest run
    p  standard deviation of the log point over draws of runs and of the prior's mean
    n  independent runs

Parameter bootstraps alone cover 40–53 % of held-out losses at a nominal 95 %, because they ignore that the form itself is wrong.
With draws of the prior's mean, the spread grows with the extrapolation. The floor of .004 and the 3 in n − 3 were found on the public
ladders' held-out runs, on runs drawn from them at random and on planted ladders of eleven runs: 95 % intervals hold 95 to 97 % of
each. `tests/benchmarks/forecast.py` checks the intervals on all its ladders; RESULTS.md has the results.

With many runs p is near 0 however far the target lies, while the form stays wrong. So the error of the form, .004 and r within
a decade, grows as h² beyond. A form that matches the loss and its slope at the largest runs misses the curvature first, and an unknown
curvature errs by h². The power is not fitted to the ladders: on planted dense ladders whose exponent drifts with compute, the error
at two decades was 2.0 to 4.6 times the error at one. With this growth, 95 % intervals hold 93 to 100 % of the supported runs of
finished public ladders in each band of distance up to 2.5 decades; beyond 1.25 decades they hold 95 % or more whichever family is
left out. Without it they held 82 % between 1.5 and 2 decades and 62 % beyond (measured).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from scaling.arrays import Array
from scaling.checks import positive
from scaling.fits.ensemble import FEW_ONE_SIZE, Ensemble
from scaling.forms.expert_law import SPARSITY
from scaling.forms.law import NATS, Law, compute_flops
from scaling.presentation import counted, lines
from scaling.serialization import JsonResult

DEFAULT = "forecast"
"""Name of `ScalingFit.forecast` in a backtest, next to the names of the forms."""
FLOOR = 0.004
"""Least scale of a log error, for many runs on the law: the error of the form, and the noise of the target's seed (measured)."""
NEAR_DECADES = 1.0
"""Decades of compute above the largest run within which FLOOR was measured and the form's error is assumed not to grow."""
GROWTH = 2.0
"""Power of the distance with which the form's error grows beyond, as from an unknown curvature (see the head of this file)."""

FREEDOM = 8
"""Degrees of freedom of the log error's distribution, Student's t."""


@dataclass(frozen=True, kw_only=True)
class Forecast(JsonResult):
    """The predicted final loss of one run.

    Attributes:
        n_tokens: training tokens D.
        low: lower bound of the interval.
        high: upper bound of the interval.
        level: nominal coverage of the interval; it holds across ladders, not for several targets of one ladder.
        log_scale: scale s of the error of log loss.
        extrapolation: C of this run over the largest C in the fit.
        reasons: why the forecast is unsupported (`scaling.fits.support`); empty if it is supported.
        law_loss: loss by the fitted law alone, for comparison.
        n_params_convention, loss_unit: what N counts, and the unit of the losses, as in the fit.
        sparsity: total over active parameters, None under a law without this column.
    """

    n_params: float
    n_tokens: float
    loss: float
    low: float
    high: float
    level: float
    log_scale: float
    extrapolation: float
    reasons: tuple[str, ...]
    law_loss: float | None = None
    n_params_convention: str = ""
    loss_unit: str = NATS
    sparsity: float | None = None

    @property
    def supported(self) -> bool:
        """True if no reason suggests that the interval misses."""
        return not self.reasons

    @property
    def columns(self) -> dict[str, float]:
        """The law's further columns."""
        return {} if self.sparsity is None else {SPARSITY: self.sparsity}

    @property
    def compute_flops(self) -> float:
        """C = 6·N·D."""
        return float(compute_flops(self.n_params, self.n_tokens))

    def probability(self, target: float) -> float:
        """Probability that the loss is at most the target, by the interval's distribution: the bounds at 90 % have 5 % and 95 %."""
        from scipy.special import stdtr

        return float(stdtr(FREEDOM, math.log(positive("target", target) / self.loss) / self.log_scale))

    def __str__(self) -> str:
        """Loss, interval, position of the run, and whether the forecast is supported."""
        return lines(
            {
                "loss": f"{self.loss:.4f} {self.loss_unit}, {self.level:.0%} within {self.low:.4f} to {self.high:.4f}",
                "at": f"{self.n_params:.4g} parameters ({counted(self.n_params_convention)}), {self.n_tokens:.4g} tokens, "
                f"{self.compute_flops:.3g} FLOPs"
                + "".join(f", {name} {value:.4g}" for name, value in self.columns.items()),
                **({} if self.law_loss is None else {"law": f"{self.law_loss:.4f} by the fitted form alone"}),
                "extrapolation": f"{self.extrapolation:.3g}× the largest fitted compute",
                "status": "supported" if self.supported else "unsupported: " + "; ".join(self.reasons),
            }
        )


def forecast(
    law: Law,
    ensemble: Ensemble,
    n_params: float,
    n_tokens: float,
    *,
    level: float,
    reasons: Sequence[str],
    columns: Mapping[str, float],
) -> Forecast:
    """Make the forecast of `ScalingFit.forecast`.

    Args:
        law: the fitted law, for comparison.
        ensemble: the fits behind the forecast.
        level: nominal coverage of the interval.
        reasons: why the forecast is unsupported (`scaling.fits.support`).
        columns: the law's further columns.
    """
    loss = math.exp(ensemble.log_loss(n_params, n_tokens, **columns))
    scale = float(log_scale(ensemble, n_params, n_tokens, **columns))
    reach = math.exp(interval_factor(level) * scale)
    return Forecast(
        n_params=float(n_params),
        n_tokens=float(n_tokens),
        loss=loss,
        low=loss / reach,
        high=loss * reach,
        level=level,
        log_scale=scale,
        extrapolation=float(compute_flops(n_params, n_tokens)) / ensemble.largest_flops,
        reasons=tuple(reasons),
        law_loss=float(law.loss(n_params, n_tokens, **columns)),
        n_params_convention=law.n_params_convention,
        loss_unit=law.loss_unit,
        sparsity=float(columns[SPARSITY]) if SPARSITY in columns else None,
    )


def log_scale(ensemble: Ensemble, n_params: ArrayLike, n_tokens: ArrayLike, **columns: ArrayLike) -> Array:
    """Scale s of the log error, of the broadcast shape of the columns, by the formula at the head of this file."""
    decades = np.log10(compute_flops(n_params, n_tokens) / ensemble.largest_flops)
    form = (FLOOR**2 + ensemble.residual**2) * np.maximum(decades, NEAR_DECADES) ** (2 * GROWTH)
    variance = form + ensemble.draw_spread(n_params, n_tokens, **columns) ** 2
    if ensemble.form.tokens_only:
        return np.asarray(np.sqrt(variance * FEW_ONE_SIZE))
    return np.asarray(np.sqrt(variance * ensemble.n_runs / max(ensemble.n_runs - 3, 1)))


def interval_factor(level: float) -> float:
    """Factor k of the interval: the two-sided quantile of Student's t with `FREEDOM`.

    Values at 90 and 95 % were measured on the public ladders; at other levels the curve is our interpolation.
    """
    from scipy.special import stdtrit

    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    return float(stdtrit(FREEDOM, (1 + level) / 2))
