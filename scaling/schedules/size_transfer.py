"""The change of the loss after the last measured step of a run, from runs of other sizes N and lengths T.

If the curves have no lengths and every fitted size has run the same schedule, y is the log of the ratio of their loss to their loss at
the last measured step. Otherwise y is the gain of the decay since that step over the loss there, by the groups' laws. Across groups y
is linear in log N and log T:

    y = mean of y_i + e·(log N − mean of log N_i) + f·(log T − mean of log T_i)

The slopes e and f have a normal prior of mean 0 and standard deviation SLOPE_SPREAD·|mean of y_i|, unless another spread is stated.
Each y_i has the variance sigma², the mean of (SIZE_ERROR·mean of y_i)², counted as 3, and of the squared residuals over their degrees
of freedom, n − 1 less the slopes. So groups that follow no such line widen the interval. A line is a weighted sum of the y_i and stays
bounded; a power of N, which was tried, is not where one y_i is near 0.

Measured, 25M and 100M forecasting the final loss of 400M parameters: mean error .16 % by the ratio, .35 % by laws to which the
schedule was not fitted, .62 % by the ratio of 100M alone (`tests/benchmarks/schedule_forecasts.py`).

With the gain by laws, the loss at a constant rate comes from the run itself: its measured loss plus the gain is fitted by
l + m·(power term of the nearest size's law), so only l and m are its own.
"""

from __future__ import annotations

import numpy as np

from scaling.arrays import Array

SLOPE_SPREAD = 0.2
"""Spread of the slope as a share of the mean (assumed; from 25M to 100M parameters the gain of two cooldowns grows by .12 per e-fold
of N, its share of the loss by .19)."""
SIZE_ERROR, SIZE_ERROR_COUNT = 0.07, 3
"""Relative error of one size's y (assumed from the errors of about .2 % of the loss where the gain is 3 %), and its weight."""


def transferred(
    values: Array, covariates: Array, target: Array, *, slope_spread: float = SLOPE_SPREAD
) -> tuple[Array, Array]:
    """Return y of the target and its standard error, [K] each, by the formula at the head of this file.

    Args:
        values: y per group and step, [groups, K].
        covariates: log N and log length of the groups, or one of them, [groups, covariates].
        target: those of the run, [covariates].
        slope_spread: standard deviation of the slopes' prior, as a share of the mean.
    """
    mean, centre = values.mean(axis=0), covariates.mean(axis=0)
    centred, distance = covariates - centre, target - centre
    n, freedom = len(covariates), max(len(covariates) - 1 - len(target), 0)
    squares, axes = np.linalg.eigh(centred.T @ centred)
    centred, distance = centred @ axes, axes.T @ distance
    slope = (centred.T @ values) / (squares + (SIZE_ERROR / slope_spread) ** 2)[:, None]
    residual = ((values - mean - centred @ slope) ** 2).sum(axis=0) if freedom else 0.0
    variance = (SIZE_ERROR_COUNT * (SIZE_ERROR * mean) ** 2 + residual) / (SIZE_ERROR_COUNT + freedom)
    prior = (slope_spread * mean) ** 2
    # Posterior variance of the slopes; the least positive number stands for the denominator of a y that is 0 in all groups.
    of_slope = variance * prior / np.maximum(variance + squares[:, None] * prior, np.finfo(float).tiny)
    return mean + distance @ slope, np.sqrt(variance / n + distance**2 @ of_slope)


def constant_rate_loss(power: Array, loss: Array) -> tuple[float, float]:
    """Fit l + m·power, m at least 0, to losses at a constant rate by relative least squares; return (l, m)."""
    columns = np.stack([np.ones_like(power), power], axis=1) / loss[:, None]
    level, factor = np.linalg.lstsq(columns, np.ones_like(loss), rcond=None)[0]
    if factor < 0:
        return float(loss.mean()), 0.0
    return float(level), float(factor)
