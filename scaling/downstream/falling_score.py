"""A score that is positive and falls without bound, such as bits per byte of the right answer, as a function of N and D.

    loss law          `fit` of the score: a floor and powers of N and D, as for a loss
    likelihood law    exp(−score) as a sigmoid of ln N and ln D: a skill that is being learned lowers the score faster than powers do

Both forecast in the score's unit. The second has no floor: a skill that is learned ends at 0. On runs that were left out, forecasts
may miss by more than their intervals tell, since neither law knows when a skill is learned. The side of the interval on which these
runs lie is then inflated by that factor, on the scale of ln score.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.checks import positive
from scaling.downstream.score_law import ScoreForecast, ScoreLaw, fit_score
from scaling.fits.fitting import fit
from scaling.fits.result import ScalingFit
from scaling.fits.runs import to_nats
from scaling.quantiles import two_sided
from scaling.serialization import JsonResult

LOSS_LAW, LIKELIHOOD_LAW = "loss law", "likelihood law"
NO_INFLATION = (1.0, 1.0)
DOUBTFUL = 2.0
"""Inflation above which a forecast is doubtful (assumed)."""
_LEAST = 1e-12  # likelihood that counts as 0, and distance from 1 that counts as 1
_LEVEL = 0.9  # of the intervals that misses are compared with


@dataclass(frozen=True, kw_only=True, eq=False)
class FallingLaw(JsonResult):
    """A law of a falling score.

    Attributes:
        worst: largest score of the rows. An inflated bound is not above it.
        inflation: factors by which the interval's lower and upper side are widened, in ln score.
    """

    metric: str
    worst: float
    inflation: tuple[float, float] = NO_INFLATION

    def forecast(self, n_params: float, n_tokens: float, level: float = 0.9, *, seed: int = 0) -> ScoreForecast:
        """Forecast the score of one run.

        Raises:
            ValueError, ScalingError: for the reasons of the law that was fitted.
        """
        found = self._by_law(n_params, n_tokens, level, seed)
        if self.inflation == NO_INFLATION:
            return found
        below, above = (math.log(max(bound, _LEAST) / found.value) for bound in (found.low, found.high))
        most = max(above, math.log(self.worst / found.value))
        factor = max(self.inflation)
        missed = (
            f"on runs left out the {found.method} misses by {factor:.2g} standard deviations, so its interval is wider"
        )
        return replace(
            found,
            low=found.value * math.exp(self.inflation[0] * below) if found.low else 0.0,
            high=found.value * math.exp(min(self.inflation[1] * above, most)),
            reasons=(*found.reasons, *([missed] if factor > DOUBTFUL else [])),
        )

    def probability(self, n_params: float, n_tokens: float, target: float, *, seed: int = 0) -> float:
        """Probability that one run's score is at most the target.

        Raises:
            ValueError, ScalingError: the target is not above 0, or as for `forecast`.
        """
        middle = self._by_law(n_params, n_tokens, _LEVEL, seed).value
        below, above = self.inflation
        nearer = (positive("target", target) / middle) ** (1 / (above if target > middle else below))
        return self._at_most(n_params, n_tokens, float(middle * nearer), seed)

    @abstractmethod
    def _by_law(self, n_params: float, n_tokens: float, level: float, seed: int) -> ScoreForecast:
        """The forecast without inflation."""

    @abstractmethod
    def _at_most(self, n_params: float, n_tokens: float, target: float, seed: int) -> float:
        """The probability without inflation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossLaw(FallingLaw):
    """A falling score by the law of a loss, in the score's unit."""

    law: ScalingFit

    def _by_law(self, n_params: float, n_tokens: float, level: float, seed: int) -> ScoreForecast:
        del seed  # the forecast draws nothing
        ahead = self.law.forecast(n_params, n_tokens, level)
        return ScoreForecast(
            metric=self.metric,
            n_params=float(n_params),
            n_tokens=float(n_tokens),
            family="",
            value=ahead.loss,
            low=ahead.low,
            high=ahead.high,
            level=level,
            reasons=ahead.reasons,
            method=LOSS_LAW,
        )

    def _at_most(self, n_params: float, n_tokens: float, target: float, seed: int) -> float:
        del seed
        return self.law.forecast(n_params, n_tokens).probability(target)

    def __str__(self) -> str:
        return str(self.law)


@dataclass(frozen=True, kw_only=True, eq=False)
class LikelihoodLaw(FallingLaw):
    """A falling score by the law of its likelihood, exp(−score)."""

    law: ScoreLaw

    def _by_law(self, n_params: float, n_tokens: float, level: float, seed: int) -> ScoreForecast:
        ahead = self.law.forecast(n_params, n_tokens, level=level, seed=seed)
        return replace(
            ahead,
            metric=self.metric,
            value=_score(ahead.value),
            low=0.0 if ahead.high == 1 else _score(ahead.high),
            high=_score(ahead.low),
            method=LIKELIHOOD_LAW,
        )

    def _at_most(self, n_params: float, n_tokens: float, target: float, seed: int) -> float:
        return self.law.probability(n_params, n_tokens, math.exp(-target), seed=seed)

    def __str__(self) -> str:
        return str(self.law)


def fit_loss_law(
    ends: pd.DataFrame, metric: str, *, n_params_convention: str, unit: str, n_bootstrap: int, seed: int
) -> LossLaw:
    """Fit the loss law to ends of runs: `n_params`, `n_tokens`, `stem` and the metric; raises the errors of `fit`."""
    law = fit(
        ends[["n_params", "n_tokens", "stem"]].assign(loss=ends[metric]),
        n_params_convention=n_params_convention,
        loss_unit=unit if to_nats(unit)[0] == 1 else f"{unit} of {metric}",  # the score stays in its unit
        n_bootstrap=n_bootstrap,
        seed=seed,
    )
    return LossLaw(metric=metric, law=law, worst=float(ends[metric].max()))


def fit_likelihood_law(ends: pd.DataFrame, metric: str, *, seed: int) -> LikelihoodLaw:
    """Fit the likelihood law to the same columns; raises the errors of `fit_score`."""
    likelihood = np.exp(-ends[metric])
    table = ends[["n_params", "n_tokens"]].assign(likelihood=likelihood)
    if "standard_error" in ends:
        table["standard_error"] = likelihood * ends["standard_error"]
    law = fit_score(table, metric="likelihood", seed=seed)
    return LikelihoodLaw(metric=metric, law=law, worst=float(ends[metric].max()))


def inflation_of(law: FallingLaw, n_params: Array, n_tokens: Array, score: Array) -> tuple[float, float]:
    """Return how far runs left out lie below and above their forecasts: root mean squares in standard deviations, at least 1."""
    below, above = [0.0], [0.0]
    for n, d, measured in zip(n_params, n_tokens, score, strict=True):
        ahead = law.forecast(float(n), float(d), level=_LEVEL)
        side, bound = (below, ahead.low) if measured < ahead.value else (above, ahead.high)
        deviation = abs(math.log(max(bound, _LEAST) / ahead.value)) / two_sided(_LEVEL)
        side.append(math.log(max(float(measured), _LEAST) / ahead.value) / max(deviation, _LEAST))
    low, high = (max(1.0, math.sqrt(sum(miss**2 for miss in side) / max(1, len(side) - 1))) for side in (below, above))
    return low, high


def _score(likelihood: float) -> float:
    """Return the score of a likelihood; above 0, as a logarithm of it is taken."""
    return -math.log(min(max(likelihood, _LEAST), 1 - _LEAST))
