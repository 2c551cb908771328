"""Base of every distribution: its checks, its table, and its scale from 0 to 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, ClassVar, TypeAlias, TypeGuard

import numpy as np

from search_spaces.condition import Condition
from search_spaces.errors import SpaceError
from search_spaces.prior import Density, Prior
from search_spaces.serialization import plain
from search_spaces.weights import Weights

Scalar: TypeAlias = bool | int | float | str
Value: TypeAlias = Scalar | Weights


@dataclass(frozen=True, kw_only=True, repr=False)
class Distribution(ABC):
    """Distribution over the values of one hyperparameter, as a map from a cube.

    `decode` maps a point of the unit cube, one coordinate in [0, 1] for each dimension, to a value, and `encode` maps the value back.
    A surrogate model therefore sees the same scale for all hyperparameters, and a sample is `decode` of uniform draws. The fields
    of a subclass are the keys of its table.

    Attributes:
        kind: Name under the key "distribution" of a table.
        takes_points: True if a grid can be coarse or fine; otherwise it holds every value.
        prior: Belief about the best value; samples follow the prior, grids and the map from the cube do not.
        when: Values of other hyperparameters for which this hyperparameter is active; the space checks them.
    """

    kind: ClassVar[str]
    takes_points: ClassVar[bool]
    prior: Prior | None = None
    when: Condition | None = None

    def __post_init__(self) -> None:
        self._check()
        if self.prior is not None:
            if not isinstance(self.prior, Prior):
                raise SpaceError(f"{self.kind} needs a Prior as prior, got {self.prior!r}")
            if not self.contains(self.prior.centre):
                raise SpaceError(
                    f"the centre of a prior must be in {self.kind} {self._support()}, got {self.prior.centre}"
                )
            self._densities(self.prior)
        if self.when is not None and not isinstance(self.when, Condition):
            raise SpaceError(f"{self.kind} needs a Condition as when, got {self.when!r}")

    @property
    def dimensions(self) -> int:
        """Number of places that a value encodes to."""
        return 1

    @abstractmethod
    def contains(self, value: object) -> bool:
        """Return True if `value` has the right type and lies in the support."""

    @abstractmethod
    def _check(self) -> None:
        """Normalise the fields of the subclass, or raise a SpaceError."""

    @abstractmethod
    def _encode(self, value: Any) -> tuple[float, ...]:
        """Return `encode` of a value that lies in the support."""

    @abstractmethod
    def _decode(self, places: Sequence[float]) -> Value:
        """Return `decode` of as many places in [0, 1] as there are dimensions."""

    @abstractmethod
    def _grid(self, n: int) -> list[Value]:
        """Return `grid` of an n of at least 1."""

    @abstractmethod
    def _densities(self, prior: Prior) -> tuple[Density, ...]:
        """Return the prior's density along each dimension, for a centre in the support."""

    @abstractmethod
    def _support(self) -> str:
        """Return the support in a few characters."""

    def encode(self, value: object) -> tuple[float, ...]:
        """Return the places of `value` in [0, 1], one for each dimension; raise SpaceError if `value` is not in the support."""
        if not self.contains(value):
            raise SpaceError(f"{value!r} is not in {self.kind} {self._support()}")
        return self._encode(value)

    def decode(self, places: Sequence[float]) -> Value:
        """Return the value at the places, one for each dimension.

        Raises:
            SpaceError: If the number of places differs from the dimensions, or a place is not in [0, 1].
        """
        if len(places) != self.dimensions:
            raise SpaceError(f"{self.kind} decodes {self.dimensions} places, got {len(places)}")
        for u in places:
            if not 0 <= u <= 1:
                raise SpaceError(f"a place to decode must lie in [0, 1], got {u}")
        return self._decode([float(u) for u in places])

    def from_prior(self, places: Sequence[float]) -> tuple[float, ...]:
        """Map uniformly distributed places to places that follow the prior; without a prior, return them unchanged."""
        if self.prior is None:
            return tuple(places)
        densities = self._densities(self.prior)
        return tuple(density.quantile(u) for density, u in zip(densities, places, strict=True))

    def log_prior(self, value: object) -> float:
        """Return the log of the prior's density in the unit cube at the places of `value`; 0 without a prior.

        Raises:
            SpaceError: If `value` is not in the support.
        """
        places = self.encode(value)
        if self.prior is None:
            return 0.0
        return sum(density.log(u) for density, u in zip(self._densities(self.prior), places, strict=True))

    def sample(self, rng: np.random.Generator) -> Value:
        """Draw one value, by the prior if there is one."""
        return self._decode(self.from_prior([rng.random() for _ in range(self.dimensions)]))

    def grid(self, n: int) -> list[Value]:
        """Return `n` values at even distances on the distribution's scale, including both bounds; the middle for n = 1.

        Integers that round to the same number appear once. A distribution that takes no points returns all its values for any `n`.

        Raises:
            SpaceError: If `n` is not a whole number of at least 1.
        """
        if not is_integer(n) or n < 1:
            raise SpaceError(f"a grid needs a whole number of points, at least 1, got {n!r}")
        return self._grid(n)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for TOML or JSON; `distribution_from_dict` makes an equal distribution of them."""
        when = {"when": self.when.to_dict()} if self.when else {}
        own = {key: plain(value) for key in self._keys() if (value := getattr(self, key)) is not None}
        return {"distribution": self.kind, **own, **when}

    @classmethod
    def _keys(cls) -> list[str]:
        """Return the keys of a table: those of the kind, then those of every kind."""
        common = [field.name for field in fields(Distribution)]
        return [field.name for field in fields(cls) if field.name not in common] + common

    def __str__(self) -> str:
        prior = f", {self.prior}" if self.prior else ""
        return f"{self._support()}{prior}{f', if {self.when}' if self.when else ''}"

    def __repr__(self) -> str:
        values = {key: value for key in self._keys() if (value := getattr(self, key)) is not None}
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def is_integer(value: object) -> TypeGuard[int]:
    """Return True for a whole number of Python or numpy; true and false are not numbers."""
    return isinstance(value, Integral) and not isinstance(value, bool)
