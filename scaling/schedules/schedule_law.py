"""The loss along a training, from its learning-rate schedule: the multi-power law, fitted to whole curves of one model.

    L(t) = L0 + A·(S1(t) + S_W)^−alpha − LD(t),      LD(t) = B·Σ_k (eta_{k−1} − eta_k)·G(eta_k^−gamma · S_k(t))
    S1(t) = Σ_{τ ≤ t} eta_τ,   S_k(t) = Σ_{k ≤ τ ≤ t} eta_τ,   G(x) = 1 − (1 + C·x)^−beta,   S_W the warmup's own sum

(Luo et al. 2503.12811.) The first terms are the loss at a constant rate; LD is the gain from its decay. Fitted to a few
schedules, the law predicts others. It does not cover other sizes, batches or peak rates than those of its curves;
`unsupported_reasons` states how a schedule lies too far from them. The warmup counts as a rise (a negative drop), which adds
little more than a constant near B·peak: with it the authors' published numbers give nearly the errors that they publish.

Measured on their curves (25M, 100M, 400M parameters; fitted as in the paper to cosine and constant of 24,000 steps and a two-stage
schedule; six other schedules, up to three times as long, held out): mean relative error .12, .16, .21 %, R² .9981, .9973, .9968,
worst error .6, .8, .8 %, averaged over schedules. The authors' numbers give .12, .16, .18 %, .9982, .9975, .9970 and
.8, 1.0, 1.4 % on the same rows.
Three schedules do not determine C, beta and gamma, so these have a weak prior (`PRIOR`); so has alpha, for noisy curves. Without the
prior the errors were .14, .17, .21 %, and a law of two schedules (constant and linear cooldown, 25M) erred by 1.1 instead of .3 % at
the end of the other curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.checks import names, numbers, require_columns
from scaling.errors import ScalingError
from scaling.presentation import lines, span
from scaling.schedules.schedule_curve import ScheduleCurve, peak_and_depth
from scaling.serialization import FittedResult
from scaling.threads import single_threaded

BOUNDS: Mapping[str, tuple[float, float]] = {
    "L0": (1e-3, 1e3),
    "A": (1e-6, 1e6),
    "alpha": (0.01, 3.0),
    "B": (1e-3, 1e8),
    "C": (1e-4, 1e4),
    "beta": (0.01, 5.0),
    "gamma": (0.01, 3.0),
}
"""Wide bounds: Luo et al. find L0 2.4–3.0, A .5–.7, alpha .4–.5, B 360–520, C 2.0–2.1, beta .58–.60, gamma .64–.66."""
_OWN = [[*BOUNDS].index(name) for name in ("L0", "A", "B")]
_SCREENED: Mapping[str, tuple[float, ...]] = {
    "alpha": (0.3, 0.5, 0.8),
    "C": (0.3, 2.0, 10.0),
    "beta": (0.3, 0.6, 1.0),
    "gamma": (0.3, 0.6, 0.9),
}
NO_RATE = 1e-3
"""Share of the peak that counts as a rate of 0: what is trained at less hardly changes the loss."""
INDEPENDENT = 1.645
"""One-sided quantile of the normal distribution at 95 %."""
DELTA = 1e-3
"""Huber threshold on log residuals."""
PRIOR: Mapping[str, tuple[float, float]] = {
    "alpha": (0.5, 0.5),
    "beta": (0.5, 0.5),
    "gamma": (0.5, 0.5),
    "C": (0.1, 1.5),
}
"""Centre and standard deviation of the logarithm, assumed from the numbers above; of C in units of a step: C·peak^(1 − gamma).
alpha is determined by curves of little noise; on ladders of a few hundred steps it fell to .15, and their L0 to 0, without a prior."""
PRIOR_WEIGHT = 10 * DELTA
"""Residual of one standard deviation of the prior, which then costs as much as some 20 losses that lie DELTA off (measured: with
10·DELTA the curves of 25M and 100M parameters that were held out lie closer to the law than without, or with DELTA; 30·DELTA is
no better)."""
N_POLISHED = 2
MAX_ROWS = 150
"""Most losses of one curve that are fitted; if there are more, they are thinned evenly."""
MIN_DROP = 0.1
"""Share of the highest rate by which at least one curve's rate must fall to show the second term."""
MAX_PEAK_RATIO, MAX_STEPS_RATIO, MAX_DEPTH_RATIO = 1.5, 3.1, 2.0
"""Declared support: largest factor of the peak rate from the fitted peaks (assumed), of the steps over the fitted steps (measured to
three, above; the last loss may lie before the end), and of the fitted curves' least rate, as a share of the peak, over the
schedule's (assumed)."""


