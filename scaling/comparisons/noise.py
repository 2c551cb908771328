"""Noise between runs that differ only by their seed, which limits every comparison of hyperparameters.

    log loss_ij = setting_i + seed_j + error_ij

A seed fixes the initial values and the order of the data. Settings share these, so part of the noise moves all settings
alike and cancels between them. Only the rest, the error, obscures which setting is best.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.checks import losses, require_columns, seeds
from scaling.errors import ScalingError
from scaling.optima.optimum import MAX_EXCESS
from scaling.presentation import lines
from scaling.serialization import JsonResult, OrNan


@dataclass(frozen=True, kw_only=True, eq=False)
class TwoWay:
    """Least squares of setting + seed.

    Attributes:
        level: mean of the fitted table, over all I settings and J seeds.
        settings: each setting's level minus the mean level, [I].
        unit_covariance: covariance of `settings` for noise 1, [I, I].
        seeds: each seed's level minus the mean level, [J].
        dof: degrees of freedom of the residuals.
        connected: True if every setting can be compared with every other through shared seeds; if not, the
            differences mean nothing.
    """

    level: float
    settings: Array
    unit_covariance: Array
    seeds: Array
    sum_of_squares: float
    dof: int
    connected: bool


def fit_two_way(settings: NDArray[np.int64], seeds: NDArray[np.int64], y: Array) -> TwoWay:
    """Fit K values `y` with the codes of their settings and seeds, each [K], from 0; any cells may be missing."""
    n_settings, n_seeds = int(settings.max()) + 1, int(seeds.max()) + 1
    design = np.hstack([settings[:, None] == np.arange(n_settings), seeds[:, None] == np.arange(n_seeds)]).astype(float)
    # The design lacks one rank, as a constant can move from seeds to settings; the results below do not depend on it.
    inverse = np.linalg.pinv(design.T @ design, hermitian=True)
    coefficients = inverse @ design.T @ y
    residual = y - design @ coefficients
    rank = int(np.linalg.matrix_rank(design))
    a, s = coefficients[:n_settings], coefficients[n_settings:]
    centring = np.eye(n_settings) - 1 / n_settings
    return TwoWay(
        level=float(a.mean() + s.mean()),
        settings=a - a.mean(),
        unit_covariance=np.asarray(centring @ inverse[:n_settings, :n_settings] @ centring),
        seeds=s - s.mean(),
        sum_of_squares=float(residual @ residual),
        dof=len(y) - rank,
        connected=rank == n_settings + n_seeds - 1,
    )


@dataclass(frozen=True, kw_only=True)
class SeedNoise(JsonResult):
    """Standard deviations of log loss between seeds.

    Attributes:
        sd: standard deviation of one run about setting + seed: the noise in a comparison of two settings on the same seeds;
            NaN if no seeds are shared.
        dof: degrees of freedom of `sd`.
        total: standard deviation of one run about its setting's mean: the effect of another seed.
        total_dof: number of runs beyond the first of each setting; with shared seeds the effective number is smaller.
    """

    sd: OrNan
    dof: int
    total: float
    total_dof: int
    n_settings: int
    n_runs: int

    @property
    def prior(self) -> tuple[float, float]:
        """(sd, dof) for `compare_finalists(noise=…)`: of the paired noise, or of the total noise if the paired is not known."""
        return (self.sd, self.dof) if self.dof else (self.total, self.total_dof)

    def __str__(self) -> str:
        paired = (
            f"{self.sd:.3%} of the loss, {self.dof} degrees of freedom" if self.dof else "not known: no shared seeds"
        )
        return lines(
            {
                "on shared seeds": paired,
                "in all": f"{self.total:.3%} of the loss, {self.total_dof} degrees of freedom",
                "from": f"{self.n_runs} runs of {self.n_settings} settings",
            }
        )


def seed_noise(
    rows: pd.DataFrame, settings: Sequence[str], *, blocks: Sequence[str] = (), max_excess: float = MAX_EXCESS
) -> SeedNoise:
    """Pool the noise between seeds over all settings that were run with several seeds.

    Only settings near the best of their block are used, as noise grows towards the rates at which runs diverge. Settings
    with a diverged run are not used.

    Args:
        rows: one row per run: the columns named in `settings` and `blocks`, `seed`, `loss` (nats per token; NaN if diverged).
        settings: columns such that runs with equal values differ only by the seed, e.g. `("rate",)`.
        blocks: columns within which a seed's level is shared, e.g. `("width",)`: another width has other initial values.
        max_excess: largest distance of a setting's mean log loss above the least of its block.

    Raises:
        ValueError: a column is missing or breaks its rule, or a setting has two runs with one seed.
        ScalingError: no setting near the best has two runs.
    """
    if not settings:
        raise ValueError("settings must name at least one column, got none")
    require_columns(rows, (*settings, *blocks, "seed", "loss"))
    table = pd.DataFrame({"y": np.log(losses(rows)), "seed": seeds(rows, *settings, *blocks)})
    table["block"] = rows.groupby(list(blocks), dropna=False).ngroup().to_numpy() if blocks else 0
    table["setting"] = rows.groupby([*settings, *blocks], dropna=False).ngroup().to_numpy()
    mean = table.groupby("setting")["y"].transform(lambda y: y.mean(skipna=False))
    near = mean <= mean.groupby(table["block"]).transform("min") + max_excess
    repeated = table.groupby("setting")["y"].transform("size") > 1
    used = table[near & repeated]
    if not len(used):
        raise ScalingError(
            f"none of {table['setting'].nunique()} settings lies within {max_excess:g} of the best and has runs of two seeds"
        )
    deviations = used["y"] - used.groupby("setting")["y"].transform("mean")
    total_dof = len(used) - used["setting"].nunique()
    sum_of_squares, dof = 0.0, 0
    for _, part in used.groupby("block"):
        fitted = fit_two_way(pd.factorize(part["setting"])[0], pd.factorize(part["seed"])[0], part["y"].to_numpy())
        sum_of_squares, dof = sum_of_squares + fitted.sum_of_squares, dof + fitted.dof
    return SeedNoise(
        sd=math.sqrt(sum_of_squares / dof) if dof else math.nan,
        dof=dof,
        total=math.sqrt(float((deviations**2).sum()) / total_dof),
        total_dof=total_dof,
        n_settings=used["setting"].nunique(),
        n_runs=len(used),
    )
