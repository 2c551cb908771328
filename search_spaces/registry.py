"""Registry of the distributions that a table may name under the key "distribution"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from search_spaces.base import Distribution
from search_spaces.condition import Condition, OneOf, Range
from search_spaces.discrete import Choice, Fixed, Listed, Ordinal
from search_spaces.distributions import Integer, Interval, LogUniform, Uniform, is_real
from search_spaces.errors import SpaceError, unknown
from search_spaces.prior import Prior
from search_spaces.serialization import read
from search_spaces.simplex import Simplex

KINDS: dict[str, type[Distribution]] = {
    kind.kind: kind for kind in (Uniform, LogUniform, Integer, Ordinal, Choice, Simplex, Fixed)
}


def distribution_from_dict(table: Mapping[str, Any]) -> Distribution:
    """Read the distribution from a table such as `{distribution = "uniform", low = 0, high = 1}`.

    Raises:
        SpaceError: If the kind or a key is unknown, a key is missing, or a value breaks a rule of the kind.
    """
    if not isinstance(table, Mapping) or "distribution" not in table:
        raise SpaceError(f'needs a table with the key "distribution", got {table!r}')
    values = dict(table)
    kind = values.pop("distribution")
    if not isinstance(kind, str) or kind not in KINDS:
        raise SpaceError(unknown("distribution", kind, KINDS))
    if "prior" in values:
        values["prior"] = read(Prior, values["prior"], "a prior")
    if "when" in values:
        values["when"] = Condition.from_dict(values["when"])
    return read(KINDS[kind], values, kind)


def can_hold(allowed: OneOf | Range, distribution: Distribution) -> bool:
    """Return True if a condition allows at least one value of a distribution."""
    if isinstance(allowed, OneOf):
        return any(map(distribution.contains, allowed.values))
    match distribution:
        case Integer() | Interval():
            low = max(distribution.low, -math.inf if allowed.low is None else allowed.low)
            high = min(distribution.high, math.inf if allowed.high is None else allowed.high)
            return (math.ceil(low) if isinstance(distribution, Integer) else low) <= high
        case Listed(values=values):
            return any(map(allowed.holds, values))
        case Fixed(value=value):
            return allowed.holds(value)
    return False


def is_numeric(distribution: Distribution) -> bool:
    """Return True if all values of a distribution are numbers."""
    match distribution:
        case Interval() | Integer():
            return True
        case Listed(values=values):
            return all(is_real(value) for value in values)
        case Fixed(value=value):
            return is_real(value)
    return False
