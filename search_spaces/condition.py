"""Conditions on the values of other hyperparameters, under which a hyperparameter is active."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

from search_spaces.errors import SpaceError
from search_spaces.prior import is_finite
from search_spaces.serialization import plain, read


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, both included; None: no bound on that side."""

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            if (value := getattr(self, name)) is not None and not is_finite(value):
                raise SpaceError(f"a range needs a finite number as {name}, got {value!r}")
        if self.low is None and self.high is None:
            raise SpaceError("a range needs low or high")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise SpaceError(f"a range needs low <= high, got low = {self.low}, high = {self.high}")

    def holds(self, value: object) -> bool:
        """Return True if `value` is a number in the range."""
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        number = float(value)
        return (self.low is None or number >= self.low) and (self.high is None or number <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f">= {self.low:g}"
        return f"<= {self.high:g}" if self.low is None else f"in {self.low:g} … {self.high:g}"


@dataclass(frozen=True, kw_only=True)
class OneOf:
    """Condition that a value is one of several."""

    values: tuple[bool | int | float | str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.values, list | tuple) or not self.values:
            raise SpaceError(f"a condition needs a list of values or a range, got {self.values!r}")
        for value in self.values:
            if not isinstance(value, bool | int | float | str):
                raise SpaceError(f"a condition takes text, numbers and true or false, got {value!r}")
        object.__setattr__(self, "values", tuple(self.values))

    def holds(self, value: object) -> bool:
        """Return True if `value` is among them; true is not 1."""
        return any(same(value, known) for known in self.values)

    def __str__(self) -> str:
        return "= " + " | ".join(map(str, self.values))


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Values that other hyperparameters, the parents, must all have for a hyperparameter to be active.

    Attributes:
        parents: Name and allowed values of each parent, in the given order.
    """

    parents: tuple[tuple[str, OneOf | Range], ...]

    @classmethod
    def from_dict(cls, table: object) -> Self:
        """Read the condition from a table such as `{optimizer = ["adamw", "lion"], n_layers = {low = 4}}`.

        Raises:
            SpaceError: If the table is empty, or an entry is neither a list of values nor a range.
        """
        if not isinstance(table, Mapping) or not table:
            raise SpaceError(f"when needs a table from names to lists of values or ranges, got {table!r}")
        parents = []
        for name, entry in table.items():
            try:
                is_range = isinstance(entry, Mapping)
                parents.append((name, read(Range, entry, "a range") if is_range else OneOf(values=entry)))
            except SpaceError as error:
                raise SpaceError(f"when.{name}: {error}") from error
        return cls(parents=tuple(parents))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `from_dict` makes an equal condition of them."""
        return {
            name: plain(allowed.values if isinstance(allowed, OneOf) else allowed) for name, allowed in self.parents
        }

    def holds(self, config: Mapping[str, object]) -> bool:
        """Return True if `config` has every parent with an allowed value."""
        return all(name in config and allowed.holds(config[name]) for name, allowed in self.parents)

    def __str__(self) -> str:
        return " and ".join(f"{name} {allowed}" for name, allowed in self.parents)


def same(value: object, known: object) -> bool:
    """Compare for equality; true is not 1."""
    return isinstance(value, Real | str) and isinstance(value, bool) == isinstance(known, bool) and value == known
