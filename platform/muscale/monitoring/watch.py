"""A full run beside its band, as it stands now: what `muscale watch` and a notebook draw."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from muscale.errors import StageError
from muscale.formatting import format_duration
from muscale.full_runs.promote.promotion import Promotion, recorded_promotion
from muscale.full_runs.records.alarms import Alarm, find_alarms
from muscale.full_runs.records.events import Event, run_events
from muscale.full_runs.records.run_records import RunRecords
from muscale.layout import FAILURE, FULL_RUNS, OBSERVED
from muscale.monitoring import figures
from muscale.monitoring.band import Band, registered_band
from muscale.store.ledger import Ledger
from scaling.presentation import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

_RATE_STEPS = 50  # that the tokens per second are over
_TOLD = 8  # evaluations, the newest


@dataclass(frozen=True, kw_only=True, eq=False)
class Watch(Result):
    """One look at a run; losses in nats per token.

    Attributes:
        plan: Key of the plan.
        n_tokens: D.
        band: What was expected of it before it began.
        curve: Columns tokens, train_loss: its training loss.
        evaluations: By the run itself or beside it; columns tokens, share, loss (held-out, of the last weights), expected, low,
            high, and place: "before the band", "inside", "above" or "below".
        alarms: Stretches outside the band, the oldest first.
        run_events: These and what befell its workers, in order of time.
        tokens_per_second: Of the last steps; None where times are not known.
        idle_seconds: Since the last record was written.
        promotion: The residual, once it is recorded.
        failure: Why the run ended that another attempt would end in again; None otherwise.
        asserted: Whether the run is elsewhere, and its losses are as its owner tells them.
    """

    plan: str
    n_tokens: int
    band: Band
    curve: pd.DataFrame = field(repr=False)
    evaluations: pd.DataFrame = field(repr=False)
    alarms: tuple[Alarm, ...]
    run_events: tuple[Event, ...]
    tokens_per_second: float | None
    idle_seconds: float
    promotion: Promotion | None
    failure: str | None
    asserted: bool

    @property
    def tokens(self) -> int:
        """Seen so far."""
        seen = [frame["tokens"].iloc[-1] for frame in (self.curve, self.evaluations) if len(frame)]
        return int(max(seen, default=0))

    @property
    def seconds_left(self) -> float | None:
        """At the rate of the last steps."""
        if self.tokens_per_second is None or self.ended:
            return None
        return max(0, self.n_tokens - self.tokens) / self.tokens_per_second

    @property
    def measured(self) -> float | None:
        """The held-out loss at the end."""
        if self.promotion:
            return self.promotion.loss
        at_end = self.evaluations[self.evaluations["tokens"] >= self.n_tokens]
        return None if at_end.empty else float(at_end["loss"].iloc[-1])

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: its last loss is measured, or it failed."""
        return self.measured is not None or self.failure is not None

    @property
    def inside(self) -> bool | None:
        """Whether the last evaluation lies in the band, at the end the final one in the interval; None before there is one."""
        if self.promotion:
            return self.promotion.inside
        if self.failure:
            return False
        held = self.evaluations[self.evaluations["place"] != "before the band"]
        return None if held.empty else bool(held["place"].iloc[-1] == "inside")

    @property
    def alarming(self) -> bool:
        """Whether the last evaluations are an alarm, or the run ended outside."""
        if self.ended:
            return not self.inside
        last = self.evaluations["place"].iloc[::-1]
        outside = int((last == "inside").to_numpy().argmax()) if (last == "inside").any() else len(last)
        return bool(self.alarms) and outside >= self.alarms[-1].evaluations

    def to_frame(self) -> pd.DataFrame:
        """Its evaluations beside the band."""
        return self.evaluations

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        names = (
            "plan",
            "n_tokens",
            "tokens",
            "tokens_per_second",
            "seconds_left",
            "idle_seconds",
            "failure",
            "asserted",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "inside": self.inside,
            "ended": self.ended,
            "band": self.band.to_dict(),
            "evaluations": self.evaluations.to_dict("records"),
            "alarms": [alarm.to_dict() for alarm in self.alarms],
            "run_events": [event.to_dict() for event in self.run_events],
            "promotion": self.promotion.to_dict() if self.promotion else None,
        }

    def plot(self) -> go.Figure:
        """Training loss, evaluations, the band, and the forecast of the end."""
        band = self.band
        forecast = {name: getattr(band, name) for name in ("loss", "low", "high", "level")}
        figure = figures.draw_curve(
            figures.curve_data(self.curve),
            forecast,
            self.measured,
            end=self.n_tokens,
            band=figures.band_data(band),
            evaluations=self.evaluations,
        )
        return figure.update_layout(title="a run elsewhere, as its owner tells") if self.asserted else figure

    def __str__(self) -> str:
        of = "an outside run of plan" if self.asserted else "plan"
        lines = [
            f"watch: {of} {self.plan}, {self.tokens:,} of {self.n_tokens:,} tokens{self._pace()}",
            f"  {self.band}",
        ]
        lines += [f"  {format_evaluation(row)}" for row in self.evaluations.tail(_TOLD).to_dict("records")]
        if self.promotion:
            return "\n".join([*lines, str(self.promotion)])
        lines += [f"  {event}" for event in self.run_events]
        if self.failure:
            lines.append(f"  it failed: {self.failure}")
        return "\n".join(lines)

    def _pace(self) -> str:
        if self.ended:
            return ", ended"
        pace = f", {self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second else ""
        left = f", {format_duration(self.seconds_left)} left" if self.seconds_left is not None else ""
        idle = f", nothing new for {format_duration(self.idle_seconds)}" if self.idle_seconds > 60 else ""
        return pace + left + idle


