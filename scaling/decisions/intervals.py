"""Intervals of a decision: the decisions that other runs or another fit would give."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.fits.ensemble import Ensemble
from scaling.fits.forecast import Forecast
from scaling.fits.result import ScalingFit
from scaling.forms.law import FLOPS_PER_PARAM_TOKEN
from scaling.forms.problem import Values
from scaling.forms.spending import QUANTITIES, Spending
from scaling.quantiles import tails


def by_forecast(
    ensemble: Ensemble,
    spending: Spending,
    values: Mapping[str, Array],
    answer: pd.Series,
    loss: float | None,
    forecast: Forecast,
) -> pd.DataFrame:
    """Estimate, low, high of `QUANTITIES` for a decision by the forecast's mean.

    The interval of the loss is the forecast's. Sizes and tokens move with the choice of fit and of runs (`Ensemble.moves`).
    If a loss is to be reached, the bounds of compute are those at which the bounds of the forecast's interval reach this loss, and
    the intervals of sizes and tokens include the best sizes and tokens at both bounds.

    Args:
        values: parameters of the mean, [1, 1] each.
        loss: loss to be reached, or None for a budget.
        forecast: forecast of the decision, at the level of the intervals.
    """
    each = replace(spending, form=ensemble.form)

    def chosen(those: Values, count: int) -> Array:
        budgets = np.full(count, answer["total_flops"]) if loss is None else each.least_budget(those, loss, count)
        return np.asarray(np.log(each.answers(those, budgets)[["n_params", "n_tokens"]].to_numpy(float)))

    decided = np.log(answer[["n_params", "n_tokens"]].to_numpy(float))
    sizes, tokens = np.exp(decided + ensemble.moves(chosen)).T
    sizes = _allowed(spending, sizes, answer["total_flops"] if loss is None else math.inf)
    if loss is None:
        tokens = spending.tokens(sizes, answer["total_flops"])
    ends = np.array(tails(forecast.level))
    table = pd.DataFrame({"estimate": answer.to_numpy(float)}, index=[*QUANTITIES])
    ratio = np.where(
        np.isfinite(tokens) & np.isfinite(sizes), tokens / np.where(np.isfinite(sizes), sizes, 1.0), np.inf
    )
    for name, found in {"n_params": sizes, "n_tokens": tokens, "tokens_per_param": ratio}.items():
        table.loc[name, ["low", "high"]] = np.quantile(found, ends, method="nearest")
    table.loc["total_flops", ["low", "high"]] = answer["total_flops"]
    table.loc["loss", ["low", "high"]] = [forecast.low, forecast.high]
    if loss is not None:
        reach = forecast.high / forecast.loss
        flops = np.array([spending.least_budget(values, loss * by, 1)[0] for by in (reach, 1 / reach)])
        table.loc["total_flops", ["low", "high"]] = flops
        wide = pd.concat([spending.answers(values, flops[[i]]) for i in (0, 1)])
        for name in ("n_params", "n_tokens"):
            table.loc[name, "low"] = min(table.loc[name, "low"], wide[name].min())
            table.loc[name, "high"] = max(table.loc[name, "high"], wide[name].max())
    return table


def by_refits(
    fit: ScalingFit, spending: Spending, answer: pd.Series, loss: float | None, budget: float, level: float
) -> pd.DataFrame:
    """Intervals over the refits of a law that has no forecast, widened; infinite if refits never reach the loss."""
    values, count = fit.law.form.stacked(fit.refits), len(fit.refits)
    budgets = np.full(count, budget) if loss is None else spending.least_budget(values, loss, count)
    estimate = answer.to_numpy(float)
    found = pd.DataFrame(
        estimate * (spending.answers(values, budgets).to_numpy() / estimate) ** fit.widening, columns=[*QUANTITIES]
    )
    sizes = found["n_params"].to_numpy()
    found["n_params"] = sizes = np.where(np.isfinite(sizes), _allowed(spending, sizes, budgets), sizes)
    if loss is None:
        found["n_tokens"] = spending.tokens(sizes, budget)
        found["tokens_per_param"] = found["n_tokens"] / sizes
    # Bounds are draws themselves, as one can't interpolate between two infinite draws.
    low, high = np.quantile(found, tails(level), axis=0, method="nearest")
    return pd.DataFrame({"estimate": estimate, "low": low, "high": high}, index=[*QUANTITIES])


def _allowed(spending: Spending, sizes: Array, budget: float | Array) -> Array:
    """The nearest of the sizes that can be chosen, within the memory, and with a token that the budget leaves for training."""
    if spending.sizes is not None:
        sizes = spending.sizes[np.abs(np.log(spending.sizes) - np.log(sizes)[:, None]).argmin(axis=1)]
    of_budget = np.asarray(budget) / (FLOPS_PER_PARAM_TOKEN + spending.served_flops_per_param)
    return np.minimum(sizes, np.minimum(spending.max_active_params, of_budget))
