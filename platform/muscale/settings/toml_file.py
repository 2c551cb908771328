"""TOML: reading a file of settings, and writing a value on one line."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Item


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        OSError: If it can't be read.
        ValueError: If it is not UTF-8 or not TOML; the message does not name the file.
    """
    return parse_toml(path.read_bytes())


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """The tables of a text.

    Raises:
        ValueError: If it is not UTF-8 or not TOML, whose integers have 64 bits.
    """
    try:
        values = tomllib.loads(text if isinstance(text, str) else text.decode())
        _require_64_bits(values)
    except ValueError as error:
        raise ValueError(f"can't be read as TOML: {error}") from error
    return values


def _require_64_bits(value: Any) -> None:
    """Refuse an integer that TOML does not have, and that may be too large for a float."""
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_64_bits(entry)
    if isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"an integer must fit into 64 bits, got one of {value.bit_length()}")


def inline(value: Any) -> Item:
    """A value on one line, with the tables and lists in it."""
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update({key: inline(entry) for key, entry in value.items()})
        return table
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(inline(entry) for entry in value)
        return array
    item: Item = tomlkit.item(value)
    return item
