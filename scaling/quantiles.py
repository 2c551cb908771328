"""Ends of intervals: the probabilities below them, and the standard deviations that they lie from the middle."""

import math


def tails(level: float) -> tuple[float, float]:
    """Probability below either end of an equal-tailed interval.

    Raises:
        ValueError: the level is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    return (1 - level) / 2, (1 + level) / 2


def two_sided(level: float, dof: float = math.inf) -> float:
    """Standard deviations from the middle of an interval to its ends: Student's t, or normal without degrees of freedom."""
    from scipy.special import ndtri, stdtrit

    _, high = tails(level)
    return float(ndtri(high) if dof == math.inf else stdtrit(dof, high))
