"""Approach 2: the best size of each budget from a parabola of loss in log N, and the sizes as a power of compute.

A parabola matches the loss near its minimum only. Even without noise, its vertex is off the minimum if the tested sizes reach far from
the best size, lie to one side of it, or if alpha differs from beta (Czech et al. 2603.22339): on the Llama 3 runs by enough
to waste 6.5 % of the target's compute. `fit_isoflops` estimates this error for the given grids and warns of it; `fit` has no
such error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.approaches.compute_powers import (
    MIN_POINTS,
    PARAMETERS,
    ComputePowers,
    Powers,
    drawn_apart,
    powers_through,
    require_draws,
    resampled,
)
from scaling.arrays import Array
from scaling.errors import ScalingError
from scaling.fits.as_found import NO_COLUMNS
from scaling.fits.fitting import fit, select
from scaling.fits.runs import Table, require_convention
from scaling.forms import Chinchilla
from scaling.forms.law import FLOPS_PER_PARAM_TOKEN, Law
from scaling.minimizers.bootstrap import noise_weights, stem_weights, widening
from scaling.quantiles import two_sided

SAME_BUDGET = 0.05
"""Most decades of compute between neighbours among the runs of one budget."""
MIN_SIZES = 4
"""Fewest sizes of a budget: three points always lie on a parabola, whatever their noise."""
MAX_UNANSWERED = 0.05
TELLING = 0.01
"""Relative error of N*, at the largest budget or at ten times as much, that raises a warning of bias."""
LEVEL = 0.9
"""Level of the vertices' intervals."""
OFF_CENTRE = 0.5
"""Mean distance from the middle of a budget's sizes to its best size, in octaves of N, that raises a warning."""


@dataclass(frozen=True)
class _Grid:
    """The runs of one budget."""

    compute: float
    rows: NDArray[np.int64]  # indices of the runs

    def vertex(self, log_size: Array, loss: Array, weights: Array) -> tuple[float, float, float] | None:
        """Log of the best size, the loss there and the curvature; None if the parabola has no minimum among the sizes."""
        x, y, root = log_size[self.rows], loss[self.rows], np.sqrt(weights[self.rows])
        middle = float(x.mean())
        curvature, slope, level = np.polyfit(x - middle, y, 2, w=root)
        if curvature <= 0:
            return None
        best = middle - slope / (2 * curvature)
        if not x.min() <= best <= x.max():
            return None
        return float(best), float(level - slope**2 / (4 * curvature)), float(2 * curvature)

    def interval(self, log_size: Array, loss: Array, weights: Array) -> tuple[float, float]:
        """Interval of the best size at `LEVEL`; NaN if the runs do not distinguish a parabola from a straight line.

        The interval holds the sizes whose slope cannot be distinguished from zero, for runs with independent errors of variances
        that are inverse to the weights (Fieller, JRSS B 16 (1954) 175).
        """
        x, root = log_size[self.rows] - log_size[self.rows].mean(), np.sqrt(weights[self.rows])
        columns, y = np.vander(x, 3) * root[:, None], loss[self.rows] * root
        (a, b, c), dof = np.linalg.lstsq(columns, y)[0], len(x) - 3
        variance = float(np.square(y - columns @ [a, b, c]).sum()) / dof * np.linalg.inv(columns.T @ columns)
        reach = variance * two_sided(LEVEL, dof) ** 2
        # Coefficients of (2·a·x + b)² = (t · its standard error)².
        square, twice, rest = 4 * (a**2 - reach[0, 0]), 4 * (a * b - reach[0, 1]), b**2 - reach[1, 1]
        if square <= 0:
            return math.nan, math.nan
        middle, half = -twice / (2 * square), math.sqrt(max(twice**2 - 4 * square * rest, 0.0)) / (2 * square)
        mean = float(log_size[self.rows].mean())
        return math.exp(mean + middle - half), math.exp(mean + middle + half)


