"""The loss of a run whose data change once, by the share q of its tokens after the change.

Runs whose data change at a planned share q0 give the law L(N, D). Other runs of their stems end with smaller shares. For these,

    y(q) = log loss − log L(N, D) − the same of the stem's run with q0

so errors that the runs of a stem share cancel, and y(q0) = 0. At each share, y is a line in log N and log D through the stems
(`scaling.schedules.size_transfer`). Between the shares it is interpolated by a monotone cubic in the root of q, since the loss falls
fastest in the first tokens after the change.

A branch is shorter than the run for which its stem is tuned, by log2((1 − q)/(1 − q0)) octaves. What that may cost is added to the
interval, since all stems share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from scaling.checks import numbers, require_columns
from scaling.errors import ScalingError
from scaling.fits.result import ScalingFit
from scaling.schedules.schedule_fit import MAX_RATIO
from scaling.schedules.size_transfer import transferred
from scaling.serialization import JsonResult

MIN_STEMS = 3
"""Fewest stems with a share: their scatter is the error of the law."""
SLOPE_SPREAD = 0.05
"""Spread of the slopes as a share of the mean effect. Chosen on the three full runs of `tests/benchmarks/staged_data.py`: with the .2
of schedules, the slopes that the ladder shows were followed too far."""
MISTUNED = 0.013
"""Log loss of a run whose weight decay and rate are those of an octave more tokens (measured: .7 to 1.9 %); it grows as the square."""


@dataclass(frozen=True, kw_only=True)
class StageEffect(JsonResult):
    """The loss of a run with one share after the change over that with the planned share, for the same size and tokens.

    Attributes:
        share: share of the run's tokens after the change.
        log_ratio: log of the ratio.
        half_width: half the width of its interval.
        reasons: why it is unsupported; empty if it is supported.
    """

    share: float
    log_ratio: float
    half_width: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageLaw:
    """Law of the share of tokens after the change of the data.

    Attributes:
        planned: share of the runs of the law L(N, D), above 0 and below 1: a run with 1 has no data before the change.
        ratios: a row for each run with another share: stem, n_params, n_tokens, share and log_ratio, y of the formula at the head of
            this file.
    """

    planned: float
    ratios: pd.DataFrame

    def __post_init__(self) -> None:
        if not 0 < self.planned < 1:
            raise ValueError(f"the planned (largest) share must be above 0 and below 1, got {self.planned!r}")

    @property
    def shares(self) -> list[float]:
        """The shares that were trained, without the planned one; ascending."""
        return sorted(set(self.ratios["share"]))

    def effect(self, n_params: float, n_tokens: float, share: float, *, level: float = 0.9) -> StageEffect:
        """Compare a run with the run of the same size and tokens that has the planned share after the change.

        Args:
            n_tokens: training tokens of the whole run.
            level: nominal coverage of the interval.
        """
        from scipy.interpolate import PchipInterpolator
        from scipy.special import stdtrit

        values, errors = self._at_shares(n_params, n_tokens)
        at = np.sqrt([*self.shares, self.planned])
        within = min(max(share, self.shares[0]), self.planned)
        root = math.sqrt(within)
        error = float(np.interp(root, at, [*errors, 0.0]))
        octaves = math.log2((1 - within) / (1 - self.planned))
        return StageEffect(
            share=share,
            log_ratio=float(PchipInterpolator(at, [*values, 0.0])(root)),
            half_width=math.hypot(float(stdtrit(self._freedom, (1 + level) / 2)) * error, MISTUNED * octaves**2),
            reasons=tuple(self._reasons(n_params, n_tokens, share)),
        )

    def _at_shares(self, n_params: float, n_tokens: float) -> tuple[list[float], list[float]]:
        """Return y at each of `shares` and its standard error."""
        values, errors = [], []
        for known in self.shares:
            rows = self.ratios[self.ratios["share"] == known]
            covariates = np.log(rows[["n_params", "n_tokens"]].to_numpy(np.float64))
            varies = np.ptp(covariates, axis=0) > 0
            target = np.log([n_params, n_tokens])[varies]
            ratios = rows[["log_ratio"]].to_numpy(np.float64)
            value, error = transferred(ratios, covariates[:, varies], target, slope_spread=SLOPE_SPREAD)
            values.append(float(value[0]))
            errors.append(float(error[0]))
        return values, errors

    @property
    def _freedom(self) -> int:
        return int(self.ratios.groupby("share")["stem"].nunique().min()) - 1

    def _reasons(self, n_params: float, n_tokens: float, share: float) -> list[str]:
        reasons = []
        if not self.shares[0] <= share <= self.planned:
            reasons.append(
                f"a share of {share:.0%} after the change: runs were trained with {self.shares[0]:.0%} to {self.planned:.0%}"
            )
        for name, value, most in zip(
            ("n_params", "n_tokens"), (n_params, n_tokens), (MAX_RATIO["n_params"], MAX_RATIO["length"]), strict=True
        ):
            nearest = min(self.ratios[name], key=lambda fitted: abs(math.log(fitted / value)))
            if not 1 / most <= value / nearest <= most:
                reasons.append(f"{name} {value:.4g}: assumed up to {most:g}× the nearest fitted {nearest:.4g}")
        return reasons


def fit_stages(runs: pd.DataFrame, fit: ScalingFit) -> StageLaw:
    """Fit the law to runs of several shares.

    Args:
        runs: a row for each run: stem, n_params, n_tokens, loss and share. Rows with equal shares are compared. The largest share is
            the planned one, which the runs of `fit` have. A share that fewer than `MIN_STEMS` stems have is left out.
        fit: the law L(N, D) at the planned share.

    Raises:
        ValueError: a column is missing or breaks its rule, or the planned share is not above 0 and below 1.
        ScalingError: no share is left.
    """
    require_columns(runs, ("stem", *(columns := ("n_params", "n_tokens", "loss", "share"))))
    rows = runs.assign(**{name: numbers(runs, name, inclusive=name == "share") for name in columns})
    planned = float(rows["share"].max())
    at = fit.ensemble.log_loss(rows["n_params"].to_numpy(), rows["n_tokens"].to_numpy())
    rows = rows.assign(log_ratio=np.log(rows["loss"].to_numpy()) - at)
    own = rows[rows["share"] == planned].groupby("stem")["log_ratio"].mean()
    others = rows[(rows["share"] < planned) & rows["stem"].isin(own.index)]
    others = others.assign(log_ratio=others["log_ratio"] - others["stem"].map(own).astype(float))
    n_stems = others.groupby("share")["stem"].transform("nunique")
    kept = others[n_stems >= MIN_STEMS].sort_values(["share", "stem"])
    if kept.empty:
        most = int(n_stems.max()) if len(others) else 0
        raise ScalingError(
            f"{most} stems have a run with the planned share of tokens after the change of the data and one with another share; "
            f"need {MIN_STEMS}"
        )
    kept = kept[["stem", "n_params", "n_tokens", "share", "log_ratio"]]
    return StageLaw(planned=planned, ratios=kept.reset_index(drop=True))