@dataclass(frozen=True, kw_only=True)
class ScheduleLaw(FittedResult):
    """The law of one model's curves.

    Attributes:
        L0, A, alpha, B, C, beta, gamma: numbers of the law, with rates as given, e.g. 3e-4, and steps as units.
        warmup_steps: steps of the linear warmup, before the highest rate.
        rms: root mean square of the fitted log residuals beyond their noise, given or seen in the differences of neighbouring rows.
        runs: names of the fitted curves.
        peaks: least and greatest of the curves' highest rates.
        deepest: smallest ratio of least to highest rate among the curves.
    """

    formula: ClassVar[str] = "L0 + A·(S1 + S_W)^−alpha − B·Σ_k (eta_{k−1} − eta_k)·(1 − (1 + C·eta_k^−gamma·S_k)^−beta)"
    source: ClassVar[str] = "Luo et al. 2503.12811"

    L0: float
    A: float
    alpha: float
    B: float
    C: float
    beta: float
    gamma: float
    warmup_steps: float
    rms: float
    n_rows: int
    runs: tuple[str, ...]
    steps: tuple[float, float]
    peaks: tuple[float, float]
    deepest: float
    warnings: tuple[str, ...]

    def predict(self, schedule: pd.DataFrame) -> Array:
        """Loss, nats per token, at each row of one run's schedule: `step` and `lr`, dense enough to follow the rate.

        Raises:
            ValueError: a column is missing or breaks its rule, the rows are of several runs, the first step lies in the warmup,
                or its rate is 0.
            ScalingError: the predicted loss is not above 0, as the decay term exceeds the rest.
        """
        power, gain = self.terms(schedule)
        steps, loss = numbers(schedule, "step"), self.L0 + power - gain
        least = int(np.argmin(loss))
        if loss[least] <= 0:
            reasons = "; ".join(self.unsupported_reasons(schedule)) or "its decay gains more than there is"
            raise ScalingError(f"the law gives a loss of {loss[least]:.3g} at step {steps[least]:g}: {reasons}")
        return loss

    def terms(self, schedule: pd.DataFrame) -> tuple[Array, Array]:
        """Return A·(S1 + S_W)^−alpha and LD, nats, at each row of one run's schedule; the loss is L0 plus the first minus the second.

        Raises:
            ValueError: as `predict`.
        """
        _require_schedule(schedule)
        steps = numbers(schedule, "step")
        curve = ScheduleCurve.of(steps, numbers(schedule, "lr", inclusive=True), steps, self.warmup_steps)
        loss, jacobian = curve.linearise(np.log([getattr(self, name) for name in BOUNDS]))
        power = jacobian[:, 1]  # derivative by log A
        return power, self.L0 + power - loss

    def unsupported_reasons(self, schedule: pd.DataFrame) -> tuple[str, ...]:
        """Reasons why a prediction of this schedule is outside the declared support; empty inside.

        Raises:
            ValueError: a column is missing or breaks its rule, the rows are of several runs, or the rate is 0 in every row.
        """
        _require_schedule(schedule)
        length, rates = float(numbers(schedule, "step").max()), numbers(schedule, "lr", inclusive=True)
        peak, depth = peak_and_depth(rates)
        reasons, (low, high) = list(self.warnings), self.peaks
        if not low / MAX_PEAK_RATIO <= peak <= high * MAX_PEAK_RATIO:
            reasons.append(f"peak rate {peak:.3g}: tested within {MAX_PEAK_RATIO:g}× of the fitted {span(low, high)}")
        if length > self.steps[1] * MAX_STEPS_RATIO:
            reasons.append(f"{length:g} steps: tested to {MAX_STEPS_RATIO:g}× the fitted {self.steps[1]:g}")
        if max(depth, NO_RATE) < self.deepest / MAX_DEPTH_RATIO:
            reasons.append(
                f"the rate falls to {depth:.3g} of its peak, but in the fitted curves only to {self.deepest:.3g}"
            )
        return tuple(reasons)

    def score(self, curves: pd.DataFrame) -> pd.DataFrame:
        """Score the predictions of curves: one row per run with mean and worst relative error, R² and the error at the end.

        R² is NaN if all losses of a run are equal.

        Raises:
            ValueError: a column is missing or breaks its rule, or a run has no loss.
            ScalingError: for the reason of `predict`.
        """
        require_columns(curves, ("run", "step", "lr", "loss"))
        curves, records = in_numbers(curves).assign(run=names(curves, "run")), {}
        for run, part in curves.groupby("run", sort=True):
            known = part["loss"].notna().to_numpy()
            if not known.any():
                raise ValueError(f"loss must be known in some row of run {run}, got none")
            loss, predicted = part["loss"].to_numpy()[known], self.predict(part)[known]
            off = predicted / loss - 1
            spread = ((loss - loss.mean()) ** 2).sum()
            r_squared = 1 - ((predicted - loss) ** 2).sum() / spread if spread else math.nan
            end = int(np.argmax(part["step"].to_numpy()[known]))
            records[run] = [np.abs(off).mean(), np.abs(off).max(), r_squared, off[end]]
        return pd.DataFrame.from_dict(
            records,
            orient="index",
            columns=["mean_relative_error", "worst_relative_error", "r_squared", "error_at_end"],
        )

    def __str__(self) -> str:
        return lines(
            {
                "L(t)": self.formula,
                "numbers": ", ".join(f"{name} {getattr(self, name):.4g}" for name in BOUNDS),
                "fitted to": f"{self.n_rows} losses of {', '.join(self.runs)}, {span(*self.steps, 5)} steps",
                "rates": f"peaks {span(*self.peaks)}, falling to {self.deepest:.3g} of it",
                "residual": f"{self.rms:.2%} of the loss",
                "status": self.status_line,
            }
        )


