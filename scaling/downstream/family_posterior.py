"""Posterior of a score as a sigmoid of a linear predictor with an offset for each family of models.

    η = intercept + slopes · x + offset[family] + ε        score = floor + (ceiling − floor) / (1 + exp(−η)) + e

Families differ in data and recipe, so their models share an offset; offsets come from a Student distribution whose scale, the
spread, is fitted. ε and e, the scatter of a model in the predictor and in the score, are Student too, with a common number of
degrees of freedom, since single models of a family lie far off. ε enters by its first order, as variance of the score.

Given all other numbers, the families are independent, so each offset is summed over a grid. An ensemble of chains draws the other
numbers, by affine-invariant moves (Goodman and Weare 2010) and by differences of chains (ter Braak 2006).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array

OFFSET_FREEDOM = 6.0
"""Degrees of freedom of the offsets' distribution (assumed; 4 to 8 change the coverage of left-out families by less than .01)."""
N_NODES = 31
"""Grid points of an offset, out to `_REACH` spreads."""
_REACH = 4.5
_WALKERS = 60
_ROUND = 150  # steps of a round
_MOST_ROUNDS = 8
SETTLED = 0.25
"""Largest difference between the means of a round's halves, in posterior deviations, with which sampling ends."""

# Medians and deviations of the logarithms, of the priors (assumed). Slopes are per e-fold of a predictor.
_SLOPE, _SPREAD, _SCATTER, _NOISE, _FREEDOM = (0.5, 1.0), (0.5, 1.0), (0.4, 0.7), (0.02, 1.0), (2.0, 0.3)
_INTERCEPT = 3.0  # deviation, at the mean of the predictors


class Numbers(NamedTuple):
    """Draws of the numbers that all families share; each [n], `slopes` [n, P]."""

    floor: Array
    ceiling: Array
    intercept: Array
    slopes: Array
    spread: Array
    scatter: Array
    noise: Array
    freedom: Array


@dataclass(frozen=True)
class Posterior:
    """Draws of the shared numbers, and of each family's offset in spreads, [n, F]; `drift` is that of `SETTLED`."""

    numbers: Numbers
    offsets: Array
    drift: float


@dataclass(frozen=True)
class Rows:
    """Measured scores with their predictors.

    Attributes:
        x: predictors less their means, [K, P].
        score: scores as shares of the largest possible one, [K].
        variance: known variance of each score, such as that of a mean over items, [K].
        family: number of each row's family, [K].
        floor, ceiling: bounds of both, in which they are uniform; two equal numbers for one that is given.
    """

    x: Array
    score: Array
    variance: Array
    family: NDArray[np.int64]
    floor: tuple[float, float]
    ceiling: tuple[float, float]


