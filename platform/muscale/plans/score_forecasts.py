"""Forecasts of a full run's task scores, registered with its plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from muscale.plans.plan import Plan
from muscale.serialization import Recorded
from muscale.settings.scores import ScoresSettings
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.evaluation.repeated_windows import HELD_OUT, MEMORISATION, times_read
from proxy_models.evaluation.smooth_scores import CHANCE, CONTAMINATED, TASKS
from scaling import ScalingError, ScoreLaw, TaskLaw, fit_score, fit_task

MEMORISED = "memorised"
BITS = "bits_per_byte"
FALLING = (BITS,)
"""Metrics that fall without bound as models get better."""


@dataclass(frozen=True, kw_only=True)
class PlannedScore(Recorded):
    """Forecast of one score of a full run, and the score once it is measured.

    Attributes:
        task, metric: What is forecast; the windows that count for memorisation have the name "memorisation, 4–7 times" or so.
        value, low, high: Median and interval; None if there is no forecast.
        method: Law of the forecast, as in `TaskLaw.method`; "" without a law.
        errors: Error of each law on the ladder's largest runs.
        signal_to_noise: None if the ladder does not show the noise.
        reasons: Why the forecast is doubtful, or why there is none.
        measured, standard_error: Score of the finished run; None before.
    """

    DERIVED = ("inside",)

    task: str
    metric: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    method: str = ""
    errors: dict[str, float]
    signal_to_noise: float | None = None
    reasons: tuple[str, ...] = ()
    measured: float | None = None
    standard_error: float | None = None

    @property
    def inside(self) -> bool | None:
        """Whether the measured score is in the interval; None without either."""
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high

    def __str__(self) -> str:
        name = f"{self.task} {self.metric}"
        if self.value is None:
            text = f"{name}: no forecast; {'; '.join(self.reasons)}"
        else:
            text = f"{name}: {self.value:.4g}, {self.low:.4g} to {self.high:.4g} by {self.method}"
            text += f"; doubtful: {'; '.join(self.reasons)}" if self.reasons else ""
        if self.measured is None:
            return text
        place = {None: "", True: ", inside", False: ", OUTSIDE"}[self.inside]
        return f"{text}; measured {self.measured:.4g}{place}"


@dataclass(frozen=True, kw_only=True)
class ScoreForecasts(Recorded):
    """Forecasts of all scores of a plan's run.

    Attributes:
        plan: Key of the plan.
        level: Level of the intervals.
    """

    plan: str
    level: float
    scores: tuple[PlannedScore, ...]

    def with_measured(self, measured: pd.DataFrame) -> ScoreForecasts:
        """Add the scores of the finished run, rows of `score_table`."""
        is_task = measured["measure"] == TASKS
        named = measured.assign(name=measured["name"].where(is_task, measured["measure"] + ", " + measured["name"]))
        found = named.drop_duplicates(["name", "metric"], keep="last").set_index(["name", "metric"])
        return replace(self, scores=tuple(_measured(score, found) for score in self.scores))

    def with_further(self, current: ScoreForecasts) -> ScoreForecasts:
        """Add scores that are measured only since these were registered, without a forecast."""
        known = {(score.task, score.metric) for score in self.scores}
        why = "the scores of this plan were registered before this one was measured"
        further = (s for s in current.scores if (s.task, s.metric) not in known)
        late = (PlannedScore(task=s.task, metric=s.metric, errors={}, reasons=(why,)) for s in further)
        return replace(self, scores=(*self.scores, *late))

    @property
    def table(self) -> pd.DataFrame:
        """One row per score; all columns also if [scores] has nothing that is forecast."""
        columns = [*PlannedScore(task="", metric="", errors={}).to_dict()]
        return pd.DataFrame([score.to_dict() for score in self.scores], columns=columns)

    def __str__(self) -> str:
        head = f"scores of plan {self.plan}, {self.level:.0%} intervals"
        return "\n".join(
            [head, *([f"  {score}" for score in self.scores] or ["  none: nothing in [scores] is forecast"])]
        )


def forecast_scores(plan: Plan, ladder: pd.DataFrame, settings: ScoresSettings) -> ScoreForecasts:
    """Forecast every task's scores and the memorised shares of the plan's run.

    Args:
        ladder: As `ladder_scores` returns it.
    """
    level = plan.forecast.level
    return ScoreForecasts(
        plan=plan.key,
        level=level,
        scores=(
            *(_forecast(task, metric, law, plan, level) for task, metric, law in task_laws(ladder, plan, settings)),
            *_memorised(ladder, plan, level),
        ),
    )


def task_laws(
    ladder: pd.DataFrame, plan: Plan, settings: ScoresSettings, wanted: Collection[str] | None = None
) -> Iterator[tuple[str, str, TaskLaw | str]]:
    """Yield each task and metric of the ladder with its law, or with the reason why there is none.

    Args:
        wanted: Names as TASK.METRIC; None: all.
    """
    rows = ladder[(ladder["measure"] == TASKS) & ~ladder["name"].str.endswith(CONTAMINATED)]
    for task, of_task in rows.groupby("name", sort=False):
        wide = of_task.pivot_table(index="weights", columns="metric", values="value", sort=False)
        errors = of_task.pivot_table(index="weights", columns="metric", values="standard_error", sort=False)
        about = of_task.drop_duplicates("weights").set_index("weights")[["n_params", "n_tokens", "tokens", "run"]]
        chance = wide[CHANCE].mean() if CHANCE in wide else math.nan
        for metric in (name for name in wide if name != CHANCE):
            if wanted is not None and f"{task}.{metric}" not in wanted:
                continue
            values = wide[metric]
            if metric not in FALLING and not values.dropna().between(0, 1).all():
                outside = f"scores must lie from 0 to 1, as others have no known range, got {values.min():.4g} to {values.max():.4g}"
                yield str(task), str(metric), outside
                continue
            table = about.assign(**{metric: values})
            if metric in errors:
                table["standard_error"] = errors[metric].fillna(0.0)
            if metric != BITS and BITS in wide:
                table["task_loss"] = wide[BITS]
            try:
                law: TaskLaw | str = fit_task(
                    table.reset_index(drop=True),
                    n_params_convention=plan.forecast.n_params_convention,
                    metric=str(metric),
                    falls=metric in FALLING,
                    chance=None if metric in FALLING or math.isnan(chance) else float(chance),
                    loss_unit="bits per byte",
                    min_ratio=settings.least_signal_to_noise,
                )
            except (ScalingError, ValueError) as error:
                law = str(error)
            yield str(task), str(metric), law


def _forecast(task: str, metric: str, law: TaskLaw | str, plan: Plan, level: float) -> PlannedScore:
    if isinstance(law, str):
        return PlannedScore(task=task, metric=metric, errors={}, reasons=(law,))
    known: dict[str, Any] = {
        "task": task,
        "metric": metric,
        "method": law.method,
        "errors": law.errors,
        "signal_to_noise": law.signal.ratio if law.signal and math.isfinite(law.signal.ratio) else None,
    }
    try:
        found = law.forecast(plan.n_params, plan.n_tokens, level)
    except ScalingError as error:
        return PlannedScore(**known, reasons=(str(error),))
    return PlannedScore(**known, value=found.value, low=found.low, high=found.high, reasons=found.reasons)


def memorisation_law(ladder: pd.DataFrame) -> ScoreLaw:
    """Fit the memorised share over size and the times that a window was read; its floor is the share of held-out windows.

    Raises:
        ScalingError: If there are too few shares.
    """
    rows = ladder[ladder["measure"] == MEMORISATION]
    of_windows = ["weights", "name", "n_params"]
    wide = rows.pivot_table(index=of_windows, columns="metric", values="value", sort=False)
    errors = rows[rows["metric"] == MEMORISED].set_index(of_windows)["standard_error"]
    is_held_out = wide.index.get_level_values("name") == HELD_OUT
    floor = wide.loc[is_held_out, MEMORISED].mean() if is_held_out.any() else 0.0
    table = wide.assign(standard_error=errors)[~is_held_out].reset_index()
    law = fit_score(table, metric=MEMORISED, chance=float(floor), columns={"n_tokens": "repetitions"})
    return replace(law, tokens_per_param_range=(0.0, math.inf))  # repetitions per parameter mean nothing


def _memorised(ladder: pd.DataFrame, plan: Plan, level: float) -> Iterator[PlannedScore]:
    """Yield the forecasts of the shares, up to the times read if the most read text of the ladder is read on at the same rate.

    Shares rise from none to most within a few doublings, so runs that memorised nothing don't tell when a larger run will.
    """
    read = ladder[(ladder["measure"] == MEMORISATION) & (ladder["metric"] == "repetitions")]
    if read.empty:
        return
    most = (read["value"] * max(1.0, plan.n_tokens / read["n_tokens"].max())).max()
    law: ScoreLaw | None
    try:
        law, why = memorisation_law(ladder), "no share of the ladder is clearly above the floor"
    except (ScalingError, ValueError) as error:
        law, why = None, str(error)
    for least in (2**power for power in range(math.floor(math.log2(most)) + 1)):
        known = PlannedScore(task=f"{MEMORISATION}, {times_read(least)}", metric=MEMORISED, errors={}, reasons=(why,))
        if law is None or not law.rises:
            yield known
            continue
        found = law.forecast(plan.n_params, math.sqrt(least * (2 * least - 1)), level=level)
        yield replace(
            known, value=found.value, low=found.low, high=found.high, method=found.method, reasons=found.reasons
        )


def _measured(score: PlannedScore, found: pd.DataFrame) -> PlannedScore:
    if (score.task, score.metric) not in found.index:
        return score
    row = found.loc[(score.task, score.metric)]
    error = row["standard_error"]
    return replace(score, measured=float(row["value"]), standard_error=None if pd.isna(error) else float(error))


def registered_scores(plan: str, ledger: Ledger) -> ScoreForecasts | None:
    """The forecasts registered for a plan's key."""
    recorded = ledger.result(ResultKind.SCORE_FORECASTS, plan)
    return ScoreForecasts.from_dict(recorded) if recorded else None


def register_scores(forecasts: ScoreForecasts, ledger: Ledger) -> ScoreForecasts:
    """Record the forecasts once, before the run's first step, and return what is registered."""
    if known := registered_scores(forecasts.plan, ledger):
        return known
    forecasts = in_time(forecasts, ledger)
    ledger.record_result(ResultKind.SCORE_FORECASTS, forecasts.plan, forecasts.to_dict())
    return registered_scores(forecasts.plan, ledger) or forecasts


def in_time(forecasts: ScoreForecasts, ledger: Ledger) -> ScoreForecasts:
    """Return forecasts that are not registered without their values if the run has begun: nothing can be forecast any more."""
    started = (ResultKind.PROMOTION_STARTED, ResultKind.EXTERNAL_RUN_STARTED)
    if not any(ledger.result(kind, forecasts.plan) for kind in started):
        return forecasts
    why = "the run began before this score was forecast"
    late = (PlannedScore(task=s.task, metric=s.metric, errors={}, reasons=(why,)) for s in forecasts.scores)
    return replace(forecasts, scores=tuple(late))
