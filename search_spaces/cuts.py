"""Cuts of one hyperparameter's support to the range of the best trials, if chance does not explain that range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.base import Distribution
from search_spaces.discrete import Choice, Fixed, Ordinal
from search_spaces.distributions import Integer, Line, LogUniform, Uniform
from search_spaces.errors import SpaceError
from search_spaces.prior import WIDEST, Prior
from search_spaces.simplex import Simplex
from search_spaces.weights import Weights

MARGIN = 2.0
"""Distance of a bound from the outermost best trial, in mean distances between the best trials. A margin of one would make the range
unbiased for a uniform region. A margin of two keeps the optimum in 95 % of planted surfaces (measured here,
tests/search_spaces/test_narrow.py), and the best cell of Step Law's grids in 99 % of draws of 24 or 40 trials from each (measured
here)."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Decision about one hyperparameter; without a distribution the hyperparameter is dropped."""

    action: str
    reason: str
    distribution: Distribution | None


def cut(distribution: Distribution, values: Sequence[Any], best: NDArray[np.bool_], level: float) -> Cut:
    """Decide about one hyperparameter.

    Args:
        values: Value in each trial that has the hyperparameter, all in the support.
        best: True for the trials that count as best.
        level: Probability that chance alone makes a cut.
    """
    if isinstance(distribution, Fixed):
        return Cut(action="kept", reason="fixed", distribution=distribution)
    if not best.any() or best.all():
        reason = "no trial has it"
        if len(values):
            reason = f"all {len(values)} trials {'count as the best: too few, or equal' if best.any() else 'diverged'}"
        return Cut(action="kept", reason=reason, distribution=distribution)
    if isinstance(distribution, Choice):
        return _choice(distribution, values, best, level)
    if isinstance(distribution, Simplex):
        return _simplex(distribution, values, best, level)
    places = np.array([distribution.encode(value)[0] for value in values])
    return _line(distribution, places, best, level)


def _line(distribution: Distribution, places: NDArray[np.float64], best: NDArray[np.bool_], level: float) -> Cut:
    low, high = float(places[best].min()), float(places[best].max())
    m = int(best.sum())
    chance = _chance_of_range(m, float(((places >= low) & (places <= high)).mean()))
    if chance > level:
        reason = f"the {m} best are no closer together than {m} random trials may be (p = {chance:.2g})"
        return Cut(action="kept", reason=reason, distribution=distribution)
    margin = MARGIN * (high - low) / (m - 1)
    # On a grid the best trials may share one value, so the tried values next to it stay, too.
    next_below, next_above = places[places < low].max(initial=0.0), places[places > high].min(initial=1.0)
    ends = (max(min(low - margin, next_below), 0.0), min(max(high + margin, next_above), 1.0))
    smaller = _cut(distribution, *ends)
    at = [side for side, end in (("low", ends[0] <= 0), ("high", ends[1] >= 1)) if end]
    reason = f"the {m} best lie within this range and its margin (p = {chance:.1g})"
    if at:
        reason += f"; they reach the {' and the '.join(at)} bound, which is kept: search beyond it"
    if distribution.prior is not None and smaller.prior is None and not isinstance(smaller, Fixed):
        reason += "; the prior was dropped, because it is flat there"
    return Cut(
        action="at the edge" if at else ("cut" if smaller != distribution else "kept"),
        reason=reason,
        distribution=smaller,
    )


def _chance_of_range(m: int, share: float) -> float:
    """Return the probability that m uniform draws span at most `share` of their interval.

    For m of n trials, none of which can be drawn twice, this is an upper bound: at m = 12, n = 48 and .01, four times too large.
    """
    return m * share ** (m - 1) - (m - 1) * share**m


