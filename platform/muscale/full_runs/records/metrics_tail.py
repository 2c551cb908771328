"""A file of metrics that grows while it is read: a JSON object a line, for each step, evaluated ones with `val_loss`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

_COLUMNS = ("tokens", "train_loss", "val_loss", "seconds")


class MetricsTail:
    """Reads what is new; a file that was written anew, as after a resumption, is read from its start.

    Args:
        path: Of the file, which need not be there yet.
        columns: To read, `tokens` first.
    """

    def __init__(self, path: Path, columns: Sequence[str] = _COLUMNS) -> None:
        self.path = path
        self._file: int | None = None  # its inode
        self._read = 0  # bytes
        self._columns: dict[str, list[Any]] = {name: [] for name in columns}  # of a run of millions of steps, too
        self._table: pd.DataFrame | None = None

    def table(self) -> pd.DataFrame:
        """The columns of every whole line so far; NaN where a line has none."""
        if self.path.exists():
            self._advance()
        if self._table is None:
            counted, *measured = self._columns
            self._table = pd.DataFrame(self._columns).astype({counted: int, **dict.fromkeys(measured, float)})
        return self._table

    def _advance(self) -> None:
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())  # of what was opened: the path may be another file's by now
            if status.st_ino != self._file or status.st_size < self._read:
                self._file, self._read = status.st_ino, 0
                for column in self._columns.values():
                    column.clear()
                self._table = None
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be half written
        if whole:
            self._table = None
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # torn by a kill
                continue
            for name, column in self._columns.items():
                column.append(row.get(name))
