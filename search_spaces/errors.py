"""The one exception of this package, and the hint that goes into its messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpaceError(ValueError):
    """A space, a distribution, a configuration or a name breaks the rule that the message states."""


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The message for a name outside `known`: the nearest known name where one is near, then all of them."""
    names = list(known)
    near = get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {what} {name!r}{hint}; known: {', '.join(names)}"
