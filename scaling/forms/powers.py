"""Sums of two powers, of parameters and of tokens: Chinchilla's form, the same with one exponent, Kaplan's, and a joint one.

The forms are fitted in centred log coordinates: for x = log N − mean log N and y = log D − mean log D, log A − alpha·mean log N
and log B − beta·mean log D are the logarithms of the two terms at the centre of the data. Without centring, A and B are
so correlated with alpha and beta that quasi-Newton methods stop early and report success.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.forms.law import Form
from scaling.forms.problem import Problem, Restricted, Values

EXPONENT_BOUNDS = (0.01, 3.0)
"""Range in which exponents are sought; published ones lie within .07–.8, so an estimate on a bound is no estimate."""
GRID = np.geomspace(0.05, 2.0, 24)
"""Exponents that starts are screened at, both for alpha and for beta."""
SHAPE_BOUNDS = (0.2, 5.0)
"""Bounds of the joint form's g: towards 0 the loss above E is the larger of the two terms, and the data do not determine g."""
_POSITIVE = (1e-300, 1e300)
_NUMBERS = {"E": _POSITIVE, "A": _POSITIVE, "B": _POSITIVE, "alpha": EXPONENT_BOUNDS, "beta": EXPONENT_BOUNDS}


class Chinchilla(Form):
    """Two independent terms: the loss due to few parameters, and the loss due to few tokens."""

    name = "chinchilla"
    formula = "E + A/N^alpha + B/D^beta"
    source = "Hoffmann et al. 2203.15556, sec. 3.3 and app. D.3"
    parameters = _NUMBERS

    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        of_params = values["A"] * rows["n_params"] ** -values["alpha"]
        return values["E"] + of_params + values["B"] * rows["n_tokens"] ** -values["beta"]

    def problem(self, rows: Mapping[str, Array], log_loss: Array) -> Problem:
        """Problem in (log E, the two log terms at the centre, alpha, beta)."""
        return SumOfPowers.at(rows["n_params"], rows["n_tokens"], log_loss)

    def powers(self, values: Values) -> tuple[Any, Any, Any, Any]:
        return values["A"], values["alpha"], values["B"], values["beta"]


class TiedChinchilla(Form):
    """One exponent for both terms, so that the best D/N is the same at every compute."""

    name = "tied"
    formula = "E + A/N^alpha + B/D^alpha"
    source = "Hoffmann et al. 2203.15556, sec. 3.3, with alpha = beta"
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {
        name: bounds for name, bounds in _NUMBERS.items() if name != "beta"
    }

    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        return Chinchilla().loss({**values, "beta": values["alpha"]}, rows)

    def problem(self, rows: Mapping[str, Array], log_loss: Array) -> Problem:
        """Chinchilla's problem with both exponents in one coordinate."""
        full = SumOfPowers.at(rows["n_params"], rows["n_tokens"], log_loss)
        basis = np.zeros((5, 4))
        basis[[0, 1, 2, 3, 4], [0, 1, 2, 3, 3]] = 1
        low, high = full.lower[:4], full.upper[:4]
        return Restricted(full=full, basis=basis, offset=np.zeros(5), lower=low, upper=high, kept=(0, 1, 2, 3))

    def powers(self, values: Values) -> tuple[Any, Any, Any, Any]:
        return values["A"], values["alpha"], values["B"], values["alpha"]


class Joint(Form):
    """Two terms that limit each other: g = 1 is Chinchilla's sum; below 1 the larger term counts more."""

    name = "joint"
    formula = "E + (A^(1/g)·N^(−alpha/g) + B^(1/g)·D^(−beta/g))^g"
    source = "Kaplan et al. 2001.08361, eq. 1.5, with E and a free exponent of tokens"
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {**_NUMBERS, "g": SHAPE_BOUNDS}

    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        of_params = np.log(values["A"]) - values["alpha"] * np.log(rows["n_params"])
        of_tokens = np.log(values["B"]) - values["beta"] * np.log(rows["n_tokens"])
        g = values["g"]  # logarithms, as A^(1/g) is beyond float64 for a small g
        return values["E"] + np.exp(g * np.logaddexp(of_params / g, of_tokens / g))

    def problem(self, rows: Mapping[str, Array], log_loss: Array) -> Problem:
        """Problem in (log E, the two log terms at the centre, log alpha, log beta, log g)."""
        return JointPowers.at(rows["n_params"], rows["n_tokens"], log_loss)

    def powers(self, values: Values) -> tuple[Any, Any, Any, Any]:
        g = values["g"]
        return values["A"] ** (1 / g), values["alpha"] / g, values["B"] ** (1 / g), values["beta"] / g


