"""The forecast of an amended run: the law at its tokens, corrected by what the lineage measured so far, widened by its changes.

The law's error on this lineage, e in log loss, has the scale s of its forecast. The evaluations near the checkpoint measure it
as o, the mean log ratio of loss to band, with the variance v that the ladder's runs have from each other there. By both,

    e = o·s² / (s² + v),   var e = s²·v / (s² + v), and at least FLOOR².

The run's own curve also forecasts the end of the parent's schedule (`ScheduleFit.forecast`), if the law of the ladder's schedules
holds for it. Then e is the mean of both, weighted by their variances. If they lie farther apart than these allow, d² > v1 + v2, the
variance of the mean grows by d² / (v1 + v2) (Birge, Phys. Rev. 40, 1932).

A change of the schedule or the rate is worth what the law of the ladder's schedules (`scaling.fit_schedules`) says, anchored at the
run's own curve: its forecast of the changed schedule over that of the parent's, stretched to the same tokens. The interval of this
ratio (`ScheduleFit.effect`) is added as an independent error.

Another start of the corpus's last stage is worth what the law of the ladder's branches (`scaling.fit_stages`) says; its interval is
added, too.

A change that no law covers may cost all that the run has still to gain, or gain as much again: the log of the highest loss in the
second half of the parent over the forecast. That amount is added too, once for all changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from scipy.stats import t as student

from muscale.full_runs.amend.amendment import Amendment
from muscale.full_runs.amend.so_far import SoFar
from muscale.plans.band import Band, registered_band
from muscale.plans.ladder_schedules import LadderSchedules
from muscale.plans.plan import Plan
from muscale.plans.sizing import epochs, repeats
from muscale.proxies.ladder import law_columns
from muscale.serialization import Recorded
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.continued import amended
from scaling import ScalingError, ScalingFit, ScheduleEffect, ScheduleForecast, StageLaw
from scaling.fits.forecast import FLOOR, interval_factor
from scaling.schedules.schedule_fit import MAX_WIDENING

COVERED = ("n_tokens", "seed", "until_fraction")
"""Changes that the law of size and tokens covers, or that of the corpus's stages, which is judged by the tokens themselves."""
OF_SCHEDULE = tuple(
    f"hyperparameters.{name}"
    for name in (
        "schedule",
        "cooldown_fraction",
        "final_fraction",
        "learning_rate",
        "learning_rate_factor",
        "rewarm_tokens",
    )
)
"""Changes that the law of schedules covers."""
_MOST_DOUBTS = 3  # about a schedule, which are named
NEAR = 0.2
"""Share of the parent's tokens before the checkpoint whose evaluations measure the law's error."""