def format_evaluation(row: dict[str, Any]) -> str:
    """A row of `Watch.evaluations` in a line."""
    at = f"{row['tokens']:>15,} ({row['share']:>4.0%})  loss {row['loss']:.4f}"
    if row["place"] == "before the band":
        return f"{at}  before the band begins"
    mark = row["place"] if row["place"] == "inside" else row["place"].upper()
    return f"{at}  expected {row['expected']:.4f} [{row['low']:.4f}, {row['high']:.4f}]  {mark}"


class Watcher:
    """Looks at one run again and again; each look reads only what is new.

    Args:
        ledger: The study's.
        plan: Key of a plan; None: the run that was begun last.
        alarm_after: Evaluations in a row outside the band that are an alarm.

    Raises:
        StageError: If no such run was begun.
    """

    def __init__(self, ledger: Ledger, *, plan: str | None = None, alarm_after: int) -> None:
        self.ledger, self.alarm_after = ledger, alarm_after
        self.plan, self.asserted = _begun(ledger, plan)
        self.directory = ledger.directory / (OBSERVED if self.asserted else FULL_RUNS) / self.plan
        forecast = ledger.forecast(self.plan)
        if forecast is None:
            raise StageError(f"watch: no forecast is registered for plan {self.plan}")
        self._n_tokens = int(forecast["payload"]["n_tokens"])
        of_end = {name: forecast[name] for name in ("loss", "low", "high", "level")}
        self._band = registered_band(self.plan, ledger) or Band.of_end_alone(
            "none was registered before the run began", n_tokens=self._n_tokens, **of_end
        )
        self._records = RunRecords(self.directory)

    def look(self) -> Watch:
        """The run as it stands now."""
        rows = self._records.steps()
        evaluations = place(self._records.evaluations(), self._band)
        alarms = find_alarms(evaluations, plan=self.plan, alarm_after=self.alarm_after, asserted=self.asserted)
        failure = self.directory / FAILURE
        return Watch(
            plan=self.plan,
            n_tokens=self._n_tokens,
            band=self._band,
            curve=rows.dropna(subset=["train_loss"])[["tokens", "train_loss"]].reset_index(drop=True),
            evaluations=evaluations,
            alarms=alarms,
            run_events=run_events(self.ledger, self.plan, asserted=self.asserted, seen=alarms),
            tokens_per_second=_pace(rows),
            idle_seconds=_idle(self._records.metrics),
            promotion=recorded_promotion(self.ledger, self.plan, asserted=self.asserted),
            failure=failure.read_text() if failure.exists() else None,
            asserted=self.asserted,
        )


def _begun(ledger: Ledger, plan: str | None) -> tuple[str, bool]:
    """The key of the plan whose run is meant, and whether it is an outside one."""
    stages = {"promotion_started": False, "observation_started": True}
    if plan is None:
        begun = [
            (row["created_at"], row["key"], outside)
            for stage, outside in stages.items()
            if (row := ledger.latest_result(stage))
        ]
        if begun:
            _, key, asserted = max(begun)
            return key, asserted
        raise StageError(
            "watch: no full run has begun; begin one with `muscale promote`, or `muscale observe` one that is elsewhere"
        )
    for stage, asserted in stages.items():
        if ledger.result(stage, plan):
            return plan, asserted
    raise StageError(f"watch: no run of plan {plan} has begun; begin it with `muscale promote`")


def place(evaluated: pd.DataFrame, band: Band) -> pd.DataFrame:
    """Where each evaluation lies: see `Watch.evaluations`.

    Args:
        evaluated: Columns tokens, val_loss.
        band: Of the run.
    """
    frame = evaluated[["tokens", "val_loss"]].rename(columns={"val_loss": "loss"}).reset_index(drop=True)
    frame.insert(1, "share", frame["tokens"] / band.n_tokens)
    frame = pd.concat([frame, band.at(frame["tokens"].to_numpy(dtype=float))], axis=1)
    frame["place"] = "inside"
    frame.loc[frame["loss"] > frame["high"], "place"] = "above"
    frame.loc[frame["loss"] < frame["low"], "place"] = "below"
    frame.loc[frame["expected"].isna(), "place"] = "before the band"
    return frame


def _pace(rows: pd.DataFrame) -> float | None:
    """Tokens per second over the last steps."""
    last = rows.dropna(subset=["seconds"]).tail(_RATE_STEPS + 1)
    if len(last) < 2:
        return None
    tokens, seconds = (float(last[name].iloc[-1] - last[name].iloc[0]) for name in ("tokens", "seconds"))
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def _idle(path: Path) -> float:
    return max(0.0, time.time() - path.stat().st_mtime) if path.exists() else math.nan
