"""The exception of this package, and the hint in its messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpaceError(ValueError):
    """Error for a space, distribution, configuration or name that breaks the rule in the message."""


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """Return the message for a name outside `known`, with the nearest known name if one is near, then all known names."""
    names = list(known)
    near = get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {what} {name!r}{hint}; known: {', '.join(names)}"
