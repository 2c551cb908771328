"""Bytes that a disk loses or changes."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, at: int, bit: int = 2) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def tear(path: Path) -> None:
    """Keep the first half, as a kill in the middle of a write or a lost block does."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_the_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)
