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
Three schedules do not determine C, beta and gamma, so these have a weak prior (`PRIOR`). Without it the errors were .14, .17, .21 %,
and a law of two schedules (constant and linear cooldown, 25M) erred by 1.1 instead of .3 % at the end of the other curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd

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
_SCREENED: Mapping[str, tuple[float, ...]] = {
    "alpha": (0.3, 0.5, 0.8),
    "C": (0.3, 2.0, 10.0),
    "beta": (0.3, 0.6, 1.0),
    "gamma": (0.3, 0.6, 0.9),
}
DELTA = 1e-3
"""Huber threshold on log residuals."""
PRIOR: Mapping[str, tuple[float, float]] = {"beta": (0.5, 0.5), "gamma": (0.5, 0.5), "C": (0.1, 1.5)}
"""Centre and standard deviation of the logarithm, assumed from the numbers above; of C in units of a step: C·peak^(1 − gamma)."""
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
        rms: root mean square of the fitted log residuals.
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
        steps, loss = schedule["step"].to_numpy(), self.L0 + power - gain
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
        if depth < self.deepest / MAX_DEPTH_RATIO:
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
        curves, records = curves.assign(run=names(curves, "run")), {}
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


@single_threaded
def fit_schedule_law(curves: pd.DataFrame, *, warmup_steps: float = 0.0) -> ScheduleLaw:
    """Fit the multi-power law to loss curves of one model under several schedules, at least a constant and a decaying one.

    For fixed alpha, C, beta, gamma the law is linear in L0, A and B: a grid of the four is solved in closed form, and the best points
    are polished by scipy's bounded least squares under Huber's function of log residuals and of the prior's, with exact derivatives.

    Args:
        curves: one row per evaluation: `run`, `step`, `lr` (the rate at that step), `loss` (nats per token, smoothed; NaN if
            the row states only the rate).
        warmup_steps: steps of a linear warmup to the rate of a run's first row, which must lie after the warmup.

    Raises:
        ValueError: a column or a number is missing or breaks its rule, or a run's first rate is 0.
        ScalingError: no curve's rate falls, or there are fewer losses than numbers.
    """
    require_columns(curves, ("run", "step", "lr", "loss"))
    if not (math.isfinite(warmup_steps) and warmup_steps >= 0):
        raise ValueError(f"warmup_steps must be finite and at least 0, got {warmup_steps!r}")
    curves = curves.assign(run=names(curves, "run"))
    known = curves["loss"].notna()
    numbers(curves[known], "loss")
    prepared, log_losses, reached = [], [], []
    for _, part in curves.groupby("run", sort=True):
        ordered = part.sort_values("step")
        evaluated = ordered[ordered["loss"].notna()]
        evaluated = evaluated.iloc[
            np.unique(np.linspace(0, len(evaluated) - 1, min(len(evaluated), MAX_ROWS)).astype(int))
        ]
        at, rates = numbers(evaluated, "step"), numbers(ordered, "lr", inclusive=True)
        prepared.append(ScheduleCurve.of(numbers(ordered, "step"), rates, at, warmup_steps))
        reached.append(peak_and_depth(rates))
        log_losses.append(np.log(evaluated["loss"].to_numpy(np.float64)))
    log_loss = np.concatenate(log_losses)
    if len(log_loss) <= len(BOUNDS):
        raise ScalingError(f"{len(log_loss)} losses for {len(BOUNDS)} numbers: add evaluations")
    falls = [float(c.drops[c.drops > 0].sum()) / c.peak for c in prepared]
    if max(falls) < MIN_DROP:
        raise ScalingError(
            f"the rate of some curve must fall by {MIN_DROP:.0%} of its peak for the gain of decay to be seen, "
            f"got at most {max(falls):.1%}"
        )
    theta, converged = _minimised(prepared, log_loss, max(peak for peak, _ in reached))
    residual = np.concatenate([np.log(c.linearise(theta)[0]) for c in prepared]) - log_loss
    lower, upper = np.log(np.array([*BOUNDS.values()])).T
    warnings = [
        f"{n} lies on its bound"
        for n, x, a, b in zip(BOUNDS, theta, lower, upper, strict=True)
        if not a + 1e-6 < x < b - 1e-6
    ]
    if not converged:
        warnings.append("the minimum was not reached")
    if len(prepared) == 1:
        warnings.append(
            "one schedule: the gain of decay cannot be separated from the gain of further steps; add a schedule"
        )
    return ScheduleLaw(
        **dict(zip(BOUNDS, map(float, np.exp(theta)), strict=True)),
        warmup_steps=float(warmup_steps),
        rms=float(np.sqrt((residual**2).mean())),
        n_rows=len(log_loss),
        runs=tuple(sorted(curves["run"].unique())),
        steps=(float(curves["step"].min()), float(curves["step"].max())),
        peaks=(min(peak for peak, _ in reached), max(peak for peak, _ in reached)),
        deepest=min(depth for _, depth in reached),
        warnings=tuple(warnings),
    )


