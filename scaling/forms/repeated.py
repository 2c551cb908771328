"""Chinchilla's form for runs that see their data more than once: each further epoch, and each excess parameter, counts less.

    L = E + A/N'^alpha + B/D'^beta,   D' = U_D + U_D·rd_star·(1 − exp(−R_D/rd_star)),   R_D = D/U_D − 1 epochs beyond the first
                                      N' = U_N + U_N·rn_star·(1 − exp(−R_N/rn_star)),   R_N = N/U_N − 1

U_D are the unique tokens (`unique_tokens`, at most D), and U_N the parameters that would be best for them, at most N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.forms.law import Form
from scaling.forms.powers import _POSITIVE, EXPONENT_BOUNDS, Chinchilla, SumOfPowers
from scaling.forms.problem import Problem, Values

REPEAT_BOUNDS = (0.1, 1e4)
"""Bounds of rd_star and rn_star: below, a second epoch is worth next to nothing; above, thousands are worth as many new ones."""
_RD_STARTS, _RN_STARTS = (3.0, 12.0, 50.0), (1.5, 8.0)
_LEAST_LOG = 0.0  # one parameter is the least that can be useful


@dataclass(frozen=True, eq=False)
class RepeatedTokens(Form):
    """A form of a loss in N, D and perhaps further columns, evaluated at D' instead of D.

    The form, as fitted to the ladder, determines the value of parameters beyond the best number for these tokens.
    """

    form: Form

    source = "Muennighoff et al. 2305.16264, sec. 3"

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """The form's, and unique_tokens."""
        return (*self.form.columns, "unique_tokens")

    @property
    def name(self) -> str:  # type: ignore[override]
        """With the form's own."""
        return f"{self.form.name}, repeats counting less"

    @property
    def formula(self) -> str:  # type: ignore[override]
        """With the form's own."""
        return f"{self.form.formula} at D' for D"

    @property
    def parameters(self) -> Mapping[str, tuple[float, float]]:  # type: ignore[override]
        """The form's, and rd_star."""
        return {**self.form.parameters, "rd_star": REPEAT_BOUNDS}

    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        """Expected loss, nats per token."""
        return self.form.loss(values, {**rows, "n_tokens": _effective_tokens(values, rows)})


