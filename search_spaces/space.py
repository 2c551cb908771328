"""A search space: the distribution of each hyperparameter, by name."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from itertools import product
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from search_spaces.base import Distribution, Value
from search_spaces.distributions import Fixed, distribution_from_dict
from search_spaces.errors import SpaceError, unknown

Config: TypeAlias = dict[str, Value]


# Equality and the rest of a read-only mapping come from Mapping.
@dataclass(frozen=True, eq=False)
class Space(Mapping[str, Distribution]):
    """A mapping from hyperparameter to distribution; the order is kept, and decides only the order of results.

    Attributes:
        distributions: At least one, by name; copied.
    """

    distributions: Mapping[str, Distribution]

    def __post_init__(self) -> None:
        if not self.distributions:
            raise SpaceError("a space needs at least one hyperparameter")
        for name, distribution in self.distributions.items():
            if not isinstance(name, str) or not name:
                raise SpaceError(f"a hyperparameter needs a name, got {name!r}")
            if not isinstance(distribution, Distribution):
                raise SpaceError(f"{name} needs a distribution, got {distribution!r}")
        object.__setattr__(self, "distributions", dict(self.distributions))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "space") -> Self:
        """The space that a table of tables describes, as TOML and JSON hold it.

        Args:
            table: `{name: {"distribution": kind, ...}}`; the keys of a kind are the fields of its class.
            where: Where the table stands, for messages: "study.toml: sweep.space".

        Raises:
            SpaceError: Naming `where`, the hyperparameter, the rule and the value received.
        """
        if not isinstance(table, Mapping):
            raise SpaceError(f"{where}: needs a table of hyperparameters, got {table!r}")
        distributions = {}
        for name, entry in table.items():
            try:
                distributions[name] = distribution_from_dict(entry)
            except SpaceError as error:
                raise SpaceError(f"{where}.{name}: {error}") from error
        try:
            return cls(distributions)
        except SpaceError as error:
            raise SpaceError(f"{where}: {error}") from error

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values; `from_dict` makes an equal space of them."""
        return {name: distribution.to_dict() for name, distribution in self.items()}

    def __getitem__(self, name: str) -> Distribution:
        return self.distributions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.distributions)

    def __len__(self) -> int:
        return len(self.distributions)

    @property
    def names(self) -> tuple[str, ...]:
        """Every hyperparameter."""
        return tuple(self)

    @property
    def searched(self) -> tuple[str, ...]:
        """Those that are not fixed: the axes of the unit cube, in order."""
        return tuple(name for name, distribution in self.items() if not isinstance(distribution, Fixed))

    def sample(self, n: int, seed: int) -> list[Config]:
        """`n` random configurations.

        Each value depends only on the seed, the position of its configuration, its name and its distribution: asking
        for more, or adding a hyperparameter, leaves the earlier values as they were.

        Raises:
            SpaceError: If `n` is negative.
        """
        if n < 0:
            raise SpaceError(f"the number of samples must not be negative, got {n}")
        return [
            {name: distribution.sample(_generator(seed, i, name)) for name, distribution in self.items()}
            for i in range(n)
        ]

    def grid(self, points: int | Mapping[str, int]) -> list[Config]:
        """Every combination of the values of each hyperparameter's own grid; the last name varies fastest.

        Args:
            points: One number for all numeric hyperparameters, or one for each by name. A choice is taken whole.

        Raises:
            SpaceError: If a numeric hyperparameter has no number of points, any other has one, or one is below 1.
        """
        numeric = [name for name, distribution in self.items() if distribution.takes_points]
        by_name = points if isinstance(points, Mapping) else dict.fromkeys(numeric, points)
        for name in by_name:
            if name not in numeric:
                raise SpaceError(unknown("name in the points of a grid", name, numeric))
        if missing := [name for name in numeric if name not in by_name]:
            raise SpaceError(f"a grid needs a number of points for {', '.join(missing)}")
        # Distributions that take no points ignore the number.
        values = [distribution.grid(by_name.get(name, 1)) for name, distribution in self.items()]
        return [dict(zip(self, combination, strict=True)) for combination in product(*values)]

    def validate(self, config: Mapping[str, object]) -> None:
        """Check a configuration.

        Raises:
            SpaceError: Naming everything that is wrong: a name missing or unknown, a value outside its support.
        """
        if problems := list(self._problems(config)):
            raise SpaceError("; ".join(problems))

    def contains(self, config: Mapping[str, object]) -> bool:
        """Whether `config` has a value in the support of every hyperparameter, and no other names."""
        return not any(self._problems(config))

    def encode(self, config: Mapping[str, object]) -> NDArray[np.float64]:
        """The point of a configuration in the unit cube, shape `(len(searched),)`.

        Raises:
            SpaceError: If `config` is not in the space.
        """
        self.validate(config)
        return np.array([self[name].encode(config[name]) for name in self.searched], dtype=np.float64)

    def decode(self, point: ArrayLike) -> Config:
        """The configuration at a point of the unit cube, shape `(len(searched),)`; what is fixed is filled in.

        Raises:
            SpaceError: If the shape is another, or a coordinate is not in [0, 1].
        """
        coordinates = np.asarray(point, dtype=np.float64)
        if coordinates.shape != (len(self.searched),):
            raise SpaceError(
                f"a point needs shape ({len(self.searched)},) for {self.searched}, got {coordinates.shape}"
            )
        places = dict(zip(self.searched, coordinates.tolist(), strict=True))
        return {name: distribution.decode(places.get(name, 0.0)) for name, distribution in self.items()}

    def _problems(self, config: Mapping[str, object]) -> Iterator[str]:
        for name, distribution in self.items():
            if name not in config:
                yield f"{name} is missing"
            elif not distribution.contains(config[name]):
                yield f"{name} = {config[name]!r} is not in {distribution.kind} {distribution}"
        for name in config:
            if name not in self:
                yield unknown("hyperparameter", name, self)

    def __str__(self) -> str:
        """One aligned line for each hyperparameter: name, kind, support."""
        name_width = max(len(name) for name in self)
        kind_width = max(len(distribution.kind) for distribution in self.values())
        return "\n".join(f"{name:<{name_width}}  {d.kind:<{kind_width}}  {d}" for name, d in self.items())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{d.kind}</td><td>{escape(str(d))}</td></tr>" for name, d in self.items()
        )
        return f"<table><tr><th>hyperparameter</th><th>distribution</th><th>values</th></tr>{rows}</table>"


def _generator(seed: int, index: int, name: str) -> np.random.Generator:
    """A generator of its own for each (seed, index, name)."""
    digest = sha256(f"{operator.index(seed)}/{index}/{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))
