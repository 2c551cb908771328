"""A full run that goes on elsewhere: its losses are read from a growing table, watched like our own, and marked as asserted.

Nothing here can check what such a table says: that its held-out text is the study's, or that its run began after the forecast.
So it is kept apart from our own runs, in the study's directory, in the ledger, and in the calibration.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from muscale.errors import StageError
from muscale.formatting import format_read_error
from muscale.full_runs.promote.promotion import Promotion
from muscale.layout import FAILURE, METRICS, OBSERVED
from muscale.monitoring.band import registered_band
from muscale.plans.planning import Plan
from muscale.secrets import redacted
from muscale.store.ledger import Ledger, now
from proxy_models.atomic_write import atomic_write

TOLERANCE = 1e-3  # of D: other frameworks end on another whole batch (assumed)
_MOST_LOG = 700.0  # of a loss: exp is finite up to there
_LOSSES = {"loss": "val_loss", "val_loss": "val_loss", "train_loss": "train_loss"}  # column: what it is


def read_csv(
    path: Path, *, growing: bool = False, tokens: str | None = None, loss: str | None = None
) -> list[dict[str, Any]]:
    """Rows with `tokens` or `step`, and `val_loss`, `train_loss` or both.

    Args:
        path: With a header line. The column `loss` is of held-out losses.
        growing: The last line counts only with its newline, as it may be half written.
        tokens, loss: Names of the columns, where they are others; one that is called "…step" counts steps.

    Raises:
        StageError: If it can't be read, naming file, line and column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise StageError(f"observe: {path}: {format_read_error(error)}") from error
    if growing:
        text = text[: text.rfind("\n") + 1]
    lines = csv.DictReader(text.splitlines())
    try:
        return _rows(lines, list(lines.fieldnames or []), str(path), tokens, loss, first_line=2)
    except csv.Error as error:
        raise StageError(f"observe: {path}, line {lines.line_num}: can't be read as CSV: {error}") from error


def read_wandb(path: str, *, tokens: str | None = None, loss: str | None = None) -> list[dict[str, Any]]:
    """The same of a run of Weights & Biases, through its public API.

    Args:
        path: entity/project/run.
        tokens, loss: Names of what it logged, by default `tokens` and `loss`; `_step` is its own count of steps.

    Raises:
        StageError: If there is no WANDB_API_KEY, or the run can't be read.
    """
    if not os.environ.get("WANDB_API_KEY"):
        raise StageError(f"observe: {path}: reading a run of Weights & Biases needs its key in WANDB_API_KEY")
    import wandb

    names = [tokens or "tokens", loss or "loss"]
    try:
        history = wandb.Api().run(path).scan_history(keys=names)
        found = [dict(row) for row in history]
    except Exception as error:  # wandb raises what its transport does, too
        told = redacted(f"{type(error).__name__}: {error}")
        raise StageError(f"observe: {path}: Weights & Biases: {told}") from error
    return _rows(found, names, path, names[0], names[1], first_line=1)


def _rows(
    lines: Iterable[Mapping[str, Any]],
    columns: list[str],
    where: str,
    tokens: str | None,
    loss: str | None,
    *,
    first_line: int,
) -> list[dict[str, Any]]:
    at = tokens or next((name for name in ("tokens", "step") if name in columns), None)
    losses = {loss: _LOSSES.get(loss, "val_loss")} if loss else {n: kind for n, kind in _LOSSES.items() if n in columns}
    wanted = [at or "tokens or step", *(losses or {"loss, val_loss or train_loss": ""})]
    if missing := [name for name in wanted if name not in columns]:
        raise StageError(
            f"observe: {where}: no column {' and none '.join(missing)}; there are {', '.join(columns) or 'none'}"
        )
    if repeated := [name for name in wanted if columns.count(name) > 1]:
        raise StageError(
            f"observe: {where}: column {repeated[0]} must be there once, got it {columns.count(repeated[0])} times"
        )
    at = str(at)
    counted = "step" if at.endswith("step") else "tokens"
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=first_line):
        place = f"{where}, line {number}"
        row = {
            kind: _number(line.get(n), f"{place}, {n}") for n, kind in losses.items() if line.get(n) not in (None, "")
        }
        if not row:
            continue  # logged at other steps
        row[counted] = _number(line.get(at), f"{place}, {at}")
        if not 0 <= row[counted] < math.inf:
            raise StageError(f"observe: {place}, {at}: must be finite and not negative, got {row[counted]}")
        for kind in losses.values():
            if row.get(kind, 1.0) <= 0:
                raise StageError(f"observe: {place}, {kind}: must be above 0 (or NaN: diverged), got {row[kind]}")
        found.append(row)
    return found


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise StageError(f"observe: {where}: must be a number, got {value!r}") from None


def open_observer(ledger: Ledger, source: str, plan: str | None = None) -> Observer:
    """What takes an outside run's table into a study.

    Args:
        ledger: The study's.
        source: What the table is called.
        plan: Key of the plan that the run follows, by default the one registered last.

    Raises:
        StageError: If no forecast is registered, or the plan's run is this study's own.
    """
    row = ledger.forecast(plan) if plan else ledger.latest_forecast()
    if row is None:
        raise StageError(
            "observe: no forecast is registered, so nothing can be held against it; run `muscale plan` first"
        )
    observed = Plan.from_dict(row["payload"])
    if ledger.result("promotion_started", observed.key):
        raise StageError(f"observe: plan {observed.key} was promoted in this study; `muscale watch` shows its own run")
    return Observer(ledger, observed, source)


