"""Downstream metric as a function of loss: a sigmoid between a floor (chance) and a ceiling.

    metric = floor + (ceiling − floor) / (1 + exp((loss − midpoint) / width))

This is the second step of the OLMo ladder (Bhagia et al. 2412.04403). The sigmoid is fitted by scipy's bounded least squares;
intervals come from draws of the posterior (`scaling.downstream.sigmoid_posterior`), with the scatter of a run.
`scaling.downstream.two_step` predicts the metric from (N, D) through the task's loss.

A metric that is positive and falls to a floor like a loss (bits per byte, perplexity's logarithm, the share of wrong answers) is
fitted by `fit` itself: pass it as `loss`, and its unit as `loss_unit`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.arrays import Array
from scaling.checks import names, numbers, require_columns
from scaling.downstream.sigmoid_posterior import draw
from scaling.errors import ScalingError
from scaling.presentation import lines, span
from scaling.quantiles import tails
from scaling.serialization import FittedResult

PARAMETERS = ("floor", "ceiling", "midpoint", "width")
MIN_ROWS = 6
MAX_WIDTHS = 10.0
"""Width of the sigmoid, in spans of the fitted losses, above which the sigmoid is a straight line."""
PERCENT = 100.0
"""Largest value of a metric from which a floor or ceiling below 1 counts as a share given by mistake."""
MIN_RISE = 3.0
"""Least rise of the fitted metric, in standard deviations of the residual, that distinguishes the sigmoid from a constant."""
_WIDTH_SHARES, _MIDDLES = (0.1, 0.3, 1.0), (0.0, 0.5, 1.0)  # starts, in spans of the losses


@dataclass(frozen=True, kw_only=True, eq=False)
class DownstreamLaw(FittedResult):
    """A sigmoid of loss.

    Attributes:
        floor, ceiling: values at high and at low loss, in the metric's unit.
        midpoint, width: loss at half-way, and width of the transition, in the loss's unit.
        held: names of the numbers that were given, not fitted.
        most: the metric's largest possible value.
        residual: standard deviation of the residuals, with one degree of freedom less for each fitted number.
        draws: draws of the four numbers from their posterior, [n_draws, 4].
        scatters: standard deviation of a run about the sigmoid, for each draw, [n_draws].
    """

    metric: str
    floor: float
    ceiling: float
    midpoint: float
    width: float
    held: tuple[str, ...]
    most: float
    residual: float
    loss_range: tuple[float, float]
    n_rows: int
    draws: Array = field(repr=False)
    scatters: Array = field(repr=False)
    warnings: tuple[str, ...]

    def predict(self, loss: ArrayLike) -> Array:
        """Metric at a loss, of the same shape."""
        return _sigmoid(np.array([getattr(self, name) for name in PARAMETERS]), np.asarray(loss, np.float64))[()]

    def interval(self, loss: float, level: float = 0.9, *, seed: int = 0) -> tuple[float, float]:
        """Interval of the metric of one run with this loss, between 0 and `most`: percentiles over the draws, with scatter.

        Measured on planted sigmoids of 12 to 60 losses, .3 nats below the least of them: 90 % intervals hold 82 to 94 % of further
        runs, on average 90 % (tests/benchmarks/interval_coverage.py).
        """
        return self.interval_of(np.full(len(self.draws), float(loss)), level, seed=seed)

    def interval_of(self, losses: Array, level: float = 0.9, *, seed: int = 0) -> tuple[float, float]:
        """Interval for an uncertain loss: one loss for each draw, [n_draws], or several, [n_draws, n]."""
        low, high = np.clip(np.quantile(self.scores(losses, seed=seed), tails(level)), 0, self.most)
        return float(low), float(high)

    def scores(self, losses: Array, *, seed: int = 0) -> Array:
        """Draws of the metric of runs with uncertain losses, as for `interval_of`; scatter may take them beyond 0 and `most`."""
        each = losses.reshape(len(self.draws), -1)
        values = _sigmoid(self.draws.T[:, :, None], each)[..., None]
        errors = np.random.default_rng(seed).standard_normal((*each.shape, 20))
        return np.asarray(values + self.scatters[:, None, None] * errors)

    def __str__(self) -> str:
        low, high = np.quantile(self.draws, [0.05, 0.95], axis=0)
        shown = [
            f"{name} {getattr(self, name):.4g} ({'given' if name in self.held else f'{span(a, b)}'})"
            for name, a, b in zip(PARAMETERS, low, high, strict=True)
        ]
        return lines(
            {
                self.metric: "floor + (ceiling − floor) / (1 + exp((loss − midpoint) / width))",
                "numbers": ", ".join(shown),
                "rows": f"{self.n_rows}, losses {span(*self.loss_range)}, intervals 90 % of {len(self.draws)} draws",
                "residual": f"{self.residual:.3g}",
                "status": self.status_line,
            }
        )


def require_unit(metric: str, most: float, **bounds: float | None) -> None:
    """Raise ValueError if a bound looks like a fraction while the metric is a percentage."""
    for name, given in bounds.items():
        if most >= PERCENT and given is not None and 0 < given < 1:
            raise ValueError(
                f"{name} must be in the unit of {metric}, whose maximum is {most:g}, got {given!r}: that looks like a fraction "
                "(if it is not, divide the metric too and leave most at 1)"
            )


def fit_downstream(
    rows: pd.DataFrame,
    *,
    metric: str = "accuracy",
    chance: float | None = None,
    ceiling: float | None = None,
    most: float = 1.0,
    n_draws: int = 400,
    seed: int = 0,
) -> DownstreamLaw:
    """Fit a metric that rises as the loss falls.

    Args:
        rows: one row per run or checkpoint: `loss` (preferably the task's loss, in any unit) and the metric's column; optional `stem`
            (rows of one training run count as fewer rows the more their residuals agree; without `stem` each row is a separate run).
        chance: the floor in the metric's unit, e.g. .25 for four choices; by default fitted between 0 and the mean of the rows.
        ceiling: the ceiling in the metric's unit; by default fitted between that mean and `most`.
        most: the metric's largest possible value, 1 for a share, 100 for a percentage.
        n_draws: draws of the posterior, from which intervals come.

    Raises:
        ValueError: a column is missing or breaks its rule, or chance and ceiling don't lie between 0 and `most`, or are shares
            while the metric is a percentage.
        ScalingError: there are fewer than six rows.
    """
    require_columns(rows, ("loss", metric))
    loss, value = numbers(rows, "loss"), numbers(rows, metric, inclusive=True)
    if len(rows) < MIN_ROWS:
        raise ScalingError(f"need at least {MIN_ROWS} rows for {len(PARAMETERS)} numbers, got {len(rows)}")
    if n_draws < 2:
        raise ValueError(f"n_draws must be at least 2, got {n_draws}")
    if value.max() > most:
        raise ValueError(f"{metric} must be at most {most:g}, got {value.max():g}")
    require_unit(metric, most, chance=chance, ceiling=ceiling)
    low, top = 0.0 if chance is None else chance, most if ceiling is None else ceiling
    if not 0 <= low < top <= most:
        raise ValueError(f"chance and ceiling must keep 0 <= chance < ceiling <= {most:g}, got {low!r} and {top!r}")
    reach = float(np.ptp(loss))
    if reach == 0:
        raise ValueError(f"loss must differ between rows, got {loss[0]:g} in every row")
    bounds = _bounds(loss, value, low, top, chance is not None, ceiling is not None)
    theta, squares = min(
        (_fitted(loss, value, start, bounds) for start in _starts(loss, bounds)), key=lambda found: found[1]
    )
    stems, runs = pd.factorize(names(rows, "stem") if "stem" in rows else np.arange(len(rows)))
    held = tuple(
        name for name, given in zip(PARAMETERS, (chance, ceiling, None, None), strict=True) if given is not None
    )
    draws, scatters = draw(
        loss,
        value,
        _independent(_sigmoid(theta, loss) - value, np.asarray(stems, np.int64)),
        theta,
        bounds,
        np.array([chance is not None, ceiling is not None]),
        n_draws=n_draws,
        seed=seed,
    )
    residual = math.sqrt(squares / max(len(loss) - len(PARAMETERS) + len(held), 1))
    return DownstreamLaw(
        metric=metric,
        **dict(zip(PARAMETERS, map(float, theta), strict=True)),
        held=held,
        most=float(most),
        residual=residual,
        loss_range=(float(loss.min()), float(loss.max())),
        n_rows=len(loss),
        draws=draws,
        scatters=scatters,
        warnings=tuple(_warnings(theta, loss, value, residual, top, "ceiling" in held, len(runs))),
    )


def _sigmoid(theta: Array, loss: Array) -> Array:
    floor, ceiling, midpoint, width = theta
    return np.asarray(floor + (ceiling - floor) / (1 + np.exp(np.clip((loss - midpoint) / width, -500, 500))))


def _jacobian(theta: Array, loss: Array) -> Array:
    """Jacobian of the metric by (floor, ceiling, midpoint, width), [K, 4]."""
    floor, ceiling, midpoint, width = theta
    share = _sigmoid(np.array([0.0, 1.0, midpoint, width]), loss)
    slope = (ceiling - floor) * share * (1 - share) / width
    return np.stack([1 - share, share, slope, slope * (loss - midpoint) / width], axis=1)


def _bounds(
    loss: Array, value: Array, low: float, top: float, floor_held: bool, ceiling_held: bool
) -> tuple[Array, Array]:
    """Bounds of (floor, ceiling, midpoint, width); held numbers have almost equal bounds.

    The mean of the metric separates floor from ceiling. Its extremes would not do: noise takes them beyond both, the farther
    the more rows there are.
    """
    reach, hair = float(np.ptp(loss)), 1e-9 * (top - low)
    middle = float(np.clip(value.mean(), low + hair, top - hair))
    lower = [low, top - hair if ceiling_held else middle, loss.min() - 3 * reach, 1e-3 * reach]
    upper = [low + hair if floor_held else middle, top, loss.max() + 3 * reach, 2 * MAX_WIDTHS * reach]
    return np.array(lower, np.float64), np.array(upper, np.float64)


def _starts(loss: Array, bounds: tuple[Array, Array]) -> list[Array]:
    reach, (lower, upper) = float(np.ptp(loss)), bounds
    middle = (lower[:2] + upper[:2]) / 2
    return [
        np.clip(np.array([*middle, loss.min() + m * reach, w * reach]), lower, upper)
        for m in _MIDDLES
        for w in _WIDTH_SHARES
    ]


def _fitted(loss: Array, value: Array, start: Array, bounds: tuple[Array, Array]) -> tuple[Array, float]:
    """Least-squares estimate from one start, and its sum of squares."""
    from scipy.optimize import least_squares

    lower, upper = bounds
    inner = np.clip(start, lower + 1e-3 * (upper - lower), upper - 1e-3 * (upper - lower))
    result = least_squares(
        lambda theta: _sigmoid(theta, loss) - value,
        inner,
        jac=lambda theta: _jacobian(theta, loss),
        bounds=bounds,
        x_scale="jac",
        max_nfev=500,
    )
    return np.asarray(result.x), 2 * float(result.cost)


def _independent(residual: Array, stems: NDArray[np.int64]) -> Array:
    """Number of independent rows that each row stands for, [K]: one over the design effect of its stem (Kish 1965, sec. 5.4).

    The correlation of two residuals of a stem is the mean of their products over the variance.
    """
    sums, counts = np.bincount(stems, residual), np.bincount(stems)
    products, pairs = float((sums**2).sum() - (residual**2).sum()), float((counts * (counts - 1)).sum())
    variance = float((residual**2).mean())
    correlation = float(np.clip(products / pairs / variance, 0, 1)) if pairs and variance else 0.0
    return np.asarray(1 / (1 + (counts[stems] - 1) * correlation))


def _warnings(
    theta: Array, loss: Array, value: Array, residual: float, top: float, ceiling_held: bool, n_runs: int
) -> list[str]:
    _, ceiling, midpoint, width = theta
    rise = float(_sigmoid(theta, loss.min()) - _sigmoid(theta, loss.max()))
    warnings = []
    if n_runs < MIN_ROWS:
        warnings.append(f"{n_runs} independent runs: intervals over runs need at least {MIN_ROWS}")
    if np.ptp(value) == 0:
        warnings.append(f"the metric is {value[0]:g} in every row: its dependence on the loss is not visible")
    elif falls(loss, value):
        warnings.append(
            "the metric falls as the loss falls, but a sigmoid can only rise; pass such a metric to `fit` as its loss"
        )
    elif rise < MIN_RISE * residual:
        warnings.append(f"the metric rises by {rise:.3g}, its scatter is {residual:.3g}: the runs may all be at chance")
    if width > MAX_WIDTHS * float(np.ptp(loss)):
        warnings.append("a straight line fits as well: neither floor nor ceiling is seen")
    if not ceiling_held and ceiling > top - 1e-4 and midpoint < loss.min():
        warnings.append(f"no run has reached the midpoint: the ceiling is the largest possible, {top:g}, not the runs'")
    return warnings


def falls(loss: Array, value: Array) -> bool:
    """Whether the metric falls as the loss falls, by a straight line, by more than MIN_RISE standard errors."""
    if np.ptp(value) == 0:
        return False
    correlation = float(np.corrcoef(loss, value)[0, 1])
    return correlation > 0 and correlation**2 * (len(loss) - 2) > MIN_RISE**2 * (1 - correlation**2)
