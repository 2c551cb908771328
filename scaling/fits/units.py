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
    target = np.log(loss)
    smooth = _smooth(np.log(n_params), np.log(n_tokens))
    one = target - smooth @ np.linalg.lstsq(smooth, target)[0]
    best, apart, found = math.inf, 0.0, np.zeros(len(loss), bool)
    orders = (np.argsort(-one), np.argsort(-target))  # rows in bits stand out of the surface, or out of the losses
    for order in orders:
        for first in np.unique(np.linspace(2, len(loss) - 2, _STARTS).astype(int)):
            above = np.zeros(len(loss), bool)
            above[order[:first]] = True
            for _ in range(_STEPS):
                design = np.column_stack([smooth, above])
                numbers = np.linalg.lstsq(design, target)[0]
                rest = target - design @ numbers
                if float(rest @ rest) < best:
                    best, apart, found = float(rest @ rest), float(numbers[-1]), above
                nearer = target - smooth @ numbers[:-1] > numbers[-1] / 2
                if (nearer == above).all() or not 2 <= nearer.sum() <= len(loss) - 2:
                    break
                above = nearer
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