class Observer:
    """Takes what an outside run's table says into the study, again and again, and its residual once it has ended.

    Args:
        ledger: The study's.
        plan: That the run follows, registered.
        source: What the table is called.
    """

    def __init__(self, ledger: Ledger, plan: Plan, source: str) -> None:
        self.ledger, self.plan, self.source = ledger, plan, source
        self.directory = ledger.directory / OBSERVED / plan.key
        self._band = registered_band(plan.key, ledger)

    def take(self, rows: list[dict[str, Any]]) -> None:
        """Keep these rows, all of the table so far.

        Raises:
            StageError: If they go beyond the plan's tokens.
        """
        if self.ledger.result("observation", self.plan.key):
            return  # final
        records = self._records(rows)
        last = max((row["tokens"] for row in records), default=0)
        if not self.ledger.result("observation_started", self.plan.key):
            seen = {"at": now(), "source": self.source, "tokens": last, "share": last / self.plan.n_tokens}
            self.ledger.record_result("observation_started", self.plan.key, seen)
        self.directory.mkdir(parents=True, exist_ok=True)
        broken = next(
            (row for row in records for name in ("val_loss", "train_loss") if not math.isfinite(row.get(name, 0))), None
        )
        failure = self.directory / FAILURE
        if broken:
            with atomic_write(failure) as unfinished:
                unfinished.write_text(f"the loss is not finite after {broken['tokens']:,} tokens")
            records = [row for row in records if row["tokens"] < broken["tokens"]]
        else:
            failure.unlink(missing_ok=True)
        self._write(records)
        end = next((row for row in records if row["tokens"] == self.plan.n_tokens and "val_loss" in row), None)
        if end:
            self._record(end["val_loss"])

    def _records(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """By tokens, ascending; where a run was set back, what it did again is what counts."""
        n_tokens, kept = self.plan.n_tokens, list[dict[str, Any]]()
        for row in rows:
            tokens = row["tokens"] if "tokens" in row else self._tokens_at(min(row["step"], n_tokens + 1))
            if tokens > n_tokens * (1 + TOLERANCE):
                raise StageError(
                    f"observe: {self.source}: {tokens:,.0f} tokens are more than the {n_tokens:,} of plan {self.plan.key}"
                )
            at = n_tokens if tokens >= n_tokens * (1 - TOLERANCE) else int(tokens)
            while kept and kept[-1]["tokens"] > at:
                kept.pop()
            losses = {name: value for name, value in row.items() if name in ("train_loss", "val_loss")}
            if kept and kept[-1]["tokens"] == at:
                losses = {**kept.pop(), **losses}
            kept.append({**losses, "tokens": at})
        if kept and not any("val_loss" in row for row in kept):
            kept = self._estimated(kept)
        return kept

    def _tokens_at(self, step: float) -> int:
        """Seen after so many steps of the plan's batches."""
        ramp = self.plan.segments[0].recipe.ramp
        if not ramp.doublings:
            return round(step) * ramp.batch_tokens
        return self._ends[min(round(step), len(self._ends) - 1)]

    @cached_property
    def _ends(self) -> list[int]:
        """Tokens seen after each of the plan's steps, and 0 before the first."""
        ramp = self.plan.segments[0].recipe.ramp
        return [0, *(before + batch for before, batch in ramp.steps(0, self.plan.n_tokens + ramp.batch_tokens))]

    def _estimated(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Held-out losses for a table of training losses alone: means of whole windows, with the ladder's offset."""
        band, n_tokens = self._band, self.plan.n_tokens
        if band is None or band.reason:
            return records
        share = np.array([row["tokens"] for row in records]) / n_tokens
        logs = np.log([row["train_loss"] for row in records])
        found = list(records)
        for number in range(1, math.floor(share[-1] / band.window - 0.5) + 1):
            centre = number * band.window
            within = np.abs(share - centre) <= band.window / 2
            if within.any():
                loss = float(np.exp(min(float(logs[within].mean()) + band.offset, _MOST_LOG)))
                found.append({"tokens": int(centre * n_tokens), "val_loss": loss})
        return sorted(found, key=lambda row: row["tokens"])

    def _write(self, records: list[dict[str, Any]]) -> None:
        """Where they differ from what is there, whole or not at all."""
        path = self.directory / METRICS
        text = "".join(json.dumps(row) + "\n" for row in records)
        if path.exists() and path.read_text() == text:
            return
        with atomic_write(path) as unfinished:
            unfinished.write_text(text)

    def _record(self, loss: float) -> None:
        """The residual, as the owner of the run tells it."""
        forecast = self.ledger.forecast(self.plan.key) or {}
        started = self.ledger.result("observation_started", self.plan.key) or {}
        promotion = Promotion(
            plan=self.plan.key,
            loss=loss,
            source_losses={},
            forecast=forecast["loss"],
            **{name: forecast[name] for name in ("low", "high", "level", "registered_at")},
            started_at=started["at"],
            finished_at=now(),
            verdict="",
            forced=False,
            world_size=0,
            seconds=0.0,
            asserted=True,
        )
        self.ledger.record_result("observation", self.plan.key, promotion.to_dict())
