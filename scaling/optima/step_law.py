"""The best rate and the best batch as powers of parameters and tokens at once (Step Law, 2503.04715, abstract).

    eta = c · N^a · D^b   (c 1.79, a −.713, b .307 there),      B = d · N^f · D^e  tokens   (d .58, e .571, f none there)

Fitted by weighted least squares in logarithms, from the optimum of each cell (N, D). Where size doesn't change, or muP takes care of
it, `fit_horizon_law` and `fit_batch_law` are the ones to use: they leave each size its own level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from scaling.arrays import Array
from scaling.checks import numbers, positive, require_columns
from scaling.errors import ScalingError
from scaling.presentation import lines, span
from scaling.quantiles import two_sided
from scaling.serialization import FittedResult, TableLayout

MAX_CORRELATION = 0.95
"""Correlation of log N and log D over the cells above which their exponents cannot be separated (assumed)."""
MIN_CELLS = 6
_ROUNDING = 1e-12  # of a correlation


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLaw(FittedResult):
    """One power law of N and D.

    Attributes:
        of: `rate` or `batch` (in tokens).
        coefficient: c, or d.
        params_exponent: a, or f; 0 if it was not fitted.
        tokens_exponent: b, or e.
        covariance: of (log value at the centre of the cells, the fitted exponents), from the cells' scatter.
        centre: geometric means of N and D over the cells.
        scatter: standard deviation of the cells about the law, octaves.
        n_params_range, n_tokens_range: least and most of the cells.
        cells: n_params, n_tokens, the best value, and `off`, octaves above the law.
    """

    of: str
    coefficient: float
    params_exponent: float
    tokens_exponent: float
    scatter: float
    centre: tuple[float, float]
    n_params_range: tuple[float, float]
    n_tokens_range: tuple[float, float]
    warnings: tuple[str, ...]
    covariance: Array = field(repr=False)
    cells: Annotated[pd.DataFrame, TableLayout("list")] = field(repr=False)

    @property
    def of_params(self) -> bool:
        """True if the exponent of N was fitted."""
        return len(self.covariance) == 3

    @property
    def _dof(self) -> int:
        return len(self.cells) - len(self.covariance)

    def best(self, n_params: ArrayLike, n_tokens: ArrayLike) -> Array:
        """The best rate, or batch in tokens, of the broadcast shape."""
        sizes, tokens = positive("n_params", n_params), positive("n_tokens", n_tokens)
        return np.asarray(self.coefficient * sizes**self.params_exponent * tokens**self.tokens_exponent)[()]

    def supports(self, n_params: float, n_tokens: float) -> bool:
        """Check that both lie within ten times the fitted ranges."""
        pairs = ((n_params, self.n_params_range), (n_tokens, self.n_tokens_range))
        return all(low / 10 <= value <= high * 10 for value, (low, high) in pairs)

    def interval(self, n_params: float, n_tokens: float, level: float = 0.9) -> tuple[float, float]:
        """Interval of the best value of one cell: Student's t, with the cells' own scatter."""
        sizes, tokens = float(positive("n_params", n_params)), float(positive("n_tokens", n_tokens))
        octaves = [math.log2(sizes / self.centre[0])] if self.of_params else []
        gradient = np.array([1.0, *octaves, math.log2(tokens / self.centre[1])])
        spread = math.sqrt(gradient @ self.covariance @ gradient + self.scatter**2)
        reach = two_sided(level, self._dof) * spread
        value = float(self.best(sizes, tokens))
        return value * 2**-reach, value * 2**reach

    def intervals(self, level: float = 0.9) -> pd.DataFrame:
        """Columns estimate, low, high for the coefficient (at N = D = 1, far outside the cells) and the exponents."""
        reach = two_sided(level, self._dof)
        back = np.array([1.0, *([-math.log2(self.centre[0])] if self.of_params else []), -math.log2(self.centre[1])])
        spread = reach * math.sqrt(back @ self.covariance @ back)
        rows = {"coefficient": (self.coefficient, self.coefficient * 2**-spread, self.coefficient * 2**spread)}
        errors = reach * np.sqrt(np.diag(self.covariance))[1:]
        names = ["params_exponent", "tokens_exponent"][-len(errors) :]
        for name, error in zip(names, errors, strict=True):
            value = getattr(self, name)
            rows[name] = (value, value - error, value + error)
        return pd.DataFrame.from_dict(rows, orient="index", columns=["estimate", "low", "high"])

    def __str__(self) -> str:
        power = f"·N^{self.params_exponent:.3f}" if self.of_params else ""
        unit = " tokens" if self.of == "batch" else ""
        table = self.intervals().map("{:.4g}".format).to_string()
        about = {
            "cells": f"{len(self.cells)}, N {span(*self.n_params_range)}, D {span(*self.n_tokens_range)}",
            "scatter": f"{self.scatter:.2f} octaves",
            "status": self.status_line,
        }
        return f"{self.of} = {self.coefficient:.4g}{power}·D^{self.tokens_exponent:.3f}{unit}\n{table}\n{lines(about)}"


def fit_step_law(
    cells: pd.DataFrame, *, of: Literal["rate", "batch"] = "rate", depends_on_params: bool | None = None
) -> StepLaw:
    """Fit the law through the optimum of each cell.

    Args:
        cells: one row per (N, D): `n_params`, `n_tokens`, and the best `rate` or `batch_tokens` there; optional `stderr` of it in
            octaves, by which cells are weighted (a parabola's, as `fit_optimum` gives; best points of a grid have none).
        of: which of the two.
        depends_on_params: whether the exponent of N is fitted; by default of a rate, not of a batch, as in Step Law.

    Raises:
        ValueError: a column is missing or breaks its rule, or `of` is neither.
        ScalingError: there are fewer than six cells, N or D doesn't vary, or one is a power of the other in all of them.
    """
    if of not in ("rate", "batch"):
        raise ValueError(f"of must be rate or batch, got {of!r}")
    column = "rate" if of == "rate" else "batch_tokens"
    require_columns(cells, ("n_params", "n_tokens", column))
    n_params, n_tokens, best = (numbers(cells, name) for name in ("n_params", "n_tokens", column))
    with_params = of == "rate" if depends_on_params is None else depends_on_params
    if len(cells) < MIN_CELLS:
        raise ScalingError(f"need at least {MIN_CELLS} cells (N, D), got {len(cells)}")
    for name, values in (("n_params", n_params), ("n_tokens", n_tokens)):
        if len(np.unique(values)) < 2 and (with_params or name == "n_tokens"):
            raise ScalingError(f"{name} must differ between cells for its exponent to be fitted, got one value")
    weights = 1 / numbers(cells, "stderr") ** 2 if "stderr" in cells else np.ones(len(cells))
    weights = weights / weights.mean()
    x, y = np.log2(n_params), np.log2(n_tokens)
    correlation = float(np.corrcoef(x, y)[0, 1]) if with_params else 0.0
    if 1 - abs(correlation) < _ROUNDING:
        raise ScalingError(
            "log N and log D lie on one line over the cells: their exponents cannot be separated "
            "(depends_on_params=False fits one exponent of D along it)"
        )
    middle = float(np.average(x, weights=weights)), float(np.average(y, weights=weights))
    design = np.column_stack([np.ones(len(x)), *([x - middle[0]] if with_params else []), y - middle[1]])
    inverse = np.linalg.inv(design.T @ (design * weights[:, None]))
    estimate = inverse @ design.T @ (weights * np.log2(best))
    off = np.log2(best) - design @ estimate
    variance = float((weights * off**2).sum()) / (len(x) - design.shape[1])
    a, b = (float(estimate[1]) if with_params else 0.0), float(estimate[-1])
    warnings = []
    if abs(correlation) > MAX_CORRELATION:
        warnings.append(f"log N and log D correlate by {correlation:.2f}: their exponents cannot be separated")
    return StepLaw(
        of=of,
        coefficient=float(2 ** (estimate[0] - a * middle[0] - b * middle[1])),
        params_exponent=a,
        tokens_exponent=b,
        covariance=variance * inverse,
        centre=(2 ** middle[0], 2 ** middle[1]),
        scatter=math.sqrt(variance),
        n_params_range=(float(n_params.min()), float(n_params.max())),
        n_tokens_range=(float(n_tokens.min()), float(n_tokens.max())),
        cells=pd.DataFrame({"n_params": n_params, "n_tokens": n_tokens, column: best, "off": off}),
        warnings=tuple(warnings),
    )
