"""Axes of a mixture of experts along which the full run differs from its proxies, and the laws of its learning rate there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from proxy_models.architecture.member import Member
from scaling import AxisLaw

AxisLaws: TypeAlias = Mapping[str, AxisLaw | str]
"""Law of the learning rate along each axis of experts, or the reason why there is none (`Verdict.axis_laws`)."""
NO_LAWS: AxisLaws = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class AxisChange:
    """The sizes of the full run and of its proxies along one axis; a size along "experts" is no model's number of experts."""

    axis: str
    full: float
    proxies: float

    def __str__(self) -> str:
        return f"axis {self.axis} from {self.proxies:g} to {self.full:g}"


def axis_changes(full: Member, proxies: Member) -> tuple[AxisChange, ...]:
    """Return the axes along which a mixture differs from its proxies; none for other models."""
    sizes, before = full.expert_sizes(proxies), proxies.expert_sizes(proxies)
    found = (AxisChange(axis=axis, full=size, proxies=before[axis]) for axis, size in sizes.items())
    return tuple(change for change in found if not math.isclose(change.full, change.proxies, rel_tol=1e-9))


def experts_text(full: Member, proxies: Member) -> str:
    """Return the fields of the full run's experts, each with that of its proxies."""
    before = proxies.expert_fields
    return ", ".join(f"{name} {own:g} ({before[name]:g} in proxies)" for name, own in full.expert_fields.items())


def rate_factor(model: Member, proxies: Member, laws: AxisLaws) -> float:
    """Return the factor on the learning rate of a mixture by the laws of the axes along which it differs from its proxies."""
    along = laws_of(axis_changes(model, proxies), laws)
    return math.prod(law.factor(change.full, change.proxies) for change, law in along.items())


def laws_of(changes: tuple[AxisChange, ...], laws: AxisLaws) -> dict[AxisChange, AxisLaw]:
    """Return the law of each changed axis that has one and is followed to the full run's size."""
    return {
        change: law
        for change in changes
        if isinstance(law := laws.get(change.axis), AxisLaw) and law.supports(change.full)
    }
