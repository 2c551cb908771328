"""Priors: beliefs about the best value of a hyperparameter, as densities on the scale from 0 to 1.

A prior replaces the uniform density of the unit cube, coordinate by coordinate. A sample is the prior's quantile of a
uniform draw, and a searcher may weight its acquisition by the density (pi-BO, Hvarfner et al., arXiv 2204.11051).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from numbers import Real
from statistics import NormalDist

from scipy.special import betaincinv, betaln

from search_spaces.errors import SpaceError
from search_spaces.weights import Weights

WIDEST = 1000.0
"""Largest spread of a normal, in lengths of the support; beyond this the prior is flat to at least three digits."""
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class Prior:
    """A belief about the best value; a table writes it as `{centre = 0.004, spread = 1}`.

    Attributes:
        centre: Most likely value, which must lie in the support; for a simplex the mean weights.
        spread: Expected distance of the best value from the centre, in units of the distribution's search scale:
            uniform and integer: a standard deviation in units of the value, before truncation at the bounds;
            log_uniform and integer with log: a standard deviation in octaves (factors of two), before truncation;
            ordinal: a standard deviation in ranks, before truncation;
            choice: the total probability, in (0, 1), of the values other than the centre, shared equally;
            simplex: s in (0, 1), where s·√(m(1 - m)) is the standard deviation of a part whose mean weight is m
            (Dirichlet with concentration 1/s² - 1, over the rest above the lower bounds).
    """

    centre: bool | int | float | str | Weights
    spread: float

    def __post_init__(self) -> None:
        if isinstance(self.centre, Mapping) and not isinstance(self.centre, Weights):
            object.__setattr__(self, "centre", Weights(self.centre))
        if not is_finite(self.spread) or self.spread <= 0:
            raise SpaceError(f"a prior needs a positive, finite spread, got {self.spread!r}")
        object.__setattr__(self, "spread", float(self.spread))

    def __str__(self) -> str:
        return f"around {self.centre} ± {self.spread:g}"


class Density(ABC):
    """A density on [0, 1]."""

    @abstractmethod
    def quantile(self, u: float) -> float:
        """Return the place below which the share `u` of the mass lies."""

    @abstractmethod
    def log(self, place: float) -> float:
        """Return the natural logarithm of the density at `place`; 0 at the density without a prior."""


@dataclass(frozen=True, kw_only=True)
class TruncatedNormal(Density):
    """Normal density with this mean, in [0, 1], and standard deviation, truncated at 0 and 1."""

    mean: float
    spread: float

    def __post_init__(self) -> None:
        if not 0 < self.spread <= WIDEST:
            raise SpaceError(f"a prior's spread must be at most {WIDEST:g} times the range, got {self.spread:g} times")

    @cached_property
    def _normal(self) -> NormalDist:
        return NormalDist(self.mean, self.spread)

    def quantile(self, u: float) -> float:
        low, high = self._normal.cdf(0), self._normal.cdf(1)
        p = min(max(low + u * (high - low), 1e-300), 1 - 1e-16)
        return min(max(self._normal.inv_cdf(p), 0.0), 1.0)

    def log(self, place: float) -> float:
        inside = self._normal.cdf(1) - self._normal.cdf(0)
        z = (place - self.mean) / self.spread
        return -0.5 * z * z - math.log(self.spread * math.sqrt(2 * math.pi) * inside)


@dataclass(frozen=True, kw_only=True)
class Steps(Density):
    """Density that is constant on each of equally long cells, with these masses."""

    masses: tuple[float, ...]

    def quantile(self, u: float) -> float:
        below = [0.0, *accumulate(self.masses)]
        i = min(bisect_right(below, u) - 1, len(self.masses) - 1)
        return min((i + (u - below[i]) / self.masses[i]) / len(self.masses), 1.0)

    def log(self, place: float) -> float:
        n = len(self.masses)
        return math.log(n * self.masses[min(int(place * n), n - 1)])


@dataclass(frozen=True, kw_only=True)
class BetaStick(Density):
    """Density of a broken-off share v ~ Beta(a, b), on the scale 1 - (1 - v)^left, on which Beta(1, left) is uniform.

    Under Dirichlet(α) the shares are independent: a = α_j, and b is the sum of α over the later parts.
    """

    a: float
    b: float
    left: int

    def quantile(self, u: float) -> float:
        share = float(betaincinv(self.a, self.b, u))
        return 1.0 if share >= 1 else -math.expm1(self.left * math.log1p(-share))

    def log(self, place: float) -> float:
        rest = (1 - place) ** (1 / self.left)
        rest = min(max(rest, _TINY), 1 - _TINY)
        powers = (self.a - 1) * math.log1p(-rest) + (self.b - self.left) * math.log(rest)
        return float(powers - betaln(self.a, self.b) - math.log(self.left))


def is_finite(value: object) -> bool:
    """Return True for a finite real number; true and false are not numbers."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