@dataclass(frozen=True, kw_only=True)
class SecondForecast(Recorded):
    """The forecast of an amended run's final held-out loss, in nats per token, registered before its first step.

    Attributes:
        loss, low, high, level: The forecast.
        n_tokens: Tokens of the lineage at the run's end.
        by_law: Loss that the law forecasts for these tokens.
        correction: Log of the loss over the law's, by what was measured so far; 0 if nothing was.
        by_curve: Loss at the end of the parent's schedule by the run's own curve; None if no law of schedules holds for it.
        reweighting: Log ratio of the parent's loss under the new weights of its sources to its loss under the old ones.
        by_schedule: Log of the loss over that of the parent's schedule; 0 if the schedule is the parent's or no law covers it.
        by_stages: Log of the loss over that with the planned share of tokens in the corpus's last stage; likewise.
        widening: Log loss that the interval was widened by, for changes that no law covers.
        reasons: What the law does not cover; empty if it covers all.
    """

    loss: float
    low: float
    high: float
    level: float
    n_tokens: int
    by_law: float
    correction: float
    by_curve: float | None = None
    reweighting: float
    by_schedule: float = 0.0
    by_stages: float = 0.0
    widening: float
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        of_curve = "" if self.by_curve is None else f", whose curve alone gives {self.by_curve:.4f}"
        parts = [f"{self.by_law:.4f} by the law", f"{math.expm1(self.correction):+.2%} by the losses so far{of_curve}"]
        if self.reweighting:
            parts.append(f"{math.expm1(self.reweighting):+.2%} by the new weights")
        if self.by_schedule:
            parts.append(f"{math.expm1(self.by_schedule):+.2%} by the schedule")
        if self.by_stages:
            parts.append(f"{math.expm1(self.by_stages):+.2%} by the start of the last stage")
        lines = [
            f"forecast {self.loss:.4f} nats per token after {self.n_tokens:,} tokens in all, {self.level:.0%} interval "
            f"[{self.low:.4f}, {self.high:.4f}]: {', '.join(parts)}",
            *(f"not covered: {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)


def second_forecast(
    amendment: Amendment,
    fit: ScalingFit | None,
    ledger: Ledger,
    *,
    level: float,
    schedules: Callable[[], LadderSchedules | str] = lambda: "no law of schedules was fitted",
    stages: Callable[[], StageLaw | str] = lambda: "no law of stages was fitted",
) -> SecondForecast | str:
    """Forecast an amended run, before it starts.

    Args:
        fit: The study's law.
        ledger: Ledger of the study, with the plan's forecast and band.
        level: Nominal coverage of the interval.
        schedules: Gives the law of the ladder's schedules, or why there is none.
        stages: Gives the law of the corpus's stages, or why there is none.

    Returns:
        The forecast, or why there is none.
    """
    if fit is None:
        return "the runs of the law are not all trained under these settings"
    lineage, parent = amendment.lineage, amendment.parent
    if any(set(past.sources.values()) != set(lineage[0].sources.values()) for past in lineage):
        return "the law holds only for the corpus that it was fitted on"
    registered = ledger.forecast(lineage[0].run)
    if registered is None:
        return f"no forecast is registered for {lineage[0].label}"
    plan, n_tokens = Plan.of_row(registered), sum(past.tokens for past in lineage)
    band = registered_band(plan.key, ledger)
    so_far = SoFar.of(
        [(past.run, past.tokens) for past in parent.lineage],
        amendment.directory,
        ledger,
        band.offset if band else 0.0,
        last_stage_begins=_last_stage_begins(amendment),
    )
    law = fit.forecast(plan.n_params, n_tokens, level=level, **law_columns(fit, plan.model))
    of_batch = plan.batch.effect / interval_factor(level) if plan.batch else 0.0
    error, variance = _error(so_far.losses, band, law.log_scale + of_batch, lineage[0].tokens)  # both as in the plan
    by_curve, of_schedule = _by_own_curve(amendment, so_far, schedules, plan, level)
    if by_curve:
        of_curve = math.log(by_curve.high / by_curve.loss) / interval_factor(level)
        error, variance = _combined(error, variance, math.log(by_curve.loss / law.loss), of_curve**2)
    of_stages = _by_stages(amendment, stages, plan, level)
    uncovered = (*_without_a_law(amendment, ledger), *of_schedule.uncovered, *of_stages.uncovered)
    loss = law.loss * math.exp(error + of_schedule.log_ratio + of_stages.log_ratio)
    second_half = [row["loss"] for row in so_far.losses if row["tokens"] >= parent.tokens_before / 2]
    if uncovered and not second_half:
        return "no law covers the change, and no loss of the parent says what it has still to gain"
    widening = max(0.0, math.log(max(second_half) / loss)) if uncovered else 0.0
    reweighting = _reweighting(so_far.losses, amendment)
    of_plan = *repeats(epochs(amendment.corpus, n_tokens, plan.model.context_length)), *plan.off_policy
    loss *= math.exp(reweighting)
    of_error = interval_factor(level) * math.sqrt(variance)
    whole = math.exp(math.hypot(of_error, of_schedule.half_width, of_stages.half_width, widening))
    return SecondForecast(
        loss=loss,
        low=loss / whole,
        high=loss * whole,
        level=level,
        n_tokens=n_tokens,
        by_law=law.loss,
        correction=error,
        by_curve=by_curve.loss if by_curve else None,
        reweighting=reweighting,
        by_schedule=of_schedule.log_ratio,
        by_stages=of_stages.log_ratio,
        widening=widening,
        reasons=tuple(dict.fromkeys((*law.reasons, *of_plan, *uncovered, *of_schedule.doubts))),
    )


@dataclass(frozen=True, kw_only=True)
class _Effect:
    """Effect of a change on the log loss.

    Attributes:
        half_width: Half the width of its interval.
        uncovered: What no law covers, so that the interval is widened.
        doubts: What the interval contains but a reader should know.
    """

    log_ratio: float = 0.0
    half_width: float = 0.0
    uncovered: Sequence[str] = ()
    doubts: Sequence[str] = ()


def _without_a_law(amendment: Amendment, ledger: Ledger) -> Iterator[str]:
    """Yield the changes of the lineage that no law covers, other than those of schedules and of the corpus's stages."""
    parent, factor = amendment.parent, amendment.parent.factor
    for key, value in amendment.changes.items():
        if key not in (*COVERED, *OF_SCHEDULE):
            yield f"{key} = {value}: no law covers this change"
    if factor < 1 and amendment.segments[-1].end + parent.tokens != parent.segments[-1].end:
        yield f"the parent's rate has fallen to {factor:.0%} of its peak, and no law covers a longer run from there"
    for past in parent.lineage[1:]:
        changed = (ledger.result(ResultKind.AMENDMENT_STARTED, past.run) or {}).get("changes", {})
        yield from (
            f"{key} = {changed[key]} of {past.label}: no law covers it" for key in changed if key not in COVERED
        )


def _by_own_curve(
    amendment: Amendment, so_far: SoFar, schedules: Callable[[], LadderSchedules | str], plan: Plan, level: float
) -> tuple[ScheduleForecast | None, _Effect]:
    """Forecast the end of the parent's schedule by the run's own curve, if the law of schedules holds, and the schedule's effect."""
    changes_it = bool(amendment.changes.keys() & {*OF_SCHEDULE})
    try:
        unchanged, changed = _by_law_of_schedules(amendment, so_far, schedules(), plan, level)
    except (ValueError, ScalingError) as reason:
        return None, _Effect(uncovered=[f"the schedule: {reason}"] if changes_it else [])
    curve = None if _unlike(unchanged) else unchanged
    if not changes_it:
        return curve, _Effect()
    doubts = [f"the schedule: {doubt}" for doubt in changed.reasons[:_MOST_DOUBTS]]
    return curve, _Effect(
        log_ratio=changed.log_ratio,
        half_width=changed.half_width,
        uncovered=doubts if _unlike(changed) else [],
        doubts=doubts,
    )


def _by_law_of_schedules(
    amendment: Amendment, so_far: SoFar, schedules: LadderSchedules | str, plan: Plan, level: float
) -> tuple[ScheduleForecast, ScheduleEffect]:
    """Return the law's forecast of the parent's schedule to its end, and the effect of the changed schedule.

    Raises:
        ValueError, ScalingError: If there is no law of schedules, or none for this curve.
    """
    if isinstance(schedules, str):
        raise ScalingError(schedules)
    parent = amendment.parent
    before, total = parent.tokens_before - parent.tokens, parent.tokens_before + amendment.n_tokens
    longer = None if total == before + parent.segments[-1].end else total
    group: dict[str, Any] = {"n_params": float(plan.n_params), "length": float(plan.n_tokens), "level": level}
    try:
        unchanged = amended(parent.segments, parent.tokens, {}, n_tokens=longer, before=before)
    except ValueError as error:  # its advice is for the parent's settings, not for those of this amendment
        raise ScalingError(f"the parent's has no form of {total:,} tokens from there to compare it with") from error
    ours, theirs = (
        schedules.path(so_far.curve, ahead, parent.tokens_before, length=plan.n_tokens)
        for ahead in (amendment.segments, unchanged)
    )
    return schedules.law.forecast(theirs, **group), schedules.law.effect(ours, theirs, **group)


def _last_stage_begins(amendment: Amendment) -> int:
    """Tokens of the parent's lineage after which the last stage of its corpus begins; 0 for one stage."""
    parent, own = amendment.parent, amendment.parent.lineage[-1]
    mixture = Corpus.open(amendment.directory / own.folder).mixture_of(parent.numerics.run_tokens)
    if mixture is None or len(mixture.stages) < 2:
        return 0
    return parent.tokens_before - own.position - own.tokens + mixture.last_stage_begins


def _by_stages(amendment: Amendment, stages: Callable[[], StageLaw | str], plan: Plan, level: float) -> _Effect:
    """Return the effect of another start of the corpus's last stage than the planned one."""
    total = amendment.parent.tokens_before + amendment.n_tokens
    if (planned := amendment.planned_share) is None:
        moved = amendment.changes.get("until_fraction")
        what = f"until_fraction = {moved}: the plan has no stages that end at fractions"
        return _Effect(uncovered=[what] if moved else [])
    if total == plan.n_tokens and amendment.has_stages_of(plan.n_tokens):
        return _Effect()
    if (share := amendment.last_stage_share) is None:
        named = any(key.split(".")[0] in ("mixture", "corpus") for key in amendment.changes)
        what = "the stages of the corpus differ from the plan's: no law covers this change"
        return _Effect(uncovered=[] if named else [what])
    if abs(share - planned) * total < amendment.segments[-1].recipe.batch_tokens:
        return _Effect()
    if isinstance(law := stages(), str):
        what = f"{share:.1%} of the tokens in the last stage of the corpus, {planned:.1%} on the ladder"
        return _Effect(uncovered=[f"{what}: {law}"])
    found = law.effect(plan.n_params, total, share, level=level)
    return _Effect(log_ratio=found.log_ratio, half_width=found.half_width, uncovered=found.reasons)


def _unlike(found: ScheduleForecast | ScheduleEffect) -> bool:
    """Whether there is a doubt that the interval does not contain: errors beyond those of the tested curves are in it."""
    return len(found.reasons) > (found.widening > MAX_WIDENING)


def _combined(one: float, variance: float, other: float, other_variance: float) -> tuple[float, float]:
    """Mean of two values weighted by their variances, and its variance, by the formula at the head of this file."""
    both = variance + other_variance
    mean = (one * other_variance + other * variance) / both
    return mean, max(variance * other_variance / both * max(1.0, (one - other) ** 2 / both), FLOOR**2)


def _error(rows: Sequence[Mapping[str, Any]], band: Band | None, scale: float, tokens: int) -> tuple[float, float]:
    """The law's error in log loss on this lineage, and its variance, by losses of the plan's first `tokens` inside its band."""
    known = (0.0, scale**2)
    if band is None or band.n_stems < 2:
        return known
    near = [row for row in rows if tokens * (1 - NEAR) <= row["tokens"] <= min(tokens, band.n_tokens)]
    frame = pd.DataFrame(
        [{"tokens": row["tokens"], "val_loss": row["loss"]} for row in near], columns=["tokens", "val_loss"]
    )
    placed = band.place(frame).dropna(subset=["expected"])
    if placed.empty:
        return known
    logs = [math.log(loss / expected) for loss, expected in zip(placed["loss"], placed["expected"], strict=True)]
    observed = sum(logs) / len(logs)
    own = math.log(band.high / band.loss)
    reach = math.log(placed["high"].iloc[-1] / placed["expected"].iloc[-1])
    spread = max(0.0, reach**2 - own**2) / float(student.ppf((1 + band.level) / 2, band.n_stems - 1)) ** 2
    of_plan = (own / interval_factor(band.level)) ** 2  # the law's error at the plan's tokens
    weight = of_plan / (of_plan + spread)
    farther = max(0.0, scale**2 - of_plan)  # the law's further error at other tokens
    return weight * observed, max(of_plan * (1 - weight) + farther, FLOOR**2)


def _reweighting(rows: Sequence[Mapping[str, Any]], amendment: Amendment) -> float:
    """Log ratio of the last loss under the run's weights of sources to that under the parent's."""
    weights = amendment.corpus.evaluation_weights
    last = rows[-1] if rows else {"sources": {}}
    if set(last["sources"]) != set(weights) or not last["sources"]:
        return 0.0
    return math.log(sum(weights[name] * last["sources"][name] for name in weights) / last["loss"])
