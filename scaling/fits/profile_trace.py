"""Points of a profile: fits of a law with one more observation, which pins a quantity to a value (`scaling.fits.profile`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.forms.problem import Problem
from scaling.minimizers.newton import minimize, objective

MAX_STEPS = 24
"""Most steps to each side, the first of half a bootstrap standard deviation of log g; an end not reached by then is open."""
_FLAT, _STEEP = 0.1, 0.5
"""Shares of the reach. If a step moves the root by less than the first, the next step is four times as long; a step that moves the
root by more than the second, or misses its value, is halved. Steps adapt because the bootstrap deviation is near 0 if every refit
lies at a bound, and then does not show how far the other end is."""
_MAX_HALVINGS = 8
_PIN = 100.0  # weight of the pinned observation over that of all rows: it is met within a hundredth of a residual
_STEP = 1e-4  # step of a quantity's differences, in coordinates of order one
Quantity = Callable[[Array], Array]
"""Function from theta [J, P] to log g [J]."""


@dataclass(frozen=True)
class Trace:
    """Fits along a profile."""

    problem: Problem
    quantity: Quantity
    log_loss: Array
    weights: Array
    delta: float
    best: Array
    scale: float

    def outwards(self, step: float, reach: float) -> list[Array]:
        """Theta at each value to one side, until the root exceeds `reach`, a bound stops the quantity, or the steps are used up."""
        found: list[Array] = []
        theta, log_value, root = self.best, float(self.quantity(self.best[None])[0]), 0.0
        pinned = Pinned(self.problem, self.quantity)
        weights, halvings = np.append(self.weights, _PIN * len(self.log_loss)), 0
        while len(found) < MAX_STEPS:
            observed = np.append(self.log_loss, log_value + step)
            there = minimize(pinned, observed, weights[None], theta[None], (self.delta,))[0][0]
            reached = float(self.quantity(there[None])[0])
            missed = abs(reached - log_value - step) > abs(step) / 2
            rise = abs(float(self.read(there[None])[2][0])) - root
            if (missed or rise > _STEEP * reach) and halvings < _MAX_HALVINGS:
                step, halvings = step / 2, halvings + 1
                continue
            if missed:
                break
            found.append(there)
            theta, log_value, root = there, log_value + step, root + rise
            if root > reach:
                break
            if rise < _FLAT * reach and not halvings:
                step *= 4
        return found

    def read(self, thetas: Array) -> tuple[Array, Array, Array]:
        """Value, objective and signed root at each theta."""
        log_values = self.quantity(thetas)
        values = objective(self.problem, self.log_loss, self.weights, thetas, self.delta)
        least = objective(self.problem, self.log_loss, self.weights, self.best[None], self.delta)
        side = np.sign(log_values - self.quantity(self.best[None]))
        return np.exp(log_values), values, side * np.sqrt(2 * np.maximum(values - least, 0) / self.scale)


class Pinned(Problem):
    """A problem with one more row: the logarithm of a quantity."""

    def __init__(self, full: Problem, quantity: Quantity) -> None:
        self.full, self.quantity = full, quantity
        self.lower, self.upper = full.lower, full.upper

    def log_loss(self, theta: Array) -> Array:
        return np.concatenate([self.full.log_loss(theta), self.quantity(theta)[:, None]], axis=1)

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        value, jacobian = self.full.linearise(theta)
        steps = _STEP * np.eye(theta.shape[1])
        ahead, behind = self._around(theta, steps), self._around(theta, -steps)
        slope = ((ahead - behind) / (2 * _STEP))[:, None, :]
        own = self.quantity(theta)[:, None]
        return np.concatenate([value, own], axis=1), np.concatenate([jacobian, slope], axis=1)

    def curvature(self, theta: Array, jacobian: Array, weights: Array) -> Array:
        """Curvature of the full problem, plus that of the quantity by second differences."""
        hessian = self.full.curvature(theta, jacobian[:, :-1], weights[:, :-1])
        n = theta.shape[1]
        steps = _STEP * np.eye(n)
        both, apart = steps[:, None] + steps, steps[:, None] - steps
        shifts = np.stack([both, -both, apart, -apart]).reshape(-1, n)
        there = self._around(theta, shifts).reshape(len(theta), 4, n, n)
        own = (there[:, 0] + there[:, 1] - there[:, 2] - there[:, 3]) / (4 * _STEP**2)
        return np.asarray(hessian + weights[:, -1, None, None] * own)

    def _around(self, theta: Array, shifts: Array) -> Array:
        """Quantity at theta [J, P] moved by each of the shifts [S, P], [J, S]."""
        return self.quantity((theta[:, None] + shifts).reshape(-1, theta.shape[1])).reshape(len(theta), len(shifts))

    def starts(self, log_loss: Array) -> Array:
        return self.full.starts(log_loss[:-1])

    def part(self, rows: NDArray[np.int64]) -> Problem:
        return self.full.part(rows)

    def natural(self, theta: Array) -> Array:
        return self.full.natural(theta)
