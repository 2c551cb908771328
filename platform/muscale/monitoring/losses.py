"""Sources of the losses of a run trained elsewhere: a CSV or JSON Lines file, a run of Weights & Biases, a DataFrame."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from muscale.errors import StageError
from muscale.formatting import format_read_error
from muscale.secrets import redacted

WANDB = "wandb:"  # begins the name of a run of Weights & Biases
_LOSSES = {"loss": "val_loss", "val_loss": "val_loss", "train_loss": "train_loss"}  # column: its meaning

Row = dict[str, float]
"""`tokens` or `step`, and `val_loss` (held-out), `train_loss` or both, in nats per token."""


class LossSource(Protocol):
    """All losses of a run so far, under a name."""

    @property
    def name(self) -> str:
        """Name of the source in messages and in the ledger."""

    def read(self) -> list[Row]:
        """The rows in their order in the source.

        Raises:
            StageError: If it can't be read, naming source, row and column.
        """


@dataclass(frozen=True, kw_only=True)
class LossFile:
    """A CSV file with a header line, or a .jsonl file of objects, such as a trainer's rows.

    Attributes:
        path: Of the file; it has a column `tokens` or `step`, and `loss` or `val_loss` (held-out), `train_loss` or both.
        tokens_column, loss_column: Other names of the columns; a name that ends in "step" counts steps.
        growing: Whether the file is still being written; a last line without a newline is left for later.
    """

    path: Path
    tokens_column: str | None = None
    loss_column: str | None = None
    growing: bool = False

    @property
    def name(self) -> str:
        """The absolute path."""
        return str(self.path.absolute())

    def read(self) -> list[Row]:
        """See `LossSource`; a row without a loss is skipped."""
        try:
            text = self.path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise StageError(f"watch: {self.name}: {format_read_error(error)}") from error
        if self.growing:
            text = text[: text.rfind("\n") + 1]
        if self.path.suffix == ".jsonl":
            return self._read_json_lines(text)
        lines = csv.DictReader(text.splitlines())
        try:
            columns = list(lines.fieldnames or [])
            numbered = ((f"line {lines.line_num}", line) for line in lines)
            return _rows(numbered, columns, self.name, self.tokens_column, self.loss_column)
        except csv.Error as error:
            raise StageError(f"watch: {self.name}, line {lines.line_num}: not valid CSV: {error}") from error

    def _read_json_lines(self, text: str) -> list[Row]:
        """Rows of objects, a line each; a loss of null is a divergence, as in a trainer's rows."""
        records: list[tuple[str, dict[str, Any]]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise StageError(f"watch: {self.name}, line {number}: must be a JSON object, got {line[:80]!r}")
            records.append(
                (f"line {number}", {name: math.nan if value is None else value for name, value in found.items()})
            )
        columns = list(dict.fromkeys(name for _, record in records for name in record))
        return _rows(records, columns, self.name, self.tokens_column, self.loss_column)


@dataclass(frozen=True, kw_only=True)
class WandbRun:
    """A run of Weights & Biases, read through its public API with the key in WANDB_API_KEY.

    Attributes:
        path: entity/project/run.
        tokens_column, loss_column: Keys that the run logged; `_step` is its own count of steps.
    """

    path: str
    tokens_column: str | None = None
    loss_column: str | None = None

    @property
    def name(self) -> str:
        """The path after `wandb:`."""
        return WANDB + self.path

    def read(self) -> list[Row]:
        """See `LossSource`."""
        if not os.environ.get("WANDB_API_KEY"):
            raise StageError(f"watch: {self.name}: WANDB_API_KEY is not set; it must hold a key of Weights & Biases")
        import wandb

        tokens, loss = self.tokens_column or "tokens", self.loss_column or "loss"
        try:
            history = [dict(row) for row in wandb.Api().run(self.path).scan_history(keys=[tokens, loss])]
        except Exception as error:  # wandb also raises its transport's errors
            reason = redacted(f"{type(error).__name__}: {error}")
            raise StageError(f"watch: {self.name}: {reason}") from error
        return _rows(_numbered(history), [tokens, loss], self.name, tokens, loss)


@dataclass(frozen=True, kw_only=True, eq=False)
class LossTable:
    """A DataFrame with the columns of a `LossFile`; NaN means "not logged", and an infinite loss that the run diverged."""

    frame: pd.DataFrame
    name: str = "DataFrame"

    def read(self) -> list[Row]:
        """See `LossSource`."""
        rows = self.frame.astype(object).where(self.frame.notna(), None).to_dict("records")
        return _rows(_numbered(rows), list(map(str, self.frame.columns)), self.name, None, None)


def loss_source(
    losses: str | Path | pd.DataFrame,
    *,
    tokens_column: str | None = None,
    loss_column: str | None = None,
    growing: bool = False,
) -> LossSource:
    """The source that is meant by a path, by `wandb:entity/project/run`, or by a DataFrame.

    Args:
        losses: Path, run or table.
        tokens_column, loss_column, growing: As in `LossFile`; a DataFrame's columns are named as they must be.
    """
    if isinstance(losses, pd.DataFrame):
        return LossTable(frame=losses)
    if str(losses).startswith(WANDB):
        run = str(losses).removeprefix(WANDB)
        return WandbRun(path=run, tokens_column=tokens_column, loss_column=loss_column)
    return LossFile(path=Path(losses), tokens_column=tokens_column, loss_column=loss_column, growing=growing)


def _numbered(records: list[dict[Any, Any]]) -> Iterable[tuple[str, dict[Any, Any]]]:
    return ((f"row {number}", record) for number, record in enumerate(records))


def _rows(
    records: Iterable[tuple[str, Mapping[Any, Any]]],
    columns: list[str],
    source: str,
    tokens_column: str | None,
    loss_column: str | None,
) -> list[Row]:
    """The rows of records, each with its place in the source; their values are numbers or text."""
    counter = tokens_column or next((name for name in ("tokens", "step") if name in columns), "tokens or step")
    if loss_column:
        losses = {loss_column: _LOSSES.get(loss_column, "val_loss")}
    else:
        losses = {name: meaning for name, meaning in _LOSSES.items() if name in columns}
    wanted = [counter, *(losses or ("loss, val_loss or train_loss",))]
    if missing := [name for name in wanted if name not in columns]:
        raise StageError(
            f"watch: {source}: no column {' and none '.join(missing)}; the columns are {', '.join(columns) or 'none'}"
        )
    if repeated := [name for name in wanted if columns.count(name) > 1]:
        raise StageError(
            f"watch: {source}: column {repeated[0]} must occur once, got it {columns.count(repeated[0])} times"
        )
    unit = "step" if counter.endswith("step") else "tokens"
    rows: list[Row] = []
    for place, record in records:
        at = f"{source}, {place}"
        row = {
            meaning: _number(record.get(name), f"{at}, {name}")
            for name, meaning in losses.items()
            if record.get(name) not in (None, "")
        }
        if not row:
            continue  # other metrics were logged there
        row[unit] = _number(record.get(counter), f"{at}, {counter}")
        if not 0 <= row[unit] < math.inf:
            raise StageError(f"watch: {at}, {counter}: must be finite and not negative, got {row[unit]}")
        for name, meaning in losses.items():
            if row.get(meaning, 1.0) <= 0:
                raise StageError(f"watch: {at}, {name}: must be above 0 (or NaN: diverged), got {row[meaning]}")
        rows.append(row)
    return rows


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise StageError(f"watch: {where}: must be a number, got {value!r}") from None
