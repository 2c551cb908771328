"""TOML: reads a file of settings, and writes a value on one line."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Item

from muscale.errors import MuscaleError, refusing
from muscale.formatting import format_read_error

_SHORT = 30  # most characters of an entry that shares its line with others


def read_toml(path: Path, refusal: type[MuscaleError], *, missing: str = "", is_folder: str = "") -> dict[str, Any]:
    """Read the tables of a file.

    Args:
        refusal: Exception to raise, naming the file, if it can't be read, is not UTF-8 or is not TOML.
        missing, is_folder: Messages for a file that does not exist, and for a folder.
    """
    try:
        return parse_toml(path.read_bytes())
    except FileNotFoundError as error:
        raise refusal(f"{path}: {missing or format_read_error(error)}") from error
    except IsADirectoryError as error:
        raise refusal(f"{path}: {is_folder or format_read_error(error)}") from error
    except OSError as error:
        raise refusal(f"{path}: {format_read_error(error)}") from error
    except ValueError as error:
        raise refusal(f"{path}: {error}") from error


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """Parse the tables of a text; raise ValueError if the text is not UTF-8 or not TOML, whose integers have 64 bits."""
    with refusing("can't be read as TOML", raising=ValueError):
        # editors of Windows add a mark
        values = tomllib.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
        _require_64_bits(values)
    return values


def _require_64_bits(value: Any) -> None:
    """Refuse an integer beyond TOML's 64 bits, which may be too large for a float."""
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_64_bits(entry)
    if isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"an integer must fit into 64 bits, got one of {value.bit_length()}")


def inline(value: Any, *, wrap: bool = False) -> Item:
    """Format a value on one line, with its tables and lists; where lists wrap, long entries and tables get separate lines."""
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update({key: inline(entry, wrap=wrap) for key, entry in value.items()})
        return table
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(inline(entry, wrap=wrap) for entry in value)
        return array.multiline(wrap and any(isinstance(entry, dict) or len(str(entry)) > _SHORT for entry in value))
    item: Item = tomlkit.item(value)
    return item
