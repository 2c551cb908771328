"""Weights of rows, and refits under resampled runs: how far the parameters depend on the choice of runs."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.forms.problem import Problem
from scaling.minimizers.newton import NormalPrior, minimize

BATCH = 100
"""Refits minimised together: about as many as a processor's cache holds for a few hundred rows."""
N_SHARE_DRAWS = 64
MANY_STEMS = 1000
"""Number of stems from which `share_seen` counts as 1; it is then less by half a percent at most."""
LEAST_SEEN = 0.1
"""Least share that `widening` divides by: with fewer runs than parameters the share is near 0; with five runs it is .2."""


def noise_weights(rows: pd.DataFrame) -> Array:
    """Row weights 1/noise² with mean one; equal weights if the rows have no `noise`."""
    weights = rows["noise"].to_numpy() ** -2.0 if "noise" in rows else np.ones(len(rows))
    return np.asarray(weights / weights.mean())


def stem_weights(stems: NDArray[np.int64], n_draws: int, seed: int) -> Array:
    """Row weights [n_draws, K] of a Bayesian bootstrap over stems (Rubin 1981): Dirichlet(1, …, 1), mean one per row.

    All rows of a stem share one weight: a stem is one training run, and resampling its rows one by one would count the same
    chance several times. Unlike multinomial counts, these weights never drop a stem altogether, so small ladders keep
    their rank. On the reference problem, standard deviations under both agree within 3 %; within 15 % for B, which is
    heavy-tailed.

    Args:
        stems: number of the stem of each row, [K], from 0.
        seed: the same seed gives the same weights.
    """
    n_stems = int(stems.max()) + 1
    shares = np.random.default_rng(seed).dirichlet(np.ones(n_stems), size=n_draws)
    return np.asarray(shares[:, stems] * n_stems)


def refit(
    problem: Problem,
    log_loss: Array,
    weights: Array,
    start: Array,
    deltas: tuple[float, ...],
    prior: NormalPrior | None = None,
) -> tuple[Array, NDArray[np.bool_]]:
    """Minimise under each weighting, always from the same start: theta [J, P] and converged [J]."""
    theta = np.empty((len(weights), len(start)))
    converged = np.empty(len(weights), dtype=bool)
    for first in range(0, len(weights), BATCH):
        part = slice(first, first + BATCH)
        starts, own = np.tile(start, (len(weights[part]), 1)), prior and prior.of(part)
        theta[part], _, converged[part] = minimize(problem, log_loss, weights[part], starts, deltas, own)
    return theta, converged


def free_columns(problem: Problem, theta: Array) -> Array:
    """Jacobian of log loss at the estimate [P] with respect to the parameters within their bounds, [K, F]."""
    free = (theta > problem.lower) & (theta < problem.upper)
    return np.asarray(problem.linearise(theta[None])[1][0][:, free])


def share_seen(jacobian: Array, weights: Array, stems: NDArray[np.int64]) -> float:
    """Share of the errors' variance that a refit's gain in the objective shows; below 1, as residuals are smaller than errors.

    The share is taken from linear least squares on the same rows with one error for each run: about .6 for 20 runs and 5 parameters.
    With G [P, runs] the sums of weighted Jacobian rows by run, H and H* the two normal matrices and w* the weights of a draw, the
    residuals of the fit give scores (G·diag(w*) − H*·H⁻¹·G)·error, and the errors themselves G·error. The gain is the mean square
    of a score in H*⁻¹, or in H⁻¹.

    Args:
        jacobian: derivatives of the fitted quantity by its free parameters, at the estimate, [K, F].
        weights: row weights of the fit, [K].
        stems: number of the stem of each row, [K], from 0.
    """
    n = jacobian.shape[1]
    if (n_stems := int(stems.max()) + 1) >= MANY_STEMS or not n:
        return 1.0
    weighted = weights[:, None] * jacobian
    scores = np.stack([np.bincount(stems, column) for column in weighted.T], axis=1)
    products = np.stack([np.bincount(stems, a * b) for a in weighted.T for b in jacobian.T], axis=1).reshape(-1, n, n)
    squares = scores[:, :, None] * scores[:, None, :]
    total = products.sum(axis=0)
    ridge = 1e-12 * np.trace(total) * np.eye(n)
    by_stem = stem_weights(np.arange(n_stems), N_SHARE_DRAWS, seed=0)
    drawn = np.tensordot(by_stem, products, 1) + ridge
    ratio = drawn @ np.linalg.inv(total + ridge)
    mixed, all_of_it = ratio @ np.tensordot(by_stem, squares, 1), squares.sum(axis=0)
    score = (
        np.tensordot(by_stem**2, squares, 1)
        - mixed
        - np.swapaxes(mixed, 1, 2)
        + ratio @ all_of_it @ np.swapaxes(ratio, 1, 2)
    )
    seen = np.trace(np.linalg.solve(drawn, score), axis1=1, axis2=2)
    return float(seen.mean() / np.trace(np.linalg.solve(total + ridge, all_of_it)))


def widening(jacobian: Array, weights: Array, stems: NDArray[np.int64]) -> float:
    """Factor that spreads the draws, so that their percentiles cover at their nominal rate.

    The factor is 1/√`share_seen`, times the standard deviation of Student's t with runs minus free parameters (at least three) as
    degrees of freedom, since the errors' variance is estimated. It is 1.4 for 20 runs and 5 parameters, 1.03 for 240 runs. The share
    of the parameters' variance that refits show is somewhat larger, but intervals with this factor were found to cover (RESULTS.md).
    """
    dof = max(int(stems.max()) + 1 - jacobian.shape[1], 3)
    return float(np.sqrt(dof / (dof - 2) / max(share_seen(jacobian, weights, stems), LEAST_SEEN)))
