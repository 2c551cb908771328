"""The status of a full run against its band: the result of `muscale watch` and `study.watch()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from muscale.formatting import format_duration
from muscale.full_runs.amend.amended_runs import AmendedRun
from muscale.full_runs.promote.promotion import Promotion
from muscale.full_runs.records.alarms import Alarm
from muscale.full_runs.records.events import Event
from muscale.monitoring import run_figures
from muscale.plans.band import Band
from scaling.presentation import Result

_NEWEST = 8  # evaluations shown in the text


@dataclass(frozen=True, kw_only=True, eq=False)
class RunStatus(Result):
    """The status of a full run at one time; losses in nats per token.

    Attributes:
        plan: Key of the plan.
        n_tokens: Tokens of the complete run, D.
        band: Band registered before the run began.
        curve: Training loss; columns tokens, train_loss, and for a mixture of experts router_entropy (nats), largest_load (over the
            mean load) and dead_experts (without a token in the step).
        evaluations: Held-out losses of the last weights; columns tokens, share, loss, expected, low, high, and place:
            "before the band", "inside", "above" or "below".
        alarms: Alarms, oldest first.
        run_events: Alarms and incidents, in order of time.
        tokens_per_second: Speed over the last steps; None if times are not known.
        mfu: Model FLOP utilisation over the last steps; None if the device's peak is not known.
        experts: Warning about experts that get no tokens; None: there are none.
        idle_seconds: Seconds since the last record was written.
        promotion: The residual, once it is recorded.
        failure: Why the run failed for good; None if it has not.
        asserted: Whether the run is trained elsewhere and its losses are reported by the user, not verified.
        amended: Runs that branched off this one.
    """

    plan: str
    n_tokens: int
    band: Band
    curve: pd.DataFrame = field(repr=False)
    evaluations: pd.DataFrame = field(repr=False)
    alarms: tuple[Alarm, ...]
    run_events: tuple[Event, ...]
    tokens_per_second: float | None
    mfu: float | None
    experts: str | None
    idle_seconds: float
    promotion: Promotion | None
    failure: str | None
    asserted: bool
    amended: tuple[AmendedRun, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens trained so far."""
        seen = [frame["tokens"].iloc[-1] for frame in (self.curve, self.evaluations) if len(frame)]
        return int(max(seen, default=0))

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the end, at the rate of the last steps."""
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
        """Whether the run is over: its final loss is measured, or it failed."""
        return self.measured is not None or self.failure is not None

    @property
    def inside(self) -> bool | None:
        """Whether the last evaluation is in the band, or the final loss in the interval; None before the first evaluation."""
        if self.promotion:
            return self.promotion.inside
        if self.failure:
            return False
        compared = self.evaluations[self.evaluations["place"] != "before the band"]
        return None if compared.empty else bool(compared["place"].iloc[-1] == "inside")

    @property
    def alarming(self) -> bool:
        """Whether the last evaluations raise an alarm, or the run ended outside its interval."""
        if self.ended:
            return not self.inside
        last = self.evaluations["place"].iloc[::-1]
        outside = int((last == "inside").to_numpy().argmax()) if (last == "inside").any() else len(last)
        return bool(self.alarms) and outside >= self.alarms[-1].evaluations

    def to_frame(self) -> pd.DataFrame:
        """The evaluations."""
        return self.evaluations

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        known = ("plan", "n_tokens", "tokens", "tokens_per_second", "mfu", "seconds_left", "idle_seconds", "experts")
        return {
            **{name: getattr(self, name) for name in (*known, "failure", "asserted", "inside", "ended")},
            "band": self.band.to_dict(),
            "evaluations": self.evaluations.to_dict("records"),
            "alarms": [alarm.to_dict() for alarm in self.alarms],
            "run_events": [event.to_dict() for event in self.run_events],
            "promotion": self.promotion.to_dict() if self.promotion else None,
            "amended": [run.to_dict() for run in self.amended],
        }

    def plot(self) -> go.Figure:
        """Training loss, evaluations, the band, and the forecast of the end."""
        band = self.band
        forecast = {name: getattr(band, name) for name in ("loss", "low", "high", "level")}
        figure = run_figures.draw_curve(
            run_figures.curve_data(self.curve),
            forecast,
            self.measured,
            end=self.n_tokens,
            band=band.to_frame(),
            evaluations=self.evaluations,
        )
        return (
            figure.update_layout(title="run trained elsewhere, losses reported by the user")
            if self.asserted
            else figure
        )

    def __str__(self) -> str:
        run = "external run of plan" if self.asserted else "plan"
        lines = [
            f"watch: {run} {self.plan}, {self.tokens:,} of {self.n_tokens:,} tokens{self._pace()}",
            f"  {self.band}",
            *([f"  {self._routing()}"] if "router_entropy" in self.curve else []),
        ]
        lines += [f"  {format_evaluation(row)}" for row in self.evaluations.tail(_NEWEST).to_dict("records")]
        lines += [f"  {run}" for run in self.amended]
        if self.promotion:
            return "\n".join([*lines, str(self.promotion)])
        lines += [f"  {event}" for event in self.run_events]
        if self.experts:
            lines.append(f"  warning: {self.experts}")
        if self.failure:
            lines.append(f"  failed: {self.failure}")
        return "\n".join(lines)

    def _routing(self) -> str:
        last = self.curve.iloc[-1]
        return (
            f"experts: router entropy {last['router_entropy']:.2f} nats, largest load {last['largest_load']:.2f} of the mean, "
            f"{last['dead_experts']:.0f} without a token"
        )

    def _pace(self) -> str:
        if self.ended:
            return ", ended"
        pace = f", {self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second else ""
        pace += f", MFU {self.mfu:.1%}" if self.mfu else ""
        left = f", {format_duration(self.seconds_left)} left" if self.seconds_left is not None else ""
        idle = f", no new record for {format_duration(self.idle_seconds)}" if self.idle_seconds > 60 else ""
        return pace + left + idle


def format_evaluation(row: dict[str, Any]) -> str:
    """Format a row of `RunStatus.evaluations` as one line."""
    at = f"{row['tokens']:>15,} ({row['share']:>4.0%})  loss {row['loss']:.4f}"
    if row["place"] == "before the band":
        return f"{at}  before the band begins"
    mark = row["place"] if row["place"] == "inside" else row["place"].upper()
    return f"{at}  expected {row['expected']:.4f} [{row['low']:.4f}, {row['high']:.4f}]  {mark}"
