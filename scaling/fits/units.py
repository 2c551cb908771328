"""Check that all losses of a table are in one unit: rows in bits lie above rows in nats by a factor that nothing else has.

The check compares one smooth surface through log loss over log N and log D with two parallel surfaces, each row on the nearer
one. Tests show that the check suspects no public ladder of one unit.
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
_CLOSE = 0.03  # largest deviation of the distance found from OFFSET, as a share of OFFSET (assumed)
_SPREAD = 0.1  # largest residual about two surfaces, as a share of OFFSET (assumed)
_BETTER = 3.0  # least factor by which residuals about one surface are larger (assumed)
_STARTS, _STEPS = 48, 8


def rows_in_bits(n_params: Array, n_tokens: Array, loss: Array) -> NDArray[np.bool_] | None:
    """Return the rows that seem to be in bits while the others are in nats; None if all seem to be in one unit.

    Args:
        n_params, n_tokens, loss: Columns of K rows, finite and above 0, [K]; both units may occur at the same sizes.
    """
    if len(loss) < LEAST_ROWS:
        return None
    # Project off the smooth surface, and regress the remainders on each other (Frisch and Waugh 1933).
    basis = np.linalg.qr(_smooth(np.log(n_params), np.log(n_tokens)))[0]
    target = np.log(loss)
    one = target - basis @ (basis.T @ target)
    firsts = np.unique(np.linspace(2, len(loss) - 2, _STARTS).astype(int))
    # Rows in bits have the largest residuals from the surface, or the largest losses.
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
