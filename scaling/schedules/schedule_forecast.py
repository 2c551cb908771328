"""Forecast of the loss along a schedule that was not run: values, intervals, and whether such intervals have been tested.

The scale s of the error of log loss at step t is

    s² = k²·(a² + b²·x) + r² (+ g² if the law does not fit)

    x  share of the loss by which the law's two terms change between the last measured step and t; without a measured loss, share by
       which they differ at t from their values in the nearest row of a fitted curve
    a  .0012 with a measured loss, .0025 without
    b  .0122, so the variance grows with x as in a random walk
    k  rms of z, error / scale with k = 1, over fitted schedules, each forecast by the law of the others; 1 counts as 4 of them, and as
       fewer, 4/(mean z²), if z² is above 1 in the mean, so that curves without a law are not judged by those that had one. With a
       measured loss, only forecasts count whose decay gained at least half as much: a constant rate says nothing of a cooldown
    r  error of a change carried from other sizes and lengths (`scaling.schedules.size_transfer`; 0 for fitted ones), and of the run's
       own level and slope by the noise of its losses, as a share of the loss
    g  gain of the decay since the last measured step, as a share of the loss, by the law; it counts if the rms of the fitted
       curves' log residuals is above .0034

The run itself also gives a k: from its last measured loss, forecast from half and three quarters of the measured steps. So do the
fitted curves: the rms of their log residuals beyond noise over .0017. The largest k counts. The interval is exp(±q·s)
with q Student's t; its degrees of freedom are the number of schedules behind k, with the default's.

a, b and the 4 were chosen on the curves of 25M and 100M parameters of Luo et al. (2503.12811): there, with three of nine
schedules fitted and the others held out, measured to 0, 40, 60 and 80 %, 90 % intervals hold 96 % of the final losses. At 400M
parameters, which were not used, they hold 92 % (`tests/benchmarks/schedule_forecasts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.presentation import lines
from scaling.serialization import JsonResult, TableLayout

UNMEASURED, MEASURED, GROWTH = 0.0025, 0.0012, 0.0122
"""a without and with a measured loss, and b, of the formula at the head of this file."""
LARGEST_RMS = 0.0017
"""Largest rms of the log residuals of any three curves of 25M or 100M parameters (measured); beyond, the law does not hold."""
PRIOR_SCHEDULES = 4
"""Number of held-out schedules that the default width, k = 1, counts as."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleForecast(JsonResult):
    """The predicted loss of one run at chosen steps of its schedule.

    Attributes:
        table: one row per step: `step`, `loss`, `low`, `high` (nats per token) and `log_scale`, scale s of the error of log loss.
        level: nominal coverage of each row's interval.
        measured_to: last step with a measured loss; None if no loss of the run was given.
        widening: k of the formula at the head of this file.
        reasons: why the forecast is unsupported; empty if it is supported.
    """

    table: Annotated[pd.DataFrame, TableLayout("list")]
    level: float
    measured_to: float | None
    widening: float
    reasons: tuple[str, ...]

    @property
    def step(self) -> float:
        """Last step of the table; `loss`, `low` and `high` belong to it."""
        return float(self.table["step"].iloc[-1])

    @property
    def loss(self) -> float:
        """Predicted loss at the last step."""
        return float(self.table["loss"].iloc[-1])

    @property
    def low(self) -> float:
        """Lower bound at the last step."""
        return float(self.table["low"].iloc[-1])

    @property
    def high(self) -> float:
        """Upper bound at the last step."""
        return float(self.table["high"].iloc[-1])

    @property
    def supported(self) -> bool:
        """True if no reason suggests that the intervals miss."""
        return not self.reasons

    def __str__(self) -> str:
        return lines(
            {
                "loss": f"{self.loss:.4f}, {self.level:.0%} within {self.low:.4f} to {self.high:.4f}",
                "at": f"step {self.step:g}",
                "measured": "nothing" if self.measured_to is None else f"to step {self.measured_to:g}",
                "width": f"{self.widening:.2f}× the default",
                "status": "supported" if self.supported else "unsupported: " + "; ".join(self.reasons),
            }
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleEffect(JsonResult):
    """The loss at the end of one schedule over that at the end of another, for one run.

    Attributes:
        log_ratio: log of the ratio.
        half_width: half the width of its interval.
        widening: k of the formula at the head of this file.
        reasons: why it is unsupported; empty if it is supported.
    """

    log_ratio: float
    half_width: float
    widening: float
    reasons: tuple[str, ...]


def default_scale(change: Array, measured: bool) -> Array:
    """Scale of the log error for k = 1 and a fitted size, by the formula at the head of this file; `change` is its x."""
    return np.sqrt((MEASURED if measured else UNMEASURED) ** 2 + GROWTH**2 * change)


@dataclass(frozen=True, order=True)
class Widening:
    """k of the formula at the head of this file, and the degrees of freedom of the interval."""

    k: float
    freedom: float

    @classmethod
    def of(cls, squares: Array) -> Widening:
        """Widening by the mean z² of each held-out schedule, [schedules]."""
        count = PRIOR_SCHEDULES / max(1.0, float(squares.mean())) if len(squares) else PRIOR_SCHEDULES
        freedom = count + len(squares)
        return cls(float(np.sqrt((count + squares.sum()) / freedom)), freedom)

    @classmethod
    def of_fit(cls, rms: float) -> Widening:
        """Widening by the rms of the fitted curves' log residuals."""
        return cls(rms / LARGEST_RMS, PRIOR_SCHEDULES)

    def factor(self, level: float) -> float:
        """Factor q of the interval.

        Raises:
            ValueError: the level does not lie between 0 and 1.
        """
        from scipy.special import stdtrit

        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level!r}")
        return float(stdtrit(self.freedom, (1 + level) / 2))
