"""The band expected for a full run's held-out losses: the forecast times the loss ratio measured on the ladder's runs.

At a share u of its tokens a run's loss is r(u) times its final loss. r and its spread from run to run are measured on the
ladder's runs of the plan's schedule. These runs evaluate only where a segment ends; in between, their training losses are used:
each step's batch is new to the model, so the mean over a window is a held-out loss up to an offset, which is measured where
both are known. Both the full run and the ladder's runs evaluate their last weights. Averaged weights, by which rungs are
ranked, have a lower loss in the stable phase and do not enter the band.

With h the forecast's interval in log loss and s(u) the standard deviation of log r(u) over runs of n stems, the band is

    forecast · exp(mean log r(u) ± sqrt(h² + t²·(s²(1 + 1/n) + e²)))

where t is the quantile of Student's t with n - 1 degrees of freedom (prediction interval of one more run), and e the standard
error of the offset, 0 if the ladder evaluated. At the end r is 1, and the band is the registered interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import t as student

from muscale.plans.plan import Plan
from muscale.proxies.ladder_curves import Floats, RunCurve, read_curves
from muscale.serialization import Recorded
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.data.mixture import Mixture

WINDOW = 0.05
"""Share of a run over which training losses are averaged; the band begins one window after warmup (assumed: 8 to 128 steps of
the quickstart's ladder)."""
MIN_STEPS = 100  # in a run, so that a window has five (assumed)
MIN_STEMS = 3  # for a spread (assumed)
_LINE_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class Band(Recorded):
    """The expected held-out loss along a run, with its interval, in nats per token; registered with the plan.

    Attributes:
        loss, low, high, level: Forecast of the final loss.
        shares: u at each point, ascending; the last is 1.
        log_ratio: Mean of log r at each point.
        log_reach: Half the interval in log loss at each point.
        n_runs, n_stems: Runs and stems of the ladder from which r was measured.
        offset: Log of held-out over training loss of the same weights, measured on the ladder.
        window: Share of a run over which training losses are averaged.
        reason: Why the band covers only the end; "" if it covers more.
    """

    loss: float
    low: float
    high: float
    level: float
    n_tokens: int
    shares: tuple[float, ...] = (1.0,)
    log_ratio: tuple[float, ...] = (0.0,)
    log_reach: tuple[float, ...]
    n_runs: int = 0
    n_stems: int = 0
    offset: float = 0.0
    window: float = WINDOW
    reason: str = ""

    @property
    def begins(self) -> float:
        """Share of the run at which the band begins."""
        return self.shares[0]

    @property
    def along(self) -> list[dict[str, float]]:
        """The band at its points: tokens, loss (expected), low, high."""
        tokens = [share * self.n_tokens for share in self.shares]
        sides = self.at(tokens).rename(columns={"expected": "loss"})
        return [{"tokens": round(n), **side} for n, side in zip(tokens, sides.to_dict("records"), strict=True)]

    def at(self, tokens: ArrayLike) -> pd.DataFrame:
        """Columns expected, low, high, one row per number of tokens; NaN before the band begins."""
        share = np.atleast_1d(np.asarray(tokens, dtype=float)) / self.n_tokens
        ratio = np.interp(share, self.shares, self.log_ratio, left=math.nan)
        reach = np.interp(share, self.shares, self.log_reach, left=math.nan)
        end = share >= 1
        frame = pd.DataFrame({name: self.loss * np.exp(ratio + sign * reach) for name, sign in _SIDES.items()})
        frame.loc[end, ["expected", "low", "high"]] = self.loss, self.low, self.high
        return frame

    def to_frame(self) -> pd.DataFrame:
        """The band as a smooth line: columns tokens, expected, low, high; a single row if the band covers only the end."""
        shares = np.linspace(self.begins, 1.0, _LINE_POINTS) if self.begins < 1 else np.array([1.0])
        tokens = shares * self.n_tokens
        return pd.concat([pd.DataFrame({"tokens": tokens}), self.at(tokens)], axis=1)

    def place(self, evaluations: pd.DataFrame) -> pd.DataFrame:
        """Compare evaluations (columns tokens, val_loss) with the band; see `RunStatus.evaluations`."""
        frame = evaluations[["tokens", "val_loss"]].rename(columns={"val_loss": "loss"}).reset_index(drop=True)
        frame.insert(1, "share", frame["tokens"] / self.n_tokens)
        frame = pd.concat([frame, self.at(frame["tokens"].to_numpy(dtype=float))], axis=1)
        frame["place"] = "inside"
        frame.loc[frame["loss"] > frame["high"], "place"] = "above"
        frame.loc[frame["loss"] < frame["low"], "place"] = "below"
        frame.loc[frame["expected"].isna(), "place"] = "before the band"
        return frame

    @classmethod
    def end_only(cls, reason: str, *, loss: float, high: float, **known: Any) -> Self:
        """A band without points before the end, where it is the registered interval; `reason` says why, `known` holds other fields."""
        reach = math.log(high / loss)
        return cls(loss=loss, high=high, log_reach=(reach,), reason=reason, **known)

    def __str__(self) -> str:
        if self.reason:
            return f"band: end only, [{self.low:.4f}, {self.high:.4f}]: {self.reason}"
        return (
            f"band: from {self.begins:.0%} of the run on, from {self.n_runs} ladder runs of {self.n_stems} stems; at the end "
            f"[{self.low:.4f}, {self.high:.4f}]"
        )


_SIDES = {"expected": 0, "low": -1, "high": 1}


def make_band(
    curves: Sequence[RunCurve],
    *,
    warmup_tokens: int,
    ends: Sequence[int],
    loss: float,
    low: float,
    high: float,
    level: float,
    data_from: float = 0.0,
) -> Band:
    """Compute the band of a run.

    Args:
        curves: Runs with the schedule of the run.
        ends: Tokens at which the run's segments end; the last is D.
        loss, low, high, level: Forecast of the run's final loss.
        data_from: Share of a run after which its data are in the proportions of the held-out loss; before, a training loss says
            nothing about it.
    """
    n_tokens = ends[-1]
    usable = [c for c in curves if len(c.ends) == len(ends) and len(c.positions) >= MIN_STEPS]
    n_stems = len({curve.stem for curve in usable})
    common: dict[str, Any] = {"loss": loss, "low": low, "high": high, "level": level, "n_tokens": n_tokens}
    common |= {"n_runs": len(usable), "n_stems": n_stems}
    if n_stems < MIN_STEMS:
        reason = (
            f"a spread needs {MIN_STEMS} ladder stems with recorded curves of at least {MIN_STEPS} steps under the plan's "
            f"schedule, got {n_stems}; add to ladder.stems"
        )
        return Band.end_only(reason, **common)
    warmup = max(data_from, warmup_tokens / n_tokens, *(curve.warmup_tokens / curve.n_tokens for curve in usable))
    fractions = np.array([0, *ends]) / n_tokens
    centres = _centres(fractions, warmup)
    if not centres:
        return Band.end_only(
            f"no part of the schedule after warmup and earlier stages of the data is longer than {WINDOW:.0%} of the run",
            **common,
        )
    offset, stderr = held_out_offset(usable, warmup)
    if math.isnan(offset):
        return Band.end_only("no held-out loss lies one window after warmup", **common)
    t, h = float(student.ppf((1 + level) / 2, n_stems - 1)), math.log(high / loss)

    def point(share: float, logs: Sequence[float], error: float) -> tuple[float, float, float]:
        """The share, the mean log ratio of the runs there, and half the interval of one more run."""
        variance = np.var(logs, ddof=1) * (1 + 1 / n_stems) + error**2
        return share, float(np.mean(logs)), math.hypot(h, t * math.sqrt(variance))

    inner = [float(end) for end in fractions[1:-1] if end > warmup]
    smoothed = [point(c, [_smoothed(curve, fractions, c) + offset for curve in usable], stderr) for c in centres]
    evaluated = [point(end, [_evaluated(curve, fractions, end) for curve in usable], 0.0) for end in inner]
    shares, ratio, reach = np.array(sorted([*smoothed, *evaluated, (1.0, 0.0, h)])).T
    first = float(max(warmup + WINDOW, shares[0]))
    shown = [first, *shares[shares > first].tolist()]
    return Band(
        **common,
        shares=tuple(shown),
        log_ratio=tuple(np.interp(shown, shares, ratio).tolist()),
        log_reach=tuple(np.interp(shown, shares, reach).tolist()),
        offset=offset,
    )


def _centres(fractions: Floats, warmup: float) -> list[float]:
    """Centres of windows, half a window apart; no window crosses the end of a segment, where the rate may begin to fall."""
    centres: list[float] = []
    for start, end in pairwise(fractions):
        first, last = max(start, warmup) + WINDOW / 2, end - WINDOW / 2
        if last >= first:
            centres += [float(c) for c in np.linspace(first, last, math.ceil((last - first) / (WINDOW / 2)) + 1)]
    return centres


def _smoothed(curve: RunCurve, fractions: Floats, centre: float) -> float:
    """Log ratio of the training loss around a share to the final held-out loss."""
    # rounding to batches moves the ends of segments a little
    own = float(np.interp(centre, fractions, curve.fractions))
    return curve.mean_log(own - WINDOW / 2, own + WINDOW / 2) - math.log(curve.final_loss)


def _evaluated(curve: RunCurve, fractions: Floats, end: float) -> float:
    """Log ratio of the held-out loss at the end of a segment to the final held-out loss."""
    number = int(np.argmin(np.abs(fractions[1:] - end)))
    return math.log(curve.ends[number][1] / curve.final_loss)


def held_out_offset(curves: Sequence[RunCurve], warmup: float) -> tuple[float, float]:
    """Mean log ratio of held-out to training loss of the same weights at ends of segments, and its standard error by stems.

    The training loss at an end is extrapolated linearly from the means of the two half windows before it.
    """
    by_stem: dict[str, list[float]] = {}
    for curve in curves:
        for (start, end), (_, loss) in zip(pairwise(curve.fractions), curve.ends, strict=True):
            if end - WINDOW >= max(start, warmup):
                middle = end - WINDOW / 2
                before, last = curve.mean_log(end - WINDOW, middle), curve.mean_log(middle, end)
                by_stem.setdefault(curve.stem, []).append(math.log(loss) - (1.5 * last - 0.5 * before))
    if not by_stem:
        return math.nan, math.nan
    means = np.array([np.mean(found) for found in by_stem.values()])
    return float(means.mean()), float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0


def registered_band(plan: str, ledger: Ledger) -> Band | None:
    """The band registered for a plan's key."""
    recorded = ledger.result(ResultKind.BAND, plan)
    return Band.from_dict(recorded) if recorded else None


def register_band(
    plan: Plan, ledger: Ledger, ladder: pd.DataFrame, *, max_regret: float, mixture: Mixture | None = None
) -> Band:
    """Compute the band of a plan, and record it once in the ledger before the run's first step.

    A run that began without a band is compared with its forecast at the end only.

    Args:
        ladder: Table of `ladder.law_rows`; the runs in the law's fit also enter the band.
        max_regret: Value of [fit].
        mixture: That of the corpus, if it has several sources.
    """
    if known := registered_band(plan.key, ledger):
        return known
    fitted = (ladder["purpose"] == "ladder") & (ladder["left_out"] == "") & (ladder["regret"] <= max_regret)
    forecast = {name: getattr(plan.forecast, name) for name in ("loss", "low", "high", "level")}
    started = (ResultKind.PROMOTION_STARTED, ResultKind.EXTERNAL_RUN_STARTED)
    if any(ledger.result(kind, plan.key) for kind in started):
        reason = "the run began before the band was registered"
        return Band.end_only(reason, n_tokens=plan.n_tokens, **forecast)
    data_from = mixture.last_stage_fraction if mixture else 0.0
    if data_from is None:
        reason = (
            "the corpus's stages end after numbers of tokens, at other shares of the ladder's runs than of this one"
        )
        band = Band.end_only(reason, n_tokens=plan.n_tokens, **forecast)
    else:
        band = make_band(
            read_curves(ledger, list(ladder["key"][fitted])),
            warmup_tokens=plan.segments[0].recipe.warmup_tokens,
            ends=[segment.end for segment in plan.segments],
            data_from=data_from,
            **forecast,
        )
    ledger.record_result(ResultKind.BAND, plan.key, band.to_dict())
    return registered_band(plan.key, ledger) or band  # another process may have registered first
