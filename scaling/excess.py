"""What of a table of losses is told to the surface: log loss above the best of its scale, clipped, of the nearest runs.

With e = log loss − least log loss of its cell (one scale):

    w = MAX_EXCESS · (1 − exp(−e / MAX_EXCESS))

Near the best w is e; far up a wall, where nothing is a parabola, all are alike, and a diverged run is one of them. On
Step Law's grid this searched better than a hard clip and than a logarithm, from which it was chosen there.
"""

import numpy as np

from scaling.basin import Integers
from scaling.form import Array
from scaling.optima import MAX_EXCESS

MAX_ROWS = 256
"""Runs that the process holds at most: those nearest the best of their scale, each scale in turn. A fit costs the cube."""


def clipped_excess(log_loss: Array, cell: Integers) -> Array:
    """The w of each run, [n]; NaN, a diverged run, lies at MAX_EXCESS."""
    w = np.full(len(log_loss), MAX_EXCESS)
    for number in np.unique(cell[np.isfinite(log_loss)]):
        rows = np.flatnonzero((cell == number) & np.isfinite(log_loss))
        w[rows] = -MAX_EXCESS * np.expm1(-(log_loss[rows] - log_loss[rows].min()) / MAX_EXCESS)
    return w


def nearest_the_best(w: Array, cell: Integers) -> Integers:
    """Rows to keep: the best of every cell, then the second best of each, up to MAX_ROWS; in the order of the table."""
    if len(w) <= MAX_ROWS:
        return np.arange(len(w))
    rank = np.empty(len(w))
    for number in np.unique(cell):
        rows = np.flatnonzero(cell == number)
        rank[rows[np.argsort(w[rows], kind="stable")]] = np.arange(len(rows))
    return np.sort(np.argsort(rank, kind="stable")[:MAX_ROWS])
