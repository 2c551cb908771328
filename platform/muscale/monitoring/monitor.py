"""The monitor of a full run: compares losses, from the run's records or from a run trained elsewhere, with the forecast."""

from __future__ import annotations

import math
import time

import pandas as pd

from muscale.errors import StageError
from muscale.findings import Findings, StudyContents, findings
from muscale.full_runs.amend.amended_runs import amended_runs
from muscale.full_runs.promote.promotion import recorded_promotion
from muscale.full_runs.records.alarms import find_alarms
from muscale.full_runs.records.events import run_events
from muscale.full_runs.records.run_records import FIGURES, RunRecords, seconds_per_token
from muscale.idle_experts import IDLE_STEPS, idle_experts
from muscale.layout import EXTERNAL_RUNS, FAILURE, FULL_RUNS
from muscale.monitoring.external_run import ExternalRun
from muscale.monitoring.losses import LossSource
from muscale.monitoring.run_status import RunStatus
from muscale.plans.band import Band, registered_band
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.statements import find

_RATE_STEPS = 50  # steps over which tokens per second are measured
# kind of result in the ledger: whether the run is external
_STARTED = {ResultKind.PROMOTION_STARTED: False, ResultKind.EXTERNAL_RUN_STARTED: True}


class Monitor:
    """Watches one run; each look reads only new records.

    Args:
        plan: Key of a plan; default: the plan whose run began last, or with `losses` the only registered plan.
        losses: Source of the losses of a run trained elsewhere; None: the records in the study's directory.
        alarm_after: Consecutive evaluations outside the band that raise an alarm.

    Raises:
        StageError: If there is no such run; otherwise as `ExternalRun`.
    """

    def __init__(
        self, ledger: Ledger, plan: str | None = None, losses: LossSource | None = None, *, alarm_after: int
    ) -> None:
        self.ledger, self.alarm_after = ledger, alarm_after
        self._external = None if losses is None else ExternalRun(ledger, losses, plan)
        self.plan, self.asserted = (self._external.plan.key, True) if self._external else _begun(ledger, plan)
        self.directory = ledger.directory / (EXTERNAL_RUNS if self.asserted else FULL_RUNS) / self.plan
        self._band = _band_of(self.plan, ledger)
        self._n_tokens = self._band.n_tokens
        self._records = RunRecords(self.directory)

    def look(self) -> RunStatus:
        """The current status of the run; raises StageError like `ExternalRun.update`."""
        if self._external:
            self._external.update()
        steps = self._records.steps()
        evaluations = self._band.place(self._records.evaluations())
        alarms = find_alarms(evaluations, plan=self.plan, alarm_after=self.alarm_after, asserted=self.asserted)
        failure, file = self.directory / FAILURE, self._records.metrics
        pace, mfu = seconds_per_token(steps, _RATE_STEPS), steps["mfu"].dropna().tail(_RATE_STEPS)
        return RunStatus(
            plan=self.plan,
            n_tokens=self._n_tokens,
            band=self._band,
            curve=_curve(steps),
            evaluations=evaluations,
            alarms=alarms,
            run_events=run_events(self.ledger, self.plan, asserted=self.asserted, seen=alarms),
            tokens_per_second=pace and 1 / pace,
            mfu=float(mfu.mean()) if len(mfu) else None,
            experts=idle_experts(steps["dead_experts"], least_steps=IDLE_STEPS),
            idle_seconds=max(0.0, time.time() - file.stat().st_mtime) if file.exists() else math.nan,
            promotion=recorded_promotion(self.ledger, self.plan, asserted=self.asserted),
            failure=failure.read_text() if failure.exists() else None,
            asserted=self.asserted,
            amended=amended_runs(self.ledger.read, self.plan),
        )


def _band_of(run: str, ledger: Ledger) -> Band:
    """The band of a plan's run, or the forecast of an amended run's end; raise StageError if neither has a forecast."""
    if started := ledger.result(ResultKind.AMENDMENT_STARTED, run):
        if (forecast := started.get("forecast")) is None:
            raise StageError(
                f"watch: run {run} has no forecast: {started.get('no_forecast', 'it started before there was one')}"
            )
        final = {name: forecast[name] for name in ("loss", "low", "high", "level")}
        n_tokens = started["segments"][-1]["end"]
        return Band.end_only("an amended run has a forecast of its end only", n_tokens=n_tokens, **final)
    row = ledger.forecast(run)
    if row is None:
        raise StageError(f"watch: no forecast is registered for plan {run}")
    final = {name: row[name] for name in ("loss", "low", "high", "level")}
    return registered_band(run, ledger) or Band.end_only(
        "none was registered before the run began", n_tokens=int(row["payload"]["n_tokens"]), **final
    )


def _curve(steps: pd.DataFrame) -> pd.DataFrame:
    """Columns tokens and train_loss, and the figures of experts if the model has experts."""
    taken = steps.dropna(subset=["train_loss"]).reset_index(drop=True)
    figures = [name for name in FIGURES if taken[name].notna().any()]
    return taken[["tokens", "train_loss", *figures]]


def monitor_of(
    study: StudyContents, plan: str | None, losses: LossSource | None, known: Findings | None = None
) -> Monitor:
    """The monitor of a study's run; with `losses` and no `plan`, of the plan that the study file and its settings determine.

    Raises:
        StageError: As `Monitor`, or if that plan is not registered: losses are final and belong to a single plan.
    """
    if losses and plan is None and (planned := findings(study, known).plan):
        plan = planned.key
        if study.ledger.forecast(plan) is None:
            others = ", ".join(row["plan"] for row in study.ledger.read(find, "forecasts", order=("registered_at",)))
            raise StageError(
                f"watch: {losses.name}: the plan of these settings, {plan}, must be registered; run `muscale plan` first"
                + (f", or name the plan of the run with --plan, one of {others}" if others else "")
            )
    return Monitor(study.ledger, plan, losses, alarm_after=study.config.promote.alarm_after)


def _begun(ledger: Ledger, plan: str | None) -> tuple[str, bool]:
    """Find the key of the requested or last begun plan, and whether its run is external."""
    if plan is None:
        begun = [
            (row["created_at"], row["key"], external)
            for started, external in _STARTED.items()
            if (row := ledger.latest_result(started))
        ]
        amended = [row for row in ledger.results(ResultKind.AMENDMENT_STARTED) if row["payload"].get("forecast")]
        begun += [(row["created_at"], row["key"], False) for row in amended[-1:]]
        if begun:
            _, key, external = max(begun)
            return key, external
        raise StageError(
            "watch: no full run has started; start one with `muscale promote`, or name the losses of a run trained elsewhere "
            "with --losses"
        )
    for started, external in (*_STARTED.items(), (ResultKind.AMENDMENT_STARTED, False)):
        if ledger.result(started, plan):
            return plan, external
    raise StageError(f"watch: no run of plan {plan} has started; start it with `muscale promote --plan {plan}`")
