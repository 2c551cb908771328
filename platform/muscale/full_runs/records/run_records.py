"""Incremental reading of a run's metrics (one JSON object per step, with `val_loss` if evaluated), and of its evaluations."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from muscale import json_lines
from muscale.layout import EVALUATIONS, METRICS

FIGURES = ("router_entropy", "largest_load", "dead_experts")
_COLUMNS = ("tokens", "train_loss", "val_loss", "seconds", "mfu", *FIGURES)


class MetricsTail:
    """Reads only new lines; a file that was replaced, as after a resumption, is read from its start.

    Args:
        path: Path of the file, which may not exist yet.
        columns: Columns to read, `tokens` first.
    """

    def __init__(self, path: Path, columns: Sequence[str] = _COLUMNS) -> None:
        self.path = path
        self._file: int | None = None  # its inode
        self._read = 0  # bytes
        self._columns: dict[str, list[Any]] = {name: [] for name in columns}  # compact for millions of steps
        self._table: pd.DataFrame | None = None

    def table(self) -> pd.DataFrame:
        """The columns of all complete lines so far; NaN if a line has no value."""
        if self.path.exists():
            self._advance()
        if self._table is None:
            counted, *measured = self._columns
            self._table = pd.DataFrame(self._columns).astype({counted: int, **dict.fromkeys(measured, float)})
        return self._table

    def _advance(self) -> None:
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())  # of the opened file: the path may have been replaced
            if status.st_ino != self._file or status.st_size < self._read:
                self._file, self._read = status.st_ino, 0
                for column in self._columns.values():
                    column.clear()
                self._table = None
            file.seek(self._read)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]  # the last line may be incomplete
        if complete:
            self._table = None
        self._read += len(complete)
        for line in complete.splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # damaged by a kill
                continue
            for name, column in self._columns.items():
                column.append(row.get(name))


def seconds_per_token(steps: pd.DataFrame, last: int | None = None) -> float | None:
    """Mean time of a token, without the start of the first step; None if fewer than two steps have a time.

    Args:
        last: Number of the latest steps to average over; None: all.
    """
    timed = steps.dropna(subset=["seconds"]).tail(len(steps) if last is None else last + 1)
    if len(timed) < 2:
        return None
    tokens, seconds = (float(timed[name].iloc[-1] - timed[name].iloc[0]) for name in ("tokens", "seconds"))
    return seconds / tokens if tokens > 0 and seconds > 0 else None


class RunRecords:
    """The records in a run's directory; each call reads only new lines."""

    def __init__(self, directory: Path) -> None:
        self.metrics = directory / METRICS
        self._own, self._async = MetricsTail(self.metrics), MetricsTail(directory / EVALUATIONS)

    def steps(self) -> pd.DataFrame:
        """One row per step, with the run's own evaluations: tokens, train_loss, val_loss, seconds, mfu, and figures of experts."""
        return self._own.table()

    def expert_loads(self) -> list[list[float]] | None:
        """Load of each expert over its block's mean in the last evaluated step, [block][expert]; None without experts."""
        loads = None
        for row in json_lines.read(self.metrics) if self.steps()["largest_load"].notna().any() else ():
            loads = row.get("expert_loads", loads)
        return loads

    def evaluations(self) -> pd.DataFrame:
        """Columns tokens, val_loss, by tokens; the run's own evaluation takes precedence over an asynchronous evaluation."""
        tables = self._own.table(), self._async.table()
        found = [table.dropna(subset=["val_loss"])[["tokens", "val_loss"]] for table in tables]
        whole = pd.concat([table for table in found if len(table)] or found[:1])
        return whole.drop_duplicates("tokens").sort_values("tokens", kind="stable").reset_index(drop=True)
