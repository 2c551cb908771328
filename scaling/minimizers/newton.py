"""Many robust fits at once: a damped Newton method over a batch of parameter vectors and row weights.

Minimises Σ_k w_k · huber(log L̂_k − log L_k; delta) for every member of a batch: the starts of one fit, or the refits
of a bootstrap. Measured on the reference problem (240 rows): 4 starts reach the minimum in milliseconds, where 7 % of
4,500 starts of L-BFGS in raw coordinates do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.forms.problem import Problem

MAX_STEPS = 200
TOLERANCE, ROUGHLY = 1e-12, 1e-3
"""Share of its objective below which the gain that the next step promises ends a member's descent: at the last delta; at others."""


@dataclass(frozen=True, kw_only=True)
class NormalPrior:
    """Normal prior of theta: half of (theta − mean)ᵀ · precision · (theta − mean) is added to the objective.

    Attributes:
        mean: [P], or [J, P] if each member of the batch has its own.
        precision: [P, P], in the units of the objective; 0 for parameters without prior knowledge.
    """

    mean: Array
    precision: Array

    def of(self, members: NDArray[np.int64] | slice) -> NormalPrior:
        """The prior of some members of the batch."""
        return self if self.mean.ndim == 1 else replace(self, mean=self.mean[members])


def huber(residual: Array, delta: float) -> Array:
    """r²/2 within delta, delta·(|r| − delta/2) beyond; r²/2 everywhere for an infinite delta."""
    clipped = np.clip(residual, -delta, delta)
    return clipped * (residual - clipped / 2)


def objective(
    problem: Problem, log_loss: Array, weights: Array, theta: Array, delta: float, prior: NormalPrior | None = None
) -> Array:
    """Σ w · huber of log residuals, plus the prior's part, [J], for theta [J, P], weights [J, K] or [K], log_loss [K]."""
    value = np.asarray((weights * huber(problem.log_loss(theta) - log_loss, delta)).sum(axis=-1))
    if prior is None:
        return value
    off = theta - prior.mean
    return value + np.asarray((off @ prior.precision * off).sum(axis=-1)) / 2


def minimize(
    problem: Problem,
    log_loss: Array,
    weights: Array,
    start: Array,
    deltas: tuple[float, ...],
    prior: NormalPrior | None = None,
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Minimise from each start, through each delta in turn (wide ones smooth the way for the last).

    Args:
        problem: a form at K points.
        log_loss: observed log loss, [K].
        weights: row weights, [J, K].
        start: theta to start from, [J, P]; clipped into the problem's bounds.
        deltas: Huber thresholds; the last defines the objective.

    Returns:
        theta [J, P], objective [J], converged [J].
    """
    theta = np.clip(start, problem.lower, problem.upper)
    for delta in deltas:
        tolerance = TOLERANCE if delta == deltas[-1] else ROUGHLY
        theta, value, converged = _descend(problem, log_loss, weights, theta, delta, prior, tolerance)
    return theta, value, converged


def _descend(
    problem: Problem,
    log_loss: Array,
    weights: Array,
    theta: Array,
    delta: float,
    prior: NormalPrior | None,
    tolerance: float,
) -> tuple[Array, Array, NDArray[np.bool_]]:
    theta, unit = theta.copy(), np.eye(theta.shape[1])
    value = objective(problem, log_loss, weights, theta, delta, prior)
    damping = np.full(len(theta), 0.1)
    active = np.arange(len(theta))
    for _ in range(MAX_STEPS):
        here, w, own = theta[active], weights[active], prior and prior.of(active)
        gradient, hessian, majorant = _derivatives(problem, log_loss, w, here, delta, own)
        held = ((here <= problem.lower) & (gradient > 0)) | ((here >= problem.upper) & (gradient < 0))
        system = hessian + damping[active, None, None] * majorant
        system += 1e-12 * np.trace(majorant, axis1=1, axis2=2)[:, None, None] * unit
        system[held[:, :, None] | held[:, None, :]] = 0
        system[np.broadcast_to(unit.astype(bool), system.shape) & held[:, :, None]] = 1
        gradient[held] = 0
        step = np.clip(-np.linalg.solve(system, gradient[..., None])[..., 0], -1, 1)
        trial = np.clip(here + step, problem.lower, problem.upper)
        trial_value = objective(problem, log_loss, w, trial, delta, own)
        better = trial_value < value[active]
        promised = np.abs((gradient * (trial - here)).sum(axis=1))
        finished = promised <= tolerance * value[active]
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
    problem: Problem, log_loss: Array, weights: Array, theta: Array, delta: float, prior: NormalPrior | None
) -> tuple[Array, Array, Array]:
    """Gradient [J, P], Hessian [J, P, P], and the positive semidefinite majorant of iterated reweighting, [J, P, P]."""
    predicted, jacobian = problem.linearise(theta)
    residual = predicted - log_loss
    slope = weights * np.clip(residual, -delta, delta)
    transposed = np.swapaxes(jacobian, 1, 2)
    inside = weights * (np.abs(residual) <= delta)
    reweighted = weights / np.maximum(np.abs(residual) / delta, 1)
    gradient = (transposed @ slope[..., None])[..., 0]
    hessian = transposed @ (jacobian * inside[..., None]) + problem.curvature(theta, jacobian, slope)
    majorant = transposed @ (jacobian * reweighted[..., None])
    if prior is not None:
        gradient += (theta - prior.mean) @ prior.precision
        hessian += prior.precision
        majorant += prior.precision
    return gradient, hessian, majorant
