"""Parts of a box that no run has tried: categories, and the ends of ranges."""

import math

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.search.search_box import SearchBox

GAP = 1 / 3
"""Part of a range between its outermost run and its bound from which that end counts as untried; the half at the bound is then
explored (both assumed)."""

Region = tuple[int, float, float]
"""A column of the encoded points, and its lowest and highest value there."""


def untried(box: SearchBox, u: Array) -> list[Region]:
    """Regions of the box without a run, of encoded runs [n, q]. A range in which no run lies has no ends yet."""
    regions: list[Region] = []
    for column, values in enumerate(u.T):
        if column >= len(box.bounds):
            regions += [] if (values > 0).any() else [(column, 0.5, 1.0)]
        elif len(inside := values[(values >= 0) & (values <= 1)]):
            low, high = float(inside.min()), float(inside.max())
            regions += [(column, 0.0, low / 2)] if low > GAP else []
            regions += [(column, (1 + high) / 2, 1.0)] if high < 1 - GAP else []
    return regions


def is_within(regions: list[Region], u: Array) -> NDArray[np.bool_]:
    """Whether each encoded point [n, q] lies in one of the regions, [n]."""
    held = [(u[:, column] >= low) & (u[:, column] <= high) for column, low, high in regions]
    return np.asarray(np.any(held, axis=0))


def moved_into(regions: list[Region], point: Array, box: SearchBox) -> Array:
    """The nearest point to an encoded one [q] in each region, [n, q]."""
    moved = np.tile(point, (len(regions), 1))
    groups = np.array(box.layout.groups)
    for row, (column, low, high) in zip(moved, regions, strict=True):
        if column < len(box.bounds):
            row[column] = np.clip(row[column], low, high)
        else:
            row[groups == groups[column]] = 0.0
            row[column] = math.sqrt(0.5)
    return moved
