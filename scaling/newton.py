"""Many robust fits at once: a damped Newton method over a batch of parameter vectors and row weights.

Minimises Σ_k w_k · huber(log L̂_k − log L_k; delta) for every member of a batch: the starts of one fit, or the refits
of a bootstrap. Measured on the reference problem (240 rows): 4 starts reach the minimum in milliseconds, where 7 % of
4,500 starts of L-BFGS in raw coordinates do.
"""

import numpy as np

from scaling.form import Array, SumOfPowers

MAX_STEPS = 200
TOLERANCE = 1e-12
"""A member is finished when the next step promises less than this part of its objective."""


def huber(residual: Array, delta: float) -> Array:
    """r²/2 within delta, delta·(|r| − delta/2) beyond."""
    clipped = np.clip(residual, -delta, delta)
    return clipped * (residual - clipped / 2)


def objective(form: SumOfPowers, log_loss: Array, weights: Array, theta: Array, delta: float) -> Array:
    """Σ w · huber of log residuals, [J], for theta [J, 5], weights [J, K] or [K], log_loss [K]."""
    return np.asarray((weights * huber(form.log_loss(theta) - log_loss, delta)).sum(axis=-1))


def minimize(
    form: SumOfPowers, log_loss: Array, weights: Array, start: Array, deltas: tuple[float, ...]
) -> tuple[Array, Array, Array]:
    """Minimise from each start, through each delta in turn (wide ones smooth the way for the last).

    Args:
        form: the form at K points.
        log_loss: observed log loss, [K].
        weights: row weights, [J, K].
        start: theta to start from, [J, 5]; clipped into the form's bounds.
        deltas: Huber thresholds; the last defines the objective.

    Returns:
        theta [J, 5], objective [J], converged [J].
    """
    lower, upper = form.bounds(np.exp(log_loss))
    theta = np.clip(start, lower, upper)
    for delta in deltas:
        theta, value, converged = _descend(form, log_loss, weights, theta, delta, lower, upper)
    return theta, value, converged


def _descend(
    form: SumOfPowers, log_loss: Array, weights: Array, theta: Array, delta: float, lower: Array, upper: Array
) -> tuple[Array, Array, Array]:
    theta = theta.copy()
    value = objective(form, log_loss, weights, theta, delta)
    damping = np.full(len(theta), 0.1)
    active = np.arange(len(theta))
    for _ in range(MAX_STEPS):
        here, w = theta[active], weights[active]
        gradient, hessian, majorant = _derivatives(form, log_loss, w, here, delta)
        held = ((here <= lower) & (gradient > 0)) | ((here >= upper) & (gradient < 0))
        system = hessian + damping[active, None, None] * majorant
        system += 1e-12 * np.trace(majorant, axis1=1, axis2=2)[:, None, None] * np.eye(5)
        system[held[:, :, None] | held[:, None, :]] = 0
        system[np.broadcast_to(np.eye(5, dtype=bool), system.shape) & held[:, :, None]] = 1
        gradient[held] = 0
        step = np.clip(-np.linalg.solve(system, gradient[..., None])[..., 0], -1, 1)
        trial = np.clip(here + step, lower, upper)
        trial_value = objective(form, log_loss, w, trial, delta)
        better = trial_value < value[active]
        promised = np.abs((gradient * (trial - here)).sum(axis=1))
        finished = promised <= TOLERANCE * value[active]
        accepted = active[better]
        theta[accepted], value[accepted] = trial[better], trial_value[better]
        damping[active] = np.clip(damping[active] * np.where(better, 0.2, 8.0), 1e-9, 1e12)
        active = active[~finished]
        if not active.size:
            break
    converged = np.ones(len(theta), dtype=bool)
    converged[active] = False
    return theta, value, converged


def _derivatives(
    form: SumOfPowers, log_loss: Array, weights: Array, theta: Array, delta: float
) -> tuple[Array, Array, Array]:
    """Gradient [J, 5], exact Hessian [J, 5, 5], and the majorant of iterated reweighting, which is always positive."""
    predicted, jacobian = form.linearise(theta)
    residual = predicted - log_loss
    slope = weights * np.clip(residual, -delta, delta)
    transposed = np.swapaxes(jacobian, 1, 2)
    inside = weights * (np.abs(residual) <= delta)
    reweighted = weights * (delta / np.maximum(np.abs(residual), delta))
    gradient = (transposed @ slope[..., None])[..., 0]
    hessian = transposed @ (jacobian * inside[..., None]) + form.curvature(jacobian, slope)
    majorant = transposed @ (jacobian * reweighted[..., None])
    return gradient, hessian, majorant
