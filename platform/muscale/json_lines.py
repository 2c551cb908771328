"""Records that are appended to a file, a JSON object a line; a line that a kill tore is no record."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxy_models.files import atomic_write, named

_LONGEST = 1 << 16  # bytes of a record; one of a full run's metrics has some hundreds (assumed)


def append(file: Path, *records: dict[str, Any]) -> None:
    """Add records and have them on the disk; what several processes add goes into whole lines."""
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    with named(file):
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            end = os.fstat(descriptor).st_size
            if (
                end and os.pread(descriptor, 1, end - 1) != b"\n"
            ):  # torn: what follows on its line would be no record either
                content = b"\n" + content
            while content:  # a disk that becomes full takes a part
                content = content[os.write(descriptor, content) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file, none where there is no file."""
    records = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def last(file: Path) -> dict[str, Any] | None:
    """The last record of a file, None where there is none; however long the file is, only its end is read."""
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
    """Write the file anew with these records, whole or not at all."""
    with atomic_write(file) as unfinished:
        unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
