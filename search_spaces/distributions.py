"""Distributions of numbers between two bounds."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, TypeGuard

from search_spaces.base import Distribution, Value, is_integer
from search_spaces.errors import SpaceError
from search_spaces.prior import Density, Prior, TruncatedNormal, is_finite

LARGEST_INTEGER = 2**40
"""Largest bound of an `Integer`; up to this bound `encode` and `decode` preserve an integer exactly, also on a log scale."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Line(Distribution):
    """A distribution with one dimension; its prior is a truncated normal, except for a choice, whose values have no order."""

    def _encode(self, value: Any) -> tuple[float, ...]:
        return (self.place(value),)

    def _decode(self, places: Sequence[float]) -> Value:
        return self.at(places[0])

    def _densities(self, prior: Prior) -> tuple[Density, ...]:
        return (TruncatedNormal(mean=self.place(prior.centre), spread=prior.spread / self.length),)

    @property
    @abstractmethod
    def length(self) -> float:
        """Length of [0, 1] in the units of a prior's spread: units of the value, octaves on a log scale, or ranks."""

    @abstractmethod
    def place(self, value: Any) -> float:
        """Return the place of a value in the support."""

    @abstractmethod
    def at(self, u: float) -> Value:
        """Return the value at a place in [0, 1]."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Interval(Line):
    """Real numbers between two bounds, both included."""

    takes_points: ClassVar[bool] = True
    low: float
    high: float

    def _check(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if not is_finite(value):
                raise SpaceError(f"{self.kind} needs a finite number as {name}, got {value!r}")
            object.__setattr__(self, name, float(value))
        _check_order(self.kind, self.low, self.high)

    def contains(self, value: object) -> bool:
        return is_real(value) and self.low <= value <= self.high

    def _grid(self, n: int) -> list[Value]:
        return [self.at(u) for u in _places(n)]

    def _support(self) -> str:
        return f"{self.low:g} … {self.high:g}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Uniform(Interval):
    """Real numbers, uniformly distributed."""

    kind: ClassVar[str] = "uniform"

    def _check(self) -> None:
        super()._check()
        if not math.isfinite(self.high - self.low):
            raise SpaceError(f"uniform needs a finite high - low, got low = {self.low}, high = {self.high}")

    @property
    def length(self) -> float:
        return self.high - self.low

    def place(self, value: float) -> float:
        return (float(value) - self.low) / (self.high - self.low)

    def at(self, u: float) -> float:
        # The value is computed from the nearer bound, so that both bounds are exact.
        span = self.high - self.low
        return self.low + u * span if u < 0.5 else self.high - (1 - u) * span


@dataclass(frozen=True, kw_only=True, repr=False)
class LogUniform(Interval):
    """Positive real numbers with a uniformly distributed logarithm."""

    kind: ClassVar[str] = "log_uniform"

    def _check(self) -> None:
        super()._check()
        if self.low <= 0:
            raise SpaceError(f"log_uniform needs low > 0, got low = {self.low}")
        if not math.isfinite(self.high / self.low):
            raise SpaceError(f"log_uniform needs a finite high / low, got low = {self.low}, high = {self.high}")

    @property
    def length(self) -> float:
        return math.log2(self.high / self.low)

    def place(self, value: float) -> float:
        return math.log(float(value) / self.low) / math.log(self.high / self.low)

    def at(self, u: float) -> float:
        # The value is computed from the nearer bound, so that both bounds are exact.
        span = math.log(self.high / self.low)
        return self.low * math.exp(u * span) if u < 0.5 else self.high * math.exp((u - 1) * span)


@dataclass(frozen=True, kw_only=True, repr=False)
class Integer(Line):
    """Whole numbers, both bounds included.

    An integer k represents the interval [k - 1/2, k + 1/2] of the real numbers, uniform or with `log` log-uniform,
    and encodes to the position of k.
    """

    kind: ClassVar[str] = "integer"
    takes_points: ClassVar[bool] = True
    low: int
    high: int
    log: bool = False

    def _check(self) -> None:
        if not isinstance(self.log, bool):
            raise SpaceError(f"integer needs log = true or false, got {self.log!r}")
        for name in ("low", "high"):
            value = getattr(self, name)
            if not is_integer(value):
                raise SpaceError(f"integer needs a whole number as {name}, got {value!r}")
            if abs(value) > LARGEST_INTEGER:
                raise SpaceError(f"integer needs |{name}| <= 2**40, got {value}")
            object.__setattr__(self, name, int(value))
        _check_order("integer", self.low, self.high)
        if self.log and self.low < 1:
            raise SpaceError(f"integer with log needs low >= 1, got low = {self.low}")

    def contains(self, value: object) -> bool:
        return is_integer(value) and self.low <= value <= self.high

    def _grid(self, n: int) -> list[Value]:
        return list(dict.fromkeys(self._round(self._reals(0.0).at(u)) for u in _places(n)))

    @property
    def length(self) -> float:
        return self._reals(0.5).length

    def place(self, value: int) -> float:
        return self._reals(0.5).place(value)

    def at(self, u: float) -> int:
        return self._round(self._reals(0.5).at(u))

    def _reals(self, margin: float) -> Uniform | LogUniform:
        """Return the real numbers from `margin` below the lowest integer to `margin` above the highest."""
        return (LogUniform if self.log else Uniform)(low=self.low - margin, high=self.high + margin)

    def _round(self, real: float) -> int:
        return min(max(round(real), self.low), self.high)

    def _support(self) -> str:
        return f"{self.low} … {self.high}{' (log)' if self.log else ''}"


def is_log(distribution: Distribution) -> bool:
    """Return True if a distribution has a logarithmic scale."""
    return isinstance(distribution, LogUniform) or (isinstance(distribution, Integer) and distribution.log)


def is_real(value: object) -> TypeGuard[float]:
    """Return True for a real number; true and false are not numbers."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_order(kind: str, low: float, high: float) -> None:
    if low >= high:
        raise SpaceError(f"{kind} needs low < high, got low = {low}, high = {high}")


def _places(n: int) -> list[float]:
    """Return `n` evenly spaced places in [0, 1], both ends included; the middle for n = 1."""
    return [0.5] if n == 1 else [i / (n - 1) for i in range(n)]
