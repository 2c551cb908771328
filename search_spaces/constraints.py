"""Constraints: named predicates on several hyperparameters at once.

A table names a rule and its hyperparameters, `{less = ["beta1", "beta2"]}`; it never contains code. Custom rules are Python
functions registered under a name. A written space has only that name, so its reader has to register the rule first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any, Self

from search_spaces.errors import SpaceError, unknown
from search_spaces.prior import is_finite


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A predicate on the values of the named hyperparameters, in their order, and optionally on a bound.

    Attributes:
        predicate: Pure function of the values and, if the rule takes a bound, of the bound as the last argument.
        bounded: True if the rule takes a bound.
        numeric: True if the rule takes only numbers.
        pair: True if the rule takes exactly two values.
    """

    predicate: Callable[..., bool]
    bounded: bool = False
    numeric: bool = False
    pair: bool = False


_ROUNDING = 1e-12  # relative; sums, products and quotients of decimal fractions are not exact in binary


def _is_multiple(value: float, divisor: float) -> bool:
    if divisor == 0:
        return False
    if isinstance(value, Integral) and isinstance(divisor, Integral):
        return int(value) % int(divisor) == 0
    quotient = value / divisor
    return math.isfinite(quotient) and math.isclose(quotient, round(quotient), rel_tol=_ROUNDING, abs_tol=1e-9)


def _at_most(value: float, bound: float) -> bool:
    return value <= bound or math.isclose(value, bound, rel_tol=_ROUNDING)


_BUILT_IN: dict[str, Rule] = {
    "less": Rule(predicate=lambda *x: all(a < b for a, b in pairwise(x)), numeric=True),
    "at_most": Rule(predicate=lambda *x: all(a <= b for a, b in pairwise(x)), numeric=True),
    "multiple_of": Rule(predicate=_is_multiple, numeric=True, pair=True),
    "sum_at_most": Rule(predicate=lambda *x: _at_most(sum(x[:-1]), x[-1]), numeric=True, bounded=True),
    "product_at_least": Rule(predicate=lambda *x: _at_most(x[-1], math.prod(x[:-1])), numeric=True, bounded=True),
    "product_at_most": Rule(predicate=lambda *x: _at_most(math.prod(x[:-1]), x[-1]), numeric=True, bounded=True),
}
"""less, at_most: each value is below (or not above) the next. multiple_of: the first is a whole multiple of the second.
sum_at_most, product_at_least, product_at_most: the bound limits the sum or product, to twelve digits."""
_RULES: dict[str, Rule] = dict(_BUILT_IN)


def register_constraint(name: str, predicate: Callable[..., bool]) -> None:
    """Register `predicate` as a rule in this process.

    Args:
        predicate: Function of the values of the constraint's names, in their order, that returns True if the combination is
            allowed. It must be pure, since samples are redrawn until it holds, and sweeps are replayed.

    Raises:
        SpaceError: If the name is taken by another predicate.
    """
    if not name or (name in _RULES and _RULES[name].predicate is not predicate):
        raise SpaceError(f"a constraint's rule needs a name that is not taken, got {name!r}")
    _RULES.setdefault(name, Rule(predicate=predicate))


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A rule and its hyperparameters; the constraint holds if one of them is inactive.

    Attributes:
        rule: "less", "at_most", "multiple_of", "sum_at_most", "product_at_least", "product_at_most", or a registered name.
        names: The hyperparameters, in the order in which the rule takes them.
        bound: Bound for the rules that take a bound, in units of the sum or product.
    """

    rule: str
    names: tuple[str, ...]
    bound: float | None = None

    def __post_init__(self) -> None:
        if self.rule not in _RULES:
            raise SpaceError(f"{unknown('rule of a constraint', self.rule, _RULES)}; register_constraint adds one")
        if not isinstance(self.names, list | tuple) or not all(isinstance(name, str) and name for name in self.names):
            raise SpaceError(f"{self.rule} needs a list of names, got {self.names!r}")
        object.__setattr__(self, "names", tuple(self.names))
        rule = _RULES[self.rule]
        if rule.pair and len(self.names) != 2:
            raise SpaceError(f"{self.rule} needs two names, got {list(self.names)}")
        if len(self.names) < (1 if rule.bounded or self.rule not in _BUILT_IN else 2):
            raise SpaceError(f"{self.rule} needs more names, got {list(self.names)}")
        if len(set(self.names)) < len(self.names):
            raise SpaceError(f"{self.rule} needs names that differ, got {list(self.names)}")
        if rule.bounded != (self.bound is not None):
            raise SpaceError(f"{self.rule} {'needs a' if rule.bounded else 'takes no'} bound, got {self.bound!r}")
        if self.bound is not None and not is_finite(self.bound):
            raise SpaceError(f"{self.rule} needs a finite number as bound, got {self.bound!r}")

    @property
    def numeric(self) -> bool:
        """True if all the constraint's hyperparameters must be numbers."""
        return _RULES[self.rule].numeric

    @classmethod
    def from_dict(cls, table: object) -> Self:
        """Read the constraint from `{less = ["beta1", "beta2"]}` or `{sum_at_most = {names = ["a", "b"], bound = 0.5}}`.

        Raises:
            SpaceError: If the table is not one rule, the rule is unknown, or the names or bound break the rule.
        """
        if not isinstance(table, Mapping) or len(table) != 1:
            raise SpaceError(f'a constraint needs a table with one rule, as {{less = ["a", "b"]}}, got {table!r}')
        ((rule, entry),) = table.items()
        if not isinstance(entry, Mapping):
            return cls(rule=rule, names=entry)
        for key in entry:
            if key not in ("names", "bound"):
                raise SpaceError(unknown(f"key of {rule}", key, ("names", "bound")))
        return cls(rule=rule, names=entry.get("names", ()), bound=entry.get("bound"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `from_dict` makes an equal constraint of them."""
        names = list(self.names)
        return {self.rule: names if self.bound is None else {"names": names, "bound": self.bound}}

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Return True if the values are allowed together, or a name is missing because it is inactive."""
        if any(name not in config for name in self.names):
            return True
        values = [config[name] for name in self.names]
        return bool(_RULES[self.rule].predicate(*values, *([] if self.bound is None else [self.bound])))

    def __str__(self) -> str:
        bound = "" if self.bound is None else f", {self.bound:g}"
        return f"{self.rule}({', '.join(self.names)}{bound})"
