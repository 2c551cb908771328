"""Bounds of a search: ranges of numbers, choices of categories, columns of scales; and the parts that no run has tried."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.checks import numbers, require_columns
from scaling.search.basin import DRIFT_SPREAD, InputLayout

SOURCE, APART = "source", 4.0
"""Column of a run's source, and the octaves of scale by which a source counts as far away: over this distance the cells' own parts of
the surface lose most of their correlation (`basin.REACH`). Tried on Step Law's grid (tests/benchmarks/search_families.py)."""
OFFSET_SPREAD = 0.1
"""Standard deviation of a source's offset of the optimum, in box widths: twice that of the drift per doubling of scale (assumed)."""

GAP = 1 / 3
"""Share of a range between its outermost run and its bound above which this end counts as untried; the half next to the bound is
then explored (both assumed)."""

Point = dict[str, Any]
"""A value for each coordinate."""
Region = tuple[int, float, float]
"""A column of the encoded points, and its lowest and highest value there."""


@dataclass(frozen=True, kw_only=True)
class SearchBox:
    """Coordinates of a search, each in a unit of even effect: log2 of a rate or of a batch, a fraction.

    Attributes:
        bounds: lowest and highest value of each numeric coordinate.
        choices: the values of each category.
        scales: columns of a run's scale, e.g. n_params and n_tokens; above 0, and known before the run.
        sources: names of other families whose runs are used, in a column `source` ("" or no column: the searched
            family). At the same scale each source's optimum lies off the family's by an offset that is estimated.
        drift: prior of the move of a numeric coordinate's optimum per doubling of a scale: mean and standard deviation in the
            coordinate's unit. By default 0 ± `DRIFT_SPREAD` box widths.

    Raises:
        ValueError: there is no coordinate, a name occurs twice, bounds don't rise, a category has fewer than two choices, or a drift
            names an unknown coordinate or scale, or is not a finite mean with a deviation above 0.
    """

    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    choices: Mapping[str, tuple[Hashable, ...]] = field(default_factory=dict)
    scales: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    drift: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (*self.names, *self.scales)
        if not self.names or len(set(names)) < len(names):
            raise ValueError(f"a box needs coordinates, each name once, got {', '.join(names) or 'none'}")
        for name, (low, high) in self.bounds.items():
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ValueError(f"bounds of {name} must be finite and rise, got {low!r} and {high!r}")
        for name, values in self.choices.items():
            if len(set(values)) < max(2, len(values)):
                raise ValueError(f"choices of {name} must be two or more different ones, got {values!r}")
        for name, by_scale in self.drift.items():
            for scale, (mean, spread) in by_scale.items():
                if name not in self.bounds or scale not in self.scales:
                    raise ValueError(f"drift must be for a numeric coordinate with a scale, got {name} with {scale}")
                if not (math.isfinite(mean) and 0 < spread < math.inf):
                    raise ValueError(
                        f"drift of {name} with {scale} must be finite, its deviation above 0, got {mean!r} ± {spread!r}"
                    )

    @property
    def names(self) -> tuple[str, ...]:
        """Numeric coordinates, then categories."""
        return (*self.bounds, *self.choices)

    @property
    def layout(self) -> InputLayout:
        """Layout of the encoded columns."""
        groups = list(range(len(self.bounds)))
        for number, values in enumerate(self.choices.values(), start=len(groups)):
            groups += [number] * len(values)
        drifts = tuple(
            drift
            for name, (low, high) in self.bounds.items()
            for drift in (
                *(self._drift(name, scale, high - low) for scale in self.scales),
                *[(0.0, OFFSET_SPREAD / APART)] * len(self.sources),
            )
        )
        n_scales = len(self.scales) + len(self.sources)
        return InputLayout(n_numeric=len(self.bounds), groups=tuple(groups), n_scales=n_scales, drifts=drifts)

    def _drift(self, name: str, scale: str, width: float) -> tuple[float, float]:
        """Prior mean and standard deviation of one drift, in box widths."""
        if scale not in (stated := self.drift.get(name, {})):
            return 0.0, DRIFT_SPREAD
        mean, spread = stated[scale]
        return mean / width, spread / width

    def encode(self, points: pd.DataFrame) -> Array:
        """Encode points, [n, q]: numbers in the unit cube (outside for points outside the box), categories as 0 or √½.

        Raises:
            ValueError: a column is missing, a number is not finite, or a category has another value.
        """
        require_columns(points, self.names)
        columns = [
            (numbers(points, name, minimum=-math.inf) - low) / (high - low) for name, (low, high) in self.bounds.items()
        ]
        for name, values in self.choices.items():
            given = list(points[name])
            if strange := [value for value in given if value not in values]:
                raise ValueError(f"{name} must be one of {', '.join(map(str, values))}, got {strange[0]!r}")
            # At √½ two different categories are one apart.
            columns += [np.array([math.sqrt(0.5) * (value == one) for value in given], np.float64) for one in values]
        return np.column_stack(columns)

    def decode(self, u: Array) -> pd.DataFrame:
        """Invert `encode`; the largest of a category's columns gives its value."""
        columns: dict[str, Any] = {
            name: low + u[:, i] * (high - low) for i, (name, (low, high)) in enumerate(self.bounds.items())
        }
        first = len(self.bounds)
        for name, values in self.choices.items():
            columns[name] = [values[i] for i in u[:, first : first + len(values)].argmax(axis=1)]
            first += len(values)
        return pd.DataFrame(columns)

    def place(self, unit: Array) -> Array:
        """Encoded points [n, q] from a number in [0, 1] for each coordinate, [n, names]."""
        n = len(self.bounds)
        parts = [np.clip(unit[:, :n], 0.0, 1.0)]
        for i, values in enumerate(self.choices.values(), start=n):
            chosen = np.minimum((np.clip(unit[:, i], 0, 1) * len(values)).astype(np.int64), len(values) - 1)
            parts.append(math.sqrt(0.5) * np.eye(len(values))[chosen])
        return np.hstack(parts)

    def octaves(self, rows: pd.DataFrame) -> Array:
        """log2 of the scales, and `APART` for rows of each source, [n, k]; raises ValueError if a column is missing or unknown."""
        require_columns(rows, self.scales)
        given = rows[SOURCE] if SOURCE in rows else pd.Series("", index=rows.index)
        if strange := set(given) - {"", *self.sources}:
            raise ValueError(
                f"source must be one of {', '.join(self.sources) or 'none'}, or empty, got {strange.pop()!r}"
            )
        columns = [np.log2(numbers(rows, name)) for name in self.scales]
        columns += [APART * (given == name).to_numpy(np.float64) for name in self.sources]
        return np.column_stack(columns or [np.zeros((len(rows), 0))])


def untried(box: SearchBox, u: Array) -> list[Region]:
    """Regions of the box without any of the encoded runs [n, q]. A range without any run has no untried ends yet."""
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
    """Nearest point to an encoded point [q] in each region, [n, q]."""
    moved = np.tile(point, (len(regions), 1))
    groups = np.array(box.layout.groups)
    for row, (column, low, high) in zip(moved, regions, strict=True):
        if column < len(box.bounds):
            row[column] = np.clip(row[column], low, high)
        else:
            row[groups == groups[column]] = 0.0
            row[column] = math.sqrt(0.5)
    return moved
