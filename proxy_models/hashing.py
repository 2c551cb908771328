"""Hashes of plain values and of files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def content_key(values: Any) -> str:
    """Return the hash of plain values by their canonical JSON, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, 64 hexadecimal digits, reading the file block by block."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