class RepeatedData(Form):
    """Chinchilla's form in effective parameters and tokens; at one epoch of the best size it is Chinchilla's.

    The loss is bounded below in D for given unique tokens: epochs beyond about ten times rd_star gain nothing. The
    form does not include overfitting, which makes losses rise again, above all for models far too large for their data.
    """

    name = "repeated"
    formula = "E + A/N'^alpha + B/D'^beta, D' = U·(1 + rd_star·(1 − exp(−(D/U − 1)/rd_star))), N' likewise"
    source = "Muennighoff et al. 2305.16264, sec. 3 and app. A (R*_D, R*_N there)"
    columns: ClassVar[tuple[str, ...]] = ("n_params", "n_tokens", "unique_tokens")
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {
        "E": _POSITIVE,
        "A": _POSITIVE,
        "B": _POSITIVE,
        "alpha": EXPONENT_BOUNDS,
        "beta": EXPONENT_BOUNDS,
        "rd_star": REPEAT_BOUNDS,
        "rn_star": REPEAT_BOUNDS,
    }

    def effective(self, values: Values, rows: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return N' and D': the run's parameters and tokens, with excess parameters and repeated tokens counted at their value."""
        n_params, unique = rows["n_params"], np.minimum(rows["unique_tokens"], rows["n_tokens"])
        useful = _useful_params(values, unique, n_params)
        return _worth(useful, n_params, values["rn_star"]), _effective_tokens(values, rows)

    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        n_params, n_tokens = self.effective(values, rows)
        return Chinchilla().loss(values, {"n_params": n_params, "n_tokens": n_tokens})

    def problem(self, rows: Mapping[str, Array], log_loss: Array) -> Problem:
        """Problem in Chinchilla's centred coordinates and the logarithms of rd_star and rn_star."""
        terms = SumOfPowers.at(rows["n_params"], rows["n_tokens"], log_loss)
        lower, upper = (
            np.concatenate([bound, np.log([repeat, repeat])])
            for bound, repeat in zip((terms.lower, terms.upper), REPEAT_BOUNDS, strict=True)
        )
        unique = np.minimum(rows["unique_tokens"], rows["n_tokens"])
        return Repeated(terms=terms, unique=unique, lower=lower, upper=upper)


@dataclass(frozen=True, kw_only=True)
class Repeated(Problem):
    """The form in theta = (e, a, b, alpha, beta, log rd_star, log rn_star), the first five as Chinchilla's.

    Attributes:
        terms: Chinchilla's form at the same points, whose centring is used.
        unique: unique tokens, at most D, [K].
        lower, upper: bounds of theta, [7].
    """

    terms: SumOfPowers
    unique: Array
    lower: Array
    upper: Array

    def log_loss(self, theta: Array) -> Array:
        return self._evaluate(theta)[0]

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        """Log loss [J, K] and its Jacobian [J, K, 7], by the chain rule through the logarithms of N' and D'."""
        value, shares, params, tokens = self._evaluate(theta)
        alpha, beta = theta[:, 3, None], theta[:, 4, None]
        centre_n, centre_d = self.terms.centre
        # log U_N = (1 + beta/alpha)·log G + beta/alpha·log U_D, log G = (log(alpha/beta) + log A − log B) / (alpha + beta)
        log_g, ratio = self._log_g(theta), beta / alpha
        through = -alpha * shares[1] * params.by_unique
        of_scale = (1 + ratio) / (alpha + beta)
        along = log_g + np.log(self.unique)
        jacobian = np.empty((*value.shape, 7))
        jacobian[..., 0] = shares[0]
        jacobian[..., 1] = shares[1] + through * of_scale
        jacobian[..., 2] = shares[2] - through * of_scale
        jacobian[..., 3] = -(params.log - centre_n) * shares[1] + through * (
            of_scale * (1 / alpha + centre_n - log_g) - ratio / alpha * along
        )
        jacobian[..., 4] = -(tokens.log - centre_d) * shares[2] + through * (
            of_scale * (-1 / beta - centre_d - log_g) + along / alpha
        )
        jacobian[..., 5] = -beta * shares[2] * tokens.by_star
        jacobian[..., 6] = -alpha * shares[1] * params.by_star
        return value, jacobian

    def starts(self, log_loss: Array) -> Array:
        """Chinchilla's starts at the effective tokens of some rd_star, with some rn_star, [S, 7]."""
        n_params, n_tokens = (
            np.exp(z + c) for z, c in zip((self.terms.x, self.terms.y), self.terms.centre, strict=True)
        )
        starts = []
        for rd_star in _RD_STARTS:
            effective = np.asarray(_worth(self.unique, n_tokens, rd_star), np.float64)
            unrepeated = SumOfPowers.at(n_params, effective, log_loss)
            theta = unrepeated.starts(log_loss)
            # The form may be centred elsewhere than on these rows: they may be a part, and D' isn't D.
            theta[:, 1:3] -= theta[:, 3:] * (np.array(self.terms.centre) - np.array(unrepeated.centre))
            for rn_star in _RN_STARTS:
                repeats = np.tile(np.log([rd_star, rn_star]), (len(theta), 1))
                starts.append(np.concatenate([theta, repeats], axis=1))
        return np.asarray(np.clip(np.concatenate(starts), self.lower, self.upper))

    def part(self, rows: NDArray[np.int64]) -> Repeated:
        return replace(self, terms=self.terms.part(rows), unique=self.unique[rows])

    def natural(self, theta: Array) -> Array:
        return np.concatenate([self.terms.natural(theta[:, :5]), np.exp(theta[:, 5:])], axis=1)

    def _evaluate(self, theta: Array) -> tuple[Array, tuple[Array, Array, Array], _Effective, _Effective]:
        """Log loss, the shares of its three terms, and the effective parameters and tokens."""
        e, a, b, alpha, beta, rd_star, rn_star = theta.T[:, :, None]
        log_unique = np.broadcast_to(np.log(self.unique), (len(theta), len(self.unique)))
        tokens = _Effective.of(self.terms.y + self.terms.centre[1], log_unique, rd_star)
        log_g = self._log_g(theta)
        log_best = log_g + (log_g + log_unique) * beta / alpha
        params = _Effective.of(self.terms.x + self.terms.centre[0], log_best, rn_star)
        terms = (
            np.exp(e),
            np.exp(a - alpha * (params.log - self.terms.centre[0])),
            np.exp(b - beta * (tokens.log - self.terms.centre[1])),
        )
        total = terms[0] + terms[1] + terms[2]
        return np.log(total), (terms[0] / total, terms[1] / total, terms[2] / total), params, tokens

    def _log_g(self, theta: Array) -> Array:
        a, b, alpha, beta = theta.T[1:5, :, None]
        centre_n, centre_d = self.terms.centre
        scale = a + alpha * centre_n - b - beta * centre_d
        return np.asarray((np.log(alpha / beta) + scale) / (alpha + beta))


@dataclass(frozen=True)
class _Effective:
    """Logarithm of an effective amount that is partly repeated, [J, K], and its slopes in the logs of the unique part and the star."""

    log: Array
    by_unique: Array
    by_star: Array

    @classmethod
    def of(cls, log_used: Array, log_unique: Array, log_star: Array) -> _Effective:
        """Compute it from logarithms; of what is unique no more than is used counts."""
        held = (log_unique >= log_used) | (log_unique <= _LEAST_LOG)
        log_unique = np.maximum(np.minimum(log_unique, log_used), _LEAST_LOG)
        star = np.exp(log_star)
        further = np.expm1(log_used - log_unique)
        decay = np.exp(-further / star)
        worth = 1 + star * (1 - decay)
        by_unique = np.where(held, 0.0, 1 - (1 + further) * decay / worth)
        by_star = (star * (1 - decay) - further * decay) / worth
        return cls(log=log_unique + np.log(worth), by_unique=by_unique, by_star=by_star)


def _effective_tokens(values: Values, rows: Mapping[str, Any]) -> Any:
    """D', of which D / U_D epochs are worth as many tokens seen once."""
    return _worth(np.minimum(rows["unique_tokens"], rows["n_tokens"]), rows["n_tokens"], values["rd_star"])


def _worth(unique: Any, used: Any, star: Any) -> Any:
    """Worth of `used` of something of which `unique` are no repetition."""
    return unique * (1 - star * np.expm1(-(used / unique - 1) / star))


def _useful_params(values: Values, unique: Any, n_params: Any) -> Any:
    """The parameters that are best for the unique tokens under Chinchilla's form, G·(G·U)^(beta/alpha), at most N."""
    alpha, beta = values["alpha"], values["beta"]
    log_g = (np.log(alpha / beta) + np.log(values["A"]) - np.log(values["B"])) / (alpha + beta)
    log_best = log_g + (log_g + np.log(unique)) * beta / alpha
    return np.exp(np.clip(log_best, _LEAST_LOG, np.log(n_params)))
