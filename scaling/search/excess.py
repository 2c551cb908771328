"""Losses as the surface is fitted to them: log loss above the best of its scale, clipped, of the most informative runs.

With e = log loss − least log loss of its cell (one scale):

    w = MAX_EXCESS · (1 − exp(−e / MAX_EXCESS))

Near the best w is e; far up a wall, where nothing is a parabola, all are alike, and a diverged run is one of them. On
Step Law's grid this searched better than a hard clip and than a logarithm, from which it was chosen there.
"""

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array, Integers
from scaling.optima.optimum import MAX_EXCESS

MAX_ROWS, FAR_ROWS = 256, 32
"""Runs that the process holds at most, and how many of them are far from the best. A fit costs the cube.

Of 0, 32 and 64 far ones, 32 did best on Step Law's grid, by little: without any, known walls are forgotten."""
SOURCE_SHARE = 0.25
"""Part of MAX_ROWS that runs of other families may take where the family's own fill the rest (assumed)."""


def clipped_excess(log_loss: Array, cell: Integers) -> Array:
    """The w of each run, [n]; NaN, a diverged run, lies at MAX_EXCESS."""
    w = np.full(len(log_loss), MAX_EXCESS)
    for number in np.unique(cell[np.isfinite(log_loss)]):
        rows = np.flatnonzero((cell == number) & np.isfinite(log_loss))
        w[rows] = -MAX_EXCESS * np.expm1(-(log_loss[rows] - log_loss[rows].min()) / MAX_EXCESS)
    return w


def most_informative(w: Array, cell: Integers, own: NDArray[np.bool_]) -> Integers:
    """Rows to keep, in the order of the table: all, or MAX_ROWS of them, SOURCE_SHARE of those from sources if there are as many.

    The best of every cell, then the second best of each and so on; and of the rest FAR_ROWS, evenly in that order.

    Args:
        w: Of each run, [n].
        cell: Number of its scale, [n].
        own: Whether it is of the family that is searched, [n].
    """
    n_sources = min(int((~own).sum()), max(int(SOURCE_SHARE * MAX_ROWS), MAX_ROWS - int(own.sum())))
    shares = ((own, MAX_ROWS - n_sources), (~own, n_sources))
    return np.sort(np.concatenate([np.flatnonzero(of)[_thinned(w[of], cell[of], n)] for of, n in shares]))


def _thinned(w: Array, cell: Integers, n: int) -> Integers:
    if len(w) <= n:
        return np.arange(len(w))
    rank = np.empty(len(w))
    for number in np.unique(cell):
        rows = np.flatnonzero(cell == number)
        rank[rows[np.argsort(w[rows], kind="stable")]] = np.arange(len(rows))
    n_far = n * FAR_ROWS // MAX_ROWS
    near, rest = np.split(np.argsort(rank, kind="stable"), [n - n_far])
    return np.concatenate([near, rest[np.linspace(0, len(rest) - 1, n_far).round().astype(np.int64)]])
