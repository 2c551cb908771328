"""The value of a simplex: an immutable table from part names to weights."""

from __future__ import annotations

from typing import Any, NoReturn


class Weights(dict[str, float]):
    """An immutable, hashable dict from part to weight; as a dict, it equals a plain table and is written to JSON as one."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Weights, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("weights do not change; make new ones")

    __setitem__ = _refuse
    __delitem__ = _refuse
    __ior__ = _refuse
    clear = _refuse
    pop = _refuse
    popitem = _refuse
    setdefault = _refuse
    update = _refuse

    def __str__(self) -> str:
        # The message for a prior shows its centre before the weights have been checked to be numbers.
        return ", ".join(f"{k} {v:.3g}" if isinstance(v, int | float) else f"{k} {v!r}" for k, v in self.items())
