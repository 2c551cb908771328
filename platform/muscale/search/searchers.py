"""Searchers: grids, random draws, Optuna's samplers and CMA-ES, each a function of the results so far.

A searcher holds no state between calls: the observations contain all it needs, so an interrupted sweep continues as if it had
not been interrupted. muscale's searcher is in `muscale.search.across_scales`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from muscale.errors import StageError
from muscale.search.protocols import Known, Observation
from muscale.search.record_view import MemoizedByConfig
from search_spaces import Config, Space

MAX_OBSERVATIONS = 1000
"""Most observations that a sampler gets: Optuna's get half the best and half the latest, CMA-ES the latest. Cost grows with their
number, and poor or old ones add little (a covariance adapts within tens of generations; this number makes over a hundred)."""
MOST_OF_GP = 300
"""The same for the Gaussian process, whose cost grows with the cube: a suggestion takes .7 s with 300, 10 s with 1,000."""
CLIP = 1.1
"""Multiple of the best loss at which losses are clipped for the Gaussian process and CMA-ES. Losses beyond form a steep wall;
unclipped, the Gaussian process needs 20 instead of 13 evaluations (Step Law's grid; search_replay.py)."""

MAX_ATTEMPTS = 100
"""Suggestions that may break a constraint, which these samplers do not know, before a random draw that satisfies all is used."""
_STRIDE = 2**16  # distance between the points of a sequence that are tried for one trial
START_UP = 10
"""Trials with a result before Optuna's samplers use results (their default); priors, which they can't use, draw these trials."""
SIGMA = 0.3
"""Initial standard deviation of CMA-ES, as a share of the unit cube's edge (assumed)."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Fixed configurations in order: every combination of a grid, or results of another tool."""

    configs: Sequence[Config]
    first: int = 0  # trial that gets the first point

    def propose(self, number: int, known: Known) -> Config:
        """Return the grid's next point; raise StageError behind the last one."""
        if number - self.first >= len(self.configs):
            raise StageError(
                f"sweep: the grid has {len(self.configs)} configurations, so trial {number} has none; lower sweep.trials"
            )
        return dict(self.configs[number - self.first])


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A searcher that samples a space by a seed."""

    space: Space
    seed: int

    @cached_property
    def _contains(self) -> MemoizedByConfig[bool]:
        return MemoizedByConfig(self.space.contains)

    def _allowed(self, number: int, ask: Callable[[int], Config]) -> Config:
        """Return the first of `MAX_ATTEMPTS` suggestions that satisfies all constraints, else the random draw of this number."""
        for attempt in range(MAX_ATTEMPTS):
            if self.space.contains(config := ask(attempt)):
                return config
        return self.space.draw(self.seed, number)


@dataclass(frozen=True, kw_only=True)
class Draws(Sampler):
    """Independent random draws; each depends only on the seed and the trial's number."""

    def propose(self, number: int, known: Known) -> Config:
        """Return the draw of this number."""
        return self.space.draw(self.seed, number)


@dataclass(frozen=True, kw_only=True)
class QuasiRandom(Sampler):
    """A scrambled Sobol sequence (Owen, J. Complexity 14, 1998, through scipy), which leaves smaller gaps than draws."""

    def propose(self, number: int, known: Known) -> Config:
        """Return the sequence's point of this number."""
        from scipy.stats import qmc  # takes half a second, and workers don't need it

        def point(attempt: int) -> Config:
            sequence = qmc.Sobol(len(self.space.axes), scramble=True, rng=self.seed)
            if skipped := number + attempt * _STRIDE:
                sequence.fast_forward(skipped)
            return self.space.decode(self.space.from_prior(sequence.random(1)[0]))

        return self._allowed(number, point)


def clipped_losses(observations: Sequence[Observation], clip: float = math.inf) -> list[float]:
    """Return the losses for a searcher: clipped at `clip` times the best; a diverged trial counts as slightly worse than the worst."""
    finite = [seen.loss for seen in observations if seen.loss is not None]
    worst = max(finite) * 1.01 if finite else math.log(256)
    highest = min(finite) * clip if finite else math.inf
    return [min(worst if seen.loss is None else seen.loss, highest) for seen in observations]


@dataclass(frozen=True, kw_only=True)
class OptunaSearcher(Sampler):
    """Optuna sampler over the space; it is queried by `suggest_*`, so that it sees only active hyperparameters.

    Attributes:
        make: Builds the sampler for a seed.
        clip: Multiple of the best loss at which losses are clipped.
        most: Maximum number of observations for the sampler: half are the best, half the latest.
    """

    make: Callable[[int], Any]
    clip: float = math.inf
    most: int = MAX_OBSERVATIONS

    def propose(self, number: int, known: Known) -> Config:
        """Return the sampler's suggestion for trial `number`; the first trials are drawn by the space's priors, if it has any."""
        import optuna

        from muscale.search.optuna_space import optuna_params_of, suggest

        own = [seen for seen in known.observations if self._contains(seen.config)]
        if len(own) < START_UP and any(distribution.prior for distribution in self.space.values()):
            return self.space.draw(self.seed, number)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=self.make(_seed(self.seed, number)))
        kept = _kept(own, self.most)
        for seen, value in zip(kept, clipped_losses(kept, self.clip), strict=True):
            params, distributions = optuna_params_of(self.space, seen.config)
            study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
        for config in filter(self.space.contains, known.pending):
            study.enqueue_trial(optuna_params_of(self.space, config)[0])
            suggest(study.ask(), self.space)
        return self._allowed(number, lambda _: suggest(study.ask(), self.space))


