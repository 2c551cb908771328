"""Relations between the hyperparameters of a space: conditions and constraints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from search_spaces.base import Distribution
from search_spaces.condition import OneOf
from search_spaces.constraints import Constraint
from search_spaces.errors import SpaceError, unknown
from search_spaces.registry import can_hold, is_numeric
from search_spaces.simplex import Simplex

RESERVED = "constraints"
"""Key for the constraints in a space's table; no hyperparameter may have this name."""


@dataclass(frozen=True, kw_only=True)
class Relations:
    """Conditions in the distributions and constraints on them."""

    distributions: Mapping[str, Distribution]
    constraints: Mapping[str, Constraint]

    def check(self) -> None:
        """Check the conditions and constraints.

        Raises:
            SpaceError: If a name or value is unknown, conditions form a cycle, or a constraint on numbers has a non-numeric name.
        """
        self._check_conditions()
        self._check_constraints()

    def _check_conditions(self) -> None:
        for name, distribution in self.distributions.items():
            for parent, allowed in distribution.when.parents if distribution.when else ():
                if parent not in self.distributions:
                    raise SpaceError(f"{name}: {unknown('hyperparameter in when', parent, self.distributions)}")
                if isinstance(self.distributions[parent], Simplex):
                    raise SpaceError(f"{name}: when needs {parent} to have single values, but it is a simplex")
                for value in allowed.values if isinstance(allowed, OneOf) else ():
                    if not self.distributions[parent].contains(value):
                        raise SpaceError(
                            f"{name}: when needs {parent} = {value!r}, which is never: {self.distributions[parent]}"
                        )
                if not can_hold(allowed, self.distributions[parent]):
                    raise SpaceError(
                        f"{name}: when needs {parent} {allowed}, which is never: {self.distributions[parent]}"
                    )
        try:
            tuple(self._sorter().static_order())
        except CycleError as error:
            raise SpaceError(f"conditions form a cycle: {' → '.join(error.args[1])}") from error

    def _check_constraints(self) -> None:
        for key, constraint in self.constraints.items():
            if not isinstance(constraint, Constraint):
                raise SpaceError(f"{RESERVED}.{key} needs a constraint, got {constraint!r}")
            for name in constraint.names:
                if name not in self.distributions:
                    raise SpaceError(f"{RESERVED}.{key}: {unknown('hyperparameter', name, self.distributions)}")
                if constraint.numeric and not is_numeric(self.distributions[name]):
                    raise SpaceError(
                        f"{RESERVED}.{key}: {constraint.rule} is for numbers, {name} is {self.distributions[name]}"
                    )

    def _sorter(self) -> TopologicalSorter[str]:
        return TopologicalSorter({name: self.parents(name) for name in self.distributions})

    def parents(self, name: str) -> list[str]:
        """Return the hyperparameters that the condition of `name` depends on."""
        condition = self.distributions[name].when
        return [parent for parent, _ in condition.parents] if condition else []

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Return all hyperparameters, each after its condition's parents."""
        return tuple(self._sorter().static_order())

    def active(self, config: Mapping[str, object]) -> dict[str, object]:
        """Return the active entries of `config`, with None for an active name that is missing."""
        there: dict[str, object] = {}
        for name in self.order:
            condition = self.distributions[name].when
            if condition is None or condition.holds(there):
                there[name] = config.get(name)
        return there

    @cached_property
    def groups(self) -> list[tuple[list[str], dict[str, Constraint]]]:
        """Return names that must be drawn together, since constraints connect them to each other and to their parents."""
        links: list[tuple[str, ...]] = [self._with_ancestors(constraint) for constraint in self.constraints.values()]
        return [
            (names, {key: constraint for key, constraint in self.constraints.items() if constraint.names[0] in names})
            for names in _groups(self.distributions, links)
        ]

    def _with_ancestors(self, constraint: Constraint) -> tuple[str, ...]:
        found = list(constraint.names)
        for name in found:
            found += [parent for parent in self.parents(name) if parent not in found]
        return tuple(found)

    def text(self) -> str:
        """Return the constraints in one line."""
        return ", ".join(f"{key} ({constraint})" for key, constraint in self.constraints.items())

    def broken(self, config: Mapping[str, object]) -> Iterator[str]:
        """Yield a message for each constraint that a configuration of active names breaks."""
        for key, constraint in self.constraints.items():
            if not constraint.holds(config):
                values = ", ".join(f"{name} = {config[name]!r}" for name in constraint.names)
                yield f"breaks {key}, {constraint}: {values}"


def _groups(names: Iterable[str], links: Iterable[Iterable[str]]) -> list[list[str]]:
    """Return the names in groups that no link crosses, each group in the order of `names`."""
    of = {name: {name} for name in names}
    for link in links:
        joined = set[str]().union(*(of[name] for name in link))
        for name in joined:
            of[name] = joined
    return [list(group) for group in dict.fromkeys(tuple(n for n in of if n in of[name]) for name in of)]
