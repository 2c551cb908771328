"""TOML of settings: a file read whole or refused in words, and a value written in one line.

Refused is whatever its parser raises, and what it would never come to an end of.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Item

MOST_BYTES = 1 << 20
"""A study file has a few kilobytes (assumed)."""
MOST_DEPTH = 50
"""Of tables and lists in one another; a study file has five (assumed). Python's stack ends at a few hundred."""
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
# The parser's time grows with the square of a dotted key's length, so one is found before it is parsed.
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MOST_DEPTH}}}")


def read_toml(path: Path) -> dict[str, Any]:
    """What a file says.

    Raises:
        OSError: If it can't be read.
        ValueError: If it is too long, no UTF-8, no TOML, or too deep; says so in words, without the file's name.
    """
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"must have at most {MOST_BYTES:,} bytes, and has more")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"can't be read as TOML: {error}") from error
    return parse_toml(text)


def inline(value: Any) -> Item:
    """A value as TOML writes it in one line, tables and lists with it."""
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update({key: inline(entry) for key, entry in value.items()})
        return table
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(inline(entry) for entry in value)
        return array
    plain: Item = tomlkit.item(value)
    return plain


def parse_toml(text: str) -> dict[str, Any]:
    """What a text says; its whole numbers have 64 bits, as TOML promises.

    Raises:
        ValueError: If it is no TOML, or too deep.
    """
    too_deep = f"tables and lists must lie at most {MOST_DEPTH} deep in one another"
    if found := _LONG_KEY.search(text):
        raise ValueError(f"{too_deep}, got the key {found[0][:40]}…")
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    except ValueError as error:  # int() also refuses what has more digits than it takes
        raise ValueError(f"can't be read as TOML: {error}") from error
    level: list[tuple[str, Any]] = list(values.items())
    for _ in range(MOST_DEPTH + 1):
        for key, value in level:
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{key}: a whole number must fit into 64 bits, got one of {value.bit_length()}")
        level = [
            (f"{key}.{name}", child)
            for key, node in level
            if isinstance(node, dict | list)
            for name, child in (node.items() if isinstance(node, dict) else enumerate(node))
        ]
        if not level:
            return values
    raise ValueError(too_deep)
