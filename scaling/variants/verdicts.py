"""Verdicts on several variants over several looks at the runs, within one probability of error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Outcome = Literal["promote", "reject", "undecided"]

ERROR = 0.05
"""Probability that any promotion is wrong, over all variants and looks; the same holds for rejections."""
WORTH = 0.02
"""Least gain in compute, as a share, that is worth a change of the recipe: another seed changes a single run by about as much."""
_POWER = 2.0
"""Error spent as a power of the share of looks done, between Pocock's boundary, 1, and O'Brien & Fleming's, 3 (Kim & DeMets 1987).
Powers 1, 2, 3 and 4 leave 23, 25, 26 and 28 % of planted gains of 1.1 undecided, and promote 1.0, .3, .2 and 0 % of gains that turn
(600 sets of `tests/benchmarks/variants.py`, with one walk of .01 for all gains)."""


def error_by_look(look: int, n_looks: int, error: float = ERROR) -> float:
    """Error that the verdicts of looks 1 to `look` may have together; after `n_looks` it is `error`.

    If the prior is true, a posterior's probabilities stay true however often one looks. As long as the doubts about all promotions
    so far sum to at most `error`, the probability that any is wrong is at most `error`. Early looks spend less, since the slope is
    least known then: so verdicts are seldom wrong for variants that the prior finds unlikely, such as gains that turn.
    """
    return float(error * (look / n_looks) ** _POWER)


def verdicts(
    p_better: Mapping[str, float], p_worth: Mapping[str, float], *, promote: float, reject: float
) -> dict[str, Outcome]:
    """Verdict of each variant: promote the surest as long as their chances of being worse sum to at most `promote`.

    The sum bounds the probability that any promotion is wrong, whatever the dependence (Boole). Of the other variants, reject the
    least likely to be worth a change, as long as their chances of being worth it sum to at most `reject`.

    Args:
        p_better: P(m > 1) by variant.
        p_worth: P(m > 1 + worth) by variant.
        promote, reject: error left for promotions and for rejections.
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
