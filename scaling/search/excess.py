"""Losses in the form that the surface is fitted to: clipped log loss above the best of the scale, for the most informative runs.

With e = log loss − least log loss of its cell (one scale):

    w = MAX_EXCESS · (1 − exp(−e / MAX_EXCESS))

Near the best run w is e. Far up a wall, where the loss is no parabola, all runs have nearly the same w, diverged runs included.
This form was chosen on Step Law's grid, where searches did better with it than with a hard clip or a logarithm.
"""

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array, Integers
from scaling.optima.optimum import MAX_EXCESS

MAX_ROWS, FAR_ROWS = 256, 32
"""Most runs in the process, and how many of them are far from the best. The cost of a fit grows with the cube of the runs.

Of 0, 32 and 64 far runs, 32 did best on Step Law's grid, by little: without any, known walls are forgotten."""
SOURCE_SHARE = 0.25
"""Share of MAX_ROWS for runs of other families if the searched family's runs fill the rest (assumed)."""


def clipped_excess(log_loss: Array, cell: Integers) -> Array:
    """Clipped excess w of each run, [n]; a diverged run (NaN) has MAX_EXCESS."""
    w = np.full(len(log_loss), MAX_EXCESS)
    for number in np.unique(cell[np.isfinite(log_loss)]):
        rows = np.flatnonzero((cell == number) & np.isfinite(log_loss))
        w[rows] = -MAX_EXCESS * np.expm1(-(log_loss[rows] - log_loss[rows].min()) / MAX_EXCESS)
    return w


def most_informative(w: Array, cell: Integers, own: NDArray[np.bool_]) -> Integers:
    """Select rows, in the order of the table: all, or MAX_ROWS of them, with SOURCE_SHARE of these for sources.

    The best run of every cell comes first, then the second best of each and so on; FAR_ROWS are spread evenly over the rest.

    Args:
        w: Clipped excess of each run, [n].
        cell: Number of the run's scale, [n].
        own: Whether the run is of the searched family, [n].
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
