"""Forms for mixtures of experts: the loss in active parameters N, total parameters T = sparsity·N, and tokens D.

    L = E + ((A/N^alpha)^(1/h) + (A_total/T^alpha_total)^(1/h))^h + B/D^beta

N counts the parameters that one token uses (all k experts of each layer), T all parameters, and the sparsity T/N is 1 for a dense
model. Both counts limit the loss. With h below 1, the scarcer one counts more, so that at a given N the gain from further experts
fades; with a large h, the two counts act as their weighted geometric mean and nothing fades. If alpha_total is not alpha, the gain
from experts also changes with size. The form was derived here and chosen by held-out error (tests/benchmarks/RESULTS.md). Clark et al.
2202.01169, sec. 4 and 5, found that the gain fades with experts and falls with size, in a form without E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.forms.law import Form
from scaling.forms.powers import _NUMBERS, _POSITIVE, EXPONENT_BOUNDS, SHAPE_BOUNDS, SumOfPowers
from scaling.forms.problem import Problem, Restricted, Values

SPARSITY = "sparsity"
"""Column of total over active parameters."""
_SHAPE_STARTS = (0.5, 1.0, 2.0)
OF_TOKENS = ("B", "beta")
_TERMS, _EXPONENTS, _G = (1, 2, 5), (3, 4, 6), 8  # coordinates of the terms of N, D and T, of their exponents, and of g
_OF_TOKENS = (_TERMS[1], _EXPONENTS[1])


class JointExperts(Form):
    """The joint form with active and total parameters in the place of N; at g = 1 it is `MixtureOfExperts`."""

    name = "joint experts"
    formula = "E + (P^(1/g) + (B/D^beta)^(1/g))^g, P = ((A/N^alpha)^(1/h) + (A_total/(sparsity·N)^alpha_total)^(1/h))^h"
    source = "derived here, from Kaplan et al. 2001.08361, eq. 1.5"
    columns: ClassVar[tuple[str, ...]] = ("n_params", "n_tokens", SPARSITY)
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {
        **_NUMBERS,
        "A_total": _POSITIVE,
        "alpha_total": EXPONENT_BOUNDS,
        "h": SHAPE_BOUNDS,
        "g": SHAPE_BOUNDS,
    }

    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        log_n, g, h = np.log(rows["n_params"]), values["g"], values["h"]
        active = np.log(values["A"]) - values["alpha"] * log_n
        total = np.log(values["A_total"]) - values["alpha_total"] * (log_n + np.log(rows[SPARSITY]))
        tokens = np.log(values["B"]) - values["beta"] * np.log(rows["n_tokens"])
        params = h * np.logaddexp(active / h, total / h)
        return values["E"] + np.exp(g * np.logaddexp(params / g, tokens / g))

    def problem(self, rows: Mapping[str, Array], log_loss: Array) -> Problem:
        """Problem in logarithms of E, of the three terms at the centre, of the exponents and shapes."""
        full = ExpertPowers.at(rows, log_loss)
        return full.with_fixed(_OF_TOKENS) if np.ptp(rows["n_tokens"]) == 0 else full


class MixtureOfExperts(Form):
    """Chinchilla's form in which active and total parameters share the loss due to few parameters.

    If all runs have the same number of tokens, E includes the loss due to few tokens, and B and beta are arbitrary.
    """

    name = "experts"
    formula = "E + ((A/N^alpha)^(1/h) + (A_total/(sparsity·N)^alpha_total)^(1/h))^h + B/D^beta"
    source = "derived here, see the head of this file"
    columns = JointExperts.columns
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {
        name: bounds for name, bounds in JointExperts.parameters.items() if name != "g"
    }

    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        return JointExperts().loss({**values, "g": 1.0}, rows)

    def problem(self, rows: Mapping[str, Array], log_loss: Array) -> Problem:
        """The joint form's problem with g = 1."""
        one_length = np.ptp(rows["n_tokens"]) == 0
        return ExpertPowers.at(rows, log_loss).with_fixed((*_OF_TOKENS, _G) if one_length else (_G,))


