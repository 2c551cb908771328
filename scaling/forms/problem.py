"""A form of the loss law bound to runs, in the coordinates in which it is fitted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array

Values = Mapping[str, Any]
"""Numbers of the parameters by name, scalars or arrays that broadcast against the columns."""
N_SCREENED = 512
_STEP = 1e-5  # step of central differences of exact first derivatives, in log coordinates of order one
_COMPLEX_STEP = 1e-30


class Problem(ABC):
    """A form at K points in the coordinates theta [P] in which it is fitted, for a batch of J parameter vectors at once."""

    lower: Array
    upper: Array

    @abstractmethod
    def log_loss(self, theta: Array) -> Array:
        """Log loss [J, K] for theta [J, P]."""

    @abstractmethod
    def linearise(self, theta: Array) -> tuple[Array, Array]:
        """Log loss [J, K] and its Jacobian [J, K, P]."""

    @abstractmethod
    def starts(self, log_loss: Array) -> Array:
        """Starts of the fit, [S, P]; the best are polished."""

    @abstractmethod
    def natural(self, theta: Array) -> Array:
        """The form's parameters, in their order, [J, n], from theta [J, P]."""

    @property
    def free(self) -> NDArray[np.int64]:
        """Indices of the full problem's coordinates that are fitted, if each coordinate is one of these."""
        return np.arange(len(self.lower))

    def elsewhere(self, rows: Mapping[str, Array]) -> Problem:
        """The problem at other points, in the same coordinates; the forms of a forecast have it."""
        raise NotImplementedError(
            f"{type(self).__name__} can't be evaluated at other points, so it is no form of a forecast"
        )

    def coordinates(self, values: Mapping[str, float]) -> Array:
        """Coordinates theta [P] of the form's parameters; the forms of a forecast have it."""
        raise NotImplementedError(
            f"{type(self).__name__} has no coordinates of given parameters, so it is no form of a forecast"
        )

    @abstractmethod
    def part(self, rows: NDArray[np.int64]) -> Problem:
        """The problem at some of the points, in the same coordinates."""

    def curvature(self, theta: Array, jacobian: Array, weights: Array) -> Array:
        """Σ_k weights_k · ∂²(log L_k)/∂theta², [J, P, P], for weights [J, K]; by default from differences of exact gradients."""
        hessian = np.empty((len(theta), theta.shape[1], theta.shape[1]))
        for i in range(theta.shape[1]):
            shift = np.zeros(theta.shape[1])
            shift[i] = _STEP
            change = self.linearise(theta + shift)[1] - self.linearise(theta - shift)[1]
            hessian[:, i] = (np.swapaxes(change, 1, 2) @ weights[..., None])[..., 0] / (2 * _STEP)
        return np.asarray((hessian + np.swapaxes(hessian, 1, 2)) / 2)


@dataclass(frozen=True, kw_only=True)
class LogParameters(Problem):
    """Any form in the logarithms of its parameters; derivatives by complex steps, exact to rounding.

    Attributes:
        loss: the form's loss, from values and columns.
        rows: the form's columns, [K] each.
        lower, upper: logarithms of the bounds, [P].
    """

    loss: Callable[[Values, Mapping[str, Any]], Any]
    names: tuple[str, ...]
    rows: Mapping[str, Array]
    lower: Array
    upper: Array

    def log_loss(self, theta: Array) -> Array:
        """Log loss [J, K] for theta [J, P]; infinite, so far from every observed loss, if the form's loss is not above 0."""
        loss = self._loss(theta)
        return np.asarray(np.log(loss, out=np.full(loss.shape, np.inf), where=loss > 0))

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        value = self.log_loss(theta)
        jacobian = np.empty((*value.shape, theta.shape[1]))
        for i in range(theta.shape[1]):
            moved = theta.astype(np.complex128)
            moved[:, i] += 1j * _COMPLEX_STEP
            loss = self._loss(moved)
            slope = np.divide(loss.imag, loss.real, out=np.zeros(value.shape), where=np.isfinite(value))
            jacobian[..., i] = slope / _COMPLEX_STEP
        return value, jacobian

    def starts(self, log_loss: Array) -> Array:
        """Points of a Sobol sequence between the bounds, [N_SCREENED, P]."""
        from scipy.stats.qmc import Sobol

        cube = Sobol(len(self.lower), rng=0).random(N_SCREENED)
        return np.asarray(self.lower + (self.upper - self.lower) * cube)

    def part(self, rows: NDArray[np.int64]) -> Problem:
        return replace(self, rows={name: column[rows] for name, column in self.rows.items()})

    def natural(self, theta: Array) -> Array:
        return np.asarray(np.exp(theta))

    def _loss(self, theta: NDArray[Any]) -> NDArray[Any]:
        values = dict(zip(self.names, np.exp(theta).T[:, :, None], strict=True))
        return np.asarray(self.loss(values, self.rows))


@dataclass(frozen=True, kw_only=True)
class Restricted(Problem):
    """A full problem on an affine subspace, full theta = offset + basis · theta: tied or fixed parameters.

    Attributes:
        full: the full problem, with P coordinates.
        basis: [P, p].
        offset: [P].
        lower, upper: bounds of the coordinates on the subspace, [p].
        kept: indices of the full problem's natural parameters that this form has.
    """

    full: Problem
    basis: Array
    offset: Array
    lower: Array
    upper: Array
    kept: tuple[int, ...]

    def log_loss(self, theta: Array) -> Array:
        return self.full.log_loss(self._full(theta))

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        value, jacobian = self.full.linearise(self._full(theta))
        return value, jacobian @ self.basis

    def curvature(self, theta: Array, jacobian: Array, weights: Array) -> Array:
        inner = self._full(theta)
        hessian = self.full.curvature(inner, self.full.linearise(inner)[1], weights)
        return np.asarray(self.basis.T @ hessian @ self.basis)

    def starts(self, log_loss: Array) -> Array:
        """Starts of the full problem, projected onto the subspace by least squares."""
        own = (self.full.starts(log_loss) - self.offset) @ np.linalg.pinv(self.basis).T
        return np.asarray(np.clip(own, self.lower, self.upper))

    def part(self, rows: NDArray[np.int64]) -> Problem:
        return replace(self, full=self.full.part(rows))

    def elsewhere(self, rows: Mapping[str, Array]) -> Problem:
        return replace(self, full=self.full.elsewhere(rows))

    def coordinates(self, values: Mapping[str, float]) -> Array:
        return self.full.coordinates(values)[self.free]

    def natural(self, theta: Array) -> Array:
        return self.full.natural(self._full(theta))[:, self.kept]

    @property
    def free(self) -> NDArray[np.int64]:
        return np.asarray(self.basis.argmax(axis=0), np.int64)

    def _full(self, theta: Array) -> Array:
        return np.asarray(self.offset + theta @ self.basis.T)
