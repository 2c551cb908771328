"""Check that all losses of a table are in one unit: rows in bits lie above rows in nats by a factor that nothing else has.

One smooth surface through log loss over log N and log D is compared with two that are apart by a constant, each row on the
nearer one. That tables of one unit are not suspected is tested on every public ladder that the tests have.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array

OFFSET = -math.log(math.log(2))
"""Change of log loss from nats to bits, .3665."""
LEAST_ROWS = 12
"""Fewest rows that distinguish two surfaces of six numbers from one (assumed)."""
_CLOSE = 0.03  # of OFFSET, within which the distance found must lie (assumed)
_SPREAD = 0.1  # of OFFSET, which the residuals about two surfaces must not exceed (assumed)
_BETTER = 3.0  # by which they must be smaller than those about one (assumed)
_STARTS, _STEPS = 48, 8


def rows_in_bits(n_params: Array, n_tokens: Array, loss: Array) -> NDArray[np.bool_] | None:
    """Rows that seem to be in bits where the others are in nats; None where all seem to be in one unit.

    Args:
        n_params, n_tokens, loss: Of K rows, finite and above 0, [K]; rows of a unit need not differ in size from the others.
    """
    if len(loss) < LEAST_ROWS:
        return None
    # By projection off the smooth surface, as in a regression of what is left of each (Frisch and Waugh 1933).
    basis = np.linalg.qr(_smooth(np.log(n_params), np.log(n_tokens)))[0]
    target = np.log(loss)
    one = target - basis @ (basis.T @ target)
    firsts = np.unique(np.linspace(2, len(loss) - 2, _STARTS).astype(int))
    # Rows in bits stand out of the surface, or out of the losses.
    ranks = np.stack([np.argsort(np.argsort(-values)) for values in (one, target)])
    above = (ranks[:, None] < firsts[:, None]).reshape(-1, len(loss))
    best, apart, found = math.inf, 0.0, np.zeros(len(loss), bool)
    for _ in range(_STEPS):
        left = above - (above @ basis) @ basis.T
        distance = left @ one / np.maximum((left * left).sum(axis=1), 1e-300)
        rest = one - distance[:, None] * left
        squares = (rest * rest).sum(axis=1)
        least = int(squares.argmin())
        if squares[least] < best:
            best, apart, found = float(squares[least]), float(distance[least]), above[least]
        nearer = rest + distance[:, None] * above > distance[:, None] / 2
        open_ = (nearer != above).any(axis=1) & (nearer.sum(axis=1) >= 2) & (nearer.sum(axis=1) <= len(loss) - 2)
        if not open_.any():
            break
        above = nearer[open_]
    spread = math.sqrt(best / len(loss))
    found_two = (
        abs(apart / OFFSET - 1) <= _CLOSE
        and spread <= _SPREAD * OFFSET
        and math.sqrt(float(one @ one) / len(loss)) >= _BETTER * spread
        and 2 <= found.sum() <= len(loss) - 2
    )
    return found if found_two else None


def _smooth(x: Array, y: Array) -> Array:
    """Columns of a surface of second degree, [K, 6]."""
    x, y = x - x.mean(), y - y.mean()
    return np.column_stack([np.ones_like(x), x, y, x * x, y * y, x * y])
