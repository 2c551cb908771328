"""Distributions of listed values: with an order, without an order, and of a single value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from search_spaces.base import Distribution, Scalar, Value
from search_spaces.condition import same
from search_spaces.distributions import Line
from search_spaces.errors import SpaceError
from search_spaces.prior import Density, Prior, Steps


@dataclass(frozen=True, kw_only=True, repr=False)
class Listed(Line):
    """Distribution of several values, each with an equal share of [0, 1]; a value encodes to the middle of its share."""

    takes_points: ClassVar[bool] = False
    values: tuple[Scalar, ...]

    def _check(self) -> None:
        if not isinstance(self.values, list | tuple):
            raise SpaceError(f"{self.kind} needs a list of values, got {self.values!r}")
        for value in self.values:
            _check_value(self.kind, value)
        if len(self.values) < 2:
            raise SpaceError(f'{self.kind} needs at least two values, got {list(self.values)!r}; for one use "fixed"')
        if len(set(self.values)) < len(self.values):
            raise SpaceError(f"{self.kind} needs values that differ, got {list(self.values)!r}")
        object.__setattr__(self, "values", tuple(self.values))

    def contains(self, value: object) -> bool:
        return any(same(value, known) for known in self.values)

    def _grid(self, n: int) -> list[Value]:
        return list(self.values)

    @property
    def length(self) -> float:
        return len(self.values)

    def place(self, value: Scalar) -> float:
        return (self.values.index(value) + 0.5) / len(self.values)

    def at(self, u: float) -> Value:
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]


@dataclass(frozen=True, kw_only=True, repr=False)
class Choice(Listed):
    """Equally likely values without an order; each encodes to the middle of its share of [0, 1]."""

    kind: ClassVar[str] = "choice"

    def _densities(self, prior: Prior) -> tuple[Density, ...]:
        if prior.spread >= 1:
            raise SpaceError(f"the spread of a choice's prior is a probability, below 1, got {prior.spread:g}")
        others = prior.spread / (len(self.values) - 1)
        masses = (1 - prior.spread if same(value, prior.centre) else others for value in self.values)
        return (Steps(masses=tuple(masses)),)

    def _support(self) -> str:
        return " | ".join(map(str, self.values))


@dataclass(frozen=True, kw_only=True, repr=False)
class Ordinal(Listed):
    """Equally likely values in the given order, numbers or text; each encodes by its rank, so that neighbours are near."""

    kind: ClassVar[str] = "ordinal"

    def _support(self) -> str:
        return " < ".join(map(str, self.values))


@dataclass(frozen=True, kw_only=True, repr=False)
class Fixed(Distribution):
    """Single value that is not searched and has no dimension."""

    kind: ClassVar[str] = "fixed"
    takes_points: ClassVar[bool] = False
    value: Scalar

    def _check(self) -> None:
        _check_value("fixed", self.value)

    @property
    def dimensions(self) -> int:
        return 0

    def contains(self, value: object) -> bool:
        return same(value, self.value)

    def _grid(self, n: int) -> list[Value]:
        return [self.value]

    def _encode(self, value: Scalar) -> tuple[float, ...]:
        return ()

    def _decode(self, places: Sequence[float]) -> Value:
        return self.value

    def _densities(self, prior: Prior) -> tuple[Density, ...]:
        raise SpaceError("fixed takes no prior")

    def _support(self) -> str:
        return str(self.value)


def _check_value(kind: str, value: object) -> None:
    if not isinstance(value, Scalar) or (isinstance(value, float) and not math.isfinite(value)):
        raise SpaceError(f"{kind} takes text, finite numbers and true or false, got {value!r}")
