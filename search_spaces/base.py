"""What every distribution shares: the checks, the table form, and the scale from 0 to 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from numbers import Integral
from typing import Any, ClassVar, Self, TypeAlias, TypeGuard

import numpy as np

from search_spaces.errors import SpaceError, unknown

Value: TypeAlias = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class Distribution(ABC):
    """Over which values one hyperparameter is searched, as a map from the unit interval.

    `decode` takes a place u in [0, 1] to a value and `encode` takes it back, so that a surrogate model sees one scale
    for all, and a sample is `decode` of a uniform draw. The fields of a subclass are the keys of its table.

    Attributes:
        kind: The name under the key "distribution" of a table.
        takes_points: Whether a grid can be coarse or fine. If not, it holds every value there is.
    """

    kind: ClassVar[str]
    takes_points: ClassVar[bool]

    @abstractmethod
    def contains(self, value: object) -> bool:
        """Whether `value` has the right type and lies in the support."""

    @abstractmethod
    def _encode(self, value: Any) -> float:
        """`encode` of a value known to lie in the support."""

    @abstractmethod
    def _decode(self, u: float) -> Value:
        """`decode` of a place known to lie in [0, 1]."""

    @abstractmethod
    def _grid(self, n: int) -> list[Value]:
        """`grid` of an n known to be at least 1."""

    def encode(self, value: object) -> float:
        """The place of `value` in [0, 1].

        Raises:
            SpaceError: If `value` is not in the support.
        """
        if not self.contains(value):
            raise SpaceError(f"{value!r} is not in {self.kind} {self}")
        return self._encode(value)

    def decode(self, u: float) -> Value:
        """The value at the place `u`.

        Raises:
            SpaceError: If `u` is not in [0, 1].
        """
        if not 0 <= u <= 1:
            raise SpaceError(f"a place to decode must lie in [0, 1], got {u}")
        return self._decode(float(u))

    def sample(self, rng: np.random.Generator) -> Value:
        """One random value."""
        return self._decode(rng.random())

    def grid(self, n: int) -> list[Value]:
        """`n` values at even distances on the distribution's scale, both ends included; the middle for n = 1.

        Integers that round to the same are one value. What takes no points gives all its values, whatever `n` is.

        Raises:
            SpaceError: If `n` is not a whole number of at least 1.
        """
        if not is_integer(n) or n < 1:
            raise SpaceError(f"a grid needs a whole number of points, at least 1, got {n!r}")
        return self._grid(n)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for TOML or JSON; `from_dict` makes an equal distribution of them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"distribution": self.kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """The distribution of this kind that a table describes.

        Raises:
            SpaceError: If the table is of another kind, a key is unknown or missing, or a value breaks a rule.
        """
        values = dict(table)
        kind = values.pop("distribution", None)
        if kind != cls.kind:
            raise SpaceError(f'needs distribution = "{cls.kind}", got {kind!r}')
        for key in values:
            if key not in (known := [field.name for field in fields(cls)]):
                raise SpaceError(unknown(f"key of {cls.kind}", key, known))
        required = [field.name for field in fields(cls) if field.default is MISSING]
        if missing := [key for key in required if key not in values]:
            raise SpaceError(f"{cls.kind} needs {' and '.join(missing)}")
        return cls(**values)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number, Python's or numpy's; true and false are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
