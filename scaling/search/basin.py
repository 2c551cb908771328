"""Prior of the loss over hyperparameters and scales: one basin that keeps its shape and moves with scale.

For a run at u (hyperparameters, the box being the unit cube) and s (log2 of the scales, octaves) of cell c (one scale):

    w = level_c + stray_c · (z − ½) + q(z) + f(z, s) + noise,    z = u − drift · s

    stray_c   a slope of each cell, by which the cell's optimum strays from a straight drift
    q   a full quadratic with Gaussian coefficients; those of squares have a positive mean; slopes may change a little with s
    f   a process of covariance (shared² + own² · exp(−|Δs|² / 2 reach²)) · Matérn-5/2(|Δz / lengths|)

Everything linear is integrated out; noise, amplitudes, lengths, reach and drift maximise the posterior density given the
observations (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.7 and 5.4.1), by exact gradients.

w is log loss above the best of its cell. The priors below are assumed and wide; they were set before they were tried
on any data. Other values of MISFIT, DRIFT_SPREAD and NOISE_SPREAD were tried on Step Law's grid, but none was adopted for it.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from scaling.arrays import Array, Integers

NOISE, NOISE_SPREAD = 8e-4, 1.0
"""Median noise of log loss, and the standard deviation of its logarithm: runs of 1e17 to 1e20 FLOPs scatter by .06 %
(Step Law's table), small proxies by several times as much."""
BASIN, AMPLITUDE_SPREAD = 0.2, 1.0
"""Median of the quadratic's scale; w rises by a quarter of this scale from the middle of the box to its edge."""
SHARED, OWN = 0.02, 0.004
"""Median amplitudes of f, the deviation from a quadratic: its part shared by all cells, and its part of each cell."""
LENGTH, LENGTH_SPREAD = 0.5, 0.5
"""Median length of Matérn's correlation in box widths for two hyperparameters; it grows as the root of their number."""
REACH, REACH_SPREAD = 4.0, 0.5
"""Median octaves of scale over which the cells' own parts of f stay correlated."""
DRIFT_SPREAD = 0.05
"""Prior standard deviation of the optimum's drift if `SearchBox.drift` does not state one, in box widths per octave of scale; the
prior mean is 0."""
STRAY = 1e-4
"""Mean log loss, for each number, that a cell's stray from a straight drift costs in a purely quadratic basin. Optima scatter by .15
to .2 octaves of rate or batch (`horizon.OPTIMUM_SCATTER`, measured here; `batch.BATCH_SCATTER`), at Step Law's .0057 of log loss
per octave². The value was set from these numbers before it was tried on Step Law's 17 cells: there the density of all runs is
highest, and flat, from 3e-5 to 1e-4, and with any one cell left out from 1e-5 to 1e-4."""
LEVEL = 0.05
"""Standard deviation of a cell's level: the distance of its best run above its floor."""
SLOPES, SQUARES, CROSSES, TILTS = 1.0, 0.7, 0.5, 0.02
"""Standard deviations of the quadratic's coefficients, relative to its scale; the last is of slopes times octaves."""
Points = tuple[Array, Array, Integers, Array]
"""z, s, cell and features of some points."""


@dataclass(frozen=True, kw_only=True)
class InputLayout:
    """Layout of the columns of u, and the prior of the drift.

    Attributes:
        n_numeric: number of the numeric columns, which come first.
        groups: index of the length that each column uses.
        n_scales: number of columns of s.
        drifts: prior mean and standard deviation of each numeric column's drift with each scale, box widths per octave.
    """

    n_numeric: int
    groups: tuple[int, ...]
    n_scales: int
    drifts: tuple[tuple[float, float], ...]

    @property
    def n_lengths(self) -> int:
        """Number of lengths: one for each hyperparameter, also for a category."""
        return max(self.groups) + 1

    @cached_property
    def prior(self) -> tuple[Array, Array]:
        """Prior means and standard deviations of the process's hyperparameters (in logarithms, except for the drift)."""
        scales = np.log([NOISE, BASIN, SHARED, OWN])
        spreads = [NOISE_SPREAD, AMPLITUDE_SPREAD, AMPLITUDE_SPREAD, AMPLITUDE_SPREAD]
        length = math.log(LENGTH * math.sqrt(self.n_lengths / 2))
        drifts = np.array(self.drifts, np.float64).reshape(-1, 2)
        mean = np.concatenate([scales, np.full(self.n_lengths, length), [math.log(REACH)], drifts[:, 0]])
        spread = [np.array(spreads), np.full(self.n_lengths, LENGTH_SPREAD), np.array([REACH_SPREAD]), drifts[:, 1]]
        return mean, np.concatenate(spread)

    @cached_property
    def pairs(self) -> tuple[Integers, Integers]:
        """Columns of each product of two numeric hyperparameters."""
        return np.triu_indices(self.n_numeric, 1)


class KernelParameters(NamedTuple):
    """Hyperparameters of the process, not in logarithms; `lengths` [q] by column, `drift` [q, k]."""

    noise: float
    basin: float
    shared: float
    own: float
    lengths: Array
    reach: float
    drift: Array


def shape_of(theta: Array, layout: InputLayout) -> KernelParameters:
    """Unpack the optimised vector; categories do not drift."""
    noise, basin, shared, own = np.exp(theta[:4])
    lengths = np.exp(theta[4 : 4 + layout.n_lengths])[list(layout.groups)]
    drift = np.zeros((len(layout.groups), layout.n_scales))
    drift[: layout.n_numeric] = theta[5 + layout.n_lengths :].reshape(layout.n_numeric, layout.n_scales)
    return KernelParameters(noise, basin, shared, own, lengths, float(np.exp(theta[4 + layout.n_lengths])), drift)


def quadratic(z: Array, s: Array, basin: float, layout: InputLayout) -> tuple[Array, Array]:
    """Features [n, p], scaled so that their coefficients are standard normal, and the expected quadratic [n]."""
    t = z[:, : layout.n_numeric] - 0.5
    i, j = layout.pairs
    tilts = (t[:, :, None] * s[:, None, :]).reshape(len(z), -1)
    categories = z[:, layout.n_numeric :]
    parts = [SLOPES * t, SQUARES * t**2, CROSSES * t[:, i] * t[:, j], TILTS * tilts, SLOPES * categories / 4]
    return basin * np.hstack(parts), basin * (t**2).sum(1)


def quadratic_slopes(
    z: Array, s: Array, basin: float, layout: InputLayout, to_features: Array, weights: Array
) -> Array:
    """Slope by z of the numeric columns [n, d] through the quadratic, from the slope by its features."""
    d = layout.n_numeric
    t = z[:, :d] - 0.5
    i, j = layout.pairs
    slopes, squares, crosses, tilts, _ = np.split(to_features, np.cumsum([d, d, len(i), d * s.shape[1]]), axis=1)
    out = SLOPES * slopes + 2 * SQUARES * squares * t
    products = np.zeros((len(z), d, d))
    products[:, i, j] = products[:, j, i] = CROSSES * crosses
    out += (products @ t[:, :, None])[..., 0]
    out += TILTS * (tilts.reshape(len(z), d, s.shape[1]) * s[:, None, :]).sum(2)
    return np.asarray(basin * (out - 2 * weights[:, None] * t))


def covariance_of(shape: KernelParameters, a: Points, b: Points, layout: InputLayout) -> Array:
    correlation, _ = matern(squared_distances(a[0] / shape.lengths, b[0] / shape.lengths))
    near = np.exp(-squared_distances(a[1], b[1]) / (2 * shape.reach**2))
    d = layout.n_numeric
    slopes = stray_variance(shape.basin) * ((a[0][:, :d] - 0.5) @ (b[0][:, :d] - 0.5).T)
    own = (LEVEL**2 + slopes) * (a[2][:, None] == b[2])
    return np.asarray(a[3] @ b[3].T + correlation * (shape.shared**2 + shape.own**2 * near) + own)


def stray_variance(basin: float) -> float:
    """Variance of a cell's stray slope by each number: to ignore a slope a on top of basin · t² costs a² / (4 basin)."""
    return 4 * STRAY * basin


def squared_distances(a: Array, b: Array) -> Array:
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
    return np.asarray(np.maximum(squared, 0.0))


def matern(squared: Array) -> tuple[Array, Array]:
    """Matérn's correlation of order 5/2 at squared distances, and its derivative by them (Rasmussen and Williams 4.17)."""
    r = np.sqrt(5 * squared)
    decay = np.exp(-r)
    return (1 + r + r**2 / 3) * decay, -(5 / 6) * (1 + r) * decay