class Kaplan(Form):
    """No irreducible loss, and tokens to the first power inside: (A^(1/beta)·N^(−alpha/beta) + B^(1/beta)/D)^beta."""

    name = "kaplan"
    formula = "((N_c/N)^(alpha/beta) + D_c/D)^beta, A = N_c^alpha, B = D_c^beta"
    source = "Kaplan et al. 2001.08361, eq. 1.5 (alpha_N, alpha_D there)"
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {
        name: bounds for name, bounds in _NUMBERS.items() if name != "E"
    }

    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        return Joint().loss({**values, "E": 0.0, "g": values["beta"]}, rows)

    def problem(self, rows: Mapping[str, Array], log_loss: Array) -> Problem:
        """The joint form's problem with E = 0 and g = beta."""
        full = JointPowers.at(rows["n_params"], rows["n_tokens"], log_loss)
        basis = np.zeros((6, 4))
        basis[[1, 2, 3, 4, 5], [0, 1, 2, 3, 3]] = 1
        offset = np.array([-700.0, 0, 0, 0, 0, 0])  # log E: E is 0
        low, high = full.lower[1:5], full.upper[1:5]
        return Restricted(full=full, basis=basis, offset=offset, lower=low, upper=high, kept=(1, 2, 3, 4))

    def powers(self, values: Values) -> tuple[Any, Any, Any, Any]:
        return Joint().powers({**values, "g": values["beta"]})


