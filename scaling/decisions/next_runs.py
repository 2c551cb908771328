"""The next runs of a ladder: affordable runs that narrow the forecast of one target most.

Runs are chosen one by one among the affordable ones, by the reduction of the linearised forecast's variance
(`scaling.decisions.design`). The choice needs no losses, so a batch is chosen before any of its runs; afterwards fit and choose again.
On public pools it reached a given error with about half of the FLOPs of a random choice (tests/benchmarks/next_run.py).
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.arrays import Array
from scaling.checks import numbers, require_columns
from scaling.decisions.accelerators import require_positive
from scaling.decisions.design import Design
from scaling.fits.ensemble import RESIDUAL_RATIO, Ensemble
from scaling.fits.forecast import Forecast, interval_factor, log_scale
from scaling.fits.result import ScalingFit
from scaling.fits.runs import COUNTED, counts
from scaling.fits.support import RATIO_MARGIN, few_runs, unsupported
from scaling.forms.law import compute_flops
from scaling.presentation import counted, lines
from scaling.serialization import JsonResult, TableLayout

WORTH = 0.02
"""Least share of the interval's variance s² that a run must remove to be advised (assumed). The fit's residual and a floor stay in
s² whatever runs are added (`scaling.fits.forecast`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NextRuns(JsonResult):
    """Next runs, in the order of their choice.

    Attributes:
        runs: rows of the chosen candidates, with `cost_flops`, and after each run: `spent_flops`, `variance_left` (share of the
            parameters' variance at the target) and `interval` (expected full width of the interval over the forecast, if the
            run's loss is as the form predicts; if the form fails, the next fit's interval is wider, see RESULTS.md).
        now: forecast of the target by the present fit; it states what N counts.
        reasons: why the forecast would still be unsupported after these runs (`scaling.fits.support`); for reasons that depend
            on the fits, the present fits are used.
    """

    runs: Annotated[pd.DataFrame, TableLayout("tight")] = field(repr=False)
    now: Forecast
    stopped: str
    reasons: tuple[str, ...]

    @property
    def cost_flops(self) -> float:
        return float(self.runs["cost_flops"].sum())

    @property
    def width_now(self) -> float:
        """Full width of the interval over the forecast, before these runs."""
        return (self.now.high - self.now.low) / self.now.loss

    @property
    def width_then(self) -> float:
        """Expected full width of the interval over the forecast, after these runs."""
        return float(self.runs["interval"].iloc[-1]) if len(self.runs) else self.width_now

    @property
    def about(self) -> str:
        """Lines about the target, its interval before and after the runs, and why there are no more runs."""
        counts = counted(self.now.n_params_convention)
        target = f"{self.now.n_params:.4g} parameters ({counts}), {self.now.n_tokens:.4g} tokens"
        n_more = f"{len(self.runs)} more run{'s' * (len(self.runs) != 1)}"
        return lines(
            {
                "target": f"{target}: {self.now.loss:.4f} {self.now.loss_unit}",
                "interval": f"{self.now.level:.0%}, full width {self.width_now:.2%} of the loss now, "
                f"{self.width_then:.2%} expected after {n_more} of {self.cost_flops:.3g} FLOPs",
                "stopped": self.stopped,
                "then": "supported" if not self.reasons else "still unsupported: " + "; ".join(self.reasons),
            }
        )

    def __str__(self) -> str:
        formats = dict.fromkeys(self.runs.select_dtypes("number"), "{:.4g}".format)
        formats |= {"variance_left": "{:.1%}".format, "interval": "{:.2%}".format}
        table = [self.runs.to_string(index=False, formatters=formats)] if len(self.runs) else []
        return "\n".join([self.about, *table])


def next_runs(
    fit: ScalingFit,
    n_params: float,
    n_tokens: float,
    *,
    affordable_flops: float,
    candidates: pd.DataFrame | None = None,
    n_runs: int = 4,
    width: float | None = None,
    level: float = 0.9,
    **columns: float,
) -> NextRuns:
    """Choose the runs that shrink the variance of one forecast most.

    Args:
        affordable_flops: most FLOPs that the runs may cost together.
        candidates: one row per possible run: the law's columns, such as `n_params` and `n_tokens`, and `cost_flops` if it is not
            6·N·D; each is chosen at most once. By default `candidate_runs`.
        width: stop as soon as the expected full width of the interval over the forecast is at most this, and the
            forecast would be supported.
        columns: the law's further columns at the target, such as `sparsity`.

    Raises:
        ValueError: an argument breaks its rule.
        ScalingError: forecasts were not tested for the columns of the law.
    """
    require_positive("affordable_flops", affordable_flops)
    if n_runs < 1:
        raise ValueError(f"n_runs must be at least 1, got {n_runs}")
    if width is not None:
        require_positive("width", width)
    target = {"n_params": n_params, "n_tokens": n_tokens, **columns}
    now = fit.forecast(**target, level=level)
    if candidates is None:
        candidates = candidate_runs(fit, n_params, n_tokens, affordable_flops=affordable_flops, **columns)
    require_columns(candidates, (*target,))
    points = pd.DataFrame({name: (counts if name in COUNTED else numbers)(candidates, name) for name in target})
    cost = (
        numbers(candidates, "cost_flops")
        if "cost_flops" in candidates
        else compute_flops(points["n_params"], points["n_tokens"])
    )

    if fit.one_size is not None and (points["n_params"] != fit.one_size).any():
        raise ValueError(f"candidates must have the n_params of the law of one size, {fit.one_size:.10g}")
    ensemble = fit.ensemble
    design = Design.of(ensemble, fit.rows, **target)
    rows = fit.rows
    helps = _bring_support(rows, points, target)
    picks = _picks(design, points, cost, affordable_flops, helps)
    before = design.variance
    chosen: list[int] = []
    records: list[tuple[float, float, float]] = []
    stopped = f"{n_runs} runs were asked for"
    reasons, scale, reached = now.reasons, now.log_scale, _full_width(now.log_scale, level)
    while len(chosen) < n_runs:
        if width is not None and reached <= width and not reasons:
            stopped = f"the interval is at most {width:.2%} wide and within what was tested"
            break
        if (pick := next(picks, None)) is None:
            stopped = "no affordable candidate is left"
            break
        index, design = pick
        then = _with_runs(rows, points.iloc[[index]])
        share = design.variance / before
        after, floor = (float(log_scale(_Later.of(ensemble, left, then), **target)) for left in (share, 0.0))
        later = tuple(unsupported(then, ensemble, **target).values())
        telling = after**2 <= (1 - WORTH) * scale**2 or len(later) < len(reasons)
        if not telling and not few_runs(rows) and not (helps[index] and len(chosen) < 2):
            stopped = (
                f"no run that can still be paid for takes {WORTH:.0%} off the interval's variance: "
                f"{_full_width(floor, level):.2%} of its {reached:.2%} stay whatever runs are added"
            )
            break
        chosen.append(index)
        rows, scale, reached, reasons = then, after, _full_width(after, level), later
        records.append((cost[chosen].sum(), share, reached))
    runs = candidates.iloc[chosen].assign(cost_flops=cost[chosen])
    runs[["spent_flops", "variance_left", "interval"]] = np.reshape(records, (len(chosen), 3))
    return NextRuns(runs=runs, now=now, stopped=stopped, reasons=reasons)


def _bring_support(rows: pd.DataFrame, points: pd.DataFrame, target: Mapping[str, float]) -> NDArray[np.bool_]:
    """Mask [K] of the candidates of which two runs would leave fewer reasons about the range of the runs."""
    beside_number = {"few runs"}
    now = unsupported(rows, None, **target).keys() - beside_number
    if not now:
        return np.zeros(len(points), dtype=bool)
    rows = rows[[*target, "stem"]].astype({"stem": object})
    pairs = (_with_runs(rows, points.iloc[[number, number]]) for number in range(len(points)))
    brings = (unsupported(pair, None, **target).keys() - beside_number < now for pair in pairs)
    return np.fromiter(brings, dtype=bool, count=len(points))


def _picks(
    design: Design, points: pd.DataFrame, cost: Array, affordable: float, helps: NDArray[np.bool_]
) -> Iterator[tuple[int, Design]]:
    """Choose greedily; the first two runs are among those that bring support, as two runs extend a supported range."""
    first = np.flatnonzero(helps & (cost <= affordable / 2))
    taken: list[int] = []

    def chosen(design: Design, among: NDArray[np.intp], affordable: float) -> Iterator[tuple[int, Design]]:
        columns = {name: points[name].to_numpy()[among] for name in points}
        return design.greedy(cost=cost[among], affordable=affordable, **columns)

    for index, after in itertools.islice(chosen(design, first, affordable), 2):
        taken.append(int(first[index]))
        design = after
        yield taken[-1], design
    left = np.setdiff1d(np.arange(len(points)), taken)
    for index, after in chosen(design, left, affordable - cost[taken].sum()):
        yield int(left[index]), after


def candidate_runs(
    fit: ScalingFit,
    n_params: float,
    n_tokens: float,
    *,
    affordable_flops: float,
    per_decade: float = 6,
    **columns: float,
) -> pd.DataFrame:
    """Return possible runs: sizes from the smallest fitted to the target's, each with several D/N in the fit's range.

    Under a law of one size, candidates have this size, and lengths from the shortest run's to the target's.
    Under a law of experts each also has several sparsities, over the fit's range and up to the target's. If all runs of the fit have
    one length, so have the candidates.

    Args:
        fit: fit of the finished runs; D/N extends over the fit's range and up to twice above, but not below 2 and not
            above 500 unless the target's does: extreme runs seem the most informative, but there the form fails first.
        n_params, n_tokens: the target; no candidate has more compute than the target, or less than the smallest run.
        affordable_flops: most FLOPs that one run may cost.
        per_decade: number of sizes in each decade; D/N has half as many values in each decade, the sparsity a third.
        columns: the law's further columns at the target.

    Returns:
        Columns n_params, n_tokens, the further columns, cost_flops.

    Raises:
        ValueError: a number is not finite and above 0.
    """
    for name, value in (("n_params", n_params), ("n_tokens", n_tokens), ("affordable_flops", affordable_flops)):
        require_positive(name, value)
    low, high = fit.tokens_per_param_range
    least, most = (
        extreme(usual, n_tokens / n_params) for extreme, usual in zip((min, max), RESIDUAL_RATIO, strict=True)
    )
    sizes = _spaced(fit.n_params_range[0], max(n_params, fit.n_params_range[1]), per_decade)
    low, high = np.clip([low, high * RATIO_MARGIN], least, most)
    if fit.one_size is not None:
        sizes, (low, high) = np.array([fit.one_size]), fit.tokens_per_param_range
        high = max(high, n_tokens / fit.one_size)
    ratios = _spaced(low, high, per_decade / 2)
    further = {
        name: _spaced(min(value, fit.rows[name].min()), max(value, fit.rows[name].max()), per_decade / 3)
        for name, value in columns.items()
    }
    one_length = fit.n_tokens_range[0] == fit.n_tokens_range[1]
    grids = np.meshgrid(sizes, [1.0] if one_length else ratios, *further.values(), indexing="ij")
    size, ratio, *others = (grid.ravel() for grid in grids)
    tokens = np.full_like(size, n_tokens) if one_length else size * ratio
    cost = compute_flops(size, tokens)
    fits = (cost <= min(affordable_flops, float(compute_flops(n_params, n_tokens)))) & (cost >= fit.compute_range[0])
    found = {"n_params": size, "n_tokens": tokens, **dict(zip(further, others, strict=True)), "cost_flops": cost}
    return pd.DataFrame(found)[fits].reset_index(drop=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Later(Ensemble):
    """Forecast's fits after further runs: their spread is assumed to shrink like the linearised standard deviation."""

    share: float

    @classmethod
    def of(cls, now: Ensemble, share: float, rows: pd.DataFrame) -> "_Later":
        fits = {name: getattr(now, name) for name in Ensemble.__dataclass_fields__}
        largest = float(compute_flops(rows["n_params"], rows["n_tokens"]).max())
        then = {"n_runs": rows["stem"].nunique(), "largest_flops": largest}
        return cls(**(fits | {"refits": lambda: now.draws, "share": share} | then))

    def draw_spread(self, n_params: ArrayLike, n_tokens: ArrayLike, **columns: ArrayLike) -> Array:
        return super().draw_spread(n_params, n_tokens, **columns) * math.sqrt(self.share)


def _full_width(scale: float, level: float) -> float:
    """Full width of the interval over the forecast."""
    return 2 * math.sinh(interval_factor(level) * scale)


def _with_runs(rows: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with further runs, whose losses are unknown."""
    added = points.assign(stem=[f"next {len(rows) + number}" for number in range(len(points))])
    return pd.concat([rows.astype({"stem": object}), added], ignore_index=True)


def _spaced(low: float, high: float, per_decade: float) -> Array:
    steps = max(round(math.log10(high / low) * per_decade), 1)
    return np.geomspace(low, high, steps + 1)
