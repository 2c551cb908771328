"""Several fits of one ladder whose mean is the forecast and whose spread tells how far the form can be trusted.

Each is the joint form under weak priors. They differ in what is robust and what is recent: no single one is best on every
public ladder, and to choose one by its held-out error would be hindsight. Measured on the ladders of
`tests/benchmarks/forecast.py`; the figures are in tests/benchmarks/RESULTS.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from scaling.bootstrap import refit, stem_weights
from scaling.forms.form import Array, Problem, columns_of
from scaling.forms.powers import Joint
from scaling.law import Law, compute_flops
from scaling.newton import Prior, minimize, objective

PRIOR = {"E": (0.6, 0.6), "alpha": (0.35, 0.5), "beta": (0.35, 0.5), "g": (1.0, 0.35)}
"""Centre (of E: as a share of the least loss) and standard deviation of the logarithm, the same for every ladder."""
TUNING = 1.345
"""Huber's threshold in standard deviations of the residual: 95 % efficiency under normal noise (Huber 1981, sec. 4.5)."""
L1_DELTA = 1e-3
USUAL_RATIO = (5.0, 200.0)
"""D/N of the rows of the variant that leaves far under- and over-trained ones out."""
MIN_USUAL_ROWS = 12
RESIDUAL_RATIO = (2.0, 500.0)
"""D/N of the rows whose residuals tell how well the form fits."""
N_DRAWS = 60
_MAD = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
_LEAST_SIGMA = 1e-4  # of log residuals; below it a prior would weigh nothing
_SCALE_STEPS = 4  # of residual scale and fit in turn


@dataclass(frozen=True, kw_only=True, eq=False)
class Ensemble:
    """Fits of one ladder.

    Attributes:
        variants: of which the forecast is the mean in log loss, by name; the first is the base.
        squares: the base under squared residuals: far from the others where single rows decide.
        draws: the base under resampled stems, parameters in the form's order, [n_draws, 6].
        residual: recency-weighted rms of the base's log residuals.
        compute_range: least and largest C fitted, FLOPs.
    """

    variants: Mapping[str, Law]
    squares: Law
    draws: Array
    residual: float
    compute_range: tuple[float, float]

    def log_loss(self, n_params: ArrayLike, n_tokens: ArrayLike) -> Array:
        """The forecast, log nats per token, of the broadcast shape."""
        return np.asarray(np.mean([np.log(law.loss(n_params, n_tokens)) for law in self.variants.values()], axis=0))

    def form_spread(self, n_params: ArrayLike, n_tokens: ArrayLike) -> Array:
        """Standard deviation of log loss over the variants and the fit of squares."""
        laws = (*self.variants.values(), self.squares)
        return np.asarray(np.std([np.log(law.loss(n_params, n_tokens)) for law in laws], axis=0))

    def draw_spread(self, n_params: ArrayLike, n_tokens: ArrayLike) -> Array:
        """Standard deviation of log loss over the draws."""
        n_params, n_tokens = np.broadcast_arrays(np.asarray(n_params, np.float64), np.asarray(n_tokens, np.float64))
        values = dict(zip(Joint.parameters, self.draws.T[(...,) + (None,) * n_params.ndim], strict=True))
        rows = columns_of(Joint(), {"n_params": n_params, "n_tokens": n_tokens})
        return np.asarray(np.log(Joint().loss(values, rows)).std(axis=0))


