"""Verdicts on several variants, looked at several times, within one probability of error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Outcome = Literal["promote", "reject", "undecided"]

ERROR = 0.05
"""Probability that any of the promotions is wrong, over all variants and looks; of the rejections likewise."""
WORTH = 0.02
"""Least gain in compute, as a share, that is worth a change of the recipe: about what one more seed moves a single run."""
_POWER = 2.0
"""Of the share of the looks, by which the error is let out (between Pocock's boundary, 1, and O'Brien & Fleming's, 3: Kim & DeMets
1987). Of planted gains of 1.1 a power of 1, 2, 3 and 4 leaves 23, 25, 26 and 28 % undecided and promotes 1.0, .3, .2 and 0 % of those
that turn (600 sets of `tests/benchmarks/variants.py`, with one walk of .01 for all gains)."""


def error_by_look(look: int, n_looks: int, error: float = ERROR) -> float:
    """Error that the verdicts of looks 1 to `look` may have together; after `n_looks` it is `error`.

    A posterior's probabilities stay true however often one looks, if its prior is: as long as the doubts about all promotions so
    far sum to at most `error`, so does the probability that any is wrong. That less is let out at first, when the slope is least
    known, keeps verdicts seldom wrong for variants that the prior finds unlikely, such as gains that turn.
    """
    return float(error * (look / n_looks) ** _POWER)


def verdicts(
    p_better: Mapping[str, float], p_worth: Mapping[str, float], *, promote: float, reject: float
) -> dict[str, Outcome]:
    """Verdict of each variant: the surest are promoted as long as their chances to be worse sum to at most `promote`.

    The sum bounds the probability that any of them is wrong, whatever the dependence (Boole). Of the others, those least
    likely to be worth a change are rejected as long as the chances that they are sum to at most `reject`.

    Args:
        p_better: P(m > 1) by variant.
        p_worth: P(m > 1 + worth) by variant.
        promote, reject: error that is left for promotions and rejections.
    """
    promoted = _surest({name: 1 - p for name, p in p_better.items()}, promote)
    rejected = _surest({name: p for name, p in p_worth.items() if name not in promoted}, reject)
    return {name: "promote" if name in promoted else "reject" if name in rejected else "undecided" for name in p_better}


def _surest(doubts: Mapping[str, float], error: float) -> set[str]:
    found: set[str] = set()
    for name, doubt in sorted(doubts.items(), key=lambda item: item[1]):
        error -= doubt
        if error < -1e-12:
            break
        found.add(name)
    return found
