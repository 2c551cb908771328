"""Linearised information that finished runs give about one forecast, and that further runs would add.

The forecast's base fit is linearised about its estimate: theta ~ N(estimate, S) with S⁻¹ = Σ j jᵀ/v + P over the finished runs, j
the gradient of a run's log loss, v its variance and P the prior's precision. A further run reduces the variance gᵀSg at the target
by (gᵀSj)² / (v + jᵀSj), and S becomes S − Sj jᵀS / (v + jᵀSj) (Bayesian linear design: Chaloner and Verdinelli 1995, sec. 2;
the update is Sherman and Morrison's).

v = sigma² + (1 %·h)², with sigma the residual of the fit and h the decades of compute from the run up to the target. As the form is
not exact, a run informs less about the target the further below the target it lies.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from scaling.arrays import Array
from scaling.fits.ensemble import Ensemble
from scaling.fits.identification import LEAST_NOISE
from scaling.fits.law_prior import precision
from scaling.forms.law import compute_flops
from scaling.forms.problem import Problem
from scaling.minimizers.bootstrap import noise_weights

MISFIT_PER_DECADE = 0.01
"""Standard deviation of log loss added for each decade between a run and the target (from public ladders)."""
Criterion = Literal["variance", "variance per FLOP"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Design:
    """Linearised posterior of the base fit's parameters, and the resulting variance at the target.

    Attributes:
        law: the form bound to the finished runs, for gradients at other (N, D).
        theta: estimate of the base fit, [P].
        covariance: covariance of theta, [P, P].
        target: gradients of the log loss at the targets, [T, P].
        noise: standard deviation of a log loss.
        target_flops: compute of the target; for several targets the geometric mean.
    """

    law: Problem
    theta: Array
    covariance: Array
    target: Array
    noise: float
    target_flops: float

    @classmethod
    def of(
        cls, ensemble: Ensemble, rows: pd.DataFrame, n_params: ArrayLike, n_tokens: ArrayLike, **columns: ArrayLike
    ) -> "Design":
        """Build the design from the forecast's fits, their rows (the form's columns and loss), and one or several targets."""
        form = ensemble.form
        law = form.problem(
            {name: rows[name].to_numpy() for name in form.columns}, np.log(rows["loss"].to_numpy(np.float64))
        )
        theta = law.coordinates(next(iter(ensemble.variants.values())).parameters)
        jacobian = law.linearise(theta[None])[1][0]
        prior = precision(form=form)[np.ix_(law.free, law.free)]
        blank = cls(
            law=law,
            theta=theta,
            covariance=prior,
            target=gradient_of(law, theta, n_params, n_tokens, **columns),
            noise=max(ensemble.residual, LEAST_NOISE),
            target_flops=float(np.exp(np.log(compute_flops(n_params, n_tokens)).mean())),
        )
        variance = blank.noise_variance(compute_flops(rows["n_params"], rows["n_tokens"]), noise_weights(rows))
        return replace(blank, covariance=np.linalg.inv(jacobian.T @ (jacobian / variance[:, None]) + prior))

    @property
    def variance(self) -> float:
        """Variance of the log loss at the target, from the parameters alone; the mean over several targets."""
        return float(np.einsum("ti,ij,tj->t", self.target, self.covariance, self.target).mean())

    def noise_variance(self, compute: ArrayLike, weights: ArrayLike = 1.0) -> Array:
        """Variance of a run's log loss as evidence for the target, by the run's compute in FLOPs and its weight."""
        below = np.maximum(np.log10(self.target_flops / np.asarray(compute, np.float64)), 0)
        return np.asarray(self.noise**2 / np.asarray(weights) + (MISFIT_PER_DECADE * below) ** 2)

    def gains(self, gradient: Array, noise_variance: Array) -> Array:
        """Reduction of the variance at the target by each run, [K], from gradients [K, P] and variances [K]."""
        known = gradient @ self.covariance
        total = noise_variance + np.einsum("ki,ki->k", known, gradient)
        return np.asarray((((self.target @ known.T) ** 2).mean(axis=0)) / total)

    def with_run(self, gradient: Array, noise_variance: float) -> "Design":
        """Design after a further run, whose gradient is [P]."""
        known = self.covariance @ gradient
        covariance = self.covariance - np.outer(known, known) / (noise_variance + gradient @ known)
        return replace(self, covariance=(covariance + covariance.T) / 2)

    def greedy(
        self,
        n_params: Array,
        n_tokens: Array,
        cost: Array,
        affordable: float,
        criterion: Criterion = "variance",
        **columns: Array,
    ) -> Iterator[tuple[int, "Design"]]:
        """Choose among K runs one by one while a run is affordable; yield its index, and the design with that run."""
        gradient = gradient_of(self.law, self.theta, n_params, n_tokens, **columns)
        noise_variance = self.noise_variance(compute_flops(n_params, n_tokens))
        design, left, open_ = self, affordable, np.ones(len(cost), dtype=bool)
        while (payable := open_ & (cost <= left * (1 + 1e-12))).any():
            gains = design.gains(gradient, noise_variance) / (cost if criterion == "variance per FLOP" else 1.0)
            best = int(np.argmax(np.where(payable, gains, -np.inf)))
            design = design.with_run(gradient[best], float(noise_variance[best]))
            left, open_[best] = left - cost[best], False
            yield best, design


def gradient_of(law: Problem, theta: Array, n_params: ArrayLike, n_tokens: ArrayLike, **columns: ArrayLike) -> Array:
    """Gradients of the log loss by theta at other points, [K, P]."""
    given = {"n_params": n_params, "n_tokens": n_tokens, **columns}
    points = np.broadcast_arrays(*(np.atleast_1d(np.asarray(values, np.float64)) for values in given.values()))
    elsewhere = law.elsewhere(dict(zip(given, points, strict=True)))
    return np.asarray(elsewhere.linearise(theta[None])[1][0])
