"""The runs of a study that branched off others: amendments and continuations, as the ledger has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from muscale.full_runs.amend.control import Control
from muscale.full_runs.amend.second_forecast import SecondForecast
from muscale.serialization import Recorded
from muscale.store.ledger_tables import ResultKind
from muscale.store.read_only import Read
from muscale.store.statements import find


@dataclass(frozen=True, kw_only=True)
class AmendedRun(Recorded):
    """A run that branched off another.

    Attributes:
        parent: Key of the plan or run that it branched off.
        tokens: Tokens of the parent at the checkpoint.
        reason: Why the parent was amended; empty for a continuation.
        changes: What was changed, by dotted key.
        started_at, finished_at: Times in UTC; the forecast was registered at the start. None: not finished.
        forecast: The second forecast; None: there was none.
        measured: Held-out loss at the end; None before.
        control: The difference from the parent's recipe, if a control was trained and the run has ended.
    """

    DERIVED = ("inside",)

    key: str
    name: str
    parent: str
    tokens: int
    reason: str
    changes: dict[str, Any]
    started_at: str
    finished_at: str | None
    forecast: SecondForecast | None
    measured: float | None
    control: Control | None = None

    @property
    def inside(self) -> bool | None:
        """Whether the measured loss is in the forecast's interval; None if there is not one of each."""
        if self.forecast is None or self.measured is None:
            return None
        return self.forecast.low <= self.measured <= self.forecast.high

    def __str__(self) -> str:
        why = (
            f"amended after {self.tokens:,} tokens because {self.reason}"
            if self.reason
            else f"continued after {self.tokens:,} tokens"
        )
        changes = ", ".join(f"{key} = {value}" for key, value in self.changes.items())
        ended = "" if self.measured is None else f"; ended at {self.measured:.4f}"
        return f"{why}, by {self.name} {self.key} ({changes or 'nothing changed'}){ended}"


def amended_runs(read: Read, parent: str | None = None) -> tuple[AmendedRun, ...]:
    """Return a study's runs that branched off a parent, by its key, or off any run; in the order of their starts."""
    return tuple(run for run in _all(read) if parent in (None, run.parent))


def _all(read: Read) -> Iterator[AmendedRun]:
    ended = {row["key"]: row["payload"] for row in read(find, "results", {"kind": ResultKind.AMENDMENT.value})}
    for row in read(find, "results", {"kind": ResultKind.AMENDMENT_STARTED.value}, ["created_at", "key"]):
        started, done = row["payload"], ended.get(row["key"])
        parent, forecast = started["lineage"][-1], started.get("forecast")
        yield AmendedRun(
            key=row["key"],
            name=started["name"],
            parent=parent["run"],
            tokens=parent["tokens"],
            reason=started.get("reason", ""),
            changes=started.get("changes", {}),
            started_at=started["at"],
            finished_at=done["finished_at"] if done else None,
            forecast=SecondForecast.from_dict(forecast) if forecast else None,
            measured=done["after"]["own"] if done else None,
            control=Control.from_dict(done["control"]) if done and done.get("control") else None,
        )


def amended_table(runs: Sequence[AmendedRun]) -> pd.DataFrame:
    """A row for each run: name, parent, tokens, reason, changes, forecast, low, high, measured, inside."""
    return pd.DataFrame(
        [
            {
                "run": f"{run.name} {run.key}",
                "off": run.parent,
                "after tokens": run.tokens,
                "because": run.reason,
                "changes": ", ".join(f"{key} = {value}" for key, value in run.changes.items()),
                "forecast": run.forecast and run.forecast.loss,
                "low": run.forecast and run.forecast.low,
                "high": run.forecast and run.forecast.high,
                "measured": run.measured,
                "inside": run.inside,
            }
            for run in runs
        ]
    )
