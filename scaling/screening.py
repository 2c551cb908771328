"""Which of a form's many starts are worth following: judged on few rows, as 100 tell it about as well as 100,000."""

import numpy as np
from numpy.typing import NDArray

from scaling.forms.form import Array, Problem
from scaling.newton import Prior, objective

MANY_ROWS, SCREENED_ROWS = 2000, 100
"""Of more, that many drawn at random tell where the minima lie, and which starts are worth following."""


def screened(
    problem: Problem, log_loss: Array, weights: Array, delta: float, n_starts: int, prior: Prior | None = None
) -> Array:
    """The most promising starts, [n_starts, P], for log_loss [K] and row weights [K]."""
    some, few = some_rows(len(log_loss), MANY_ROWS), some_rows(len(log_loss), SCREENED_ROWS)
    starts = problem.part(some).starts(log_loss[some])
    values = objective(problem.part(few), log_loss[few], weights[few], starts, delta, prior)
    return np.asarray(starts[np.argsort(np.nan_to_num(values, nan=np.inf))[:n_starts]])


def some_rows(n_rows: int, wanted: int) -> NDArray[np.int64]:
    """Rows drawn at random, in order: a stride could meet the period of a grid of N and D."""
    return np.sort(np.random.default_rng(0).permutation(n_rows)[:wanted])
