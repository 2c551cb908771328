"""The next runs of a ladder: those that make the forecast of one target most certain for what they cost.

Chosen one by one by the variance that they take off the linearised forecast (`scaling.decisions.design`) among those that can still be
paid for. That needs no losses, so a batch is chosen before any of it is made; after it, fit again and ask again. On
public pools it reached a given error with about half of the FLOPs that a choice at random takes (tests/benchmarks/next_run.py).
"""

import itertools
import math
from collections.abc import Iterator
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
from scaling.fits.support import RATIO_MARGIN, few_runs, unsupported
from scaling.forms.law import compute_flops
from scaling.presentation import counted, lines
from scaling.serialization import JsonResult, TableLayout

WORTH = 0.02
"""Assumed: a run that takes less than this share off the interval's variance, s², is not worth its place in a queue. The fit's
residual and a floor stay in s² whatever runs are added (`scaling.fits.forecast`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NextRuns(JsonResult):
    """Runs to make next, in the order in which they were chosen.

    Attributes:
        runs: the candidates' rows, with `cost_flops`, and after each run: `spent_flops`, `variance_left` (share of the
            parameters' variance at the target) and `width` (expected full width of the interval over the forecast, if the
            run falls where the form expects it: where the form fails the next fit's interval is wider, see RESULTS.md).
        now: the forecast of the target as the fit stands; it states what N counts.
        reasons: why the forecast would still be unsupported once these runs are made, by the function that judges it then
            (`scaling.fits.support`); what the fits will say of the runs is taken as it is now.
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
        """Full width of the interval over the forecast, before them."""
        return (self.now.high - self.now.low) / self.now.loss

    @property
    def width_then(self) -> float:
        """Expected full width of the interval after them."""
        return float(self.runs["width"].iloc[-1]) if len(self.runs) else self.width_now

    @property
    def about(self) -> str:
        """The target, its interval now and then, and why there are no more runs."""
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
        formats |= {"variance_left": "{:.1%}".format, "width": "{:.2%}".format}
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
) -> NextRuns:
    """Choose the runs that shrink the variance of one forecast most.

    Args:
        affordable_flops: what the runs may cost together.
        candidates: one row per run that could be made: `n_params`, `n_tokens`, and `cost_flops` if it is not 6·N·D; each is
            made at most once. By default `candidate_runs`.
        width: stop as soon as the expected full width of the interval over the forecast is no more than this, and the
            forecast would be within what was tested.

    Raises:
        ValueError: an argument breaks its rule.
        ScalingError: the fit is of a law that depends on more than N and D.
    """
    require_positive("affordable_flops", affordable_flops)
    if n_runs < 1:
        raise ValueError(f"n_runs must be at least 1, got {n_runs}")
    if width is not None:
        require_positive("width", width)
    now = fit.forecast(n_params, n_tokens, level)
    if candidates is None:
        candidates = candidate_runs(fit, n_params, n_tokens, affordable_flops=affordable_flops)
    require_columns(candidates, ("n_params", "n_tokens"))
    size, tokens = numbers(candidates, "n_params"), numbers(candidates, "n_tokens")
    cost = numbers(candidates, "cost_flops") if "cost_flops" in candidates else compute_flops(size, tokens)

    ensemble = fit.ensemble
    design = Design.of(ensemble, fit.rows, n_params, n_tokens)
    rows = fit.rows
    helps = _bring_support(rows, size, tokens, n_params, n_tokens)
    picks = _picks(design, size, tokens, cost, affordable_flops, helps)
    before = design.variance
    chosen: list[int] = []
    records: list[dict[str, float]] = []
    stopped = f"{n_runs} runs were asked for"
    reasons, scale, reached = now.reasons, now.log_scale, _full_width(now.log_scale, level)
    while len(chosen) < n_runs:
        if width is not None and reached <= width and not reasons:
            stopped = f"the interval is at most {width:.2%} wide and within what was tested"
            break
        if (pick := next(picks, None)) is None:
            stopped = "no candidate is left that can be paid for"
            break
        index, design = pick
        then = _with_run(rows, size[index], tokens[index])
        share = design.variance / before
        after, floor = (float(log_scale(_Later.of(ensemble, left, then), n_params, n_tokens)) for left in (share, 0.0))
        later = tuple(unsupported(then, ensemble, n_params, n_tokens).values())
        telling = after**2 <= (1 - WORTH) * scale**2 or len(later) < len(reasons)
        if not telling and not few_runs(rows) and not (helps[index] and len(chosen) < 2):
            stopped = (
                f"no run that can still be paid for takes {WORTH:.0%} off the interval's variance: "
                f"{_full_width(floor, level):.2%} of its {reached:.2%} stay whatever runs are added"
            )
            break
        chosen.append(index)
        rows, scale, reached, reasons = then, after, _full_width(after, level), later
        records.append({"spent_flops": cost[chosen].sum(), "variance_left": share, "width": reached})
    runs = candidates.iloc[chosen].assign(cost_flops=cost[chosen])
    extra = pd.DataFrame(records, index=runs.index, columns=["spent_flops", "variance_left", "width"])
    return NextRuns(runs=pd.concat([runs, extra], axis=1), now=now, stopped=stopped, reasons=reasons)


