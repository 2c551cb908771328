"""Minima of a form's objective from many starts, screened on few rows: 100 rank the starts about as well as 100,000."""

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.errors import ScalingError
from scaling.forms.problem import Problem
from scaling.minimizers.newton import NormalPrior, huber, minimize, objective

MANY_ROWS, SCREENED_ROWS = 2000, 100
"""Most rows, drawn at random, that are used to locate the minima and to rank the starts: these suffice."""
N_STARTS, N_FINALISTS = 6, 3
"""Starts minimised under a wide Huber threshold, and the best of their minima, which are minimised further under the last one."""
N_FOLLOWED, TOLERANCE = 24, 1e-14
"""Best starts that `multistart` minimises, and its tolerance (scipy's `ftol`)."""
_STEPS = 2000
_FLAT = 1e-4  # projected gradient, as a part of the objective, below which a point counts as a minimum


def thresholds(delta: float) -> tuple[float, ...]:
    """Huber thresholds that narrow to `delta`; `delta` alone if it is infinite (least squares)."""
    return (10 * delta, 3 * delta, delta) if np.isfinite(delta) else (delta,)


def minima(
    problem: Problem, log_loss: Array, weights: Array, delta: float, prior: NormalPrior | None = None
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """The best minima under Huber's threshold `delta`: theta [N_FINALISTS, P], objective, converged.

    Of many rows a part suffices to locate the minima; only the best minima are polished on all rows.
    """
    deltas = thresholds(delta)
    starts = screened(problem, log_loss, weights, deltas[0], N_STARTS, prior)
    some = some_rows(len(log_loss), MANY_ROWS)
    thetas, values, _ = minimize(
        problem.part(some), log_loss[some], np.tile(weights[some], (len(starts), 1)), starts, deltas[:1], prior
    )
    best = thetas[np.argsort(values)[:N_FINALISTS]]
    thetas, values, converged = minimize(problem, log_loss, np.tile(weights, (len(best), 1)), best, deltas[-2:], prior)
    return thetas, values, converged


def multistart(
    problem: Problem, log_loss: Array, weights: Array, delta: float, prior: NormalPrior | None = None
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return minima as `minima` does, [N_FOLLOWED, P], by scipy's L-BFGS-B with exact gradients: an independent check.

    This way is slower than the default and shares only the form with it. The objective is divided by its value at the
    first start: on a sum of Huber terms of 1e-3 and less, L-BFGS-B takes its first steps for convergence and reports success.
    """
    from scipy.optimize import minimize as minimize_one

    def value_and_gradient(theta: Array) -> tuple[float, Array]:
        predicted, jacobian = problem.linearise(theta[None])
        residual = predicted[0] - log_loss
        slope = weights * np.clip(residual, -delta, delta)
        value, gradient = float((weights * huber(residual, delta)).sum()), jacobian[0].T @ slope
        if prior is not None:
            off = prior.precision @ (theta - prior.mean)
            value, gradient = value + float(off @ (theta - prior.mean)) / 2, gradient + off
        return scale * value, scale * gradient

    starts, scale = screened(problem, log_loss, weights, thresholds(delta)[0], N_FOLLOWED, prior), 1.0
    scale = 1.0 / max(value_and_gradient(starts[0])[0], 1e-300)
    bounds = np.column_stack([problem.lower, problem.upper])
    options = {"maxiter": _STEPS, "maxfun": 4 * _STEPS, "ftol": TOLERANCE, "gtol": 1e-12, "maxcor": 20}
    found = [
        minimize_one(value_and_gradient, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        for start in starts
    ]
    thetas = np.array([result.x for result in found])
    # scipy reports failure if a line search finds nothing lower at the last digits; the gradient decides instead.
    projected = [result.x - np.clip(result.x - result.jac, problem.lower, problem.upper) for result in found]
    flat = np.array([np.abs(p).max() <= _FLAT * r.fun for p, r in zip(projected, found, strict=True)])
    return thetas, np.array([result.fun for result in found]) / scale, np.array([r.success for r in found]) | flat


def screened(
    problem: Problem, log_loss: Array, weights: Array, delta: float, n_starts: int, prior: NormalPrior | None = None
) -> Array:
    """Best starts with a positive loss at every row, [n_starts, P], for log_loss [K] and weights [K]; raises ScalingError if none."""
    some, few = some_rows(len(log_loss), MANY_ROWS), some_rows(len(log_loss), SCREENED_ROWS)
    starts = problem.part(some).starts(log_loss[some])
    values = objective(problem.part(few), log_loss[few], weights[few], starts, delta, prior)
    require_loss(values)
    values = np.where(np.isfinite(values), values, np.inf)
    return np.asarray(starts[np.argsort(values)[: min(n_starts, int(np.isfinite(values).sum()))]])


def require_loss(objectives: Array) -> None:
    """Raise ScalingError if at no start the form's loss is above 0 for every run."""
    if not np.isfinite(objectives).any():
        raise ScalingError(
            "the form must give a loss above 0 for every run, got none at any start between its bounds; check these"
        )


def some_rows(n_rows: int, wanted: int) -> NDArray[np.int64]:
    """Indices of rows drawn at random, in order: a stride could coincide with the period of a grid of N and D."""
    return np.sort(np.random.default_rng(0).permutation(n_rows)[:wanted])