@dataclass(frozen=True, kw_only=True)
class SumOfPowers(Problem):
    """Chinchilla's form, theta = (e, a, b, alpha, beta): log L = log(exp(e) + exp(a − alpha·x) + exp(b − beta·y)).

    Attributes:
        x: centred log N, [K].
        y: centred log D, [K].
        centre: the means of log N and log D that were subtracted.
        lower, upper: bounds of theta, [5]: E from min(L)/1000 to min(L)·e^.1, as noise can take a run below E; terms from
            min(L)/e¹² to max(L)·e³.
    """

    x: Array
    y: Array
    centre: tuple[float, float]
    lower: Array
    upper: Array

    @classmethod
    def at(cls, n_params: Array, n_tokens: Array, log_loss: Array) -> SumOfPowers:
        """The form at the points given, centred on them."""
        log_n, log_d = np.log(n_params), np.log(n_tokens)
        centre = (float(log_n.mean()), float(log_d.mean()))
        low, high = float(log_loss.min()), float(log_loss.max())
        lower = np.array([low - np.log(1e3), low - 12, low - 12, *(2 * EXPONENT_BOUNDS[:1])])
        upper = np.array([low + 0.1, high + 3, high + 3, *(2 * EXPONENT_BOUNDS[1:])])
        return cls(x=log_n - centre[0], y=log_d - centre[1], centre=centre, lower=lower, upper=upper)

    def log_loss(self, theta: Array) -> Array:
        e, a, b, alpha, beta = theta.T[:, :, None]
        return np.asarray(np.log(np.exp(e) + np.exp(a - alpha * self.x) + np.exp(b - beta * self.y)))

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        e, a, b, alpha, beta = theta.T[:, :, None]
        terms = (np.exp(e), np.exp(a - alpha * self.x), np.exp(b - beta * self.y))
        total = terms[0] + terms[1] + terms[2]
        jacobian = np.empty((*total.shape, 5))
        for k in range(3):
            jacobian[..., k] = terms[k] / total
        jacobian[..., 3] = -self.x * jacobian[..., 1]
        jacobian[..., 4] = -self.y * jacobian[..., 2]
        return np.log(total), jacobian

    def curvature(self, theta: Array, jacobian: Array, weights: Array) -> Array:
        """Σ_k weights_k · ∂²(log L_k)/∂theta², [J, 5, 5], from the Jacobian [J, K, 5] and weights [J, K].

        With shares s of the three terms and their logarithms z linear in theta, the Hessian of log Σ exp z is
        Σ s ∇z ∇zᵀ − (Σ s ∇z)(Σ s ∇z)ᵀ, and the Jacobian is Σ s ∇z.
        """
        moments = np.stack(
            [weights[:, None, :] @ (jacobian * u[:, None]) for u in (np.ones_like(self.x), self.x, self.y)]
        )
        sums, by_x, by_y = moments[:, :, 0, :]
        hessian = -np.swapaxes(jacobian, 1, 2) @ (jacobian * weights[..., None])
        hessian[:, [0, 1, 2], [0, 1, 2]] += sums[:, :3]
        hessian[:, 1, 3] += sums[:, 3]
        hessian[:, 3, 1] += sums[:, 3]
        hessian[:, 3, 3] -= by_x[:, 3]
        hessian[:, 2, 4] += sums[:, 4]
        hessian[:, 4, 2] += sums[:, 4]
        hessian[:, 4, 4] -= by_y[:, 4]
        return hessian

    def starts(self, log_loss: Array) -> Array:
        """Relative least squares for E, A, B at each (alpha, beta) of a grid, in closed form (variable projection), [576, 5]."""
        scale = np.exp(-log_loss)
        u, v = (np.exp(-GRID[:, None] * z) * scale for z in (self.x, self.y))
        normal = np.empty((len(GRID), len(GRID), 3, 3))
        normal[..., 0, 0] = scale @ scale
        normal[..., 0, 1] = normal[..., 1, 0] = (u @ scale)[:, None]
        normal[..., 0, 2] = normal[..., 2, 0] = v @ scale
        normal[..., 1, 1] = (u * u).sum(axis=1)[:, None]
        normal[..., 2, 2] = (v * v).sum(axis=1)
        normal[..., 1, 2] = normal[..., 2, 1] = u @ v.T
        target = np.empty((len(GRID), len(GRID), 3))
        target[..., 0] = scale.sum()
        target[..., 1] = u.sum(axis=1)[:, None]
        target[..., 2] = v.sum(axis=1)
        ridge = 1e-10 * np.trace(normal, axis1=-2, axis2=-1)[..., None, None] * np.eye(3)
        coefficients = np.linalg.solve(normal + ridge, target[..., None])[..., 0]
        exponents = np.stack(np.meshgrid(GRID, GRID, indexing="ij"), axis=-1)
        # A negative E, A or B gives no surface: raise it to the least value allowed, where the objective ranks the start.
        theta = np.concatenate([np.log(np.maximum(coefficients, 1e-12)), exponents], axis=-1).reshape(-1, 5)
        return np.asarray(np.clip(theta, self.lower, self.upper))

    def part(self, rows: NDArray[np.int64]) -> SumOfPowers:
        return replace(self, x=self.x[rows], y=self.y[rows])

    def natural(self, theta: Array) -> Array:
        e, a, b, alpha, beta = theta.T
        scale_n, scale_d = a + alpha * self.centre[0], b + beta * self.centre[1]
        return np.stack([np.exp(e), np.exp(scale_n), np.exp(scale_d), alpha, beta], axis=1)