def fit_schedule_law(curves: pd.DataFrame, *, warmup_steps: float = 0.0) -> ScheduleLaw:
    """Fit the multi-power law to loss curves of one model under several schedules, at least a constant and a decaying one.

    Args:
        curves: one row per evaluation: `run`, `step`, `lr` (the rate at that step), `loss` (nats per token, smoothed; NaN if
            the row states only the rate); optionally `noise`, the standard error of the log loss, by which rows are weighted.
        warmup_steps: steps of a linear warmup to the rate of a run's first row, which must lie after the warmup.

    Raises:
        ValueError: a column or a number is missing or breaks its rule, or a run's first rate is 0.
        ScalingError: no curve's rate falls, or there are fewer losses than numbers.
    """
    require_columns(curves, ("run", "step", "lr", "loss"))
    return fit_common_law([in_numbers(curves)], warmup_steps=warmup_steps)[0]


@single_threaded
def fit_common_law(groups: Sequence[pd.DataFrame], *, warmup_steps: float = 0.0) -> tuple[ScheduleLaw, ...]:
    """Fit the law to several groups of curves: alpha, C, beta and gamma are common, L0, A and B are each group's own.

    For fixed alpha, C, beta, gamma the law is linear in L0, A and B: a grid of the four is solved in closed form, and the best points
    are polished by scipy's bounded least squares under Huber's function of log residuals and of the prior's, with exact derivatives.

    Args:
        groups: curves of each group, as for `fit_schedule_law`, by `in_numbers`.

    Raises:
        ValueError, ScalingError: as `fit_schedule_law`, for any of the groups.
    """
    if not (math.isfinite(warmup_steps) and warmup_steps >= 0):
        raise ValueError(f"warmup_steps must be finite and at least 0, got {warmup_steps!r}")
    prepared = [_Group.of(curves, warmup_steps) for curves in groups]
    n_rows, n_numbers = sum(len(group.log_loss) for group in prepared), len(BOUNDS) + 3 * (len(prepared) - 1)
    if n_rows <= n_numbers:
        raise ScalingError(f"{n_rows} losses for {n_numbers} numbers: add evaluations")
    for curves in groups:
        if (fall := largest_fall(curves)) < MIN_DROP:
            raise ScalingError(
                f"the rate of some curve must fall by {MIN_DROP:.0%} of its peak for the gain of decay to be seen, "
                f"got at most {fall:.1%}"
            )
    thetas, converged = _minimised(prepared)
    common = [] if converged else ["the minimum was not reached"]
    if all(len(group.curves) == 1 for group in prepared):
        common.append(
            "one schedule: the gain of decay cannot be separated from the gain of further steps; add a schedule"
        )
    lower, upper = np.log(np.array([*BOUNDS.values()])).T
    return tuple(
        ScheduleLaw(
            **dict(zip(BOUNDS, map(float, np.exp(theta)), strict=True)),
            warmup_steps=float(warmup_steps),
            rms=group.rms(theta),
            n_rows=len(group.log_loss),
            runs=group.runs,
            steps=group.steps,
            peaks=group.peaks,
            deepest=group.deepest,
            warnings=(
                *(
                    f"{n} lies on its bound"
                    for n, x, a, b in zip(BOUNDS, theta, lower, upper, strict=True)
                    if not a + 1e-6 < x < b - 1e-6
                ),
                *common,
            ),
        )
        for group, theta in zip(prepared, thetas, strict=True)
    )


