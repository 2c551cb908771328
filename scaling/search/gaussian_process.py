"""The Gaussian process of `basin`, conditioned on runs, and the fit of its hyperparameters."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array, Integers
from scaling.gaussian import NormalDensity
from scaling.search.basin import (
    LEVEL,
    InputLayout,
    KernelParameters,
    Points,
    covariance_of,
    matern,
    quadratic,
    quadratic_slopes,
    shape_of,
    squared_distances,
    stray_variance,
)

MISFIT = 0.1
"""Standard deviation of a run's misfit per unit of w: far up a wall a run carries no information about the floor."""
NOWHERE = 1e10
"""Finite value in place of an infinite objective, which the optimiser can't handle."""
EXACT = 1e-6
"""Standard deviation in place of 0."""
MAX_STEPS = 40
FARTHEST, DRIFT_FARTHEST = 4.0, 10.0
"""Most steps of the optimiser, and its range in prior standard deviations: in a narrow box the drift is large."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Observations:
    """Observations that the process is conditioned on.

    Attributes:
        u: encoded hyperparameters, [n, q]; numbers first, then categories as one-hot columns.
        s: log2 of the scales, [n, k].
        cell: number of each observation's scale, [n], from 0.
        w: log loss above the best of its cell, [n].
        exact: True if w counts as free of noise, [n].
    """

    u: Array
    s: Array
    cell: Integers
    w: Array
    exact: NDArray[np.bool_]

    def subset(self, rows: NDArray[np.bool_]) -> "Observations":
        return Observations(
            u=self.u[rows], s=self.s[rows], cell=self.cell[rows], w=self.w[rows], exact=self.exact[rows]
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianProcess:
    """The process conditioned on observations, for fixed hyperparameters `theta`."""

    layout: InputLayout
    data: Observations
    theta: Array

    @classmethod
    def fit(cls, data: Observations, layout: InputLayout) -> "GaussianProcess":
        """Use the hyperparameters of largest posterior density; with fewer than three observations, the prior's centre."""
        from scipy.optimize import minimize

        mean, spread = layout.prior
        if len(data.w) < 3:
            return cls(layout=layout, data=data, theta=mean)

        def objective(t: Array) -> tuple[float, Array]:
            try:
                value, gradient = negative_log_density(mean + spread * t, data, layout)
            except np.linalg.LinAlgError:  # rounding made the covariance indefinite: the line search should step back
                return NOWHERE, np.zeros_like(t)
            return value, gradient * spread

        reach = np.full(len(mean), FARTHEST)
        reach[5 + layout.n_lengths :] = DRIFT_FARTHEST
        found = minimize(
            objective,
            np.zeros(len(mean)),
            jac=True,
            method="L-BFGS-B",
            bounds=np.column_stack([-reach, reach]),
            options={"maxiter": MAX_STEPS, "ftol": 1e-6},
        )
        return cls(layout=layout, data=data, theta=mean + spread * found.x)

    @cached_property
    def shape(self) -> KernelParameters:
        """Hyperparameters, not in logarithms."""
        return shape_of(self.theta, self.layout)

    @cached_property
    def negative_log_density(self) -> float:
        """−log p(w, theta) without the normalization of p(w | theta) by (2π)^(n/2)."""
        return negative_log_density(self.theta, self.data, self.layout)[0]

    def and_exactly(self, u: Array, s: Array, cell: Integers) -> "GaussianProcess":
        """Condition also on running runs, as if they had finished with their expected losses."""
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
        covariance = covariance_of(self.shape, (z, s, cell, features), (z, s, cell, features), self.layout)
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
        # The prior alone has a Hessian of 1; if the likelihood bends down at a bound, only the prior counts.
        return np.asarray((vectors / np.maximum(values, 1.0)) @ vectors.T)

    def redrawn(self, generator: np.random.Generator) -> "GaussianProcess":
        """Process of the same observations under hyperparameters drawn from their approximate posterior."""
        _, spread = self.layout.prior
        step = generator.multivariate_normal(np.zeros(len(spread)), self.uncertainty, method="eigh")
        return replace(self, theta=self.theta + spread * step)

    @cached_property
    def _factored(self) -> tuple[Array, Array, Points]:
        from scipy.linalg import cho_solve

        data, shape = self.data, self.shape
        z = data.u - data.s @ shape.drift.T
        features, mean = quadratic(z, data.s, shape.basin, self.layout)
        at = (z, data.s, data.cell, features)
        covariance = covariance_of(shape, at, at, self.layout)
        covariance[np.diag_indices(len(z))] += _scatter(data, shape.noise)
        factor = np.linalg.cholesky(covariance)
        return np.asarray(factor), np.asarray(cho_solve((factor, True), data.w - mean)), at

    def _prior_at(self, u: Array, s: Array) -> tuple[Array, Array, Array]:
        z = u - s @ self.shape.drift.T
        features, mean = quadratic(z, s, self.shape.basin, self.layout)
        t = z[:, : self.layout.n_numeric] - 0.5
        own = LEVEL**2 + stray_variance(self.shape.basin) * (t**2).sum(1)
        return mean, features, (features**2).sum(1) + self.shape.shared**2 + self.shape.own**2 + own

    def _covariance(self, u: Array, s: Array, cell: Integers, features: Array) -> Array:
        z = u - s @ self.shape.drift.T
        return covariance_of(self.shape, (z, s, cell, features), self._factored[2], self.layout)


