"""Scores of a task's items, and their means with standard errors.

At small sizes accuracy is noise around chance, while bits per byte and the probability of the right choice already move smoothly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TASKS = "tasks"
"""Name of the measure."""
CONTAMINATED = ", contaminated items"
"""End of the name of a task's scores on items that occur in the training text."""
CHANCE = "chance"
"""Metric of the accuracy that guessing gives."""
Summary = tuple[float, float | None]
"""A number over items, and its standard error; None with a single item."""


class Bits(NamedTuple):
    """Bits and bytes of a whole text, for a number over all bytes of a task."""

    bits: float
    n_bytes: int


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Return minus the log-likelihood of a text in bits per byte of it."""
    return -nats / math.log(2) / max(1, n_bytes)


def choice_scores(nats: Sequence[float], n_bytes: Sequence[int], right: Sequence[int]) -> dict[str, float]:
    """Score one item of multiple choice.

    Args:
        nats: Log-likelihood of each choice.
        n_bytes: Bytes of each choice, without the space before it.
        right: Numbers of the right choices, at least one.

    Returns:
        bits_per_byte: Of the most likely right choice.
        probability: Of all right choices, after a softmax over the choices.
        accuracy: 1.0 if the most likely choice is right.
        chance: Share of right choices.
    """
    likelihoods = np.array(nats)
    weights = np.exp(likelihoods - likelihoods.max())
    best = max(right, key=lambda number: nats[number])
    return {
        "bits_per_byte": bits_per_byte(nats[best], n_bytes[best]),
        "probability": float(weights[list(right)].sum() / weights.sum()),
        "accuracy": float(likelihoods.argmax() in right),
        CHANCE: len(right) / len(nats),
    }


def mean(values: Sequence[float]) -> Summary:
    """Return the mean over items; the standard error is the sample's standard deviation over √n, or `share_error` of 0s and 1s."""
    n, value = len(values), float(np.mean(values))
    if n == 1:
        return value, None
    return value, share_error(value, n) if {*values} <= {0.0, 1.0} else float(np.std(values, ddof=1) / math.sqrt(n))


def share_error(share: float, n: int) -> float:
    """Return the standard error of a share of n items after adding two items of each kind (Agresti & Coull, Am. Stat. 52, 1998).

    The result is close to the binomial standard error, but not 0 at a share of 0 or 1.
    """
    adjusted = (n * share + 2) / (n + 4)
    return math.sqrt(adjusted * (1 - adjusted) / (n + 4))


def ratio(values: Sequence[Bits]) -> Summary:
    """Return all bits over all bytes; the standard error is that of a ratio of means, to first order."""
    bits, sizes = (np.array(column, dtype=float) for column in zip(*values, strict=True))
    value = bits.sum() / max(1.0, sizes.sum())
    _, error = mean((bits - value * sizes).tolist())
    return float(value), None if error is None else error / max(1.0, float(sizes.mean()))
