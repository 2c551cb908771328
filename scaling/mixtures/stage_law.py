"""The loss of a run whose data change once, by the share q of its tokens after the change.

Runs whose data change at a planned share q0 give the law L(N, D). Other runs of their stems end with smaller shares. For these,

    y(q) = log loss − log L(N, D) − the same of the stem's run with q0

so errors that the runs of a stem share cancel, and y(q0) = 0. At each share, y is a line in log N and log D through the stems
(`scaling.schedules.size_transfer`). Between the shares it is interpolated by a monotone cubic in the root of q, since the loss falls
fastest in the first tokens after the change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from scaling.errors import ScalingError
from scaling.fits.result import ScalingFit
from scaling.schedules.schedule_fit import MAX_RATIO
from scaling.schedules.size_transfer import transferred
from scaling.serialization import JsonResult

MIN_STEMS = 3
"""Fewest stems: their scatter is the error of the law."""
SAME_SHARE = 0.02
"""Largest difference of shares that count as one: runs end with whole batches (assumed)."""


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
        planned: share of the runs of the law L(N, D).
        ratios: a row for each run with another share: stem, n_params, n_tokens, share (the mean of those that count as one), and
            log_ratio, y of the formula at the head of this file.
    """

    planned: float
    ratios: pd.DataFrame

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
        within = math.sqrt(min(max(share, 0.0), self.planned))
        error = float(np.interp(within, at, [*errors, 0.0]))
        return StageEffect(
            share=share,
            log_ratio=float(PchipInterpolator(at, [*values, 0.0])(within)),
            half_width=float(stdtrit(self._freedom, (1 + level) / 2)) * error,
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
            value, error = transferred(rows[["log_ratio"]].to_numpy(np.float64), covariates[:, varies], target)
            values.append(float(value[0]))
            errors.append(float(error[0]))
        return values, errors

    @property
    def _freedom(self) -> int:
        return int(self.ratios["stem"].nunique()) - 1

    def _reasons(self, n_params: float, n_tokens: float, share: float) -> list[str]:
        reasons = []
        if not -SAME_SHARE <= share <= self.planned + SAME_SHARE:
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
        runs: a row for each run: stem, n_params, n_tokens, loss and share. The largest share is the planned one, which the runs of
            `fit` have.
        fit: the law L(N, D) at the planned share.

    Raises:
        ScalingError: fewer than `MIN_STEMS` stems have runs with other shares and one with the planned share.
    """
    planned = float(runs["share"].max())
    at = fit.ensemble.log_loss(runs["n_params"].to_numpy(np.float64), runs["n_tokens"].to_numpy(np.float64))
    rows = runs.assign(log_ratio=np.log(runs["loss"].to_numpy(np.float64)) - at)
    is_planned = rows["share"] > planned - SAME_SHARE
    own = rows[is_planned].groupby("stem")["log_ratio"].mean()
    others = rows[~is_planned & rows["stem"].isin(own.index)].sort_values("share")
    if others["stem"].nunique() < MIN_STEMS:
        raise ScalingError(
            f"{others['stem'].nunique()} stems have runs with several shares after the change of the data; need {MIN_STEMS}"
        )
    levels = (others["share"].diff() > SAME_SHARE).cumsum()
    others = others.assign(
        log_ratio=others["log_ratio"] - others["stem"].map(own),
        share=others.groupby(levels)["share"].transform("mean"),
    )
    return StageLaw(
        planned=planned, ratios=others[["stem", "n_params", "n_tokens", "share", "log_ratio"]].reset_index(drop=True)
    )
