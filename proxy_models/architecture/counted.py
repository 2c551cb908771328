"""Members of families of one's own that were counted, in this process or in one whose record was read here.

What only reads a study finds its members here, and so runs none of the family's code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from proxy_models.architecture.member import ModuleConfig

_counted: dict[tuple[Any, ...], dict[tuple[int, int], ModuleConfig]] = {}


def remember(members: Iterable[ModuleConfig]) -> None:
    """Keep members for `counted`; the first of a width and depth stays, so that what was counted here is not replaced."""
    for member in members:
        _counted.setdefault(_kind(member), {}).setdefault((member.d_model, member.n_layers), member)


def counted(member: ModuleConfig) -> dict[tuple[int, int], ModuleConfig]:
    """Members that differ from this one in width and depth only, by the two."""
    return _counted.get(_kind(member), {})


def counted_at_any_context(member: ModuleConfig) -> list[ModuleConfig]:
    """The same with members of other context lengths, which a full run may have."""
    *own, _ = _kind(member)
    return [found for (*kind, _), members in _counted.items() if kind == own for found in members.values()]


def _kind(member: ModuleConfig) -> tuple[Any, ...]:
    return (
        *(member.family, member.source, member.version, member.arguments),
        *(member.vocab_size, member.context_length),
    )
