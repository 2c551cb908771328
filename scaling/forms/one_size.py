"""Form for runs of one size, as of a ladder that trains given weights further: the loss in tokens alone.

    L = E + B/(D + D_0)^beta

D counts the tokens after the start, and D_0 is what the start is worth in the same tokens: 0 from scratch, large if the given weights
already know such data. Hernandez et al. (2102.01293) describe fine-tuning by such an effective number of tokens, the data transferred;
there it is a power of size and D, here it is constant. E includes the loss due to few parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.forms.law import Form
from scaling.forms.powers import _POSITIVE, EXPONENT_BOUNDS, GRID
from scaling.forms.problem import Problem, Values

START_BOUNDS = (1e-3, 1e3)
"""Bounds of D_0 over the runs' geometric mean of tokens: effectively 0, and so large that the loss is a line in D."""
_START_STARTS = (0.01, 0.3, 3.0)


class OneSize(Form):
    """The loss of one size in tokens after a start; a law of tokens only, so it chooses no size."""

    name = "one size"
    formula = "E + B/(D + D_0)^beta"
    source = "Hernandez et al. 2102.01293 (effective data transferred), here with a constant D_0"
    columns: ClassVar[tuple[str, ...]] = ("n_tokens",)
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {
        "E": _POSITIVE,
        "B": _POSITIVE,
        "beta": EXPONENT_BOUNDS,
        "D_0": _POSITIVE,
    }

    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        return values["E"] + values["B"] * (rows["n_tokens"] + values["D_0"]) ** -values["beta"]

    def problem(self, rows: Mapping[str, Array], log_loss: Array) -> Problem:
        """Problem in the logarithms of E, of the term at the centre, of beta, and of D_0 over the centre."""
        return PowerOfTokens.at(rows["n_tokens"], log_loss)


@dataclass(frozen=True, kw_only=True)
class PowerOfTokens(Problem):
    """The form of one size, theta = (e, b, log beta, c): log L = log(exp(e) + exp(b − beta·y)), y = log((x + exp(c))/(1 + exp(c))).

    Attributes:
        x: tokens over their geometric mean, [K].
        centre: geometric mean of the tokens.
        lower, upper: bounds of theta, [4]; those of E and of the term are Chinchilla's (`SumOfPowers`).
    """

    x: Array
    centre: float
    lower: Array
    upper: Array

    @classmethod
    def at(cls, n_tokens: Array, log_loss: Array) -> PowerOfTokens:
        """The form at the points given."""
        centre, low, high = float(np.exp(np.log(n_tokens).mean())), float(log_loss.min()), float(log_loss.max())
        (least, most), (none, all_) = np.log(EXPONENT_BOUNDS), np.log(START_BOUNDS)
        return cls(
            x=n_tokens / centre,
            centre=centre,
            lower=np.array([low - np.log(1e3), low - 12, least, none]),
            upper=np.array([low + 0.1, high + 3, most, all_]),
        )

    def log_loss(self, theta: Array) -> Array:
        e, b, beta, c = theta.T[:, :, None]
        return np.asarray(np.logaddexp(e, b - np.exp(beta) * self._log_tokens(c)))

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        e, b, beta, c = theta.T[:, :, None]
        beta, y, start = np.exp(beta), self._log_tokens(c), np.exp(c)
        value = np.logaddexp(e, b - beta * y)
        jacobian = np.empty((*value.shape, 4))
        jacobian[..., 1] = np.exp(b - beta * y - value)
        jacobian[..., 0] = 1 - jacobian[..., 1]
        jacobian[..., 2] = -beta * y * jacobian[..., 1]
        jacobian[..., 3] = -beta * (start / (self.x + start) - start / (1 + start)) * jacobian[..., 1]
        return value, jacobian

    def curvature(self, theta: Array, jacobian: Array, weights: Array) -> Array:
        """Σ_k weights_k · ∂²(log L_k)/∂theta², [J, 4, 4], for weights [J, K].

        With T the log of the term and s its share, this is s(1 − s)·(∇T − ∇e)(∇T − ∇e)' + s·∇²T.
        """
        beta, c = theta.T[2:, :, None]
        beta, y, start = np.exp(beta), self._log_tokens(c), np.exp(c)
        s = jacobian[..., 1]
        slope = start / (self.x + start) - start / (1 + start)  # of y in c
        bend = start * self.x / (self.x + start) ** 2 - start / (1 + start) ** 2
        above = np.stack([-np.ones_like(s), np.ones_like(s), -beta * y, -beta * slope], axis=-1)
        hessian = np.swapaxes(above, 1, 2) @ (above * (weights * s * (1 - s))[..., None])
        for i, j, own in ((2, 2, -beta * y), (2, 3, -beta * slope), (3, 2, -beta * slope), (3, 3, -beta * bend)):
            hessian[:, i, j] += (weights * s * own).sum(axis=-1)
        return np.asarray(hessian)

    def starts(self, log_loss: Array) -> Array:
        """Relative least squares for E and B at each beta of a grid and some D_0, in closed form, [72, 4]."""
        beta, start = (grid.ravel() for grid in np.meshgrid(GRID, _START_STARTS))
        scale = np.exp(-log_loss)
        term = np.exp(-beta[:, None] * self._log_tokens(np.log(start)[:, None])) * scale
        columns = np.stack([np.broadcast_to(scale, term.shape), term], axis=-1)
        normal = np.swapaxes(columns, 1, 2) @ columns
        normal += 1e-10 * np.trace(normal, axis1=1, axis2=2)[:, None, None] * np.eye(2)
        coefficients = np.linalg.solve(normal, columns.sum(axis=1)[..., None])[..., 0]
        theta = np.concatenate([np.log(np.maximum(coefficients, 1e-12)), np.log([beta, start]).T], axis=1)
        return np.asarray(np.clip(theta, self.lower, self.upper))

    def elsewhere(self, rows: Mapping[str, Array]) -> PowerOfTokens:
        return replace(self, x=rows["n_tokens"] / self.centre)

    def coordinates(self, values: Mapping[str, float]) -> Array:
        e, b, beta, start = (np.log(values[name]) for name in OneSize.parameters)
        return np.array([e, b - np.exp(beta) * np.log(self.centre + np.exp(start)), beta, start - np.log(self.centre)])

    def part(self, rows: NDArray[np.int64]) -> PowerOfTokens:
        return replace(self, x=self.x[rows])

    def natural(self, theta: Array) -> Array:
        e, b, beta, c = theta.T
        start = np.exp(c) * self.centre
        return np.stack(
            [np.exp(e), np.exp(b + np.exp(beta) * np.log(self.centre + start)), np.exp(beta), start], axis=1
        )

    def _log_tokens(self, c: Array) -> Array:
        """log((D + D_0)/(centre + D_0)), [J, K], for c [J, 1]."""
        return np.asarray(np.log((self.x + np.exp(c)) / (1 + np.exp(c))))
