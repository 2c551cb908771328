"""Counted members of custom families: counted in this process, or read from a record.

A process that only reads a study finds its members here, without running the family's code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from proxy_models.architecture.member import ModuleConfig

_counted: dict[tuple[Any, ...], dict[tuple[int, int], ModuleConfig]] = {}


def remember(members: Iterable[ModuleConfig]) -> None:
    """Keep members for `counted`; the first member of a width and depth stays, so that a count of this process is not replaced."""
    for member in members:
        _counted.setdefault(_kind(member), {}).setdefault((member.d_model, member.n_layers), member)


def counted(member: ModuleConfig) -> dict[tuple[int, int], ModuleConfig]:
    """Return the members that differ from this one only in width and depth, by (width, depth)."""
    return _counted.get(_kind(member), {})


def counted_at_any_context(member: ModuleConfig) -> list[ModuleConfig]:
    """Return the members that differ from this one only in width, depth and context length, which a full run may change."""
    *own, _ = _kind(member)
    return [found for (*kind, _), members in _counted.items() if kind == own for found in members.values()]


def _kind(member: ModuleConfig) -> tuple[Any, ...]:
    return (
        *(member.family, member.source, member.version, member.arguments),
        *(member.vocab_size, member.context_length),
    )
