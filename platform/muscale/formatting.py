"""Durations, paths, read errors and JSON values for people and files."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH = 132
"""Longest line of a folded text, characters."""
MOST_NAMED = 8
"""Most names of a list in a message."""


def format_read_error(error: Exception) -> str:
    """Return the reason why a file can't be read, without the file's name, with which the message begins."""
    match error:
        case FileNotFoundError():
            return "there is no such file"
        case IsADirectoryError():
            return "is a directory, not a file"
        case PermissionError():
            return "this user may not read it"
        case OSError(strerror=str(reason)):
            return f"can't be read: {reason}"
    return f"can't be read: {error}"


def format_duration(seconds: float) -> str:
    """Format a duration in a suitable unit: 50 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def counted(number: int, thing: str) -> str:
    """Format a number of things: 1 worker, 12 workers."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def listed(names: Sequence[object]) -> str:
    """List the first few of the names, and count the others."""
    more = f" and {n} more" if (n := len(names) - MOST_NAMED) > 0 else ""
    return ", ".join(map(str, names[:MOST_NAMED])) + more


def format_path(path: Path) -> str:
    """The path as given, or relative to the current directory if that is a folder above it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def fold(text: str, indent: int, margin: int = 0) -> list[str]:
    """A line of text as lines of at most `WIDTH` characters less the margin, all but the first indented."""
    return textwrap.wrap(
        text, WIDTH - margin, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def finite(value: Any) -> Any:
    """Return the values with null for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