def fit_ensemble(rows: pd.DataFrame, *, seed: int = 0) -> Ensemble:
    """Fit every variant.

    Args:
        rows: n_params, n_tokens, loss, stem.
        seed: of the resampling.
    """
    log_loss = np.log(rows["loss"].to_numpy())
    n_params, n_tokens = rows["n_params"].to_numpy(), rows["n_tokens"].to_numpy()
    log_compute, ratio = np.log10(compute_flops(n_params, n_tokens)), n_tokens / n_params
    fits = _Fits(Joint().problem({"n_params": n_params, "n_tokens": n_tokens}, log_loss), log_loss)
    even, usual = np.ones(len(rows)), (ratio >= USUAL_RATIO[0]) & (ratio <= USUAL_RATIO[1])
    base, sigma = fits.adaptive()
    residual = fits.residual(base)
    robust = TUNING * sigma
    thetas = {
        "adaptive Huber": base,
        # The prior weighs as against Laplace noise of the mean absolute residual.
        "least absolute residuals": fits.polished(even, (robust, L1_DELTA), L1_DELTA * np.abs(residual).mean(), base),
    }
    for name, power in (("recent rows weigh more", 0.5), ("recent rows weigh most", 1.0)):
        recent = 10 ** (power * (log_compute - log_compute.max()))
        thetas[name] = fits.polished(recent / recent.mean(), (robust,), sigma**2, base)
    if usual.sum() >= MIN_USUAL_ROWS:
        low, high = USUAL_RATIO
        thetas[f"rows of {low:g} to {high:g} tokens per parameter"] = fits.polished(
            usual.astype(np.float64), (robust,), sigma**2, base
        )
    squares = fits.polished(even, (math.inf,), max(float(np.mean(residual**2)), _LEAST_SIGMA**2), base)
    weights = stem_weights(pd.factorize(rows["stem"])[0], N_DRAWS, seed)
    draws, _ = refit(fits.problem, log_loss, weights, base, (robust,), fits.prior(sigma**2))

    telling = (ratio >= RESIDUAL_RATIO[0]) & (ratio <= RESIDUAL_RATIO[1])
    telling = telling if telling.any() else np.ones(len(rows), dtype=bool)
    recent = 10 ** (0.5 * (log_compute - log_compute.max()))
    return Ensemble(
        variants={name: fits.law(theta) for name, theta in thetas.items()},
        squares=fits.law(squares),
        draws=fits.problem.natural(draws),
        residual=float(np.sqrt(np.average(residual[telling] ** 2, weights=recent[telling]))),
        compute_range=(float(10 ** log_compute.min()), float(10 ** log_compute.max())),
    )


@dataclass(frozen=True)
class _Fits:
    """Fits of the joint form to one ladder, under the prior."""

    problem: Problem
    log_loss: Array

    def prior(self, variance: float) -> Prior:
        """In the units of an objective whose residuals have a variance."""
        centres = {name: math.log(centre) for name, (centre, _) in PRIOR.items()}
        centres["E"] += float(self.log_loss.min())
        return Prior(
            mean=np.array([centres.get(name, 0.0) for name in Joint.parameters]),
            precision=np.array([variance / PRIOR[name][1] ** 2 if name in PRIOR else 0.0 for name in Joint.parameters]),
        )

    def adaptive(self) -> tuple[Array, float]:
        """Huber's fit and the scale of its residuals, found in turn."""
        wide = 1e-2
        even, starts, prior = np.ones(len(self.log_loss)), self.problem.starts(self.log_loss), self.prior(wide**2)
        values = objective(self.problem, self.log_loss, even, starts, wide, prior)
        best = starts[np.argsort(values)[:6]]
        thetas, values, _ = minimize(self.problem, self.log_loss, np.tile(even, (6, 1)), best, (10 * wide, wide), prior)
        theta = thetas[np.argmin(values)]
        for _ in range(_SCALE_STEPS):
            sigma = max(_MAD * float(np.median(np.abs(self.residual(theta)))), _LEAST_SIGMA)
            theta = self.polished(even, (TUNING * sigma,), sigma**2, theta)
        return theta, sigma

    def polished(self, weights: Array, deltas: tuple[float, ...], variance: float, start: Array) -> Array:
        """The fit from one start."""
        theta, _, _ = minimize(self.problem, self.log_loss, weights[None], start[None], deltas, self.prior(variance))
        return np.asarray(theta[0])

    def residual(self, theta: Array) -> Array:
        """Log loss expected less log loss measured, [K]."""
        return np.asarray(self.problem.log_loss(theta[None])[0] - self.log_loss)

    def law(self, theta: Array) -> Law:
        """The law of one theta."""
        return Joint().law(**dict(zip(Joint.parameters, map(float, self.problem.natural(theta[None])[0]), strict=True)))
