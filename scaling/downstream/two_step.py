"""Downstream metric from (N, D) in two steps: N, D → the task's loss, by a law; the task's loss → the metric, by a sigmoid.

The method is that of Bhagia et al. 2412.04403 (the OLMo ladder). The task's loss is the loss on the right answers' text. The first
step is `fit`, whose forecast has an interval; the second is `fit_downstream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.arrays import Array
from scaling.checks import names, numbers, require_columns
from scaling.downstream.sigmoid import DownstreamLaw, fit_downstream
from scaling.fits.as_found import BYTES, NO_COLUMNS
from scaling.fits.fitting import fit
from scaling.fits.forecast import Forecast, interval_factor
from scaling.fits.result import ScalingFit
from scaling.fits.runs import Table, naming, read_runs, to_nats
from scaling.fits.unfinished import finished
from scaling.forms.law import NATS, Form
from scaling.presentation import counted, lines
from scaling.quantiles import two_sided
from scaling.serialization import JsonResult

_PER_DRAW = 20  # errors of the loss's forecast for each draw of the sigmoid


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskForecast(JsonResult):
    """Forecast of a future run's metric.

    Attributes:
        loss: the forecast of the task's loss, with its interval and support.
        reasons: why the forecast is doubtful, including the reasons of the loss's forecast; empty if it is not.
    """

    metric: str
    value: float
    low: float
    high: float
    level: float
    loss: Forecast
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return lines(
            {
                self.metric: f"{self.value:.4g}, {self.level:.0%} within {self.low:.4g} to {self.high:.4g}",
                "task loss": f"{self.loss.loss:.4g} ({self.loss.low:.4g} to {self.loss.high:.4g}) {self.loss.loss_unit}",
                "at": f"{self.loss.n_params:.4g} parameters ({counted(self.loss.n_params_convention)}), "
                f"{self.loss.n_tokens:.4g} tokens",
                "status": "doubtful: " + "; ".join(self.reasons) if self.reasons else "ok",
            }
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TwoStep(JsonResult):
    """N, D → task loss → metric.

    Attributes:
        task: the sigmoid.
    """

    loss: ScalingFit
    task: DownstreamLaw

    def predict(self, n_params: ArrayLike, n_tokens: ArrayLike) -> Array:
        """Metric at the task loss by the law, of the broadcast shape."""
        return self.task.predict(self.loss.predict(n_params, n_tokens))

    def forecast(self, n_params: float, n_tokens: float, level: float = 0.9, *, seed: int = 0) -> TaskForecast:
        """Forecast the metric of one run: the loss's forecast with its error, through the draws of the sigmoid, with its scatter.

        Raises:
            ValueError, ScalingError: for the reasons of `ScalingFit.forecast`.
        """
        ahead = self.loss.forecast(n_params, n_tokens, level)
        low, high = self.task.interval_of(self._losses(ahead, seed), level, seed=seed + 1)
        reasons = [*ahead.reasons, *self.task.warnings]
        least, reach = self.task.loss_range[0], float(np.ptp(self.task.loss_range))
        if ahead.loss < least - reach / 2:
            reasons.append(f"task loss {ahead.loss:.4g} is far below the least fitted, {least:.4g}")
        return TaskForecast(
            metric=self.task.metric,
            value=float(self.task.predict(ahead.loss)),
            low=low,
            high=high,
            level=level,
            loss=ahead,
            reasons=tuple(reasons),
        )

    def probability(self, n_params: float, n_tokens: float, target: float, *, seed: int = 0) -> float:
        """Probability that one run's metric is at least the target; raises the errors of `forecast`."""
        losses = self._losses(self.loss.forecast(n_params, n_tokens), seed)
        return float((self.task.scores(losses, seed=seed + 1) >= target).mean())

    def _losses(self, ahead: Forecast, seed: int) -> Array:
        """Draws of the task's loss for each draw of the sigmoid, whose spread is that of the forecast's interval."""
        deviation = ahead.log_scale * interval_factor(ahead.level) / two_sided(ahead.level)
        errors = np.random.default_rng(seed).standard_normal((len(self.task.draws), _PER_DRAW))
        return np.asarray(ahead.loss * np.exp(deviation * errors))

    def __str__(self) -> str:
        return f"step 1: task loss\n{self.loss}\n\nstep 2: {self.task.metric}\n{self.task}"


def fit_two_step(
    runs: Table,
    *,
    n_params_convention: str,
    loss_unit: str = NATS,
    metric: str = "accuracy",
    checkpoints: pd.DataFrame | None = None,
    chance: float | None = None,
    ceiling: float | None = None,
    most: float = 1.0,
    form: Form | None = None,
    n_bootstrap: int = 200,
    seed: int = 0,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> TwoStep:
    """Fit the task's loss in N and D, and the metric in the task's loss.

    The second step does not depend on N and D, so it is fitted to every row, also to rows that the first step leaves out because
    they lie on another surface of the loss (not annealed, or badly tuned).

    Args:
        runs: one row per finished run, a table or file as for `fit`: `n_params`, `n_tokens`, `task_loss` and the metric's
            column. A row without a task loss is left out, and named.
        loss_unit: unit of the task's loss, as for `fit`.
        checkpoints: further rows of `task_loss` and the metric for the second step, e.g. from checkpoints of the runs; with
            `stem` if several belong to one run.
        chance, ceiling, most: as for `fit_downstream`.
        form: form of the first step, by default Chinchilla's.
        columns: as for `fit`; `columns` may also name `task_loss`.
        seed: seed of the first step's resampling and of the second step's draws.

    Raises:
        ValueError, ScalingError: for the reasons of `fit` and `fit_downstream`.
    """
    given = read_runs(runs, columns)
    with naming(runs):
        require_columns(given, ("n_params", "n_tokens", "task_loss", metric))
        factor, unit = to_nats(loss_unit)
        table = _with_loss(finished(given, "task_loss"), factor)
        law = fit(
            table,
            n_params_convention=n_params_convention,
            loss_unit=unit,
            form=form,
            n_bootstrap=n_bootstrap,
            seed=seed,
        )
    pairs = table[["loss", metric]].assign(stem=_stems(table, "run"))
    if checkpoints is not None:
        require_columns(checkpoints, ("task_loss", metric))
        further = _with_loss(finished(checkpoints, "task_loss"), factor)
        own = _stems(further, "run" if "stem" in further else "checkpoint")
        pairs = pd.concat([pairs, further[["loss", metric]].assign(stem=own)], ignore_index=True)
    task = fit_downstream(pairs, metric=metric, chance=chance, ceiling=ceiling, most=most, seed=seed)
    return TwoStep(loss=law, task=task)


def _with_loss(table: pd.DataFrame, factor: float) -> pd.DataFrame:
    """Return the table with the task's loss, times the factor, as `loss`.

    The bytes of a token, by which `fit` would convert bits per byte for the first step alone, are left out.
    """
    kept = table.drop(columns=["task_loss", BYTES], errors="ignore")
    return kept.assign(loss=factor * numbers(table, "task_loss"))


def _stems(table: pd.DataFrame, kind: str) -> NDArray[Any]:
    stems = names(table, "stem") if "stem" in table else np.arange(len(table))
    return np.array([f"{kind} {stem}" for stem in stems])
