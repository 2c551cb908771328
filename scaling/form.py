"""The sum of two power laws in the coordinates in which it is fitted, with exact derivatives.

For K points and a batch of J parameter vectors theta = (e, a, b, alpha, beta):

    log L = log( exp(e) + exp(a − alpha·x) + exp(b − beta·y) ),   x = log N − mean log N,   y = log D − mean log D

so that e = log E, and a and b are the logarithms of the two terms at the centre of the data. Without the centring A
and B are so correlated with alpha and beta that quasi-Newton methods stop early and report success.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaling.surface import LossSurface

Array = NDArray[np.float64]

PARAMETERS = ("E", "A", "B", "alpha", "beta")
EXPONENT_BOUNDS = (0.01, 3.0)
"""Exponents are sought in this range; published ones lie within .07–.8, so an estimate on a bound says nothing."""


@dataclass(frozen=True, kw_only=True)
class SumOfPowers:
    """The form at K points (N, D).

    Attributes:
        x: centred log N, shape [K].
        y: centred log D, shape [K].
        centre: the means of log N and log D that were subtracted.
    """

    x: Array
    y: Array
    centre: tuple[float, float]

    @classmethod
    def at(cls, n_params: Array, n_tokens: Array) -> "SumOfPowers":
        """The form at the points given, centred on them."""
        log_n, log_d = np.log(n_params), np.log(n_tokens)
        centre = (float(log_n.mean()), float(log_d.mean()))
        return cls(x=log_n - centre[0], y=log_d - centre[1], centre=centre)

    def bounds(self, loss: Array) -> tuple[Array, Array]:
        """Lower and upper bounds of theta, [5]: E from min(L)/1000 to min(L), terms from min(L)/e¹² to max(L)·e³."""
        low, high = np.log(loss.min()), np.log(loss.max())
        lower = np.array([low - np.log(1e3), low - 12, low - 12, EXPONENT_BOUNDS[0], EXPONENT_BOUNDS[0]])
        upper = np.array([low, high + 3, high + 3, EXPONENT_BOUNDS[1], EXPONENT_BOUNDS[1]])
        return lower, upper

    def log_loss(self, theta: Array) -> Array:
        """Log loss [J, K] for theta [J, 5]."""
        e, a, b, alpha, beta = theta.T[:, :, None]
        return np.asarray(np.log(np.exp(e) + np.exp(a - alpha * self.x) + np.exp(b - beta * self.y)))

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        """Log loss [J, K] and its Jacobian [J, K, 5]."""
        e, a, b, alpha, beta = theta.T[:, :, None]
        terms = (np.exp(e), np.exp(a - alpha * self.x), np.exp(b - beta * self.y))
        total = terms[0] + terms[1] + terms[2]
        jacobian = np.empty((*total.shape, 5))
        for k in range(3):
            jacobian[..., k] = terms[k] / total
        jacobian[..., 3] = -self.x * jacobian[..., 1]
        jacobian[..., 4] = -self.y * jacobian[..., 2]
        return np.log(total), jacobian

    def curvature(self, jacobian: Array, weights: Array) -> Array:
        """Σ_k weights_k · ∂²(log L_k)/∂theta², [J, 5, 5], from the Jacobian [J, K, 5] and weights [J, K].

        With shares s of the three terms and their logarithms z linear in theta, the Hessian of log Σ exp z is
        Σ s ∇z ∇zᵀ − (Σ s ∇z)(Σ s ∇z)ᵀ, and the Jacobian is Σ s ∇z.
        """
        moments = np.stack(
            [weights[:, None, :] @ (jacobian * u[:, None]) for u in (np.ones_like(self.x), self.x, self.y)]
        )
        plain, by_x, by_y = moments[:, :, 0, :]
        hessian = -np.swapaxes(jacobian, 1, 2) @ (jacobian * weights[..., None])
        hessian[:, [0, 1, 2], [0, 1, 2]] += plain[:, :3]
        hessian[:, 1, 3] += plain[:, 3]
        hessian[:, 3, 1] += plain[:, 3]
        hessian[:, 3, 3] -= by_x[:, 3]
        hessian[:, 2, 4] += plain[:, 4]
        hessian[:, 4, 2] += plain[:, 4]
        hessian[:, 4, 4] -= by_y[:, 4]
        return hessian

    def natural(self, theta: Array) -> Array:
        """(E, A, B, alpha, beta), [J, 5], from theta [J, 5]."""
        e, a, b, alpha, beta = theta.T
        scale_n, scale_d = a + alpha * self.centre[0], b + beta * self.centre[1]
        return np.stack([np.exp(e), np.exp(scale_n), np.exp(scale_d), alpha, beta], axis=1)

    def surface(self, theta: Array) -> LossSurface:
        """The loss surface of one theta [5]."""
        return LossSurface(**dict(zip(PARAMETERS, map(float, self.natural(theta[None])[0]), strict=True)))
