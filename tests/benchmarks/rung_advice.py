"""A searcher's next suggestion after a sweep, and how good it is on a surface through all true finals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from scipy.interpolate import RBFInterpolator

from search_spaces import Config, LogUniform, Space, Uniform
from tests.benchmarks.rung_statistics import Array

SMOOTHINGS = tuple(10.0**k for k in range(-5, 2))
RATE_WEIGHTS = (1.0, 2.0, 4.0)  # of the first coordinate over the others, in the surface's distances
_CLIP = 0.2  # log loss over the best, beyond which the wall is all the same to the surface
_GRID = 4096
_NEAR = 0.1  # log loss over the best, from which on a quadratic's points weigh less
_RIDGE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Thin-plate spline of log loss over the unit cube, its smoothing chosen by leaving one configuration out.

    Attributes:
        points: Of the cube, [n, d].
        log_losses: Means over the seeds, [n], clipped a little above the best.
        smoothing, rate_weight: Chosen.
        error: Root mean square of the left out, log loss, over the better half.
    """

    points: Array
    log_losses: Array
    smoothing: float
    rate_weight: float
    error: float

    @classmethod
    def fit(cls, points: Array, log_losses: Array) -> Surface:
        """Choose smoothing and weight, and fit."""
        clipped = np.minimum(log_losses, log_losses.min() + _CLIP)
        better = np.flatnonzero(clipped <= np.median(clipped))
        candidates = []
        for smoothing in SMOOTHINGS:
            for weight in RATE_WEIGHTS:
                missed = []
                for left_out in better:
                    kept = np.arange(len(points)) != left_out
                    spline = _spline(points[kept], clipped[kept], smoothing, weight)
                    missed.append(spline(_scaled(points[[left_out]], weight))[0] - clipped[left_out])
                candidates.append((float(np.sqrt(np.mean(np.square(missed)))), smoothing, weight))
        error, smoothing, weight = min(candidates)
        return cls(points=points, log_losses=clipped, smoothing=smoothing, rate_weight=weight, error=error)

    def __call__(self, points: Array) -> Array:
        """Log loss, [k]."""
        spline = _spline(self.points, self.log_losses, self.smoothing, self.rate_weight)
        return np.asarray(spline(_scaled(points, self.rate_weight)), np.float64)

    def best(self) -> tuple[Array, float]:
        """Point and log loss of the minimum over random points of the cube and the fitted ones."""
        points = np.concatenate([_cube(self.points.shape[1]), self.points])
        values = self(points)
        return points[values.argmin()], float(values.min())


def _scaled(points: Array, weight: float) -> Array:
    return np.asarray(points * np.array([weight] + [1.0] * (points.shape[1] - 1)))


def _spline(points: Array, values: Array, smoothing: float, weight: float) -> RBFInterpolator:
    return RBFInterpolator(_scaled(points, weight), values, kernel="thin_plate_spline", smoothing=smoothing)


def quadratic_minimum(points: Array, log_losses: Array) -> Array:
    """Minimum of a quadratic surface through the reported losses in the unit cube, [d]; NaNs are left out.

    Slopes in every coordinate, curvature and interaction of the first two (rate and weight-decay timescale), a little
    ridge, and as in `scaling.fit_optimum` little weight for what lies far above the best.
    """
    known = ~np.isnan(log_losses)
    excess = log_losses[known] - np.nanmin(log_losses)
    root = np.minimum(1, _NEAR / np.maximum(excess, _NEAR))[:, None]
    design = _features(points[known]) * root
    ridge = np.eye(design.shape[1])[1:] * math.sqrt(_RIDGE)
    target = np.concatenate([excess * root[:, 0], np.zeros(len(ridge))])
    coefficients, *_ = np.linalg.lstsq(np.concatenate([design, ridge]), target, rcond=None)
    cube = _cube(points.shape[1])
    return np.asarray(cube[(_features(cube) @ coefficients).argmin()])


def _features(points: Array) -> Array:
    centred = 2 * points - 1
    rate, timescale = centred[:, 0], centred[:, 1]
    return np.column_stack([np.ones(len(points)), centred, rate**2, timescale**2, rate * timescale])


def _cube(d: int) -> Array:
    return np.random.default_rng(0).random((_GRID, d))


Sampler = Callable[[int], optuna.samplers.BaseSampler]
SAMPLERS: Mapping[str, Sampler] = {
    # Modelled from the first on: a sampler without the stopped trials would otherwise wait for more, and draw at random.
    "TPE": lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=4),
    "GP": lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=4, deterministic_objective=False),
}


def suggestions(
    space: Space, sampler: optuna.samplers.BaseSampler, configs: Sequence[Config], log_losses: Array, n: int
) -> list[Config]:
    """Optuna's next suggestions, `n` times, after the reported trials; NaNs are left out."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # each study would else announce itself
    study = optuna.create_study(sampler=sampler)
    distributions = {name: _distribution(space, name) for name in space}
    for config, log_loss in zip(configs, log_losses, strict=True):
        if not math.isnan(log_loss):
            trial = optuna.trial.create_trial(
                params=config,
                distributions=distributions,
                value=float(log_loss),
                state=optuna.trial.TrialState.COMPLETE,
            )
            study.add_trial(trial)
    return [dict(study.ask(distributions).params) for _ in range(n)]


def _distribution(space: Space, name: str) -> BaseDistribution:
    distribution = space[name]
    if isinstance(distribution, LogUniform | Uniform):
        return FloatDistribution(distribution.low, distribution.high, log=isinstance(distribution, LogUniform))
    raise TypeError(f"{name}: the benchmark's space is continuous, got {distribution!r}")
