"""Bounds of intervals: the probabilities below them, and their distance from the middle in standard deviations."""

import math


def tails(level: float) -> tuple[float, float]:
    """Probabilities below the two bounds of an equal-tailed interval; raises ValueError if the level is not between 0 and 1."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    return (1 - level) / 2, (1 + level) / 2


def two_sided(level: float, dof: float = math.inf) -> float:
    """Standard deviations from the middle of an interval to its bounds: Student's t with `dof`, by default normal."""
    from scipy.special import ndtri, stdtrit

    _, high = tails(level)
    return float(ndtri(high) if dof == math.inf else stdtrit(dof, high))
