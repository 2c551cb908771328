"""The least evidence that the coordinate check takes; known without torch, so that a study file can be judged by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Axis = Literal["width", "depth"]

MIN_SIZES = 4  # widths, or depths
MIN_SPAN = 8.0  # largest over smallest of them
MIN_SEEDS = 2


def require_sizes(axis: Axis, sizes: Sequence[int]) -> None:
    """Let widths or depths pass that can tell a slope.

    Raises:
        ValueError: If there are too few, or they span too little.
    """
    if len(set(sizes)) < MIN_SIZES:
        raise ValueError(f"the coordinate check needs at least {MIN_SIZES} {axis}s, got {sorted(set(sizes))}")
    if max(sizes) < MIN_SPAN * min(sizes):
        raise ValueError(
            f"{axis}s must span at least a factor of {MIN_SPAN:g}, got {min(sizes)} to {max(sizes)}, "
            f"a factor of {max(sizes) / min(sizes):.3g}"
        )


def require_seeds(seeds: Sequence[int]) -> None:
    """Let seeds pass that are enough to average over.

    Raises:
        ValueError: If there are too few.
    """
    if len(set(seeds)) < MIN_SEEDS:
        raise ValueError(f"the coordinate check averages over at least {MIN_SEEDS} seeds, got {list(seeds)}")