@dataclass(frozen=True, kw_only=True)
class JointPowers(Problem):
    """The joint form, theta = (e, a, b, log alpha, log beta, log g), with S the logarithm of the inner sum.

    log L = log(exp(e) + exp(g·S)),   S = log(exp((a − alpha·x)/g) + exp((b − beta·y)/g))

    Attributes:
        terms: Chinchilla's form at the same points; the joint form equals it at g = 1.
        lower, upper: bounds of theta, [6].
    """

    terms: SumOfPowers
    lower: Array
    upper: Array

    @classmethod
    def at(cls, n_params: Array, n_tokens: Array, log_loss: Array) -> JointPowers:
        """The form at the points given, centred on them."""
        terms = SumOfPowers.at(n_params, n_tokens, log_loss)
        lower, upper = (
            np.concatenate([bound[:3], np.log(bound[3:]), np.log([shape])])
            for bound, shape in zip((terms.lower, terms.upper), SHAPE_BOUNDS, strict=True)
        )
        return cls(terms=terms, lower=lower, upper=upper)

    def log_loss(self, theta: Array) -> Array:
        e, g, u, v = self._inner(theta)
        return np.logaddexp(e, g * np.logaddexp(u, v))

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        e, g, u, v = self._inner(theta)
        alpha, beta = np.exp(theta[:, 3, None]), np.exp(theta[:, 4, None])
        inner = np.logaddexp(u, v)
        value = np.logaddexp(e, g * inner)
        of_sum = np.exp(g * inner - value)
        of_params, of_tokens = np.exp(u - inner), np.exp(v - inner)
        jacobian = np.empty((*value.shape, 6))
        jacobian[..., 0] = 1 - of_sum
        jacobian[..., 1] = of_sum * of_params
        jacobian[..., 2] = of_sum * of_tokens
        jacobian[..., 3] = -alpha * self.terms.x * jacobian[..., 1]
        jacobian[..., 4] = -beta * self.terms.y * jacobian[..., 2]
        jacobian[..., 5] = of_sum * g * (inner - of_params * u - of_tokens * v)
        return value, jacobian

    def curvature(self, theta: Array, jacobian: Array, weights: Array) -> Array:
        """Σ_k weights_k · ∂²(log L_k)/∂theta², [J, 6, 6], for weights [J, K].

        T = g·S is homogeneous of degree one in P = g·u, Q = g·v and g, so its Hessian in them is pq/g · ww' with
        w = ∇P − ∇Q − (u − v)·∇g, p and q the shares of the inner terms; log L = log(exp(e) + exp(T)) with s the share of exp(T) adds
        s(1 − s) · (∇T − ∇e)(∇T − ∇e)'. The rest is the curvature of alpha, beta and g in their logarithms.
        """
        e, g, u, v = self._inner(theta)
        inner = np.logaddexp(u, v)
        p, q, s = np.exp(u - inner), np.exp(v - inner), 1 / (1 + np.exp(np.minimum(e - g * inner, 700.0)))
        by_x, by_y = (np.exp(theta[:, i, None]) * z for i, z in ((3, self.terms.x), (4, self.terms.y)))
        of_shape = g * (inner - p * u - q * v)
        one = np.ones_like(p)
        apart = np.stack([0 * one, one, -one, -by_x, by_y, -g * (u - v)], axis=-1)
        above = np.stack([-one, p, q, -by_x * p, -by_y * q, of_shape], axis=-1)
        hessian = np.swapaxes(apart, 1, 2) @ (apart * (weights * s * p * q / g)[..., None])
        hessian += np.swapaxes(above, 1, 2) @ (above * (weights * s * (1 - s))[..., None])
        for i, own in ((3, -by_x * p), (4, -by_y * q), (5, of_shape)):
            hessian[:, i, i] += (weights * s * own).sum(axis=-1)
        return np.asarray(hessian)

    def starts(self, log_loss: Array) -> Array:
        """Chinchilla's starts, each with g = .5, 1 and 2, [S, 6]."""
        plain = self.terms.starts(log_loss)
        plain = np.concatenate([plain[:, :3], np.log(plain[:, 3:])], axis=1)
        shapes = np.log([0.5, 1.0, 2.0])
        return np.concatenate([np.insert(plain, 5, shape, axis=1) for shape in shapes])

    def elsewhere(self, rows: Mapping[str, Array]) -> JointPowers:
        x, y = (
            np.log(rows[name]) - centre
            for name, centre in zip(("n_params", "n_tokens"), self.terms.centre, strict=True)
        )
        return replace(self, terms=replace(self.terms, x=x, y=y))

    def coordinates(self, values: Mapping[str, float]) -> Array:
        theta = np.log([values[name] for name in Joint.parameters])
        theta[1:3] -= np.exp(theta[3:5]) * self.terms.centre
        return np.asarray(theta)

    def part(self, rows: NDArray[np.int64]) -> JointPowers:
        return replace(self, terms=self.terms.part(rows))

    def natural(self, theta: Array) -> Array:
        plain = np.concatenate([theta[:, :3], np.exp(theta[:, 3:5])], axis=1)
        return np.concatenate([self.terms.natural(plain), np.exp(theta[:, 5:])], axis=1)

    def _inner(self, theta: Array) -> tuple[Array, Array, Array, Array]:
        """(e, g, and the logarithms of the two inner terms), [J, 1] or [J, K]."""
        e, a, b, alpha, beta, g = theta.T[:, :, None]
        alpha, beta, g = np.exp(alpha), np.exp(beta), np.exp(g)
        return e, g, (a - alpha * self.terms.x) / g, (b - beta * self.terms.y) / g
