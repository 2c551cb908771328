"""The final loss of a full run if its cooldown began now: the result of `muscale watch --anneal-now` and `study.anneal_now()`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from muscale.errors import StageError, refusing
from muscale.formatting import format_duration
from muscale.full_runs.amend.parent import begun_last, find_amendment
from muscale.full_runs.amend.so_far import SoFar
from muscale.full_runs.records.run_records import RunRecords, seconds_per_token
from muscale.layout import FULL_RUNS
from muscale.plans.ladder_schedules import LadderSchedules
from muscale.plans.plan import Plan
from muscale.store.ledger import Ledger
from scaling import ScalingError
from scaling.presentation import Result

SHARES = (0.1, 0.2, 0.3)
"""Lengths of the cooldown, as shares of the tokens so far."""
_MOST_REASONS = 4  # in the text


@dataclass(frozen=True, kw_only=True, eq=False)
class AnnealNow(Result):
    """Forecasts of a run's final held-out loss if its rate is cooled to zero from now on; losses in nats per token.

    Attributes:
        run: Key of the plan or the amended run.
        tokens: Tokens of its lineage so far.
        planned: Tokens of the lineage at its planned end.
        table: A row for each length: share (of the tokens so far), tokens (at the end), loss, low, high, saved (tokens that the plan
            would still train beyond that end; negative: more than planned), seconds (of the cooldown) and seconds_saved; NaN if the
            speed is not known.
        level: Nominal coverage of the intervals.
        reasons: Why the forecasts are unsupported; empty if they are supported.
    """

    run: str
    tokens: int
    planned: int
    table: pd.DataFrame = field(repr=False)
    level: float
    reasons: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        """The table."""
        return self.table

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        known = {name: getattr(self, name) for name in ("run", "tokens", "planned", "level")}
        return {**known, "table": self.table.to_dict("records"), "reasons": list(self.reasons)}

    def __str__(self) -> str:
        lines = [f"anneal now: run {self.run}, {self.tokens:,} of {self.planned:,} tokens"]
        for row in self.table.to_dict("records"):
            saved = row["saved"]
            more = f"{saved:,} tokens fewer than planned" if saved >= 0 else f"{-saved:,} tokens more than planned"
            hours = f", {format_duration(row['seconds'])}" if math.isfinite(row["seconds"]) else ""
            lines.append(
                f"  cooled over {row['share']:.0%} more, to {row['tokens']:,} tokens{hours}: loss {row['loss']:.4f}, "
                f"{self.level:.0%} interval [{row['low']:.4f}, {row['high']:.4f}]; {more}"
            )
        shown, others = self.reasons[:_MOST_REASONS], len(self.reasons) - _MOST_REASONS
        lines += [f"  not covered: {reason}" for reason in shown]
        return "\n".join([*lines, *([f"  and {others} reasons more"] if others > 0 else [])])


def anneal_now(
    ledger: Ledger,
    schedules: LadderSchedules | str,
    run: str | None = None,
    *,
    shares: Sequence[float] = SHARES,
    level: float,
) -> AnnealNow:
    """Forecast a run's loss under cooldowns that would begin now, by the law of the ladder's schedules and the run's own losses.

    Args:
        run: Key of a plan, or key or name of an amended run; by default the run that began last.
        shares: Lengths of the cooldowns, as shares of the tokens so far.
        level: Nominal coverage of the intervals.

    Raises:
        StageError: If there is no such run, it has no losses, its rate is zero, or the ladder has no law of schedules.
    """
    if isinstance(schedules, str):
        raise StageError(f"watch: --anneal-now needs the law of the ladder's schedules: {schedules}")
    key, started = find_amendment(run or begun_last(ledger), ledger)
    past = [(one["run"], one["tokens"]) for one in started["lineage"]] if started else []
    root = past[0][0] if past else key
    registered = ledger.forecast(root)
    if registered is None:
        raise StageError(f"watch: --plan: no plan or amended run of this study has the key {key!r}")
    plan = Plan.of_row(registered)
    records = RunRecords(ledger.directory / FULL_RUNS / key)
    trained = records.steps().dropna(subset=["train_loss"])
    if trained.empty:
        raise StageError(f"watch: run {key} has no losses yet")
    so_far = SoFar.of([*past, (key, int(trained["tokens"].iloc[-1]))], ledger.directory, ledger, schedules.offset)
    before = sum(tokens for _, tokens in past)
    tokens = before + int(trained["tokens"].iloc[-1])
    length = started["segments"][-1]["end"] if started else plan.n_tokens
    if tokens >= before + length:
        raise StageError(f"watch: --anneal-now: run {key} has ended, after {tokens:,} tokens")
    with refusing("watch: --anneal-now", ValueError, ScalingError):
        found = schedules.law.anneal_now(
            schedules.path(so_far.curve, length=plan.n_tokens),
            shares=shares,
            n_params=float(plan.n_params),
            length=float(plan.n_tokens),
            level=level,
        )
    pace = seconds_per_token(records.steps()) or math.nan
    rows = []
    for share, forecast in zip(shares, found, strict=True):
        end = round(tokens * (1 + share))
        saved = before + length - end
        rows.append(
            {
                "share": share,
                "tokens": end,
                "loss": forecast.loss,
                "low": forecast.low,
                "high": forecast.high,
                "saved": saved,
                "seconds": pace * tokens * share,
                "seconds_saved": pace * saved,
            }
        )
    reasons = tuple(dict.fromkeys(reason for forecast in found for reason in forecast.reasons))
    return AnnealNow(
        run=key, tokens=tokens, planned=before + length, table=pd.DataFrame(rows), level=level, reasons=reasons
    )
