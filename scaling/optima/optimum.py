"""The best learning rate of one grid: a parabola of log loss in log2(rate), fitted near its minimum."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.arrays import Array
from scaling.checks import losses as read_losses
from scaling.checks import numbers, require_filled
from scaling.errors import ScalingError
from scaling.presentation import lines, number
from scaling.serialization import JsonResult, OrInfinite, OrNan

MIN_RATES = 4
MIN_RUNS = 5
MAX_EXCESS = 0.05
WALL = 5.0
"""The parabola takes the rates around the best rate with a log loss of at most MAX_EXCESS above the best. It takes farther rates
only until it has MIN_RATES rates and MIN_RUNS runs, and rates beyond WALL · MAX_EXCESS only to have three rates at all.

Loss rises about 2 % one octave off the optimum (measured, small models), so .05 is about an octave and a half either
side. Farther up the wall the curve is no parabola, and rates there have the weight (MAX_EXCESS / excess)². Checked on
the 155 learning-rate grids of Step Law (2503.04715): optima from the even and the odd rates of a grid agree within 1.65
standard errors in 89 % of the grids, with little difference between windows from .01 to .1."""
WIDEST = 4.0
"""Widest window, in units of MAX_EXCESS: a window without curvature beyond the noise is doubled up to this width."""
MIN_SIGNIFICANCE = 2.0
"""Least curvature that locates a minimum, in standard errors of the curvature."""


@dataclass(frozen=True, kw_only=True)
class Optimum(JsonResult):
    """The minimum of log loss = log_loss + curvature/2 · (log2 rate − log2_rate)².

    Attributes:
        log2_rate: log2 of the best rate; if the status is not `ok`, log2 of the nearest tested rate.
        sensitivity: octaves of standard error of `log2_rate` per unit of noise in log loss; infinite if no minimum
            was found.
        curvature: second derivative of log loss, per octave²; NaN if no minimum was found.
        log_loss: log of the loss at `log2_rate`.
        noise: standard deviation of log loss about the parabola; NaN without a degree of freedom.
        dof: degrees of freedom of `noise`.
        tested: smallest and largest log2(rate) with a finite loss.
        used: smallest and largest log2(rate) in the parabola.
        n_left_out: number of unused rows: diverged, or too far from the minimum.
        status: `ok`; `edge`: the minimum lies outside the tested rates; `flat`: no curvature beyond the noise;
            `exact`: three runs, no error estimate.
    """

    log2_rate: float
    sensitivity: OrInfinite
    curvature: OrNan
    log_loss: float
    noise: OrNan
    dof: int
    tested: tuple[float, float]
    used: tuple[float, float]
    n_left_out: int
    status: str

    @property
    def rate(self) -> float:
        return float(2.0**self.log2_rate)

    @property
    def loss(self) -> float:
        return math.exp(self.log_loss)

    @property
    def stderr(self) -> float:
        """Standard error of `log2_rate` in octaves, from the residuals of the parabola; infinite if unknown."""
        return self.stderr_at(self.noise)

    def stderr_at(self, noise: float) -> float:
        """Standard error of `log2_rate` in octaves for a given noise of log loss."""
        known = math.isfinite(noise) and math.isfinite(self.sensitivity)
        return self.sensitivity * noise if known else math.inf

    @property
    def inside(self) -> bool:
        """True if the minimum was found between tested rates."""
        return self.status in ("ok", "exact")

    def regret(self, rate: ArrayLike) -> NDArray[np.float64]:
        """Predicted relative loss given up at `rate`: exp(curvature/2 · octaves²) − 1; NaN if no minimum was found."""
        octaves = np.log2(np.asarray(rate, np.float64)) - self.log2_rate
        return np.asarray(np.expm1(self.curvature / 2 * octaves**2))[()]

    def __str__(self) -> str:
        return lines(
            {
                "rate": f"{self.rate:.4g} = 2^{self.log2_rate:.3f}, ± {number(self.stderr, '.2g')} octaves (standard error)",
                "loss": f"{self.loss:.4f}, {number(float(self.regret(2 * self.rate)), '.2%')} more an octave away",
                "tested": f"2^{self.tested[0]:.2f} to 2^{self.tested[1]:.2f}, {self.n_left_out} rows left out",
                "status": self.status,
            }
        )


def fit_optimum(
    rates: ArrayLike, losses: ArrayLike, *, seeds: Sequence[Any] | None = None, max_excess: float = MAX_EXCESS
) -> Optimum:
    """Fit the parabola by least squares over the rates near the best rate, and take its minimum.

    The standard error comes from the residual variance about the parabola, repeated rates included, by the delta method, so it
    includes seed noise and misfit. With `seeds`, each seed has a separate level: runs of one seed share data order and
    initial weights across rates, and this part of the noise does not move the minimum.

    Args:
        rates: tested rates, [K]; repeats are further seeds.
        losses: final losses, [K], nats per token; NaN or infinite if the run diverged. A rate with a diverged run
            is left out, as the mean of its other runs would be too good.
        seeds: seed of each row, [K].
        max_excess: largest distance of a used rate's log loss above the least mean log loss.

    Raises:
        ValueError: a rate or a finite loss is not positive, a seed is missing, or the lengths differ.
        ScalingError: fewer than three distinct rates have a finite loss.
    """
    rates, losses = np.asarray(rates, np.float64), np.asarray(losses, np.float64)
    if rates.ndim != 1 or rates.shape != losses.shape or (seeds is not None and len(seeds) != len(rates)):
        raise ValueError(f"rates, losses and seeds must be of one length, got shapes {rates.shape} and {losses.shape}")
    rows = pd.DataFrame({"rate": rates, "loss": losses, "seed": 0 if seeds is None else list(seeds)})
    require_filled(rows, "seed")
    table = pd.DataFrame({"x": np.log2(numbers(rows, "rate")), "y": np.log(read_losses(rows)), "seed": rows["seed"]})
    by_rate = table.groupby("x")["y"].agg([("mean", lambda y: y.mean(skipna=False)), ("runs", "size")]).dropna()
    means = by_rate["mean"]
    if len(means) < 3:
        raise ScalingError(
            f"need at least 3 distinct rates with a finite loss, got {len(means)} of {table['x'].nunique()}"
        )

    used = table[table["x"].isin(_near_the_best(by_rate, max_excess))]
    excess = means.loc[used["x"]].to_numpy() - means.min()
    used = used.assign(weight=np.minimum(1, max_excess / np.maximum(excess, max_excess)) ** 2)
    quadratic = _parabola(used)
    tested = (float(means.index.min()), float(means.index.max()))
    found = Optimum(
        **_minimum(quadratic, means, tested),
        noise=math.sqrt(quadratic.variance),
        dof=quadratic.dof,
        tested=tested,
        used=(float(used["x"].min()), float(used["x"].max())),
        n_left_out=len(table) - len(used),
    )
    # One lucky run can make a narrow window flat; the walls locate the minimum, though less sharply.
    if found.status == "flat" and len(used) < len(table.dropna()) and max_excess < WIDEST * MAX_EXCESS:
        wider = fit_optimum(rates, losses, seeds=seeds, max_excess=2 * max_excess)
        return wider if wider.inside else found
    return found


def _near_the_best(by_rate: pd.DataFrame, max_excess: float) -> "pd.Index[float]":
    """Rates around the best rate within `max_excess` of its loss; if they are too few, also the next rates of least loss."""
    y, runs = by_rate["mean"].to_numpy(), by_rate["runs"].to_numpy()
    first = last = int(np.argmin(y))
    while (n_rates := last - first + 1) < len(y):
        below = y[first - 1] if first else np.inf
        above = y[last + 1] if last + 1 < len(y) else np.inf
        excess = min(below, above) - y.min()
        enough = n_rates >= MIN_RATES and runs[first : last + 1].sum() >= MIN_RUNS
        if (excess > max_excess and enough) or (excess > WALL * max_excess and n_rates >= 3):
            break
        first, last = (first - 1, last) if below <= above else (first, last + 1)
    return by_rate.index[first : last + 1]


@dataclass(frozen=True, kw_only=True)
class _Parabola:
    """Level + slope·t + half_curvature·t², t = log2(rate) − centre."""

    centre: float
    level: float
    slope: float
    half_curvature: float
    unit_covariance: Array  # covariance of (slope, half_curvature) for noise 1, [2, 2]
    variance: float
    dof: int


def _parabola(used: pd.DataFrame) -> _Parabola:
    centre = float(used["x"].mean())
    t, y = used["x"].to_numpy() - centre, used["y"].to_numpy()
    codes, seeds = pd.factorize(used["seed"])
    root = np.sqrt(used["weight"].to_numpy())
    design = np.column_stack([codes[:, None] == np.arange(len(seeds)), t, t**2]) * root[:, None]
    y = y * root
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    residual = y - design @ coefficients
    dof = len(y) - np.linalg.matrix_rank(design)
    variance = float(residual @ residual) / dof if dof else math.nan
    slope, half_curvature = coefficients[-2:]
    return _Parabola(
        centre=centre,
        level=float(np.mean(coefficients[:-2])),
        slope=float(slope),
        half_curvature=float(half_curvature),
        unit_covariance=np.asarray(np.linalg.pinv(design.T @ design)[-2:, -2:], np.float64),
        variance=variance,
        dof=int(dof),
    )


def _minimum(quadratic: _Parabola, means: "pd.Series[float]", tested: tuple[float, float]) -> dict[str, Any]:
    """Fields of `Optimum` for the location of the minimum and its error."""
    half = quadratic.half_curvature
    error = math.sqrt(quadratic.unit_covariance[1, 1] * quadratic.variance) if quadratic.dof else 0.0
    if half <= MIN_SIGNIFICANCE * error or half < 1e-12:
        best = means.idxmin()
        return {
            "log2_rate": float(best),
            "sensitivity": math.inf,
            "curvature": math.nan,
            "log_loss": float(means.min()),
            "status": "flat",
        }
    offset = -quadratic.slope / (2 * half)
    minimum = quadratic.centre + offset
    where = min(max(minimum, tested[0]), tested[1])
    gradient = np.array([-1 / (2 * half), quadratic.slope / (2 * half**2)])
    sensitivity = math.sqrt(gradient @ quadratic.unit_covariance @ gradient)
    t = where - quadratic.centre
    return {
        "log2_rate": where,
        "sensitivity": sensitivity if where == minimum else math.inf,
        "curvature": 2 * half if where == minimum else math.nan,
        "log_loss": quadratic.level + quadratic.slope * t + half * t**2,
        "status": "edge" if where != minimum else "ok" if quadratic.dof else "exact",
    }