def _bring_support(
    rows: pd.DataFrame, size: Array, tokens: Array, n_params: float, n_tokens: float
) -> NDArray[np.bool_]:
    """Candidates two of which, with the same N and D, would leave fewer reasons against what the runs cover, [K]."""
    beside_number = {"few runs"}
    now = unsupported(rows, None, n_params, n_tokens).keys() - beside_number
    if not now:
        return np.zeros(len(size), dtype=bool)
    pairs = (_with_run(_with_run(rows, n, d), n, d) for n, d in zip(size, tokens, strict=True))
    return np.array([unsupported(pair, None, n_params, n_tokens).keys() - beside_number < now for pair in pairs])


def _picks(
    design: Design, size: Array, tokens: Array, cost: Array, affordable: float, helps: NDArray[np.bool_]
) -> Iterator[tuple[int, Design]]:
    """The greedy choice; its first two are among those that bring support, as ranges end where two runs lie."""
    first = np.flatnonzero(helps & (cost <= affordable / 2))
    taken: list[int] = []
    for index, after in itertools.islice(design.greedy(size[first], tokens[first], cost[first], affordable), 2):
        taken.append(int(first[index]))
        design = after
        yield taken[-1], design
    left = np.setdiff1d(np.arange(len(size)), taken)
    for index, after in design.greedy(size[left], tokens[left], cost[left], affordable - cost[taken].sum()):
        yield int(left[index]), after


def candidate_runs(
    fit: ScalingFit, n_params: float, n_tokens: float, *, affordable_flops: float, per_decade: int = 6
) -> pd.DataFrame:
    """Runs that could be made: sizes from the smallest fitted to the target's, each with ratios D/N as the fit has them.

    Args:
        fit: of the runs made so far; D/N is taken within its range and up to twice above it, but no lower than 2 and no
            higher than 500 unless the target lies there: far-out runs seem the most informative, and there the form fails first.
        n_params, n_tokens: the target; no candidate is of more compute, nor of less than the smallest run.
        affordable_flops: most that one run may cost.
        per_decade: sizes in each decade; of ratios, D/N, half as many.

    Returns:
        Columns n_params, n_tokens, cost_flops.

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
    ratios = _spaced(low, high, per_decade / 2)
    size, ratio = (grid.ravel() for grid in np.meshgrid(sizes, ratios, indexing="ij"))
    cost = compute_flops(size, size * ratio)
    fits = (cost <= min(affordable_flops, float(compute_flops(n_params, n_tokens)))) & (cost >= fit.compute_range[0])
    return pd.DataFrame({"n_params": size, "n_tokens": size * ratio, "cost_flops": cost})[fits].reset_index(drop=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Later(Ensemble):
    """The fits as they will be: their spread is taken to shrink as the linearised standard deviation does."""

    share: float

    @classmethod
    def of(cls, now: Ensemble, share: float, rows: pd.DataFrame) -> "_Later":
        fits = {name: getattr(now, name) for name in Ensemble.__dataclass_fields__}
        largest = float(compute_flops(rows["n_params"], rows["n_tokens"]).max())
        then = {"n_runs": rows["stem"].nunique(), "largest_flops": largest}
        return cls(**(fits | {"refits": lambda: now.draws, "share": share} | then))

    def draw_spread(self, n_params: ArrayLike, n_tokens: ArrayLike) -> Array:
        return super().draw_spread(n_params, n_tokens) * math.sqrt(self.share)


def _full_width(scale: float, level: float) -> float:
    """Full width of the interval over the forecast."""
    return 2 * math.sinh(interval_factor(level) * scale)


def _with_run(rows: pd.DataFrame, n_params: float, n_tokens: float) -> pd.DataFrame:
    """The rows with a further run, whose loss is not known."""
    added = pd.DataFrame({"n_params": [n_params], "n_tokens": [n_tokens], "stem": [f"next {len(rows)}"]})
    return pd.concat([rows.astype({"stem": object}), added.astype({"stem": object})], ignore_index=True)


def _spaced(low: float, high: float, per_decade: float) -> Array:
    steps = max(round(math.log10(high / low) * per_decade), 1)
    return np.geomspace(low, high, steps + 1)
