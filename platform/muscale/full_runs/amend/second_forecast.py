"""The forecast of an amended run: the law at its tokens, corrected by what the lineage measured so far, widened by its changes.

The law's error on this lineage, e in log loss, has the scale s of its forecast. The evaluations near the checkpoint measure it
as o, the mean log ratio of loss to band, with the variance v that the ladder's runs have from each other there. By both,

    e = o·s² / (s² + v),   var e = s²·v / (s² + v), and at least FLOOR².

A change that no law covers may cost all that the run has still to gain, or gain as much again: the log of the highest loss in the
second half of the parent over the forecast. That amount is added to the interval, as an independent error, once for all changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as student

from muscale import json_lines
from muscale.full_runs.amend.amendment import Amendment
from muscale.layout import FULL_RUNS, METRICS
from muscale.plans.band import Band, registered_band
from muscale.plans.planning import Plan
from muscale.serialization import Recorded
from muscale.store.ledger import Ledger
from scaling import ScalingFit
from scaling.fits.forecast import FLOOR, interval_factor

COVERED = ("n_tokens", "seed")
"""Changes that the law covers."""
_WINDOWS = 10  # of the second half of the parent's tokens: 5 % of them each, as in the band
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
        reweighting: Log ratio of the parent's loss under the new weights of its sources to its loss under the old ones.
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
    reweighting: float
    widening: float
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.by_law:.4f} by the law", f"{math.expm1(self.correction):+.2%} by the losses so far"]
        if self.reweighting:
            parts.append(f"{math.expm1(self.reweighting):+.2%} by the new weights")
        lines = [
            f"forecast {self.loss:.4f} nats per token after {self.n_tokens:,} tokens in all, {self.level:.0%} interval "
            f"[{self.low:.4f}, {self.high:.4f}]: {', '.join(parts)}",
            *(f"not covered: {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)


def second_forecast(
    amendment: Amendment, fit: ScalingFit | None, ledger: Ledger, *, level: float
) -> SecondForecast | str:
    """Forecast an amended run, before it starts.

    Args:
        fit: The study's law.
        ledger: Ledger of the study, with the plan's forecast and band.
        level: Nominal coverage of the interval.

    Returns:
        The forecast, or why there is none.
    """
    if fit is None:
        return "the runs of the law are not all trained under these settings"
    lineage = amendment.lineage
    if any(set(past.sources.values()) != set(lineage[0].sources.values()) for past in lineage):
        return "the law holds only for the corpus that it was fitted on"
    registered = ledger.forecast(lineage[0].run)
    if registered is None:
        return f"no forecast is registered for {lineage[0].label}"
    plan, n_tokens = Plan.of_row(registered), sum(past.tokens for past in lineage)
    band = registered_band(plan.key, ledger)
    rows = _losses(amendment, band.offset if band else 0.0)
    law = fit.forecast(plan.n_params, n_tokens, level=level)
    error, variance = _error(rows, band, law.log_scale, amendment.parent.tokens_before)
    loss = law.loss * math.exp(error)
    uncovered = [key for key in amendment.changes if key not in COVERED]
    second_half = [row["loss"] for row in rows if row["tokens"] >= amendment.parent.tokens_before / 2]
    widening = max(0.0, math.log(max(second_half) / loss)) if uncovered and second_half else 0.0
    reweighting = _reweighting(rows, amendment)
    loss *= math.exp(reweighting)
    reach = math.exp(math.hypot(interval_factor(level) * math.sqrt(variance), widening))
    reasons = [f"{key} = {amendment.changes[key]}: no law covers this change" for key in uncovered]
    if uncovered and not second_half:
        return "no law covers the change, and no held-out loss of the parent says what it has still to gain"
    return SecondForecast(
        loss=loss,
        low=loss / reach,
        high=loss * reach,
        level=level,
        n_tokens=n_tokens,
        by_law=law.loss,
        correction=error,
        reweighting=reweighting,
        widening=widening,
        reasons=(*law.reasons, *reasons),
    )


def _losses(amendment: Amendment, offset: float) -> list[dict[str, Any]]:
    """Losses of the lineage up to the checkpoint: tokens of the lineage, loss, and `sources` of a mixture.

    Without a held-out loss in the second half, means of the training loss over windows of that half stand in for them, each times
    exp(`offset`), the held-out over the training loss of the ladder's runs.
    """
    found: list[dict[str, Any]] = []
    steps: list[tuple[int, float]] = []
    before, end = 0, amendment.parent.tokens_before
    for past in amendment.parent.lineage:
        for row in json_lines.read(amendment.directory / FULL_RUNS / past.run / METRICS):
            if row["tokens"] > past.tokens:
                continue
            tokens = before + row["tokens"]
            if row.get("val_loss") is not None:
                found.append({"tokens": tokens, "loss": row["val_loss"], "sources": row.get("source_losses") or {}})
            if row.get("train_loss") is not None and tokens > end / 2:
                steps.append((tokens, math.log(row["train_loss"])))
        before += past.tokens
    if not steps or any(row["tokens"] > end / 2 for row in found):
        return found
    for window in np.array_split(np.array(steps), min(_WINDOWS, len(steps))):
        tokens, log_loss = window.mean(axis=0)
        found.append({"tokens": round(tokens), "loss": math.exp(log_loss + offset), "sources": {}})
    return found


def _error(rows: Sequence[Mapping[str, Any]], band: Band | None, scale: float, tokens: int) -> tuple[float, float]:
    """The law's error in log loss on this lineage, and its variance, by the evaluations inside the plan's band."""
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
