"""Conversion of this package's dataclasses to tables for TOML and JSON and back, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from search_spaces.errors import SpaceError, unknown
from search_spaces.weights import Weights

T = TypeVar("T")


def plain(value: Any) -> Any:
    """Return plain values: a dataclass becomes a table of its fields that are set, a tuple a list."""
    if is_dataclass(value):
        there = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: plain(entry) for name, entry in there.items() if entry is not None}
    if isinstance(value, Weights):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def read(cls: type[T], table: object, what: str) -> T:
    """Make a dataclass from a table of its fields.

    Args:
        table: A value for each field without a default, and optionally for others.

    Raises:
        SpaceError: If this is not a table, a key is unknown or missing, or a value breaks a rule of the class.
    """
    required = [
        field.name
        for field in fields(cls)  # type: ignore[arg-type]
        if field.default is MISSING and field.default_factory is MISSING
    ]
    keys = list(dict.fromkeys([*required, *(field.name for field in fields(cls))]))  # type: ignore[arg-type]
    if not isinstance(table, Mapping):
        raise SpaceError(f"{what} needs a table with {' and '.join(required)}, got {table!r}")
    for key in table:
        if key not in keys:
            raise SpaceError(unknown(f"key of {what}", key, keys))
    if missing := [key for key in required if key not in table]:
        raise SpaceError(f"{what} needs {' and '.join(missing)}")
    return cls(**table)
