"""The distributions: what a table may name under the key "distribution"."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, TypeGuard

from search_spaces.base import Distribution, Value, is_integer
from search_spaces.errors import SpaceError, unknown

LARGEST_INTEGER = 2**40
"""Largest bound of an `Integer`; up to here an integer survives `encode` and `decode` exactly, also on a log scale."""


@dataclass(frozen=True, kw_only=True)
class _Interval(Distribution):
    """Real numbers between two bounds, both included."""

    takes_points: ClassVar[bool] = True
    low: float
    high: float

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if not (_is_real(value) and abs(value) <= sys.float_info.max):
                raise SpaceError(f"{self.kind} needs a finite number as {name}, got {value!r}")
            object.__setattr__(self, name, float(value))
        _check_order(self.kind, self.low, self.high)

    def contains(self, value: object) -> bool:
        return _is_real(value) and self.low <= value <= self.high

    def _grid(self, n: int) -> list[Value]:
        return [self._decode(u) for u in _places(n)]

    def __str__(self) -> str:
        return f"{self.low:g} … {self.high:g}"


@dataclass(frozen=True, kw_only=True)
class Uniform(_Interval):
    """Real numbers, each interval as likely as it is long."""

    kind: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.high - self.low):
            raise SpaceError(f"uniform needs a finite high - low, got low = {self.low}, high = {self.high}")

    def _encode(self, value: float) -> float:
        return (float(value) - self.low) / (self.high - self.low)

    def _decode(self, u: float) -> float:
        # From the nearer end, so that both ends are exact.
        span = self.high - self.low
        return self.low + u * span if u < 0.5 else self.high - (1 - u) * span


@dataclass(frozen=True, kw_only=True)
class LogUniform(_Interval):
    """Positive real numbers, each interval as likely as its logarithm is long."""

    kind: ClassVar[str] = "log_uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low <= 0:
            raise SpaceError(f"log_uniform needs low > 0, got low = {self.low}")
        if not math.isfinite(self.high / self.low):
            raise SpaceError(f"log_uniform needs a finite high / low, got low = {self.low}, high = {self.high}")

    def _encode(self, value: float) -> float:
        return math.log(float(value) / self.low) / math.log(self.high / self.low)

    def _decode(self, u: float) -> float:
        # From the nearer end, so that both ends are exact.
        span = math.log(self.high / self.low)
        return self.low * math.exp(u * span) if u < 0.5 else self.high * math.exp((u - 1) * span)


@dataclass(frozen=True, kw_only=True)
class Integer(Distribution):
    """Whole numbers, both bounds included.

    An integer k stands for the interval [k - 1/2, k + 1/2] of the real numbers, uniform or with `log` log-uniform,
    and encodes to the place of k itself.
    """

    kind: ClassVar[str] = "integer"
    takes_points: ClassVar[bool] = True
    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
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
        return list(dict.fromkeys(self._round(self._reals(0.0)._decode(u)) for u in _places(n)))

    def _encode(self, value: int) -> float:
        return self._reals(0.5)._encode(value)

    def _decode(self, u: float) -> int:
        return self._round(self._reals(0.5)._decode(u))

    def _reals(self, margin: float) -> Uniform | LogUniform:
        """The real numbers from `margin` below the lowest integer to `margin` above the highest."""
        return (LogUniform if self.log else Uniform)(low=self.low - margin, high=self.high + margin)

    def _round(self, real: float) -> int:
        return min(max(round(real), self.low), self.high)

    def __str__(self) -> str:
        return f"{self.low} … {self.high}{' (log)' if self.log else ''}"


@dataclass(frozen=True, kw_only=True)
class Choice(Distribution):
    """One of several values without an order, equally likely; each encodes to the middle of its share of [0, 1]."""

    kind: ClassVar[str] = "choice"
    takes_points: ClassVar[bool] = False
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.values, list | tuple):
            raise SpaceError(f"choice needs a list of values, got {self.values!r}")
        for value in self.values:
            _check_value("choice", value)
        if len(self.values) < 2:
            raise SpaceError(f'choice needs at least two values, got {list(self.values)!r}; for one use "fixed"')
        if len(set(self.values)) < len(self.values):
            raise SpaceError(f"choice needs values that differ, got {list(self.values)!r}")
        object.__setattr__(self, "values", tuple(self.values))

    def contains(self, value: object) -> bool:
        return any(_same(value, known) for known in self.values)

    def _grid(self, n: int) -> list[Value]:
        return list(self.values)

    def _encode(self, value: Value) -> float:
        return (self.values.index(value) + 0.5) / len(self.values)

    def _decode(self, u: float) -> Value:
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]

    def __str__(self) -> str:
        return " | ".join(map(str, self.values))


@dataclass(frozen=True, kw_only=True)
class Fixed(Distribution):
    """One value, not searched. It encodes to 0, and any place decodes to it."""

    kind: ClassVar[str] = "fixed"
    takes_points: ClassVar[bool] = False
    value: Value

    def __post_init__(self) -> None:
        _check_value("fixed", self.value)

    def contains(self, value: object) -> bool:
        return _same(value, self.value)

    def _grid(self, n: int) -> list[Value]:
        return [self.value]

    def _encode(self, value: Value) -> float:
        return 0.0

    def _decode(self, u: float) -> Value:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


KINDS: dict[str, type[Distribution]] = {kind.kind: kind for kind in (Uniform, LogUniform, Integer, Choice, Fixed)}


def distribution_from_dict(table: Mapping[str, Any]) -> Distribution:
    """The distribution that a table such as `{distribution = "uniform", low = 0, high = 1}` describes.

    Raises:
        SpaceError: If the kind or a key is unknown, a key is missing, or a value breaks a rule of the kind.
    """
    if not isinstance(table, Mapping) or "distribution" not in table:
        raise SpaceError(f'needs a table with the key "distribution", got {table!r}')
    kind = table["distribution"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise SpaceError(unknown("distribution", kind, KINDS))
    return KINDS[kind].from_dict(table)


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _same(value: object, known: Value) -> bool:
    """Equality in which true is not 1."""
    return isinstance(value, Real | str) and isinstance(value, bool) == isinstance(known, bool) and value == known


def _check_order(kind: str, low: float, high: float) -> None:
    if low >= high:
        raise SpaceError(f"{kind} needs low < high, got low = {low}, high = {high}")


def _check_value(kind: str, value: object) -> None:
    if not isinstance(value, Value) or (isinstance(value, float) and not math.isfinite(value)):
        raise SpaceError(f"{kind} takes text, finite numbers and true or false, got {value!r}")


def _places(n: int) -> list[float]:
    """`n` evenly spaced places in [0, 1], both ends included; the middle for n = 1."""
    return [0.5] if n == 1 else [i / (n - 1) for i in range(n)]