def tpe(space: Space, seed: int) -> OptunaSearcher:
    """Return Optuna's tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011) with defaults, aware of running trials."""
    import optuna

    return OptunaSearcher(
        space=space, seed=seed, make=lambda number: optuna.samplers.TPESampler(seed=number, constant_liar=True)
    )


def gaussian_process(space: Space, seed: int) -> OptunaSearcher:
    """Return Optuna's Gaussian process with log expected improvement; losses are clipped."""
    import optuna

    return OptunaSearcher(
        space=space, seed=seed, clip=CLIP, most=MOST_OF_GP, make=lambda number: optuna.samplers.GPSampler(seed=number)
    )


@dataclass(frozen=True, kw_only=True)
class CmaEs(Sampler):
    """Covariance matrix adaptation (Hansen, arXiv 1604.00772, through the package cmaes) in the unit cube, losses clipped.

    A generation is the next batch of observed trials, in the order of trials; it does not wait for stragglers.
    """

    @cached_property
    def _encode(self) -> MemoizedByConfig[np.ndarray[Any, np.dtype[np.float64]]]:
        return MemoizedByConfig(self.space.encode)

    def propose(self, number: int, known: Known) -> Config:
        """Return a draw from the distribution after all complete generations so far."""
        from cmaes import CMA

        n = len(self.space.axes)
        strategy = CMA(
            mean=self.space.from_prior(np.full(n, 0.5)), sigma=SIGMA, bounds=np.tile([0.0, 1.0], (n, 1)), seed=self.seed
        )
        observations = [seen for seen in known.observations if self._contains(seen.config)]
        losses = clipped_losses(observations, CLIP)
        size = strategy.population_size
        oldest = max(0, len(observations) // size - MAX_OBSERVATIONS // size) * size
        for first in range(oldest, len(observations) - size + 1, size):
            generation = zip(observations[first : first + size], losses[first : first + size], strict=True)
            strategy.tell([(self._encode(seen.config), loss) for seen, loss in generation])
            if strategy.should_stop():
                break
        strategy.reseed_rng(_seed(self.seed, number))
        return self._allowed(number, lambda _: self.space.decode(strategy.ask()))


def _kept(observations: Sequence[Observation], most: int) -> list[Observation]:
    """Return all observations, or the best and the latest if there are too many, oldest first."""
    if len(observations) <= most:
        return list(observations)
    half = most // 2
    order = sorted(range(len(observations)), key=lambda i: observations[i].loss or math.inf)
    chosen = {*order[:half], *range(len(observations) - half, len(observations))}
    return [observations[i] for i in sorted(chosen)]


def _seed(seed: int, number: int) -> int:
    """Seed of a trial, different for each trial."""
    return int(np.random.SeedSequence([abs(seed), number]).generate_state(1)[0])
