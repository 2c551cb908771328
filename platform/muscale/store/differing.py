"""Where two trees of plain values differ, and when the numbers of two machines are the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, TypeAlias

SAME_LOSS = 1e-3  # relative: machines and thread counts sum in another order
_LONGEST = 60  # characters of a value in a message

Conflict: TypeAlias = tuple[str, Any, Any]
"""What it is about, our value, theirs; None where there is none, as after a divergence."""


def first_difference(ours: Any, theirs: Any, same: Callable[[Any, Any], bool], *, place: str = "") -> Conflict | None:
    """The first value of two JSON trees that is not the same, with its place in them; None where there is none."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        inner = [(str(key), ours.get(key), theirs.get(key)) for key in dict.fromkeys([*ours, *theirs])]
    elif isinstance(ours, list) and isinstance(theirs, list):
        inner = [(str(number), *pair) for number, pair in enumerate(zip_longest(ours, theirs))]
    else:
        return None if same(ours, theirs) else (place, ours, theirs)
    differing = (
        first_difference(here, there, same, place=f"{place}.{name}" if place else name) for name, here, there in inner
    )
    return next(filter(None, differing), None)


def same(ours: Any, theirs: Any) -> bool:
    """Whether two values are equal, numbers within `SAME_LOSS`."""
    if not all(isinstance(value, float | int) for value in (ours, theirs)):
        return bool(ours == theirs)
    return math.isclose(ours, theirs, rel_tol=SAME_LOSS) or (math.isnan(ours) and math.isnan(theirs))


def shown(value: Any, *, none: str) -> str:
    """A value in a message; `none` is what None means."""
    if value is None:
        return none
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
