"""A file of metrics that grows while it is read: a JSON object a line, for each step, evaluated ones with `val_loss`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

_COLUMNS = ("tokens", "train_loss", "val_loss", "seconds")


class MetricsTail:
    """Reads what is new; a file that was written anew, as after a resumption, is read from its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None  # its inode
        self._read = 0  # bytes
        self._rows: list[dict[str, Any]] = []

    def table(self) -> pd.DataFrame:
        """Columns tokens, train_loss, val_loss, seconds of every whole line so far; NaN where a line has none."""
        if self.path.exists():
            self._advance()
        return pd.DataFrame(self._rows, columns=list(_COLUMNS)).astype(dict.fromkeys(_COLUMNS[1:], float))

    def _advance(self) -> None:
        with self.path.open("rb") as file:
            status = self.path.stat()
            if status.st_ino != self._file or status.st_size < self._read:
                self._file, self._read = status.st_ino, 0
                self._rows.clear()
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be half written
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # torn by a kill
                continue
            self._rows.append({name: row.get(name) for name in _COLUMNS})