def draw(rows: Rows, *, n_draws: int, seed: int) -> Posterior:
    """Draw from the posterior; a single family has no offset."""
    model, rng = _Model(rows), np.random.default_rng(seed)
    chains = model.starts(rng)
    log_density = model.log_density(chains)
    for _ in range(_MOST_ROUNDS):
        kept = np.array([_step(model, chains, log_density, rng) for _ in range(_ROUND)])
        halves = kept[: _ROUND // 2].mean(axis=(0, 1)) - kept[_ROUND // 2 :].mean(axis=(0, 1))
        drift = float(np.max(np.abs(halves) / kept.std(axis=(0, 1))))
        if drift < SETTLED:
            break
    chosen = kept.reshape(-1, kept.shape[-1])[rng.choice(_ROUND * _WALKERS, n_draws)]
    return Posterior(model.numbers(chosen), model.offsets(chosen, rng), drift)


def _step(model: _Model, chains: Array, log_density: Array, rng: np.random.Generator) -> Array:
    """Move both halves of the ensemble, in place, each with the other's help; returns a copy of the chains."""
    half = len(chains) // 2
    for own, other in ((slice(half), chains[half:]), (slice(half, None), chains[:half])):
        now = chains[own]
        first, second = rng.permuted(np.tile(np.arange(half), (half, 1)), axis=1)[:, :2].T
        if rng.random() < 0.5:
            stretch = (1 + rng.random(half)) ** 2 / 2
            proposed = other[first] + stretch[:, None] * (now - other[first])
            jacobian = (now.shape[1] - 1) * np.log(stretch)
        else:
            factor = 1.0 if rng.random() < 0.1 else 2.38 / np.sqrt(2 * now.shape[1])
            proposed = now + factor * (other[first] - other[second]) + 1e-4 * rng.standard_normal(now.shape)
            jacobian = np.zeros(half)
        density = model.log_density(proposed)
        taken = np.log(rng.random(half)) < jacobian + density - log_density[own]
        chains[own] = np.where(taken[:, None], proposed, now)
        log_density[own] = np.where(taken, density, log_density[own])
    return chains.copy()


class _Model:
    """The density of the shared numbers, on scales without bounds: logits of floor and ceiling, logarithms of what is positive."""

    def __init__(self, rows: Rows) -> None:
        order = np.argsort(rows.family, kind="stable")
        self.x, self.score, self.variance = rows.x[order], rows.score[order], rows.variance[order]
        self.first = np.unique(rows.family[order], return_index=True)[1]  # row of each family
        self.bounds = np.array([rows.floor, rows.ceiling])
        grid = np.linspace(-1, 1, N_NODES) if len(self.first) > 1 else np.zeros(1)
        self.nodes = _REACH * (grid + 0.6 * grid**3) / 1.6  # denser in the middle
        self.gaps = np.gradient(self.nodes) if len(self.nodes) > 1 else np.zeros(1)
        self.log_weight = -(OFFSET_FREEDOM + 1) / 2 * np.log1p(self.nodes**2 / OFFSET_FREEDOM)
        self.log_weight += np.log(np.maximum(self.gaps, 1e-300))
        self.log_weight -= np.log(np.exp(self.log_weight).sum()) if len(self.nodes) > 1 else self.log_weight
        n_slopes = self.x.shape[1]
        priors = np.array([*[_SLOPE] * n_slopes, _SPREAD, _SCATTER, _NOISE, _FREEDOM]).T
        self.medians, self.deviations = np.log(priors[0]), priors[1]

    def starts(self, rng: np.random.Generator) -> Array:
        chains = 0.5 * rng.standard_normal((_WALKERS, 3 + len(self.medians)))
        chains[:, 3:] += self.medians
        return chains

    def numbers(self, chains: Array) -> Numbers:
        from scipy.special import expit

        low, high = self.bounds.T
        floor, ceiling = (low + (high - low) * expit(chains[:, :2])).T
        *slopes, spread, scatter, noise, freedom = np.exp(chains[:, 3:]).T
        return Numbers(floor, ceiling, chains[:, 2], np.transpose(slopes), spread, scatter, noise, freedom)

    def by_offset(self, chains: Array) -> Array:
        """Log posterior of each family's offset on the grid, not normalised, [n, F, nodes]."""
        from scipy.special import expit, gammaln

        n = Numbers(*(number[..., None, None] for number in self.numbers(chains)))
        eta = n.intercept + (n.slopes[..., 0, 0] @ self.x.T)[..., None] + n.spread * self.nodes
        share, height = expit(eta), n.ceiling - n.floor
        variance = self.variance[:, None] + n.noise**2 + (n.scatter * height * share * (1 - share)) ** 2
        squares = (self.score[:, None] - n.floor - height * share) ** 2 / variance
        constant = gammaln((n.freedom + 1) / 2) - gammaln(n.freedom / 2) - 0.5 * np.log(n.freedom)
        each = constant - 0.5 * np.log(variance) - (n.freedom + 1) / 2 * np.log1p(squares / n.freedom)
        return np.asarray(np.add.reduceat(each, self.first, axis=1) + self.log_weight)

    def log_density(self, chains: Array) -> Array:
        from scipy.special import expit

        grid = self.by_offset(chains)
        most = grid.max(axis=2)
        likelihood = (most + np.log(np.exp(grid - most[..., None]).sum(axis=2))).sum(axis=1)
        share = expit(chains[:, :2])
        uniform = np.log(np.maximum(share * (1 - share), 1e-300)).sum(axis=1)
        squares = (((chains[:, 3:] - self.medians) / self.deviations) ** 2).sum(axis=1)
        return np.asarray(likelihood + uniform - 0.5 * (squares + (chains[:, 2] / _INTERCEPT) ** 2))

    def offsets(self, chains: Array, rng: np.random.Generator) -> Array:
        """One draw of each family's offset for each draw of the shared numbers, in spreads, [n, F]."""
        grid = self.by_offset(chains)
        reached = np.exp(grid - grid.max(axis=2, keepdims=True)).cumsum(axis=2)
        at = (reached < rng.random(reached.shape[:2])[..., None] * reached[..., -1:]).sum(axis=2)
        return np.asarray(self.nodes[at] + self.gaps[at] * (rng.random(at.shape) - 0.5))
