"""The search so far, read from its record without annealed runs, for readers of a running search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pandas as pd
import plotly.graph_objects as go

from muscale.search.record import Record
from muscale.search.sweep_figures import draw_survivors
from muscale.store.ledger import Ledger
from muscale.store.statements import find


@dataclass(frozen=True, kw_only=True)
class SearchSoFar:
    """State of a sweep that may be running.

    Attributes:
        trials: A row each, by number: trial, status, rung (the last reached, −1 before the first), loss (there, nats per token),
            the suggestion, seconds.
        rungs: A row for each result: trial, rung, n_tokens, loss.
        running: Trials that have not reached their target rung.
        cancelled: Trials that were cancelled, with the reason.
    """

    sweep: str
    trials: pd.DataFrame = field(repr=False)
    rungs: pd.DataFrame = field(repr=False)
    running: tuple[int, ...]
    cancelled: dict[int, str]

    def plot(self, loss_unit: str) -> go.Figure | None:
        """Draw the loss of each trial from rung to rung, with the best so far highlighted."""
        alive = self.rungs.dropna(subset="loss")
        if alive.empty:
            return None
        last = alive[alive["rung"] == alive["rung"].max()]
        best = last.loc[last["loss"].idxmin(), "trial"]
        series = alive["trial"].map(lambda trial: "winner" if trial == best else "to the last rung")
        data = alive[["trial", "n_tokens", "loss"]].assign(series=series)
        figure = draw_survivors(data.sort_values(["trial", "n_tokens"], ignore_index=True), loss_unit)
        for trace in figure.data:
            trace.name = {"winner": "best so far", "to the last rung": "other trials"}.get(trace.name, trace.name)
        return figure

    def __str__(self) -> str:
        status = self.trials["status"]
        counts = ", ".join(f"{int((status == kind).sum())} {kind}" for kind in dict.fromkeys(status))
        lines = [f"search {self.sweep}: {len(self.trials)} trials started: {counts}"]
        lines += [f"  trial {trial} was cancelled: {reason}" for trial, reason in self.cancelled.items()]
        return "\n".join(lines)


def search_so_far(ledger: Ledger, rung_tokens: tuple[int, ...]) -> SearchSoFar | None:
    """Return the sweep that was begun last, or None before its first trial."""
    latest = next(iter(ledger.read(find, "rounds", {}, ["-created_at"], limit=1)), None)
    if latest is None:
        return None
    record = Record(ledger, latest["sweep"])
    if not record.configs:  # the round has begun, but has no suggestion yet
        return None
    rows = []
    for trial, config in record.configs.items():
        rung = record.last_rung(trial)
        loss = record.loss(trial, rung) if rung >= 0 else math.nan
        rows.append(
            {
                "trial": trial,
                "status": record.status(trial, len(rung_tokens) - 1),
                "rung": rung,
                "loss": loss if math.isfinite(loss) else math.nan,
                **config,
                "seconds": record.cost(trial)[1],
            }
        )
    arrived = [
        {
            "trial": trial,
            "rung": rung,
            "n_tokens": rung_tokens[min(rung, len(rung_tokens) - 1)],
            "loss": math.nan if result.loss is None else result.loss,
        }
        for (trial, rung), result in record.results.items()
    ]
    return SearchSoFar(
        sweep=record.sweep,
        trials=pd.DataFrame(rows),
        rungs=pd.DataFrame(arrived, columns=["trial", "rung", "n_tokens", "loss"]),
        running=tuple(record.open),
        cancelled=dict(record.cancelled),
    )
