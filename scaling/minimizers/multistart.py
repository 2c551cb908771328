"""Plain multi-start: scipy's L-BFGS-B from many starts, with exact gradients. Another way to the same minimum.

The objective is rescaled to its size at the first start: on a sum of Huber terms of 1e-3 and less L-BFGS-B takes its first
steps for convergence and reports success. It is slower than the default, and has nothing in common with it but the form.
"""

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.forms.problem import Problem
from scaling.minimizers.newton import huber
from scaling.minimizers.starts import screened, thresholds

N_STARTS = 24
"""Number of the form's own starts, the best by the objective, that are each followed to the end."""
TOLERANCE = 1e-14
_STEPS = 2000
_FLAT = 1e-4  # projected gradient, as a part of the objective, below which a point counts as a minimum


def multistart(
    problem: Problem, log_loss: Array, weights: Array, delta: float
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Minima under Huber's threshold `delta`, as `starts.minima` gives them: theta [N_STARTS, P], objective, converged."""
    from scipy.optimize import minimize

    def value_and_gradient(theta: Array) -> tuple[float, Array]:
        predicted, jacobian = problem.linearise(theta[None])
        residual = predicted[0] - log_loss
        slope = weights * np.clip(residual, -delta, delta)
        return scale * float((weights * huber(residual, delta)).sum()), scale * (jacobian[0].T @ slope)

    starts, scale = screened(problem, log_loss, weights, thresholds(delta)[0], N_STARTS), 1.0
    scale = 1.0 / max(value_and_gradient(starts[0])[0], 1e-300)
    bounds = np.column_stack([problem.lower, problem.upper])
    options = {"maxiter": _STEPS, "maxfun": 4 * _STEPS, "ftol": TOLERANCE, "gtol": 1e-12, "maxcor": 20}
    found = [
        minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        for start in starts
    ]
    thetas = np.array([result.x for result in found])
    # A line search that finds nothing lower at the last digits ends as a failure of scipy's: the gradient decides.
    projected = [result.x - np.clip(result.x - result.jac, problem.lower, problem.upper) for result in found]
    flat = np.array([np.abs(p).max() <= _FLAT * r.fun for p, r in zip(projected, found, strict=True)])
    return thetas, np.array([result.fun for result in found]) / scale, np.array([r.success for r in found]) | flat