@dataclass(frozen=True, kw_only=True)
class ExpertPowers(Problem):
    """The joint form, theta = (e, a, b, log alpha, log beta, c, log alpha_total, log h, log g) in the order of its parameters.

    log L = log(exp(e) + exp(S)),   S = g·log(exp(P/g) + exp((b − beta·y)/g))
                                    P = h·log(exp((a − alpha·x)/h) + exp((c − alpha_total·z)/h))

    Attributes:
        x, y, z: centred logarithms of active parameters, tokens and total parameters, [K].
        centre: the means that were subtracted.
        lower, upper: bounds of theta, [9].
    """

    x: Array
    y: Array
    z: Array
    centre: tuple[float, float, float]
    lower: Array
    upper: Array

    @classmethod
    def at(cls, rows: Mapping[str, Array], log_loss: Array) -> ExpertPowers:
        """The form at the rows, centred on them."""
        plain = SumOfPowers.at(rows["n_params"], rows["n_tokens"], log_loss)
        log_total = _logs(rows)[2]
        lower, upper = (
            np.array([*bound[:3], *np.log(bound[3:]), bound[1], *np.log([bound[3], shape, shape])])
            for bound, shape in zip((plain.lower, plain.upper), SHAPE_BOUNDS, strict=True)
        )
        centre = (*plain.centre, float(log_total.mean()))
        return cls(x=plain.x, y=plain.y, z=log_total - centre[2], centre=centre, lower=lower, upper=upper)

    def with_fixed(self, fixed: tuple[int, ...]) -> Restricted:
        """The problem with these coordinates held: g at 1, the tokens' term next to nothing."""
        free = np.setdiff1d(np.arange(len(self.lower)), fixed)
        offset = np.zeros(len(self.lower))
        if _OF_TOKENS[0] in fixed:
            offset[[*_OF_TOKENS]] = self.lower[_OF_TOKENS[0]], np.log(0.3)
        kept = tuple(i for i in range(len(self.lower)) if i != _G or _G not in fixed)
        basis = np.eye(len(self.lower))[:, free]
        return Restricted(
            full=self, basis=basis, offset=offset, lower=self.lower[free], upper=self.upper[free], kept=kept
        )

    def log_loss(self, theta: Array) -> Array:
        e, _, _, _, params, tokens, g = self._terms(theta)
        return np.logaddexp(e, g * np.logaddexp(params / g, tokens / g))

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        e, h, active, total, params, tokens, g = self._terms(theta)
        alpha, beta, alpha_total = (np.exp(theta[:, i, None]) for i in (3, 4, 6))
        inner = np.logaddexp(params / g, tokens / g)
        value = np.logaddexp(e, g * inner)
        of_sum = np.exp(g * inner - value)
        of_params, of_tokens = (of_sum * np.exp(term / g - inner) for term in (params, tokens))
        of_active, of_total = (np.exp((term - params) / h) for term in (active, total))
        jacobian = np.empty((*value.shape, 9))
        jacobian[..., 0] = 1 - of_sum
        jacobian[..., 1] = of_params * of_active
        jacobian[..., 2] = of_tokens
        jacobian[..., 3] = -alpha * self.x * jacobian[..., 1]
        jacobian[..., 4] = -beta * self.y * of_tokens
        jacobian[..., 5] = of_params * of_total
        jacobian[..., 6] = -alpha_total * self.z * jacobian[..., 5]
        jacobian[..., 7] = of_params * (params - of_active * active - of_total * total)
        jacobian[..., 8] = of_sum * g * inner - of_params * params - of_tokens * tokens
        return value, jacobian

    def starts(self, log_loss: Array) -> Array:
        """Chinchilla's starts in the geometric mean of N and T, whose terms are equal at the centre, for some h and g, [S, 9]."""
        bound = np.exp(self.lower[[3, 4]]), np.exp(self.upper[[3, 4]])
        lower, upper = (
            np.concatenate([side[:3], exponents])
            for side, exponents in zip((self.lower, self.upper), bound, strict=True)
        )
        plain = SumOfPowers(x=(self.x + self.z) / 2, y=self.y, centre=self.centre[:2], lower=lower, upper=upper).starts(
            log_loss
        )
        e, a, b, alpha, beta = plain.T
        starts = [
            np.stack(
                [e, a - h * np.log(2), b, np.log(alpha), np.log(beta), a - h * np.log(2), np.log(alpha), *logs], axis=1
            )
            for h in _SHAPE_STARTS
            for g in _SHAPE_STARTS[:2]
            for logs in [np.log([h, g])[:, None] * np.ones(len(plain))]
        ]
        return np.asarray(np.clip(np.concatenate(starts), self.lower, self.upper))

    def elsewhere(self, rows: Mapping[str, Array]) -> ExpertPowers:
        x, y, z = (column - centre for column, centre in zip(_logs(rows), self.centre, strict=True))
        return replace(self, x=x, y=y, z=z)

    def coordinates(self, values: Mapping[str, float]) -> Array:
        theta = np.log([values[name] for name in JointExperts.parameters])
        theta[[*_TERMS]] -= np.exp(theta[[*_EXPONENTS]]) * self.centre
        return np.asarray(theta)

    def part(self, rows: NDArray[np.int64]) -> ExpertPowers:
        return replace(self, x=self.x[rows], y=self.y[rows], z=self.z[rows])

    def natural(self, theta: Array) -> Array:
        logs = np.array(theta)
        logs[:, _TERMS] += np.exp(theta[:, _EXPONENTS]) * self.centre
        return np.asarray(np.exp(logs))

    def _terms(self, theta: Array) -> tuple[Array, ...]:
        """(e, h, log terms of active and total parameters, their sum, log term of tokens, g)."""
        e, a, b, alpha, beta, c, alpha_total, h, g = theta.T[:, :, None]
        h, g = np.exp(h), np.exp(g)
        active, total = a - np.exp(alpha) * self.x, c - np.exp(alpha_total) * self.z
        return e, h, active, total, h * np.logaddexp(active / h, total / h), b - np.exp(beta) * self.y, g


def _logs(rows: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Logarithms of N, D and T, [K]."""
    log_n = np.log(rows["n_params"])
    return log_n, np.log(rows["n_tokens"]), log_n + np.log(rows[SPARSITY])
