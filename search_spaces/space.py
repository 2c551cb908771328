"""A search space: the distribution of each hyperparameter, by name, with conditions and constraints."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from html import escape
from itertools import product
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from search_spaces.base import Distribution, Value
from search_spaces.constraints import Constraint
from search_spaces.errors import SpaceError, unknown
from search_spaces.registry import distribution_from_dict
from search_spaces.relations import RESERVED, Relations
from search_spaces.simplex import Simplex

Config: TypeAlias = dict[str, Value]
T = TypeVar("T")
U = TypeVar("U")

MOST_DRAWS = 1_000
"""Draws of one configuration before its constraints count as unsatisfiable; at an acceptance of 1 %, this is wrong for one
configuration in 20,000."""


# Mapping provides equality and the other methods of a read-only mapping.
@dataclass(frozen=True, eq=False)
class Space(Mapping[str, Distribution]):
    """A mapping from hyperparameter to distribution; the order is kept and affects only the order of results.

    A hyperparameter is inactive, and in no configuration, unless its `when` holds. Its parents may be inactive, too.

    Attributes:
        distributions: At least one distribution, by name; copied.
        constraints: Constraints on configurations, by the constraints' names; copied.
    """

    distributions: Mapping[str, Distribution]
    constraints: Mapping[str, Constraint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.distributions:
            raise SpaceError("a space needs at least one hyperparameter")
        for name, distribution in self.distributions.items():
            if not isinstance(name, str) or not name:
                raise SpaceError(f"a hyperparameter needs a name, got {name!r}")
            if name == RESERVED:
                raise SpaceError(f"no hyperparameter may be called {name}: a space's table has its constraints there")
            if not isinstance(distribution, Distribution):
                raise SpaceError(f"{name} needs a distribution, got {distribution!r}")
        object.__setattr__(self, "distributions", dict(self.distributions))
        object.__setattr__(self, "constraints", dict(self.constraints))
        self._between.check()

    @cached_property
    def _between(self) -> Relations:
        return Relations(distributions=self.distributions, constraints=self.constraints)

    @property
    def order(self) -> tuple[str, ...]:
        """All hyperparameters, each after its condition's parents."""
        return self._between.order

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "space") -> Self:
        """Read the space from a table of tables, as TOML and JSON hold it.

        Args:
            table: `{name: {"distribution": kind, ...}}`; the keys of a kind are the fields of its class, "prior" and
                "when". Under "constraints": `{name: {rule: [hyperparameters]}}`.
            where: Location of the table, for messages: "study.toml: sweep.space".

        Raises:
            SpaceError: Naming `where`, the hyperparameter, the rule and the value received.
        """
        if not isinstance(table, Mapping):
            raise SpaceError(f"{where}: needs a table of hyperparameters, got {table!r}")
        rest = dict(table)
        given = rest.pop(RESERVED, {})
        if not isinstance(given, Mapping):
            raise SpaceError(f"{where}.{RESERVED}: needs a table of constraints, got {given!r}")
        distributions, constraints = {}, {}
        place = where
        try:
            for name, entry in rest.items():
                place = f"{where}.{name}"
                distributions[name] = distribution_from_dict(entry)
            for name, entry in given.items():
                place = f"{where}.{RESERVED}.{name}"
                constraints[name] = Constraint.from_dict(entry)
            place = where
            return cls(distributions, constraints)
        except SpaceError as error:
            raise SpaceError(f"{place}: {error}") from error

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain values; `from_dict` makes an equal space of them."""
        table = {name: distribution.to_dict() for name, distribution in self.items()}
        if self.constraints:
            table[RESERVED] = {name: constraint.to_dict() for name, constraint in self.constraints.items()}
        return table

    def updated(
        self, distributions: Mapping[str, Distribution], constraints: Mapping[str, Constraint] | None = None
    ) -> Self:
        """Return this space with replaced or additional hyperparameters and constraints."""
        return type(self)({**self, **distributions}, {**self.constraints, **(constraints or {})})

    def __getitem__(self, name: str) -> Distribution:
        return self.distributions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.distributions)

    def __len__(self) -> int:
        return len(self.distributions)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Space) and self.constraints != other.constraints:
            return False
        return super().__eq__(other)

    @property
    def searched(self) -> tuple[str, ...]:
        """Hyperparameters that are not fixed, in order."""
        return tuple(name for name, distribution in self.items() if distribution.dimensions)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes of the unit cube, in order: each searched name, or for a simplex `name.part` of all parts except the last."""
        axes: list[str] = []
        for name, distribution in self.items():
            parts = distribution.parts[:-1] if isinstance(distribution, Simplex) else None
            axes += [f"{name}.{part}" for part in parts] if parts else [name] * distribution.dimensions
        return tuple(axes)

    def active(self, config: Mapping[str, object]) -> tuple[str, ...]:
        """Return the hyperparameters that are active under `config`, in order; values of inactive hyperparameters are ignored."""
        there = self._between.active(config)
        return tuple(name for name in self if name in there)

    def _only_active(self, values: Mapping[str, Value]) -> Config:
        return {name: values[name] for name in self.active(values)}

    def sample(self, n: int, seed: int) -> list[Config]:
        """Draw `n` configurations, by the priors if there are any.

        Each value depends only on the seed, the position of its configuration, its name and its distribution. More
        samples, or an added hyperparameter, therefore leave earlier values unchanged. If a constraint is broken, only its
        hyperparameters (with those on which they depend) are drawn again.

        Raises:
            SpaceError: If `n` is negative, or no draw satisfied the constraints.
        """
        if n < 0:
            raise SpaceError(f"the number of samples must not be negative, got {n}")
        return [self.draw(seed, i) for i in range(n)]

    def draw(self, seed: int, index: int) -> Config:
        """Draw the configuration at one position of `sample`, without drawing the previous configurations.

        Raises:
            SpaceError: If no draw satisfied the constraints.
        """
        drawn: Config = {}
        for names, constraints in self._between.groups:
            for attempt in range(MOST_DRAWS):
                values = {name: self[name].sample(_generator(seed, index, name, attempt)) for name in names}
                there = self._between.active(values) if constraints else values
                if all(constraint.holds(there) for constraint in constraints.values()):
                    drawn |= values
                    break
            else:
                self._give_up(seed, index, names, constraints)
        return self._only_active(drawn)

    def _give_up(self, seed: int, index: int, names: list[str], constraints: Mapping[str, Constraint]) -> None:
        draws = [
            self._between.active({name: self[name].sample(_generator(seed, index, name, attempt)) for name in names})
            for attempt in range(MOST_DRAWS)
        ]
        rates = (f"{key} by {sum(map(c.holds, draws)) / len(draws):.1%}" for key, c in constraints.items())
        raise SpaceError(
            f"none of {MOST_DRAWS:,} draws of {', '.join(names)} satisfied the constraints (each alone: {', '.join(rates)});"
            " narrow the bounds, or loosen a constraint"
        )

    def grid(self, points: int | Mapping[str, int]) -> list[Config]:
        """Return every combination of the values on each hyperparameter's grid; the last name varies fastest.

        Inactive hyperparameters do not multiply the combinations; combinations that break a constraint are left out.

        Args:
            points: One number for all numeric hyperparameters and simplexes, or one number for each by name. All values of a
                choice or an ordinal are used.

        Raises:
            SpaceError: If a numeric hyperparameter has no number of points, another kind has one, a number is below 1, or no
                combination satisfies the constraints.
        """
        numeric = [name for name, distribution in self.items() if distribution.takes_points]
        by_name = points if isinstance(points, Mapping) else dict.fromkeys(numeric, points)
        for name in by_name:
            if name not in numeric:
                raise SpaceError(unknown("name in the points of a grid", name, numeric))
        if missing := [name for name in numeric if name not in by_name]:
            raise SpaceError(f"a grid needs a number of points for {', '.join(missing)}")
        # Distributions that take no points ignore the number of points.
        values = [_naming(name, distribution.grid, by_name.get(name, 1)) for name, distribution in self.items()]
        combined = (dict(zip(self, combination, strict=True)) for combination in product(*values))
        distinct = {tuple(config.items()): config for config in map(self._only_active, combined)}
        grid = [config for config in distinct.values() if not any(self._between.broken(config))]
        if not grid:
            raise SpaceError(f"none of {len(distinct):,} points of the grid satisfies {self._between.text()}")
        return grid

    def validate(self, config: Mapping[str, object]) -> None:
        """Check a configuration.

        Raises:
            SpaceError: Naming every fault: a missing, unknown or inactive name, a value outside its support, a broken
                constraint.
        """
        if problems := list(self._problems(config)):
            raise SpaceError("; ".join(problems))

    def contains(self, config: Mapping[str, object]) -> bool:
        """Return True if `validate` accepts `config`."""
        return not any(self._problems(config))

    def _problems(self, config: Mapping[str, object]) -> Iterator[str]:
        there = self._between.active(config)
        wrong: dict[str, str] = {}
        for name in self.order:
            if name not in there:
                # If a parent's value is invalid, it is unknown whether this name should be active.
                if name in config and not any(parent in wrong for parent in self._between.parents(name)):
                    wrong[name] = f"{name} is inactive, it exists only if {self[name].when}"
            elif name not in config:
                wrong[name] = f"{name} is missing"
            elif not self[name].contains(config[name]):
                wrong[name] = f"{name} = {config[name]!r} is not in {self[name].kind} {self[name]}"
        yield from (wrong[name] for name in self if name in wrong)
        yield from (unknown("hyperparameter", name, self) for name in config if name not in self)
        if not wrong:
            yield from self._between.broken({name: config[name] for name in there})

    def encode(self, config: Mapping[str, object]) -> NDArray[np.float64]:
        """Return the point of a configuration in the unit cube, shape `(len(axes),)`; inactive hyperparameters are at .5.

        Raises:
            SpaceError: If `config` is not in the space.
        """
        self.validate(config)
        places: list[float] = []
        for name, distribution in self.items():
            places += distribution.encode(config[name]) if name in config else [0.5] * distribution.dimensions
        return np.array(places, dtype=np.float64)

    def decode(self, point: ArrayLike) -> Config:
        """Return the configuration at a point of the unit cube, shape `(len(axes),)`, with fixed and without inactive values.

        The configuration may break a constraint; `validate` finds this.

        Raises:
            SpaceError: If the shape differs, or a coordinate is not in [0, 1].
        """
        parts = self._split(point).items()
        return self._only_active({name: _naming(name, self[name].decode, places) for name, places in parts})

    def from_prior(self, point: ArrayLike) -> NDArray[np.float64]:
        """Map a point of a uniform or quasi-random draw to a point that follows the priors; both have shape `(len(axes),)`.

        Raises:
            SpaceError: If the shape is not `(len(axes),)`.
        """
        places: list[float] = []
        for name, part in self._split(point).items():
            places += self[name].from_prior(part)
        return np.array(places, dtype=np.float64)

    def log_prior(self, config: Mapping[str, object]) -> float:
        """Return the log of the priors' density in the unit cube at a configuration, over active values; 0 without priors.

        The density is relative to the uniform density, without normalisation for parts that constraints exclude. pi-BO (arXiv
        2204.11051) multiplies its acquisition by the density to a power that falls with the number of trials.

        Raises:
            SpaceError: If `config` is not in the space.
        """
        self.validate(config)
        return sum(self[name].log_prior(value) for name, value in config.items())

    def _split(self, point: ArrayLike) -> dict[str, Sequence[float]]:
        coordinates = np.asarray(point, dtype=np.float64)
        if coordinates.shape != (len(self.axes),):
            raise SpaceError(f"a point needs shape ({len(self.axes)},) for {self.axes}, got {coordinates.shape}")
        rest = iter(coordinates.tolist())
        return {name: [next(rest) for _ in range(d.dimensions)] for name, d in self.items()}

    def _rows(self) -> list[tuple[str, str, str]]:
        constraints = [(key, "constraint", str(constraint)) for key, constraint in self.constraints.items()]
        return [(name, d.kind, str(d)) for name, d in self.items()] + constraints

    def __str__(self) -> str:
        rows = self._rows()
        name_width, kind_width = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{name:<{name_width}}  {kind:<{kind_width}}  {text}" for name, kind, text in rows)

    def _repr_html_(self) -> str:
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self._rows())
        return f"<table><tr><th>hyperparameter</th><th>distribution</th><th>values</th></tr>{body}</table>"


def _naming(name: str, call: Callable[[T], U], argument: T) -> U:
    """Call a distribution, and add the name of its hyperparameter to its errors."""
    try:
        return call(argument)
    except SpaceError as error:
        raise SpaceError(f"{name}: {error}") from error


def _generator(seed: int, index: int, name: str, attempt: int) -> np.random.Generator:
    """Make a separate generator for each (seed, index, name, attempt)."""
    again = f"again {attempt}/" if attempt else ""
    digest = sha256(f"{again}{operator.index(seed)}/{index}/{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))