def fit_isoflops(
    runs: Table,
    *,
    n_params_convention: str,
    loss_unit: str | None = None,
    n_bootstrap: int = 400,
    seed: int = 0,
    max_regret: float = 0.0025,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> ComputePowers:
    """Fit N* and D* as powers of compute through the vertices of parabolas.

    Args:
        runs: a table or file as for `fit`, with a few budgets of several sizes each; an optional column `compute_flops` has the
            budgets, if they are not 6·N·D.
        loss_unit: as for `fit`.
        max_regret, columns: as for `fit`.

    Returns:
        Powers, with `points` one row per budget used (also: off_centre and half_width of its sizes in octaves, curvature per
        squared e-fold, and n_params_low, …, n_tokens_high, the 90 % interval of the budget's vertex, NaN if it has none), and
        `bias`, the errors that these grids make on the noise-free law fitted to the same runs: relative error of N* at the
        largest budget (`n_params`) and at ten times as much (`n_params_beyond`), error of a (`params_exponent`), and the part of
        each that would remain if every grid were centred on its optimum (`…_centred`: from width and alpha ≠ beta).

    Raises:
        ValueError: a column is missing or breaks its rule, there are too few points for a law, or `n_bootstrap` is below 2.
        ScalingError: fewer than two budgets have a minimum among their sizes.
    """
    require_convention(n_params_convention)
    require_draws(n_bootstrap)
    checked, _ = select(runs, Chinchilla(), max_regret=max_regret, loss_unit=loss_unit, columns=columns)
    rows, compute = checked.rows, checked.compute_flops
    n_params, n_tokens, loss = (rows[name].to_numpy() for name in ("n_params", "n_tokens", "loss"))
    grids, left_out = _grids(compute, n_params)
    budgets = np.full(len(rows), np.nan)
    for grid in grids:
        budgets[grid.rows] = grid.compute
    even = noise_weights(rows)
    log_n, log_d = np.log(n_params), np.log(n_tokens)

    used, records = [], []
    for grid in grids:
        by_n, by_d = grid.vertex(log_n, loss, even), grid.vertex(log_d, loss, even)
        if by_n is None or by_d is None:
            left_out.append(f"{grid.compute:.3g} FLOPs: no minimum among the sizes")
            continue
        ends = log_n[grid.rows].min(), log_n[grid.rows].max()
        off_centre, half_width = (by_n[0] - sum(ends) / 2) / math.log(2), (ends[1] - ends[0]) / 2 / math.log(2)
        used.append(grid)
        record = [grid.compute, math.exp(by_n[0]), math.exp(by_d[0]), by_n[1], off_centre, half_width, by_n[2]]
        records.append([*record, *grid.interval(log_n, loss, even), *grid.interval(log_d, loss, even)])
    if len(used) < 2:
        raise ScalingError(f"need two budgets with a minimum among their sizes, got {len(used)}: {'; '.join(left_out)}")
    names = ["compute_flops", "n_params", "n_tokens", "loss", "off_centre", "half_width", "curvature"]
    names += ["n_params_low", "n_params_high", "n_tokens_low", "n_tokens_high"]
    points = pd.DataFrame(records, columns=names)
    reference = float(np.exp(np.log(points["compute_flops"]).mean()))

    weights = stem_weights(pd.factorize(rows["stem"])[0], n_bootstrap, seed)
    draws, unanswered = resampled(
        n_bootstrap, lambda i: _powers(used, log_n, log_d, loss, even * weights[i], reference)
    )
    estimate = _powers(used, log_n, log_d, loss, even, reference)
    assert estimate is not None  # noqa: S101 - every budget in use has a vertex
    draws = drawn_apart(estimate, draws, _widening(used, log_n, even, rows["stem"]))
    law = fit(rows, n_params_convention=n_params_convention, loss_unit=checked.loss_unit, n_bootstrap=2).law
    bias = _bias(law, used, n_params, n_tokens, even)
    warnings = [*filter(None, [checked.omitted]), *checked.warnings, *left_out, *_warnings(points, bias)]
    if unanswered > MAX_UNANSWERED:
        warnings.append(f"{unanswered:.0%} of the resamplings have fewer than two budgets with a minimum")
    return ComputePowers(
        approach="isoflops",
        **dict(zip(PARAMETERS, estimate, strict=True)),
        compute_ref=reference,
        n_params_convention=n_params_convention,
        loss_unit=checked.loss_unit,
        draws=draws,
        points=points,
        rows=pd.DataFrame(
            {"compute_flops": budgets, "n_params": n_params, "n_tokens": n_tokens, "loss": loss}
        ).dropna(),
        bias=bias,
        warnings=tuple(warnings),
        assumptions=checked.assumptions,
    )


def _grids(compute: Array, n_params: Array) -> tuple[list[_Grid], list[str]]:
    """Group the runs by budget; return the grids, and why some are left out."""
    order = np.argsort(compute, kind="stable").astype(np.int64)
    ends = np.flatnonzero(np.diff(np.log10(compute[order])) > SAME_BUDGET) + 1
    grids, small = [], []
    for rows in np.split(order, ends):
        budget = float(np.exp(np.log(compute[rows]).mean()))
        if len(np.unique(n_params[rows])) < MIN_SIZES:
            small.append(budget)
        else:
            grids.append(_Grid(budget, rows))
    if not small:
        return grids, []
    which = f"{small[0]:.3g}" if len(small) == 1 else f"{len(small)} budgets of {small[0]:.3g} to {small[-1]:.3g}"
    return grids, [f"{which} FLOPs: fewer than {MIN_SIZES} sizes"]


def _powers(
    grids: list[_Grid], log_n: Array, log_d: Array, loss: Array, weights: Array, reference: float
) -> Powers | None:
    found = [(g.compute, g.vertex(log_n, loss, weights), g.vertex(log_d, loss, weights)) for g in grids]
    usable = [(c, math.exp(n[0]), math.exp(d[0])) for c, n, d in found if n is not None and d is not None]
    if len(usable) < 2:
        return None
    budgets, sizes, tokens = np.array(usable).T
    return powers_through(budgets, sizes, tokens, reference)


def _widening(grids: list[_Grid], log_n: Array, weights: Array, stem: pd.Series) -> float:
    """Factor that widens the draws, to make up for the degrees of freedom that each budget's parabola takes."""
    from scipy.linalg import block_diag

    rows = np.concatenate([grid.rows for grid in grids])
    columns = block_diag(*(np.vander(log_n[grid.rows] - log_n[grid.rows].mean(), 3) for grid in grids))
    return widening(columns, weights[rows], pd.factorize(stem.iloc[rows])[0])


def _bias(law: Law, grids: list[_Grid], n_params: Array, n_tokens: Array, weights: Array) -> dict[str, float]:
    """Errors of the parabolas on the noise-free law of the same runs, on these grids and on centred ones."""
    rows = np.concatenate([g.rows for g in grids])
    budgets = np.concatenate([np.full(len(g.rows), np.exp(np.log(n_params * n_tokens)[g.rows].mean())) for g in grids])
    best = {
        g.compute: law.allocate(FLOPS_PER_PARAM_TOKEN * b).n_params
        for g, b in zip(grids, _first(budgets, grids), strict=True)
    }
    sizes = n_params[rows]
    shift = np.concatenate([np.full(len(g.rows), best[g.compute] / _middle(n_params[g.rows])) for g in grids])
    bias: dict[str, float] = {}
    for suffix, size in (("", sizes), ("_centred", sizes * shift)):
        bias |= {name + suffix: value for name, value in _replayed(law, grids, size, budgets, weights[rows]).items()}
    return bias


def _first(budgets: Array, grids: list[_Grid]) -> Array:
    return np.asarray(budgets[np.cumsum([0, *(len(g.rows) for g in grids[:-1])])])


def _middle(sizes: Array) -> float:
    return math.sqrt(float(sizes.min()) * float(sizes.max()))


def _replayed(law: Law, grids: list[_Grid], sizes: Array, products: Array, weights: Array) -> dict[str, float]:
    """Errors on the law's losses at these sizes, with the tokens that the budget leaves."""
    tokens = products / sizes
    loss, starts = law.loss(sizes, tokens), np.cumsum([0, *(len(g.rows) for g in grids)])
    moved = [
        _Grid(FLOPS_PER_PARAM_TOKEN * float(products[i]), np.arange(i, j, dtype=np.int64)) for i, j in pairwise(starts)
    ]
    top = moved[-1].compute
    found = _powers(moved, np.log(sizes), np.log(tokens), loss, weights, top)
    if found is None or law.params_exponent is None:
        return {}
    a, _, at_top, _ = found
    right, beyond = law.allocate(top).n_params, law.allocate(10 * top).n_params
    return {
        "params_exponent": a - law.params_exponent,
        "n_params": at_top / right - 1,
        "n_params_beyond": at_top * 10**a / beyond - 1,
    }


def _warnings(points: pd.DataFrame, bias: dict[str, float]) -> list[str]:
    warnings = []
    if len(points) < MIN_POINTS:
        warnings.append(
            f"{len(points)} budgets: at least {MIN_POINTS} are needed to see whether the power law is straight"
        )
    if abs(off := float(points["off_centre"].mean())) > OFF_CENTRE:
        side = "small" if off > 0 else "large"
        warnings.append(
            f"sizes off centre: the best lie {abs(off):.1f} octaves from the middle of those tested, which are too {side}"
        )
    centred = max(abs(bias.get("n_params_centred", 0)), abs(bias.get("n_params_beyond_centred", 0)))
    if "n_params" not in bias:
        warnings.append(
            "on the law's own losses these grids have no minimum in two budgets: the parabola can't be trusted"
        )
    elif max(abs(bias["n_params"]), abs(bias["n_params_beyond"])) > TELLING:
        width = float(points["half_width"].mean())
        warnings.append(
            f"parabola bias: on noise-free losses of the fitted law these grids put N* off by {bias['n_params']:+.1%} at the "
            f"largest budget, {bias['n_params_beyond']:+.1%} at ten times it (a by {bias['params_exponent']:+.3f}); "
            + (
                f"{bias['n_params_centred']:+.1%} and {bias['n_params_beyond_centred']:+.1%} of it from the sizes' width "
                f"(±{width:.1f} octaves) and alpha ≠ beta, the rest from grids off centre"
                if centred > TELLING
                else "nearly all of it from grids off centre"
            )
        )
    return warnings
