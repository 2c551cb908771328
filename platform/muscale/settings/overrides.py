"""Overrides: settings that replace those of a file, as `table.key=value` or as a mapping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from muscale.errors import StudyFileError
from muscale.settings.toml_file import inline, parse_toml
from search_spaces import Space

Overrides = Sequence[str] | Mapping[str, Any]
"""Settings that replace those of a file."""


def override(values: dict[str, Any], overrides: Overrides) -> None:
    """Replace values in a tree of tables; raise StudyFileError if an override has no value, or a table would be one."""
    pairs = _values(overrides).items() if isinstance(overrides, Mapping) else map(_parsed, as_set(overrides))
    for key, value in pairs:
        _replace(values, key, value)


def as_set(overrides: Overrides) -> tuple[str, ...]:
    """The overrides in the form of --set; a single text is one override."""
    if isinstance(overrides, str):
        return (overrides,)
    if not isinstance(overrides, Mapping):
        return tuple(overrides)
    plain = {key: value.to_dict() if isinstance(value, Space) else value for key, value in _values(overrides).items()}
    return tuple(f"{key}={_as_toml(value)}" for key, value in plain.items())


def _values(value: Any) -> Any:
    """Convert numpy numbers and arrays, and paths, which notebooks use, to Python's numbers, lists and text."""
    if isinstance(value, Mapping) and not isinstance(value, Space):
        return {key: _values(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_values(entry) for entry in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


def _as_toml(value: Any) -> str:
    try:
        return inline(value).as_string()
    except (TypeError, ValueError):  # None, for example, which TOML can't express
        return str(value)


def _parsed(override: str) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    if not separator:
        raise StudyFileError(f"--set {override}: write table.key=value")
    try:
        return key.strip(), parse_toml(f"value = {text}")["value"]
    except ValueError:
        return key.strip(), text  # a bare word is a string, so that --set sweep.searcher=random needs no quotes


def _replace(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, name = key.split(".")
    table = values
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise StudyFileError(f"--set {key}={value}: {part} is a value, not a table")
    table[name] = value
