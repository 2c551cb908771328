"""Verdicts on several variants, looked at several times, within one probability of error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Literal

import numpy as np

Outcome = Literal["promote", "reject", "undecided"]

ERROR = 0.05
"""Probability that any of the promotions is wrong, over all variants and looks; of the rejections likewise."""
WORTH = 0.02
"""Least gain in compute, as a share, that is worth a change of the recipe: about what one more seed moves a single run."""
_N_PLACES = 400  # of the walk


def error_of_look(look: int, n_looks: int, error: float = ERROR) -> float:
    """Error that a verdict may have at a look, 1 to `n_looks`, so that over all of them it is `error`.

    The boundary is O'Brien & Fleming's (Biometrics 35, 1979) with information in proportion to the looks: z ≥ c·sqrt(J/j), hard to
    cross at first, when the slope is least known, and near the single look's in the end. A posterior's probabilities stay true
    however often one looks, if its prior is; the boundary keeps verdicts seldom wrong for variants that the prior finds
    unlikely, such as gains that turn (`tests/benchmarks/variants.py`).
    """
    from scipy.special import ndtr

    return float(ndtr(-_boundary(n_looks, error) * math.sqrt(n_looks / look)))


@cache
def _boundary(n_looks: int, error: float) -> float:
    """Factor c such that a walk of J steps from N(0, 1) is ever at c·sqrt(J) or above with probability `error`."""
    from scipy.optimize import brentq
    from scipy.special import ndtri

    single = float(-ndtri(error))
    if n_looks == 1:
        return single
    reflected = float(-ndtri(error / 2))  # of infinitely many looks, by the reflection principle
    return float(
        brentq(lambda c: _crosses(c * math.sqrt(n_looks), n_looks) - error, single - 1e-3, reflected, xtol=1e-4)
    )


def _crosses(bound: float, n_looks: int) -> float:
    """Probability that the walk is at the bound or above at one of its steps, by integration step by step."""
    places = np.linspace(-8 * math.sqrt(n_looks), bound, _N_PLACES)
    width = places[1] - places[0]
    weights = np.full(_N_PLACES, width)
    weights[[0, -1]] = width / 2
    step = np.exp(-(np.subtract.outer(places, places) ** 2) / 2) / math.sqrt(2 * math.pi)
    density = np.exp(-(places**2) / 2) / math.sqrt(2 * math.pi)
    for _ in range(n_looks - 1):
        density = step @ (weights * density)
    return 1 - float(weights @ density)


def verdicts(p_better: Mapping[str, float], p_worth: Mapping[str, float], error: float) -> dict[str, Outcome]:
    """Verdict of each variant: the surest are promoted as long as their chances to be worse sum to at most the error.

    The sum bounds the probability that any of them is wrong, whatever the dependence (Boole). Of the others, those least
    likely to be worth a change are rejected within the same bound.

    Args:
        p_better: P(m > 1) by variant.
        p_worth: P(m > 1 + worth) by variant.
        error: of this look.
    """
    promoted = _surest({name: 1 - p for name, p in p_better.items()}, error)
    rejected = _surest({name: p for name, p in p_worth.items() if name not in promoted}, error)
    return {name: "promote" if name in promoted else "reject" if name in rejected else "undecided" for name in p_better}


def _surest(doubts: Mapping[str, float], error: float) -> set[str]:
    found: set[str] = set()
    for name, doubt in sorted(doubts.items(), key=lambda item: item[1]):
        error -= doubt
        if error < -1e-12:
            break
        found.add(name)
    return found