def largest_fall(curves: pd.DataFrame) -> float:
    """Return the largest sum of a curve's drops of the rate, as a share of its peak."""
    rates = [part.sort_values("step", kind="stable")["lr"].to_numpy() for _, part in curves.groupby("run")]
    return max(float(-np.minimum(np.diff(rate), 0).sum() / rate.max()) for rate in rates)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Curves with common L0, A and B, prepared for the fit.

    Attributes:
        log_loss, noise: the fitted losses and their standard errors, in the order of the curves, [rows].
        rows: rows of each curve.
    """

    curves: list[ScheduleCurve]
    log_loss: Array
    noise: Array
    rows: tuple[int, ...]
    runs: tuple[str, ...]
    steps: tuple[float, float]
    peaks: tuple[float, float]
    deepest: float

    @classmethod
    def of(cls, curves: pd.DataFrame, warmup_steps: float) -> _Group:
        curves = curves.assign(run=names(curves, "run"))
        prepared, fitted, reached = [], [], []
        for _, part in curves.groupby("run", sort=True):
            ordered = part.sort_values("step")
            evaluated = ordered[ordered["loss"].notna()]
            evaluated = evaluated.iloc[
                np.unique(np.linspace(0, len(evaluated) - 1, min(len(evaluated), MAX_ROWS)).astype(int))
            ]
            steps, rates = ordered[["step", "lr"]].to_numpy().T
            prepared.append(ScheduleCurve.of(steps, rates, evaluated["step"].to_numpy(), warmup_steps))
            reached.append(peak_and_depth(rates))
            fitted.append(evaluated[["loss", "noise"]].to_numpy())
        loss, noise = np.concatenate(fitted).T
        peaks, depths = zip(*reached, strict=True)
        return cls(
            curves=prepared,
            log_loss=np.log(loss),
            noise=noise,
            rows=tuple(len(part) for part in fitted),
            runs=tuple(sorted(curves["run"].unique())),
            steps=(float(curves["step"].min()), float(curves["step"].max())),
            peaks=(min(peaks), max(peaks)),
            deepest=min(depths),
        )

    @property
    def weight(self) -> Array:
        """Weight of each log residual: 1 without noise."""
        return DELTA / np.hypot(DELTA, self.noise)

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        """Loss [rows] and its Jacobian [rows, 7], as `ScheduleCurve.linearise`."""
        parts = [curve.linearise(theta) for curve in self.curves]
        return np.concatenate([loss for loss, _ in parts]), np.concatenate([jacobian for _, jacobian in parts])

    def rms(self, theta: Array) -> float:
        """Root of the weighted mean square by which the log residuals exceed their noise.

        The noise is the given one or, if it is more, what neighbouring rows show. A curve that the law does not describe lies on one
        side of it for many rows, so neighbouring residuals have a covariance: their mean square less half that of their differences.
        It counts as far as independent rows would exceed it in 5 % of fits.
        """
        residual = np.log(self.linearise(theta)[0]) - self.log_loss
        weight = self.weight**2
        beyond = float(np.average(residual**2 - self.noise**2, weights=weight))
        one_curve = np.diff(np.repeat(np.arange(len(self.rows)), self.rows)) == 0
        pairs = np.sqrt(weight[1:] * weight[:-1])[one_curve]
        if not len(pairs):
            return math.sqrt(max(0.0, beyond))
        independent = float(np.average(np.diff(residual)[one_curve] ** 2, weights=pairs)) / 2
        by_chance = INDEPENDENT / math.sqrt(pairs.sum() ** 2 / (pairs**2).sum())
        together = float(np.average(residual**2, weights=weight)) - independent * (1 + by_chance)
        return math.sqrt(max(0.0, min(beyond, together)))


def in_numbers(curves: pd.DataFrame) -> pd.DataFrame:
    """Return the table with `step`, `lr`, `loss` (NaN where it is missing) and `noise` (0 where it is missing) in float64.

    Text would be sorted and compared as text, so this precedes every use of a caller's table.

    Raises:
        ValueError: `step` or `lr` is missing, or a number breaks its rule.
    """
    require_columns(curves, ("step", "lr"))
    loss = np.full(len(curves), np.nan)
    if "loss" in curves:
        measured = curves["loss"].notna().to_numpy()
        loss[measured] = numbers(curves[measured], "loss")
    noise = numbers(curves.fillna({"noise": 0.0}), "noise", inclusive=True) if "noise" in curves else 0.0
    rates = numbers(curves, "lr", inclusive=True)
    return curves.assign(step=numbers(curves, "step"), lr=rates, loss=loss, noise=noise)


def _require_schedule(schedule: pd.DataFrame) -> None:
    require_columns(schedule, ("step", "lr"))
    if "run" in schedule and (runs := schedule["run"].unique()).size > 1:
        raise ValueError(f"a schedule must come from one run, got {runs.size}: {', '.join(map(str, runs[:3]))}")


def _places(n_groups: int) -> NDArray[np.intp]:
    """Index of each group's seven numbers among all, [groups, 7]: the first group's seven, then L0, A and B of each other group."""
    places = np.tile(np.arange(len(BOUNDS)), (n_groups, 1))
    places[1:, _OWN] = len(BOUNDS) + np.arange(3 * (n_groups - 1)).reshape(-1, 3)
    return places


def _minimised(groups: list[_Group]) -> tuple[Array, bool]:
    """Return the logarithms of each group's seven numbers, [groups, 7], and whether the minimum was reached."""
    from scipy.optimize import least_squares

    places = _places(len(groups))
    bounds = np.empty((int(places.max()) + 1, 2))
    bounds[places] = np.log(np.array([*BOUNDS.values()]))
    of_prior = [[*BOUNDS].index(name) for name in PRIOR]
    centre, spread = np.array([*PRIOR.values()]).T
    gamma, c = [*PRIOR].index("gamma"), [*PRIOR].index("C")
    weight, log_peak = PRIOR_WEIGHT / spread, math.log(max(group.peaks[1] for group in groups))

    def residual(theta: Array) -> Array:
        from_centre = theta[of_prior] - np.log(centre)
        from_centre[c] += (1 - math.exp(theta[of_prior[gamma]])) * log_peak
        # If the decay term exceeds the rest, keep the loss just above 0, far from every measured loss.
        off = [
            group.weight * (np.log(np.maximum(group.linearise(theta[of])[0], 1e-3)) - group.log_loss)
            for group, of in zip(groups, places, strict=True)
        ]
        return np.concatenate([*off, weight * from_centre])

    def jacobian(theta: Array) -> Array:
        rows = []
        for group, of in zip(groups, places, strict=True):
            loss, by_own = group.linearise(theta[of])
            part = np.zeros((len(loss), len(theta)))
            part[:, of] = by_own * (group.weight / np.maximum(loss, 1e-3))[:, None]
            rows.append(part)
        prior = np.zeros((len(PRIOR), len(theta)))
        prior[range(len(PRIOR)), of_prior] = weight
        prior[c, of_prior[gamma]] = -weight[c] * math.exp(theta[of_prior[gamma]]) * log_peak
        return np.concatenate([*rows, prior])

    lower, upper = bounds.T
    found = [
        least_squares(
            residual,
            np.clip(start, lower + 1e-6, upper - 1e-6),
            jac=jacobian,
            bounds=(lower, upper),
            loss="huber",
            f_scale=DELTA,
            x_scale="jac",
            xtol=1e-8,
            ftol=1e-8,
        )
        for start in _starts(groups, places)
    ]
    best = min(found, key=lambda result: result.cost)
    return np.asarray(best.x)[places], bool(best.success)


def _starts(groups: list[_Group], places: NDArray[np.intp]) -> list[Array]:
    """Best points of a grid of (alpha, C, beta, gamma), with L0, A and B by relative least squares."""
    found = []
    for point in np.stack(np.meshgrid(*_SCREENED.values(), indexing="ij"), axis=-1).reshape(-1, len(_SCREENED)):
        alpha, c, beta, gamma = point
        unit, error, start = np.log([1.0, 1.0, alpha, 1.0, c, beta, gamma]), 0.0, np.empty(int(places.max()) + 1)
        for group, of in zip(groups, places, strict=True):
            columns = group.linearise(unit)[1][:, _OWN] * (group.weight * np.exp(-group.log_loss))[:, None]
            own, *_ = np.linalg.lstsq(columns, group.weight, rcond=None)
            own = np.maximum(own, 1e-3)
            error += float(((columns @ own - group.weight) ** 2).sum())
            start[of] = unit
            start[of[_OWN]] = np.log(own)
        found.append((error, start))
    return [start for _, start in sorted(found, key=lambda pair: pair[0])[:N_POLISHED]]
