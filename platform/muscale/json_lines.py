"""Records in a file, one JSON object per line; a torn line, as after a kill, is skipped."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxy_models.files import named, write_text

_LONGEST = 1 << 16  # bytes of a record; a record of a full run's metrics has some hundreds (assumed)


def append(file: Path, *records: dict[str, Any]) -> None:
    """Append records and sync them to disk; several processes may append to one file."""
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    with named(file):
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            end = os.fstat(descriptor).st_size
            # A record appended to a torn line would be lost too.
            if end and os.pread(descriptor, 1, end - 1) != b"\n":
                content = b"\n" + content
            while content:  # a full disk may take only a part
                content = content[os.write(descriptor, content) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file; none if there is no file."""
    records = []
    for line in file.read_text().split("\n") if file.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def last(file: Path) -> dict[str, Any] | None:
    """Return the last record of a file, or None; only the end of the file is read."""
    if not file.exists():
        return None
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - _LONGEST))
        lines = opened.read().splitlines()
    for line in reversed(lines):
        with suppress(ValueError):
            return dict(json.loads(line))
    return None


def keep(file: Path, records: list[dict[str, Any]]) -> None:
    """Replace the file's records atomically."""
    write_text(file, "".join(json.dumps(record) + "\n" for record in records))
