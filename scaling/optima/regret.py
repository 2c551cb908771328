"""Regret of a run's hyperparameters: one parabola of log loss in each, over the runs of all sweeps together.

    log loss = level_g + Σ_j (slope_j · x_j + half_curvature_j · x_j²)

Each group g of comparable runs has a separate level: runs of one size and one token budget, in the paths of one search. The
x_j are coordinates in which optima do not move: octaves from the horizon law's rate, log2 of the weight-decay timescale.
Hyperparameters are assumed to act independently: the few dozen runs of a sweep do not determine cross terms.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.checks import losses, numbers, require_columns
from scaling.errors import ScalingError
from scaling.optima.optimum import MAX_EXCESS
from scaling.presentation import lines
from scaling.serialization import JsonResult

MIN_DOF = 5
"""Fewest residual degrees of freedom; with fewer, the noise is unknown."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RegretSurface(JsonResult):
    """A sum of parabolas; only differences between points mean something.

    Attributes:
        coordinates: names of the x_j.
        centre: point about which the parabolas are expanded, [J].
        slopes, half_curvatures: coefficients of log loss about the centre, per unit and unit² of x_j, [J].
        covariance: covariance of (slopes, half_curvatures), [2J, 2J].
        noise: standard deviation of log loss about the surface.
    """

    coordinates: tuple[str, ...]
    centre: Array
    slopes: Array
    half_curvatures: Array
    covariance: Array
    noise: float
    n_runs: int
    n_groups: int

    def regret(self, points: pd.DataFrame, reference: Mapping[str, float]) -> NDArray[np.float64]:
        """Predicted loss at `points` over the loss at `reference`, minus one, [K]; below 0 if the loss at the point is lower."""
        coefficients = np.concatenate([self.slopes, self.half_curvatures])
        return np.asarray(np.expm1(self._difference(points, reference) @ coefficients))

    def stderr(self, points: pd.DataFrame, reference: Mapping[str, float]) -> NDArray[np.float64]:
        """Standard error of `regret`, [K]: 0 at the reference, and growing away from it."""
        difference = self._difference(points, reference)
        return np.asarray(np.sqrt(np.einsum("ki,ij,kj->k", difference, self.covariance, difference)))

    def _difference(self, points: pd.DataFrame, reference: Mapping[str, float]) -> Array:
        require_columns(points, self.coordinates)
        x = points[list(self.coordinates)].to_numpy(np.float64) - self.centre
        at = np.array([reference[name] for name in self.coordinates]) - self.centre
        return np.hstack([x - at, x**2 - at**2])

    def __str__(self) -> str:
        errors = np.sqrt(np.diag(self.covariance))
        n = len(self.coordinates)
        shown = {
            name: f"slope {self.slopes[j]:+.2%} ± {errors[j]:.2%}, curvature {2 * self.half_curvatures[j]:+.2%} ± "
            f"{2 * errors[n + j]:.2%} of the loss, at {self.centre[j]:.3g}"
            for j, name in enumerate(self.coordinates)
        }
        return lines(shown | {"noise": f"{self.noise:.2%} over {self.n_runs} runs in {self.n_groups} groups"})


def fit_regret_surface(rows: pd.DataFrame, *, coordinates: Sequence[str], groups: Sequence[Hashable]) -> RegretSurface:
    """Fit the parabolas by weighted least squares.

    A run far above the best of its group has the weight (MAX_EXCESS / excess)², as in `fit_optimum`, since the loss is no parabola
    there.

    Args:
        rows: the columns named in `coordinates`, and `loss` (nats per token; NaN if diverged, and then not used).
        coordinates: names of the columns x_j.
        groups: group of each row; a group with one run adds nothing.

    Raises:
        ValueError: a column is missing or breaks its rule, or the lengths differ.
        ScalingError: the runs don't determine every slope and curvature with `MIN_DOF` degrees of freedom to spare.
    """
    require_columns(rows, (*coordinates, "loss"))
    if len(groups) != len(rows):
        raise ValueError(f"groups must have one entry for each row, got {len(groups)} for {len(rows)} rows")
    table = pd.DataFrame({name: numbers(rows, name, minimum=-math.inf) for name in coordinates})
    table["y"], table["group"] = np.log(losses(rows)), list(groups)
    table = table.dropna(subset="y")
    table = table[table.groupby("group")["y"].transform("size") > 1]
    codes, names = pd.factorize(table["group"])
    x = table[list(coordinates)].to_numpy(np.float64)
    n = x.shape[1]
    excess = (table["y"] - table.groupby("group")["y"].transform("min")).to_numpy()
    root = np.minimum(1, MAX_EXCESS / np.maximum(excess, MAX_EXCESS))
    centre = np.average(x, axis=0, weights=root**2) if len(x) else np.zeros(n)
    t = x - centre
    design = np.hstack([codes[:, None] == np.arange(len(names)), t, t**2]) * root[:, None]
    dof = len(table) - design.shape[1]
    if dof < MIN_DOF or np.linalg.matrix_rank(design) < design.shape[1]:
        raise ScalingError(
            f"{len(table)} comparable runs in {len(names)} groups cannot determine {2 * n} slopes and curvatures of "
            f"{', '.join(coordinates)}"
        )
    y = table["y"].to_numpy() * root
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    variance = float(np.sum((y - design @ coefficients) ** 2)) / dof
    unit = np.linalg.inv(design.T @ design)
    return RegretSurface(
        coordinates=tuple(coordinates),
        centre=centre,
        slopes=coefficients[len(names) : len(names) + n],
        half_curvatures=coefficients[len(names) + n :],
        covariance=np.asarray(unit[len(names) :, len(names) :] * variance),
        noise=math.sqrt(variance),
        n_runs=len(table),
        n_groups=len(names),
    )