def _require_schedule(schedule: pd.DataFrame) -> None:
    require_columns(schedule, ("step", "lr"))
    if "run" in schedule and (runs := schedule["run"].unique()).size > 1:
        raise ValueError(f"a schedule must come from one run, got {runs.size}: {', '.join(map(str, runs[:3]))}")


def _minimised(curves: list[ScheduleCurve], log_loss: Array, peak: float) -> tuple[Array, bool]:
    from scipy.optimize import least_squares

    lower, upper = np.log(np.array([*BOUNDS.values()])).T
    log_peak, places = math.log(peak), [[*BOUNDS].index(name) for name in PRIOR]
    centre, spread = np.array([*PRIOR.values()]).T
    weight = PRIOR_WEIGHT / spread

    def residual(theta: Array) -> Array:
        loss = np.concatenate([curve.linearise(theta)[0] for curve in curves])
        beta, gamma, c = theta[places]
        from_centre = np.array([beta, gamma, c + (1 - math.exp(gamma)) * log_peak]) - np.log(centre)
        # If the decay term exceeds the rest, keep the loss just above 0, far from every measured loss.
        return np.concatenate([np.log(np.maximum(loss, 1e-3)) - log_loss, weight * from_centre])

    def jacobian(theta: Array) -> Array:
        parts = [curve.linearise(theta) for curve in curves]
        prior = np.zeros((len(PRIOR), len(theta)))
        prior[range(len(PRIOR)), places] = weight
        gamma, c = [*PRIOR].index("gamma"), [*PRIOR].index("C")
        prior[c, places[gamma]] = -weight[c] * math.exp(theta[places[gamma]]) * log_peak
        return np.concatenate([*(j / np.maximum(loss, 1e-3)[:, None] for loss, j in parts), prior])

    found = [
        least_squares(
            residual,
            start,
            jac=jacobian,
            bounds=(lower, upper),
            loss="huber",
            f_scale=DELTA,
            x_scale="jac",
            xtol=1e-8,
            ftol=1e-8,
        )
        for start in _starts(curves, log_loss, lower, upper)
    ]
    best = min(found, key=lambda result: result.cost)
    return np.asarray(best.x), bool(best.success)


def _starts(curves: list[ScheduleCurve], log_loss: Array, lower: Array, upper: Array) -> list[Array]:
    """Best points of a grid of (alpha, C, beta, gamma), with L0, A and B by relative least squares."""
    found = []
    inverse = np.exp(-log_loss)
    for point in np.stack(np.meshgrid(*_SCREENED.values(), indexing="ij"), axis=-1).reshape(-1, len(_SCREENED)):
        alpha, c, beta, gamma = point
        unit = np.log([1.0, 1.0, alpha, 1.0, c, beta, gamma])
        columns = np.concatenate([curve.linearise(unit)[1][:, [0, 1, 3]] for curve in curves]) * inverse[:, None]
        numbers_, *_ = np.linalg.lstsq(columns, np.ones(len(log_loss)), rcond=None)
        level, scale, gain = np.maximum(numbers_, 1e-3)
        error = float(((columns @ np.array([level, scale, gain]) - 1) ** 2).sum())
        theta = np.log([level, scale, alpha, gain, c, beta, gamma])
        found.append((error, np.clip(theta, lower + 1e-6, upper - 1e-6)))
    return [theta for _, theta in sorted(found, key=lambda pair: pair[0])[:N_POLISHED]]
