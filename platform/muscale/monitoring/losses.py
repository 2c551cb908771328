"""The losses of a run trained elsewhere: from a CSV or JSON Lines file, a run of Weights & Biases, or a DataFrame."""

from __future__ import annotations

import csv
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from muscale.errors import StageError
from muscale.formatting import format_read_error
from muscale.secrets import redacted

WANDB = "wandb:"  # prefix of the name of a Weights & Biases run
_LOSSES = {"loss": "val_loss", "val_loss": "val_loss", "train_loss": "train_loss"}  # meaning of each column
_COUNTERS = ("tokens", "step", "_step")

Row = dict[str, float]
"""`tokens` or `step`, and `val_loss` (held-out), `train_loss` or both, in nats per token."""
_Records = tuple[list[str], list[tuple[str, dict[Any, Any]]]]  # columns; each record with its location in the source


@dataclass(frozen=True, kw_only=True, eq=False)
class LossSource:
    """All losses of a run so far.

    Attributes:
        losses: A CSV file with a header line, a .jsonl file of objects such as a trainer's rows, a run `wandb:entity/project/run`,
            read through W&B's public API with the key in WANDB_API_KEY, or a DataFrame, in which NaN means "not logged".
            The columns are `tokens` or `step` (of W&B also `_step`), and `loss` or `val_loss` (held-out), `train_loss` or both.
        tokens_column, loss_column: Other names of the columns; a name that ends in "step" counts steps.
        growing: Whether the file is still being written; an incomplete last line is left for later.
    """

    losses: str | Path | pd.DataFrame
    tokens_column: str | None = None
    loss_column: str | None = None
    growing: bool = False

    @property
    def name(self) -> str:
        """Name in messages and in the ledger."""
        if isinstance(self.losses, pd.DataFrame):
            return "DataFrame"
        return str(self.losses) if str(self.losses).startswith(WANDB) else str(Path(self.losses).absolute())

    def read(self) -> list[Row]:
        """The rows in source order, without records that have no loss; raises StageError naming source, row and column."""
        if isinstance(self.losses, pd.DataFrame):
            known = self.losses.astype(object).where(self.losses.notna(), None).to_dict("records")
            return self._rows(list(map(str, self.losses.columns)), _numbered(known))
        if self.name.startswith(WANDB):
            return self._rows(*self._read_wandb())
        try:
            text = Path(self.losses).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise StageError(f"watch: {self.name}: {format_read_error(error)}") from error
        text = text[: text.rfind("\n") + 1] if self.growing else text
        return self._rows(*(self._read_json_lines(text) if self.name.endswith(".jsonl") else self._read_csv(text)))

    def _read_csv(self, text: str) -> _Records:
        lines = csv.DictReader(text.splitlines())
        try:
            return list(lines.fieldnames or []), [(f"line {lines.line_num}", line) for line in lines]
        except csv.Error as error:
            raise StageError(f"watch: {self.name}, line {lines.line_num}: not valid CSV: {error}") from error

    def _read_json_lines(self, text: str) -> _Records:
        """Read an object per line; null is a divergence, as in a trainer's rows, or a loss that the row does not have."""
        names: dict[str, None] = {}
        records: list[tuple[str, dict[Any, Any]]] = []
        for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), start=1):
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise StageError(f"watch: {self.name}, line {number}: must be a JSON object, got {line[:80]!r}")
            names |= dict.fromkeys(found)
            has_loss = any(
                found.get(name) is not None for name in ([self.loss_column] if self.loss_column else _LOSSES)
            )
            kept = {name: math.nan if value is None else value for name, value in found.items()}
            records.append((f"line {number}", {k: v for k, v in kept.items() if found[k] is not None or not has_loss}))
        return list(names), records

    def _read_wandb(self) -> _Records:
        """Read what the run logged. If a loss was logged without its tokens or step, W&B's own step count, `_step`, is read."""
        if not os.environ.get("WANDB_API_KEY"):
            raise StageError(f"watch: {self.name}: WANDB_API_KEY is not set; it must hold a key of Weights & Biases")
        import wandb

        try:
            run = wandb.Api().run(self.name.removeprefix(WANDB))
            logged = [dict(row) for row in run.scan_history()]
        except Exception as error:  # wandb also raises errors of its transport
            reason = redacted(f"{type(error).__name__}: {error}")
            raise StageError(f"watch: {self.name}: {reason}") from error
        losses = [self.loss_column] if self.loss_column else list(_LOSSES)
        counted = [row for row in logged if any(row.get(name) is not None for name in losses)]
        names = dict.fromkeys(key for row in logged for key in row)
        partly = {name for name in _COUNTERS if any(row.get(name) is None for row in counted)}
        return [name for name in names if name not in partly], _numbered(logged)

    def _rows(self, columns: list[str], records: list[tuple[str, dict[Any, Any]]]) -> list[Row]:
        """Convert records, whose values are numbers or texts, to rows."""
        counter = self.tokens_column or next((name for name in _COUNTERS if name in columns), "tokens or step")
        if self.loss_column:
            losses = {self.loss_column: _LOSSES.get(self.loss_column, "val_loss")}
        else:
            losses = {name: meaning for name, meaning in _LOSSES.items() if name in columns}
        wanted = [counter, *(losses or ("loss, val_loss or train_loss",))]
        if missing := [name for name in wanted if name not in columns]:
            raise StageError(
                f"watch: {self.name}: no column {' and none '.join(missing)}; the columns are {', '.join(columns) or 'none'}"
            )
        if repeated := [name for name in wanted if columns.count(name) > 1]:
            raise StageError(
                f"watch: {self.name}: column {repeated[0]} must occur once, got {columns.count(repeated[0])} times"
            )
        unit = "step" if counter.lower().endswith("step") else "tokens"
        rows: list[Row] = []
        for place, record in records:
            at = f"{self.name}, {place}"
            row = {
                meaning: _number(record.get(name), f"{at}, {name}")
                for name, meaning in losses.items()
                if record.get(name) not in (None, "")
            }
            if not row:
                continue  # the record has only other metrics
            row[unit] = _number(record.get(counter), f"{at}, {counter}")
            if not 0 <= row[unit] < math.inf:
                raise StageError(f"watch: {at}, {counter}: must be finite and not negative, got {row[unit]}")
            for name, meaning in losses.items():
                if row.get(meaning, 1.0) <= 0:
                    raise StageError(f"watch: {at}, {name}: must be above 0 (or NaN: diverged), got {row[meaning]}")
            rows.append(row)
        return rows


def _numbered(records: list[dict[Any, Any]]) -> list[tuple[str, dict[Any, Any]]]:
    return [(f"row {number}", record) for number, record in enumerate(records)]


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise StageError(f"watch: {where}: must be a number, got {value!r}") from None
