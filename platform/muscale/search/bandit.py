"""Population based bandits (PB2): a copy's hyperparameters are those from which a Gaussian process expects the largest gain.

Parker-Holder et al., arXiv 2002.02518: the gain of a generation is a function of hyperparameters that drifts with time, with
covariance (1 − eps)^(|t − t'|/2) · k(x, x') (section 4.1), and the next configuration maximises an upper confidence bound,
where configurations already chosen in the same generation count as if their gain had been seen (section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from muscale.search.population import Perturb, completed, may_follow, members_of
from muscale.search.record import Record
from muscale.settings.sweep import changeable
from search_spaces import Config, Space

Array = NDArray[np.float64]

FORGETTING = (0.0, 0.1, 0.3)  # eps; the likeliest of these is taken, and so for the others (assumed grids)
LENGTHS = (0.1, 0.2, 0.4, 0.8)
NOISE = 0.1  # variance of a standardised gain (assumed)
CANDIDATES = 1000
MAX_GAINS = 1000  # the latest; a covariance of n takes n³, and old gains are forgotten anyway (assumed)
EXPLORATION = 2.0  # standard deviations of the confidence bound (assumed)


@dataclass(frozen=True, kw_only=True)
class Bandit:
    """PB2's exploration over the changeable hyperparameters of a space, all of them continuous.

    An inactive hyperparameter lies in the middle of its axis, as in `Space.encode`.

    Attributes:
        space: Bounds, conditions and constraints.
        seed: Seed of the candidates, and of the first generation, for which `Perturb` chooses as there is no gain yet.
    """

    space: Space
    seed: int

    def changed(self, record: Record, trial: int, rung: int, donor: int) -> Config:
        """Return the donor's configuration with the changeable values of the highest confidence bound."""
        points, times, gains = self._gains(record, rung)
        candidates = self._candidates(record.config_at(donor, rung), rung, trial) if len(gains) >= 2 else []
        if not candidates:
            return Perturb(space=self.space, resample=0.25, seed=self.seed).changed(record, trial, rung, donor)
        places = np.array([self._point(config) for config in candidates])
        bound = _bound(points, times, gains, self._chosen(record, rung), places, float(rung + 1))
        return candidates[int(np.argmax(bound))]

    def _candidates(self, copied: Config, rung: int, trial: int) -> list[Config]:
        """Random configurations with which a copy of `copied` may continue."""
        generator, names = np.random.default_rng([self.seed, rung, trial]), changeable(self.space)
        drawn = generator.random((CANDIDATES, len(names)))
        values = (
            {name: self.space[name].decode([u]) for name, u in zip(names, row, strict=True)} for row in drawn.tolist()
        )
        configs = (completed(self.space, {**copied, **each}, generator) for each in values)
        return [config for config in configs if may_follow(self.space, config, copied)]

    def _gains(self, record: Record, rung: int) -> tuple[Array, Array, Array]:
        """Points in the unit cube [K, d], generations [K] and drops of log loss [K] of the members' latest generations."""
        rows: list[tuple[list[float], float, float]] = []
        for r in reversed(range(1, rung + 1)):
            rows = [*self._of_generation(record, r), *rows]
            if len(rows) >= MAX_GAINS:
                break
        points, times, gains = zip(*rows[-MAX_GAINS:], strict=True) if rows else ((), (), ())
        return np.array(points), np.array(times), np.array(gains)

    def _of_generation(self, record: Record, rung: int) -> Iterator[tuple[list[float], float, float]]:
        """(point, generation, drop of log loss) of every member that has a loss before and after."""
        for trial in members_of(record):
            before, after = self._before(record, trial, rung), record.loss(trial, rung)
            if math.isfinite(before) and math.isfinite(after):
                yield self._point(record.config_at(trial, rung)), float(rung), math.log(before / after)

    def _before(self, record: Record, trial: int, rung: int) -> float:
        """The loss of the state that a member's generation started from: its own, or its donor's."""
        return record.loss(record.donors.get((trial, rung - 1), trial), rung - 1)

    def _chosen(self, record: Record, rung: int) -> Array:
        """Points that were chosen for the next generation already, [C, d]."""
        chosen = [self._point(record.paths[t][-1][1]) for t in members_of(record) if (t, rung) in record.donors]
        return np.array(chosen).reshape(len(chosen), len(changeable(self.space)))

    def _point(self, config: Config) -> list[float]:
        names = changeable(self.space)
        return [self.space[name].encode(config[name])[0] if name in config else 0.5 for name in names]


def _kernel(a: Array, b: Array, times_a: Array, times_b: Array, length: float, forgetting: float) -> Array:
    squared = ((a[:, None] - b[None]) ** 2).sum(-1)
    drift = (1 - forgetting) ** (np.abs(times_a[:, None] - times_b[None]) / 2)
    return np.asarray(drift * np.exp(-squared / (2 * length**2)))


def _bound(points: Array, times: Array, gains: Array, chosen: Array, candidates: Array, now: float) -> Array:
    """Upper confidence bound of the standardised gain at the candidates: mean from the gains, spread from all points."""
    y = (gains - gains.mean()) / (gains.std() or 1.0)

    def likelihood(setting: tuple[float, float]) -> float:
        covariance = _kernel(points, points, times, times, *setting) + NOISE * np.eye(len(y))
        factor = cho_factor(covariance, lower=True)
        return float(-0.5 * y @ cho_solve(factor, y) - np.log(np.diag(factor[0])).sum())

    setting = max(((length, eps) for length in LENGTHS for eps in FORGETTING), key=likelihood)
    at = np.full(len(candidates), now)
    factor = cho_factor(_kernel(points, points, times, times, *setting) + NOISE * np.eye(len(y)), lower=True)
    mean = _kernel(candidates, points, at, times, *setting) @ cho_solve(factor, y)
    seen, seen_times = np.vstack([points, chosen]), np.concatenate([times, np.full(len(chosen), now)])
    factor = cho_factor(_kernel(seen, seen, seen_times, seen_times, *setting) + NOISE * np.eye(len(seen)), lower=True)
    cross = _kernel(candidates, seen, at, seen_times, *setting)
    variance = 1 - np.einsum("ij,ij->i", cross, cho_solve(factor, cross.T).T)
    return np.asarray(mean + EXPLORATION * np.sqrt(np.maximum(variance, 0)))