def _cut(distribution: Distribution, low: float, high: float) -> Distribution:
    """Return the distribution between two places; a single value becomes fixed."""
    first: Any = distribution.decode([low])
    last: Any = distribution.decode([high])
    match distribution:
        case Uniform() | LogUniform():
            return _with_prior(replace(distribution, prior=None, low=first, high=last), distribution.prior)
        case Integer():
            if first == last:
                return Fixed(value=first, when=distribution.when)
            return _with_prior(replace(distribution, prior=None, low=first, high=last), distribution.prior)
        case Ordinal(values=values):
            kept = values[values.index(first) : values.index(last) + 1]
            if len(kept) == 1:
                return Fixed(value=first, when=distribution.when)
            smaller = Ordinal(values=kept, when=distribution.when)
            prior = distribution.prior
            if prior is None or _is_flat(prior, smaller):
                return smaller
            rank = min(max(values.index(prior.centre), values.index(first)), values.index(last))
            return replace(smaller, prior=replace(prior, centre=values[rank]))
    raise TypeError(f"no range to cut in {distribution!r}")


def _with_prior(smaller: Uniform | LogUniform | Integer, prior: Prior | None) -> Distribution:
    """Move the prior's centre into the support, or drop a prior that is flat over it."""
    if prior is None or _is_flat(prior, smaller):
        return smaller
    centre: Any = prior.centre
    return replace(smaller, prior=replace(prior, centre=min(max(centre, smaller.low), smaller.high)))


def _is_flat(prior: Prior, over: Line) -> bool:
    return prior.spread >= WIDEST * over.length


def _choice(distribution: Choice, values: Sequence[Any], best: NDArray[np.bool_], level: float) -> Cut:
    n, m = len(values), int(best.sum())
    kept, dropped = [], []
    for value in distribution.values:
        places = np.array([distribution.encode(v) == distribution.encode(value) for v in values])
        k = int(places.sum())
        chance = _chance_of_none(n, k, m)
        if (places & best).any() or chance > level / len(distribution.values):
            kept.append(value)
        else:
            dropped.append(f"{value}: none of its {k} trials is among the {m} best (p = {chance:.1g})")
    if not dropped:
        return Cut(action="kept", reason="no value is worse beyond chance", distribution=distribution)
    reason = "; ".join(dropped)
    if len(kept) == 1:
        return Cut(action="cut", reason=reason, distribution=Fixed(value=kept[0], when=distribution.when))
    prior = distribution.prior
    if prior and prior.centre not in kept:
        prior, reason = None, f"{reason}; the prior was dropped with its centre"
    return Cut(
        action="cut", reason=reason, distribution=Choice(values=tuple(kept), prior=prior, when=distribution.when)
    )


def _chance_of_none(n: int, k: int, m: int) -> float:
    """Return the probability that none of k marked trials among n is among m drawn trials (hypergeometric)."""
    return math.comb(n - k, m) / math.comb(n, m)


def _simplex(distribution: Simplex, values: Sequence[Any], best: NDArray[np.bool_], level: float) -> Cut:
    n, m = len(values), int(best.sum())
    low, raised = dict(distribution.low), []
    for part in distribution.parts:
        weights = np.array([value[part] for value in values])
        lowest, highest = float(weights[best].min()), float(weights[best].max())
        chance = _chance_of_none(n, int((weights < lowest).sum()), m)
        # As on a line, the tried weights next to the best stay, too.
        bound = min(lowest - MARGIN * (highest - lowest) / max(m - 1, 1), weights[weights < lowest].max(initial=0.0))
        if chance <= level / len(distribution.parts) and bound > low.get(part, 0.0):
            low[part] = bound
            raised.append(f"{part}: the {m} best have at least {lowest:.3g} (p = {chance:.1g})")
    if not raised:
        return Cut(action="kept", reason="no part's weight matters beyond chance", distribution=distribution)
    smaller = replace(distribution, low=Weights(low), prior=None)
    reason = "; ".join(raised)
    if distribution.prior is not None:
        try:
            smaller = replace(smaller, prior=distribution.prior)
        except SpaceError:
            reason += "; the prior was dropped, because its centre is outside"
    return Cut(action="cut", reason=reason, distribution=smaller)
