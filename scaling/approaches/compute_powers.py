"""Best parameters and tokens as powers of compute, read off the runs without a law: the result of approaches 1 and 2.

    N* = N_ref · (C/C_ref)^a,   D* = D_ref · (C/C_ref)^b     (Hoffmann et al. 2203.15556, sec. 3.1 and 3.2)

These are cross-checks. `fit` uses every run and also predicts losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from scaling.approaches.approach_figures import draw_envelope, draw_isoflops, envelope_data, isoflops_data
from scaling.arrays import Array
from scaling.drawing import Figure
from scaling.presentation import lines, span
from scaling.quantiles import tails
from scaling.serialization import FittedResult, TableLayout

PARAMETERS = ("params_exponent", "tokens_exponent", "n_params_ref", "n_tokens_ref")
MIN_POINTS = 4
"""Fewest budgets, or sizes on an envelope, that can distinguish a straight line in logarithms from a bent one (assumed)."""
Powers = tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class ComputePowers(FittedResult):
    """Two powers of compute.

    Attributes:
        approach: `envelope` (approach 1) or `isoflops` (approach 2).
        n_params_ref, n_tokens_ref: N* and D* at `compute_ref`.
        compute_ref: geometric mean of the points' compute, FLOPs.
        draws: the four numbers under resampled runs, [n_draws, 4], in the order of `PARAMETERS`; draws of isoFLOPs are widened,
            as so few runs do not show all of their errors (`minimizers.bootstrap`).
        points: the optima: compute_flops, n_params, n_tokens, loss, and further columns of the approach.
        rows: rows that the optima were read off: n_params, n_tokens, loss, compute_flops (for an isoFLOP, its budget), and the
            `run` of an envelope's curves.
        bias: estimated errors of the approach itself (see `fit_isoflops`); empty if they are not known.
        warnings: why the numbers are doubtful; empty if they are not.
        assumptions: assumptions about the runs that no column states.
    """

    approach: str
    params_exponent: float
    tokens_exponent: float
    n_params_ref: float
    n_tokens_ref: float
    compute_ref: float
    n_params_convention: str
    loss_unit: str
    draws: Array = field(repr=False)
    points: Annotated[pd.DataFrame, TableLayout("list")] = field(repr=False)
    rows: Annotated[pd.DataFrame, TableLayout("list")] = field(repr=False)
    bias: dict[str, float]
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]

    def n_params(self, compute_flops: ArrayLike) -> Array:
        """N* at a budget in FLOPs, of its shape."""
        ratio = np.asarray(compute_flops, np.float64) / self.compute_ref
        return np.asarray(self.n_params_ref * ratio**self.params_exponent)[()]

    def n_tokens(self, compute_flops: ArrayLike) -> Array:
        """D* at a budget in FLOPs, of its shape."""
        ratio = np.asarray(compute_flops, np.float64) / self.compute_ref
        return np.asarray(self.n_tokens_ref * ratio**self.tokens_exponent)[()]

    def intervals(self, compute_flops: float | None = None, level: float = 0.9) -> pd.DataFrame:
        """Columns estimate, low, high for a and b, and for N* and D* at a budget (at `compute_ref` by default).

        Bounds are percentiles over resampled runs; they leave out the approach's bias (`bias`, `warnings`).
        """
        ratio = (compute_flops or self.compute_ref) / self.compute_ref
        estimate = np.array([getattr(self, name) for name in PARAMETERS])
        both = np.vstack([estimate, self.draws])
        both[:, 2:] *= ratio ** both[:, :2]
        low, high = np.quantile(both[1:], tails(level), axis=0)
        index = ["params_exponent", "tokens_exponent", "n_params", "n_tokens"]
        return pd.DataFrame({"estimate": both[0], "low": low, "high": high}, index=index)

    def plot(self) -> Figure:
        """Draw the source of the optima: parabolas of loss over N, or curves of loss over compute with their envelope."""
        if self.approach == "envelope":
            return draw_envelope(
                envelope_data(self.rows, self.points), self.n_params_convention, self.warnings, self.loss_unit
            )
        return draw_isoflops(
            isoflops_data(self.rows, self.points), self.n_params_convention, self.warnings, self.loss_unit
        )

    def __str__(self) -> str:
        table = self.intervals().map("{:.4g}".format).to_string()
        number = {"envelope": 1, "isoflops": 2}[self.approach]
        about = {
            "approach": f"{number} of Hoffmann et al. 2203.15556 ({self.approach}), N counts {self.n_params_convention}",
            "points": f"{len(self.points)} at {span(*np.quantile(self.points['compute_flops'], [0, 1]))} FLOPs, "
            f"N* and D* above at {self.compute_ref:.3g}",
            "interval": f"90 % of {len(self.draws)} resamplings of the runs, without the approach's own bias",
            **({"assumed": "; ".join(self.assumptions)} if self.assumptions else {}),
            "status": self.status_line,
        }
        return f"{table}\n{lines(about)}"


def powers_through(compute: Array, n_params: Array, n_tokens: Array, compute_ref: float) -> Powers:
    """Least squares of log N* and log D* on log C: (a, b, N* and D* at compute_ref)."""
    x = np.log(compute / compute_ref)
    a, log_n = np.polyfit(x, np.log(n_params), 1)
    b, log_d = np.polyfit(x, np.log(n_tokens), 1)
    return float(a), float(b), math.exp(log_n), math.exp(log_d)


def require_draws(n_bootstrap: int) -> None:
    """Raise ValueError unless there are enough resamplings for an interval."""
    if n_bootstrap < 2:
        raise ValueError(f"n_bootstrap must be at least 2, got {n_bootstrap!r}")


def drawn_apart(estimate: Powers, draws: Array, factor: float) -> Array:
    """Return draws [n, 4] whose distance from the estimate is multiplied by `factor`; sizes and tokens in logarithms."""
    centre = np.array([*estimate[:2], *np.log(estimate[2:])])
    apart = centre + factor * (np.hstack([draws[:, :2], np.log(draws[:, 2:])]) - centre)
    return np.hstack([apart[:, :2], np.exp(apart[:, 2:])])


def resampled(n_draws: int, one: Callable[[int], Powers | None]) -> tuple[Array, float]:
    """Call `one` with the number of each draw; return the answers, and the share of draws without an answer."""
    found = [powers for draw in range(n_draws) if (powers := one(draw)) is not None]
    return np.array(found, np.float64).reshape(-1, len(PARAMETERS)), 1 - len(found) / n_draws
