"""The path of a run: its schedule with the losses measured so far, and what a law forecasts along it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.checks import positive
from scaling.errors import ScalingError
from scaling.presentation import span
from scaling.schedules.schedule_forecast import default_scale
from scaling.schedules.schedule_law import ScheduleLaw

TAIL = 0.2
"""Share of the measured steps, up to the last, whose residual sets the level. Of .05, .1, .2 and .4, this one had the least mean error
on the curves of 25M and 100M parameters: right after a drop of the rate, the law errs for some hundred steps."""
POINTS_KEPT = 40
"""Rows per fitted curve that tell how near to the fitted curves a schedule comes."""


@dataclass(frozen=True)
class SchedulePath:
    """A run's schedule in the order of steps, and its measured rows up to some step.

    Attributes:
        frame: `step` and `lr`.
        log_loss: NaN where it is not measured, [rows].
        noise: standard error of the log loss, [rows].
        known: indices of measured rows.
    """

    frame: pd.DataFrame
    steps: Array
    log_loss: Array
    noise: Array
    known: NDArray[np.intp]

    @property
    def last(self) -> int | None:
        """Index of the last measured row."""
        return int(self.known[-1]) if len(self.known) else None

    @classmethod
    def of(cls, run: pd.DataFrame, upto: float) -> SchedulePath:
        """Return the path of a table as in `ScheduleFit.forecast`, by `in_numbers`."""
        ordered = run.sort_values("step", kind="stable").reset_index(drop=True)
        steps, loss, noise = ordered[["step", "loss", "noise"]].to_numpy().T
        kept = [name for name in ("run", "step", "lr") if name in ordered]
        return cls(ordered[kept], steps, np.log(loss), noise, np.flatnonzero(~np.isnan(loss))).upto(upto)

    def upto(self, step: float) -> SchedulePath:
        """Return the path with its losses up to this step."""
        return replace(self, known=self.known[self.steps[self.known] <= step])

    def recent(self, share: float) -> NDArray[np.intp]:
        """Indices of the measured rows in the last share of the steps up to the last measured one."""
        steps = self.steps[self.known]
        recent: NDArray[np.intp] = self.known[steps > (1 - share) * steps.max(initial=0.0)]
        return recent


@dataclass(frozen=True)
class ForecastAhead:
    """Forecast at each row of a path, [rows].

    Attributes:
        change: x of the default scale.
        gain: gain of the decay since the last measured row, as a share of the loss; 0 if none is measured.
        error: standard error, as a share of the loss, of a gain carried from other groups, and of the run's level and slope.
    """

    log_loss: Array
    change: Array
    gain: Array
    error: Array

    def scale(self, path: SchedulePath, row: int, measured: bool = True) -> float:
        """Scale, with k = 1, of the difference to the measured loss of this row."""
        return math.hypot(default_scale(self.change[row], measured), self.error[row], path.noise[row])


def by_own_law(law: ScheduleLaw, path: SchedulePath, curves: pd.DataFrame) -> ForecastAhead:
    """Forecast by a law of the run's group, which was fitted to these curves."""
    power, gain = law.terms(path.frame)
    if path.last is not None:
        loss = law.L0 + power - gain
        return anchored(path, path.last, loss, power, gain - gain[path.last], np.zeros(len(power)))
    loss = above_zero(law.L0 + power - gain, path)
    points = _points(law, curves)
    near = np.abs(power[:, None] - points[:, 0]) + np.abs(gain[:, None] - points[:, 1])
    return ForecastAhead(np.log(loss), near.min(axis=1) / loss, np.zeros(len(loss)), np.zeros(len(loss)))


def anchored(path: SchedulePath, last: int, loss: Array, power: Array, gain: Array, error: Array) -> ForecastAhead:
    """Forecast by the law's loss, times the factor that fits the last part of the measured steps.

    Args:
        last: index of the last measured row.
        power: term of the loss at a constant rate, nats, [rows].
        gain: gain of the decay since the last measured row, nats, [rows].
        error: standard error of a transferred gain and of the slope at a constant rate, nats, [rows].
    """
    loss, recent = above_zero(loss, path), path.recent(TAIL)
    shift = float((path.log_loss[recent] - np.log(loss[recent])).mean())
    change = (np.abs(power - power[last]) + np.abs(gain)) / loss
    of_level = float(np.linalg.norm(path.noise[recent])) / len(recent)
    return ForecastAhead(np.log(loss) + shift, change, np.abs(gain) / loss, np.hypot(error / loss, of_level))


def above_zero(loss: Array, path: SchedulePath) -> Array:
    least = int(np.argmin(loss))
    if loss[least] <= 0:
        rates = path.frame["lr"]
        raise ScalingError(
            f"the law gives a loss of {loss[least]:.3g} at step {path.steps[least]:g}; the schedule's rates, "
            f"{span(float(rates.min()), float(rates.max()))}, lie too far from the fitted ones"
        )
    return loss


def _points(law: ScheduleLaw, curves: pd.DataFrame) -> Array:
    """Law's two terms, nats, in rows of the curves, [points, 2]."""
    parts = []
    for _, part in curves.groupby("run", sort=True):
        terms = np.stack(law.terms(part.sort_values("step")), axis=1)
        parts.append(terms[np.unique(np.linspace(0, len(terms) - 1, min(len(terms), POINTS_KEPT)).astype(int))])
    return np.concatenate(parts)


def unlike(run: SchedulePath, other: SchedulePath) -> float:
    """Share of the sum of the rates after the last measured row in which two schedules differ, from 0 to 1."""
    last = run.steps[run.known[-1]]
    steps = np.union1d(run.steps, other.steps)
    steps = steps[steps > last]
    rates = [np.interp(steps, path.steps, path.frame["lr"].to_numpy(np.float64), right=0.0) for path in (run, other)]
    most = np.trapezoid(np.maximum(*rates), steps)
    return float(np.trapezoid(np.abs(rates[0] - rates[1]), steps) / most) if most > 0 else 0.0


def rows_at(path: SchedulePath, steps: Array, at: Sequence[float] | None) -> NDArray[np.intp]:
    """Indices of the rows to forecast, by their steps as given."""
    if at is None:
        rows = np.array([len(steps) - 1])
    else:
        wanted = positive("at", list(at))
        rows = np.minimum(np.searchsorted(steps, wanted), len(steps) - 1)
        if (wrong := steps[rows] != wanted).any():
            raise ValueError(f"at must hold steps of the schedule's rows, got {wanted[wrong][0]:g}")
    if path.last is not None and (rows <= path.last).any():
        raise ValueError(
            f"the step to forecast must lie after the last measured one, {steps[path.last]:g}, got {steps[rows].min():g}"
        )
    return rows
