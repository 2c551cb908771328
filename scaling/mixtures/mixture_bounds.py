"""Mixtures within bounds: the limits, the nearest mixture within them, and the search by exchanges between two domains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypedDict

import numpy as np

from scaling.arrays import Array
from scaling.checks import positive
from scaling.errors import ScalingError
from scaling.mixtures.table import require_known

STEPS = tuple(0.2 * 0.5**i for i in range(9))
"""Shares that are moved from one domain to another, down to .0008."""
EPOCHS = 4.0
STARTS = 3
COMBINED = 8
"""Number of starts of the search, and of the best exchanges that are tried together."""
_BISECTIONS = 60


class MixtureLimits(TypedDict, total=False):
    """The planned run of a mixture, and limits of the mixture.

    Attributes:
        bounds: least and largest weight of a domain.
        available_tokens: available tokens of a domain; its weight is at most tokens · max_epochs / n_tokens.
        n_tokens: tokens of the planned run: for these caps, and for the law if its runs differ in n_tokens.
        max_epochs: most epochs of any domain; by default 4, little worse than fresh data (Muennighoff et al. 2305.16264).
        n_params: size of the planned run, if the law has it; by default, as for n_tokens, the largest of the law's runs.
    """

    bounds: Mapping[str, tuple[float, float]] | None
    available_tokens: Mapping[str, float] | None
    n_tokens: float | None
    max_epochs: float
    n_params: float | None


def weight_limits(domains: tuple[str, ...], given: MixtureLimits) -> tuple[Array, Array]:
    """Least and largest weight of each domain, [m] each.

    Raises:
        TypeError: a limit is unknown.
        ValueError: a domain is unknown, bounds are not 0 <= low <= high <= 1, or tokens are given without `n_tokens`.
        ScalingError: no mixture is within the limits.
    """
    if unknown := given.keys() - MixtureLimits.__annotations__:
        raise TypeError(f"limits must be among {', '.join(MixtureLimits.__annotations__)}, got {min(unknown)}")
    bounds, available_tokens = given.get("bounds"), given.get("available_tokens")
    n_tokens, max_epochs = given.get("n_tokens"), given.get("max_epochs", EPOCHS)
    low, high = np.zeros(len(domains)), np.ones(len(domains))
    require_known("bounds", bounds or {}, domains)
    require_known("available_tokens", available_tokens or {}, domains)
    for name, pair in (bounds or {}).items():
        ends = np.asarray(pair)
        if ends.shape != (2,) or ends.dtype.kind not in "iuf" or not 0 <= pair[0] <= pair[1] <= 1:
            raise ValueError(f"bounds of {name} must be 0 <= low <= high <= 1, got {pair!r}")
        low[domains.index(name)], high[domains.index(name)] = pair
    positive("max_epochs", max_epochs)
    if available_tokens and n_tokens is None:
        raise ValueError("available_tokens needs n_tokens, the number of tokens of the planned run")
    for name, tokens in (available_tokens or {}).items():
        positive(f"available_tokens of {name}", tokens)
        most = float(tokens) * max_epochs / float(positive("n_tokens", np.nan if n_tokens is None else n_tokens))
        high[domains.index(name)] = min(high[domains.index(name)], most)
    if low.sum() > 1 + 1e-9 or high.sum() < 1 - 1e-9 or (low > high).any():
        least = ", ".join(f"{name} {a:.3g} to {b:.3g}" for name, a, b in zip(domains, low, high, strict=True) if a > b)
        raise ScalingError(
            f"no mixture is within the bounds and caps: the smallest weights sum to {low.sum():.3g}, the largest to {high.sum():.3g}"
            + (f"; {least}" if least else "")
        )
    return low, high


def nearest(weights: Array, low: Array, high: Array) -> Array:
    """Nearest mixtures within the limits, [p, m]: clip(w + t) with the t at which they sum to 1."""
    below, above = np.full((len(weights), 1), -2.0), np.full((len(weights), 1), 2.0)
    for _ in range(_BISECTIONS):
        middle = (below + above) / 2
        over = np.clip(weights + middle, low, high).sum(axis=1, keepdims=True) > 1
        below, above = np.where(over, below, middle), np.where(over, middle, above)
    return np.asarray(np.clip(weights + above, low, high))


def exchanges(weights: Array, step: float, low: Array, high: Array) -> Array:
    """Mixtures [.., m] after moving a share of at most `step` from one domain to another, as far as the limits allow."""
    m = len(weights)
    given, taken = (index.ravel() for index in np.meshgrid(np.arange(m), np.arange(m), indexing="ij"))
    moved = np.minimum(step, np.minimum((weights - low)[given], (high - weights)[taken]))
    some = (given != taken) & (moved > 1e-6)
    out = np.tile(weights, (int(some.sum()), 1))
    rows = np.arange(len(out))
    out[rows, given[some]] -= moved[some]
    out[rows, taken[some]] += moved[some]
    return np.clip(out, 0.0, 1.0)


def minimise(score: Callable[[Array], Array], starts: Array, low: Array, high: Array) -> Array:
    """Find the mixture [m] of least score within the limits by exchanges of falling size, from the best few starts.

    Nothing is random, so the order of the domains does not matter.
    """
    within = np.unique(nearest(starts, low, high).round(9), axis=0)
    values = score(within)
    best, least = within[0], np.inf
    for start in within[np.argsort(values, kind="stable")[:STARTS]]:
        point, value = start, float(score(start[None])[0])
        for step in STEPS:
            while len(moved := exchanges(point, step, low, high)):
                scores = score(moved)
                if scores.min() >= value - 1e-9:
                    break
                kept = moved[np.argsort(scores, kind="stable")[:COMBINED]]
                # the best exchange, the best two, …
                together = nearest(point + np.cumsum(kept - point, axis=0), low, high)
                combined = score(together)
                point, value = together[np.argmin(combined)], float(combined.min())
        if value < least:
            best, least = point, value
    return np.asarray(best)
