"""A Gaussian process for loss over hyperparameters and scales: one basin that keeps its shape and moves with scale.

For a run at u (hyperparameters, the box being the unit cube) and s (log2 of the scales, octaves) of cell c (one scale):

    w = level_c + q(z) + f(z, s) + noise,    z = u − drift · s

    q   a full quadratic with Gaussian coefficients, its squares expected positive; its slopes may change a little with s
    f   a process of covariance (shared² + own² · exp(−|Δs|² / 2 reach²)) · Matérn-5/2(|Δz / lengths|)

Everything linear is integrated out; noise, amplitudes, lengths, reach and drift maximise the posterior density of the
observations (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.7 and 5.4.1), by exact gradients.

Units of w: log loss above the best of its cell. The priors below are assumed, in factors and tenths of a box, and wide;
none was fitted.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scaling.form import Array

NOISE, NOISE_SPREAD = 8e-4, 1.0
"""Median noise of log loss, and the standard deviation of its logarithm: runs of 1e17 to 1e20 FLOPs scatter by .06 %
(Step Law's table), small proxies by several times as much."""
BASIN, AMPLITUDE_SPREAD = 0.2, 1.0
"""Median of the quadratic's scale: w gained from the middle of the box to its edge is a quarter of it."""
SHARED, OWN = 0.02, 0.004
"""Median amplitudes of what is no quadratic, in all cells and in each."""
LENGTH, LENGTH_SPREAD = 0.5, 0.5
"""Median length of Matérn's correlation in box widths for two hyperparameters; it grows as the root of their number."""
REACH, REACH_SPREAD = 4.0, 0.5
"""Median octaves of scale over which what is own to a cell stays correlated."""
DRIFT_SPREAD = 0.05
"""Standard deviation of the optimum's drift, in box widths per octave of scale; its mean is none."""
LEVEL = 0.05
SLOPES, SQUARES, CROSSES, TILTS = 1.0, 0.7, 0.5, 0.02
"""Standard deviations of the quadratic's coefficients, relative to its scale; of slopes times octaves last."""
MISFIT = 0.1
"""Standard deviation of a run's misfit per unit of w: far up a wall nothing is told about the floor."""
EXACT = 1e-6
MAX_STEPS = 40
FARTHEST = 4.0
"""Steps of the optimiser, and how many prior standard deviations it may go."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Observations:
    """What is conditioned on.

    Attributes:
        u: encoded hyperparameters, [n, q]; numeric ones first, then categories as one-hot columns.
        s: log2 of the scales, [n, k].
        cell: number of the scale of each, [n], from 0.
        w: log loss above the best of its cell, [n].
        exact: whether w is to be taken as free of noise, [n].
    """

    u: Array
    s: Array
    cell: Integers
    w: Array
    exact: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which columns of u are what: the first `n_numeric` are numeric; `groups` numbers each column's length."""

    n_numeric: int
    groups: tuple[int, ...]
    n_scales: int

    @property
    def n_lengths(self) -> int:
        """One for each hyperparameter, a category counting as one."""
        return max(self.groups) + 1

    @cached_property
    def prior(self) -> tuple[Array, Array]:
        """Means and standard deviations of the hyperparameters of the process (logarithms, but for the drift)."""
        scales = np.log([NOISE, BASIN, SHARED, OWN])
        spreads = [NOISE_SPREAD, AMPLITUDE_SPREAD, AMPLITUDE_SPREAD, AMPLITUDE_SPREAD]
        length = math.log(LENGTH * math.sqrt(self.n_lengths / 2))
        drifts = self.n_numeric * self.n_scales
        mean = np.concatenate([scales, np.full(self.n_lengths, length), [math.log(REACH)], np.zeros(drifts)])
        spread = [
            np.array(spreads),
            np.full(self.n_lengths, LENGTH_SPREAD),
            np.array([REACH_SPREAD]),
            np.full(drifts, DRIFT_SPREAD),
        ]
        return mean, np.concatenate(spread)

    @cached_property
    def pairs(self) -> tuple[Integers, Integers]:
        """Columns of each product of two numeric hyperparameters."""
        return np.triu_indices(self.n_numeric, 1)


class Shape(NamedTuple):
    """The hyperparameters of the process, in their own units; `lengths` [q] by column, `drift` [q, k]."""

    noise: float
    basin: float
    shared: float
    own: float
    lengths: Array
    reach: float
    drift: Array


def shape_of(theta: Array, layout: Layout) -> Shape:
    """From the vector that is optimised; categories don't drift."""
    noise, basin, shared, own = np.exp(theta[:4])
    lengths = np.exp(theta[4 : 4 + layout.n_lengths])[list(layout.groups)]
    drift = np.zeros((len(layout.groups), layout.n_scales))
    drift[: layout.n_numeric] = theta[5 + layout.n_lengths :].reshape(layout.n_numeric, layout.n_scales)
    return Shape(noise, basin, shared, own, lengths, float(np.exp(theta[4 + layout.n_lengths])), drift)


@dataclass(frozen=True, kw_only=True, eq=False)
class Process:
    """The process conditioned on observations, for fixed hyperparameters `theta`."""

    layout: Layout
    data: Observations
    theta: Array

    @classmethod
    def fit(cls, data: Observations, layout: Layout) -> "Process":
        """At the hyperparameters of largest posterior density; below three observations at the prior's centre."""
        from scipy.optimize import minimize

        mean, spread = layout.prior
        if len(data.w) < 3:
            return cls(layout=layout, data=data, theta=mean)

        def objective(t: Array) -> tuple[float, Array]:
            value, gradient = negative_log_density(mean + spread * t, data, layout)
            return value, gradient * spread

        found = minimize(
            objective,
            np.zeros(len(mean)),
            jac=True,
            method="L-BFGS-B",
            bounds=[(-FARTHEST, FARTHEST)] * len(mean),
            options={"maxiter": MAX_STEPS, "ftol": 1e-6},
        )
        return cls(layout=layout, data=data, theta=mean + spread * found.x)

    @cached_property
    def shape(self) -> Shape:
        """The hyperparameters in their own units."""
        return shape_of(self.theta, self.layout)

    def and_exactly(self, u: Array, s: Array, cell: Integers) -> "Process":
        """Conditioned as well on runs that are under way, as if they had ended where they are expected to."""
        if not len(u):
            return self
        data, (expected, _) = self.data, self.predict(u, s, cell)
        return replace(
            self,
            data=Observations(
                u=np.concatenate([data.u, u]),
                s=np.concatenate([data.s, s]),
                cell=np.concatenate([data.cell, cell]),
                w=np.concatenate([data.w, expected]),
                exact=np.concatenate([data.exact, np.ones(len(u), dtype=bool)]),
            ),
        )

    def predict(self, u: Array, s: Array, cell: Integers) -> tuple[Array, Array]:
        """Mean and standard deviation of w without noise, [m]."""
        mean, features, variance = self._prior_at(u, s)
        if not len(self.data.w):
            return mean, np.sqrt(variance)
        factor, weights, _ = self._factored
        cross = self._covariance(u, s, cell, features)
        half = _solve_lower(factor, cross.T)
        return mean + cross @ weights, np.sqrt(np.maximum(variance - (half**2).sum(0), 1e-14))

    def joint(self, u: Array, s: Array, cell: Integers) -> tuple[Array, Array]:
        """Mean [m] and covariance [m, m] of w without noise."""
        mean, features, _ = self._prior_at(u, s)
        z = u - s @ self.shape.drift.T
        covariance = _covariance(self.shape, (z, s, cell, features), (z, s, cell, features))
        if not len(self.data.w):
            return mean, covariance
        factor, weights, _ = self._factored
        cross = self._covariance(u, s, cell, features)
        half = _solve_lower(factor, cross.T)
        return mean + cross @ weights, covariance - half.T @ half

    @cached_property
    def uncertainty(self) -> Array:
        """Covariance of `theta` by Laplace's approximation, in units of the prior's deviations, [p, p]."""
        mean, spread = self.layout.prior
        if len(self.data.w) < 3:
            return np.eye(len(mean))
        step = 1e-3
        rows = []
        for direction in np.eye(len(mean)) * spread * step:
            _, above = negative_log_density(self.theta + direction, self.data, self.layout)
            _, below = negative_log_density(self.theta - direction, self.data, self.layout)
            rows.append((above - below) * spread / (2 * step))
        values, vectors = np.linalg.eigh((np.array(rows) + np.array(rows).T) / 2)
        # The prior alone has a Hessian of one; where the likelihood bends down at a bound, the prior is what is known.
        return np.asarray((vectors / np.maximum(values, 1.0)) @ vectors.T)

    def redrawn(self, generator: np.random.Generator) -> "Process":
        """The same observations under hyperparameters drawn from their approximate posterior."""
        _, spread = self.layout.prior
        step = generator.multivariate_normal(np.zeros(len(spread)), self.uncertainty, method="eigh")
        return replace(self, theta=self.theta + spread * step)

    @cached_property
    def _factored(self) -> tuple[Array, Array, tuple[Array, Array, Integers, Array]]:
        from scipy.linalg import cho_solve

        data, shape = self.data, self.shape
        z = data.u - data.s @ shape.drift.T
        features, mean = _quadratic(z, data.s, shape.basin, self.layout)
        at = (z, data.s, data.cell, features)
        covariance = _covariance(shape, at, at)
        covariance[np.diag_indices(len(z))] += _scatter(data, shape.noise)
        factor = np.linalg.cholesky(covariance)
        return np.asarray(factor), np.asarray(cho_solve((factor, True), data.w - mean)), at

    def _prior_at(self, u: Array, s: Array) -> tuple[Array, Array, Array]:
        z = u - s @ self.shape.drift.T
        features, mean = _quadratic(z, s, self.shape.basin, self.layout)
        return mean, features, (features**2).sum(1) + self.shape.shared**2 + self.shape.own**2 + LEVEL**2

    def _covariance(self, u: Array, s: Array, cell: Integers, features: Array) -> Array:
        z = u - s @ self.shape.drift.T
        return _covariance(self.shape, (z, s, cell, features), self._factored[2])


def negative_log_density(theta: Array, data: Observations, layout: Layout) -> tuple[float, Array]:
    """−log p(w, theta) up to a constant, and its gradient, [p]; one Cholesky factor and one inverse."""
    from scipy.linalg.lapack import dpotri

    shape = shape_of(theta, layout)
    n, first_drift = len(data.w), 5 + layout.n_lengths
    z = data.u - data.s @ shape.drift.T
    features, mean = _quadratic(z, data.s, shape.basin, layout)
    scaled = z / shape.lengths
    matern, matern_slope = _matern(_squared_distances(scaled, scaled))
    apart = _squared_distances(data.s, data.s) / shape.reach**2
    near = np.exp(-apart / 2)
    amplitude = shape.shared**2 + shape.own**2 * near
    covariance = features @ features.T + matern * amplitude + LEVEL**2 * (data.cell[:, None] == data.cell)
    covariance[np.diag_indices(n)] += _scatter(data, shape.noise)
    factor = np.linalg.cholesky(covariance)
    inverse = dpotri(factor, lower=1)[0]
    inverse = np.tril(inverse) + np.tril(inverse, -1).T
    weights = inverse @ (data.w - mean)
    centre, spread = layout.prior
    off = (theta - centre) / spread
    value = (data.w - mean) @ weights / 2 + np.log(np.diag(factor)).sum() + off @ off / 2

    # Backwards from the covariance: slope = d value / d covariance.
    slope = (inverse - np.outer(weights, weights)) / 2
    gradient = np.zeros_like(theta)
    gradient[0] = 2 * shape.noise**2 * np.diag(slope)[~data.exact].sum()
    to_features = 2 * slope @ features
    gradient[1] = (to_features * features).sum() - weights @ mean
    by_process = slope * matern
    by_own = by_process * near
    gradient[2] = 2 * shape.shared**2 * by_process.sum()
    gradient[3] = 2 * shape.own**2 * by_own.sum()
    gradient[first_drift - 1] = shape.own**2 * (by_own * apart).sum()
    by_distance = slope * amplitude * matern_slope
    laplacian = by_distance.sum(1)[:, None] * scaled - by_distance @ scaled
    gradient[4 : first_drift - 1] = np.bincount(layout.groups, -4 * (scaled * laplacian).sum(0))
    to_z = 4 * laplacian / shape.lengths
    to_z[:, : layout.n_numeric] += _quadratic_slopes(z, data.s, shape.basin, layout, to_features, weights)
    gradient[first_drift:] = -(to_z[:, : layout.n_numeric].T @ data.s).ravel()
    return float(value), gradient + off / spread


def _quadratic(z: Array, s: Array, basin: float, layout: Layout) -> tuple[Array, Array]:
    """Features [n, p], scaled so that their coefficients are standard normal, and the expected quadratic [n]."""
    t = z[:, : layout.n_numeric] - 0.5
    i, j = layout.pairs
    tilts = (t[:, :, None] * s[:, None, :]).reshape(len(z), -1)
    categories = z[:, layout.n_numeric :]
    parts = [SLOPES * t, SQUARES * t**2, CROSSES * t[:, i] * t[:, j], TILTS * tilts, SLOPES * categories / 4]
    return basin * np.hstack(parts), basin * (t**2).sum(1)


def _quadratic_slopes(z: Array, s: Array, basin: float, layout: Layout, to_features: Array, weights: Array) -> Array:
    """Slope by z of the numeric columns [n, d] through the quadratic, from the slope by its features."""
    d = layout.n_numeric
    t = z[:, :d] - 0.5
    i, j = layout.pairs
    slopes, squares, crosses, tilts, _ = np.split(to_features, np.cumsum([d, d, len(i), d * s.shape[1]]), axis=1)
    out = SLOPES * slopes + 2 * SQUARES * squares * t
    products = np.zeros((len(z), d, d))
    products[:, i, j] = products[:, j, i] = CROSSES * crosses
    out += (products @ t[:, :, None])[..., 0]
    out += TILTS * (tilts.reshape(len(z), d, -1) * s[:, None, :]).sum(2)
    return np.asarray(basin * (out - 2 * weights[:, None] * t))


Points = tuple[Array, Array, Integers, Array]  # z, s, cell, features


def _covariance(shape: Shape, a: Points, b: Points) -> Array:
    matern, _ = _matern(_squared_distances(a[0] / shape.lengths, b[0] / shape.lengths))
    near = np.exp(-_squared_distances(a[1], b[1]) / (2 * shape.reach**2))
    levels = LEVEL**2 * (a[2][:, None] == b[2])
    return np.asarray(a[3] @ b[3].T + matern * (shape.shared**2 + shape.own**2 * near) + levels)


def _scatter(data: Observations, noise: float) -> Array:
    """Variance of each observation about the process, [n]."""
    return np.where(data.exact, EXACT**2, noise**2 + (MISFIT * data.w) ** 2)


def _squared_distances(a: Array, b: Array) -> Array:
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
    return np.asarray(np.maximum(squared, 0.0))


def _matern(squared: Array) -> tuple[Array, Array]:
    """Matérn's correlation of order 5/2 at squared distances, and its derivative by them (Rasmussen and Williams 4.17)."""
    r = np.sqrt(5 * squared)
    decay = np.exp(-r)
    return (1 + r + r**2 / 3) * decay, -(5 / 6) * (1 + r) * decay


def _solve_lower(factor: Array, right: Array) -> Array:
    from scipy.linalg import solve_triangular

    return np.asarray(solve_triangular(factor, right, lower=True, check_finite=False))
