"""The minima of a form's objective, from many starts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.forms.problem import Problem
from scaling.minimizers.newton import minimize
from scaling.minimizers.screening import MANY_ROWS, screened, some_rows

N_STARTS, N_FINALISTS = 6, 3
"""Minimised under a wide Huber threshold, and of these under the last."""


def minima(
    problem: Problem, log_loss: Array, weights: Array, deltas: tuple[float, ...]
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """The best minima: theta [N_FINALISTS, P], objective, converged.

    A part of many rows suffices to locate the minima, and only the best are polished on all of them.
    """
    starts = screened(problem, log_loss, weights, deltas[0], N_STARTS)
    some = some_rows(len(log_loss), MANY_ROWS)
    thetas, values, _ = minimize(
        problem.part(some), log_loss[some], np.tile(weights[some], (len(starts), 1)), starts, deltas[:1]
    )
    best = thetas[np.argsort(values)[:N_FINALISTS]]
    thetas, values, converged = minimize(
        problem, log_loss, np.tile(weights, (len(best), 1)), best, deltas[1:] or deltas
    )
    return thetas, values, converged