def negative_log_density(theta: Array, data: Observations, layout: InputLayout) -> tuple[float, Array]:
    """−log p(w, theta) up to a constant, and its gradient, [p]."""
    shape = shape_of(theta, layout)
    z = data.u - data.s @ shape.drift.T
    features, mean = quadratic(z, data.s, shape.basin, layout)
    scaled = z / shape.lengths
    correlation, correlation_slope = matern(squared_distances(scaled, scaled))
    apart = squared_distances(data.s, data.s) / shape.reach**2
    near = np.exp(-apart / 2)
    amplitude = shape.shared**2 + shape.own**2 * near
    t = z[:, : layout.n_numeric] - 0.5
    same = data.cell[:, None] == data.cell
    strays = stray_variance(shape.basin) * same
    covariance = features @ features.T + correlation * amplitude + LEVEL**2 * same + strays * (t @ t.T)
    covariance[np.diag_indices(len(z))] += _scatter(data, shape.noise)
    density = NormalDensity.of(data.w - mean, covariance)
    centre, spread = layout.prior
    off = (theta - centre) / spread

    # Backpropagate from the covariance to z, and to each entry of theta.
    slope, weights = density.slope, density.weights
    to_features = 2 * slope @ features
    by_stray = slope * strays
    by_process = slope * correlation
    by_own = by_process * near
    by_distance = slope * amplitude * correlation_slope
    laplacian = by_distance.sum(1)[:, None] * scaled - by_distance @ scaled
    to_z = 4 * laplacian / shape.lengths
    to_z[:, : layout.n_numeric] += (
        quadratic_slopes(z, data.s, shape.basin, layout, to_features, weights) + 2 * by_stray @ t
    )
    gradient = {
        "noise": 2 * shape.noise**2 * np.diag(slope)[~data.exact].sum(),
        "basin": (to_features * features).sum() - weights @ mean + (by_stray * (t @ t.T)).sum(),
        "shared": 2 * shape.shared**2 * by_process.sum(),
        "own": 2 * shape.own**2 * by_own.sum(),
        "lengths": np.bincount(layout.groups, -4 * (scaled * laplacian).sum(0)),
        "reach": shape.own**2 * (by_own * apart).sum(),
        "drift": -(to_z[:, : layout.n_numeric].T @ data.s),
    }
    return density.value + float(off @ off) / 2, np.hstack([*map(np.ravel, gradient.values())]) + off / spread


def _scatter(data: Observations, noise: float) -> Array:
    """Variance of each observation about the process, [n]."""
    return np.where(data.exact, EXACT**2, noise**2 + (MISFIT * data.w) ** 2)


def _solve_lower(factor: Array, right: Array) -> Array:
    from scipy.linalg import solve_triangular

    return np.asarray(solve_triangular(factor, right, lower=True, check_finite=False))
