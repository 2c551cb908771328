"""Which member of the family the budget buys, and on how many tokens: the law's decision among the shapes that can be built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from muscale.errors import StageError
from muscale.plan_settings import PlanSettings
from proxy_models.config import ModelConfig, ModelFamily
from proxy_models.corpus import Corpus
from proxy_models.numerics import Precision
from scaling import Decision, Law, RepeatedData, ScalingError, ScalingFit, decide

REACH = 30.0
"""Sizes are looked at up to so many times the compute-optimal one, and from as far below it."""
REPEATS = {"rd_star": 15.387756, "rn_star": 5.309743}
"""What a further epoch and an excess parameter are worth in `scaling.RepeatedData`: published, not fitted to this study
(Muennighoff et al. 2305.16264, appendix A)."""
_HALVINGS = 60


def size_for(
    settings: PlanSettings,
    fit: ScalingFit,
    family: ModelFamily,
    corpus: Corpus | None = None,
    *,
    precision: Precision = "fp32",
) -> Decision:
    """The member of the family with the least loss for the budget, in the decision's `config`.

    Where that would see the corpus more than once, it is decided again with the published worth of repeats. Without a
    corpus no epochs are counted.

    Raises:
        StageError: If serving alone costs the budget.
    """
    budget = settings.budget
    conditions: dict[str, Any] = {
        "served_tokens": settings.served_tokens,
        "tolerance": settings.tolerance,
        "level": settings.level,
    }
    wanted = fit.law.allocate(budget.compute_flops).n_params
    try:
        chosen = decide(fit, budget, sizes=members(family, wanted / REACH, wanted * REACH), **conditions)
        if corpus is not None:
            seen = epochs(corpus, chosen.n_tokens)
            unique = chosen.n_tokens / seen
            if seen <= 1:
                chosen = replace(chosen, unique_tokens=unique)
            else:
                sizes = members(family, wanted / REACH, wanted * max(REACH, 2 * seen))
                repeats: dict[str, Any] = {"unique_tokens": unique, "max_epochs": settings.max_epochs}
                chosen = _telling(
                    decide(_repeating(fit), budget, sizes=sizes, **repeats, **conditions), chosen, fit.law
                )
    except ScalingError as error:
        raise StageError(f"plan: {error}") from error
    device = budget.accelerator
    if device is not None and device.precision != precision and settings.peak_flops is None:
        peak = f"hours and dollars are at the {device.precision} peak, promote.precision is {precision}: see plan.peak_flops"
        return replace(chosen, assumptions=(*chosen.assumptions, peak))
    return chosen


def _repeating(fit: ScalingFit) -> ScalingFit:
    """The fit, and each of its refits, with the published worth of repeats."""
    law = replace(fit.law, form=RepeatedData(), parameters={**fit.law.parameters, **REPEATS})
    draws = np.hstack([fit.draws, np.tile([*REPEATS.values()], (len(fit.draws), 1))])
    return replace(fit, law=law, draws=draws)


def _telling(chosen: Decision, free: Decision, law: Law) -> Decision:
    """The decision with repeats, saying what it would be without, and what repeats are taken to cost."""
    unique = chosen.unique_tokens or chosen.n_tokens
    higher = chosen.loss / float(law.loss(chosen.n_params, chosen.n_tokens)) - 1
    seen = chosen.n_tokens / unique
    said = (
        f"the worth of {seen:.3g} epochs over {unique:.4g} unique tokens is the published one (Muennighoff et al. 2305.16264, "
        f"appendix A), by which the law's loss is {higher:.2%} higher; the forecast takes every token for a new one"
    )
    without = (
        f"data: if every token were new, {free.n_params:.4g} parameters and {free.n_tokens:.4g} tokens would be best"
    )
    limits = chosen.limits if chosen.n_params == free.n_params else (*chosen.limits, without)
    told = [line for line in chosen.assumptions if "repeats" not in line]
    return replace(chosen, limits=limits, assumptions=(*told, said))


def epochs(corpus: Corpus, n_tokens: float) -> float:
    """How often a run of `n_tokens` sees its source, of a mixture the mean over the run's tokens."""
    seen = corpus.epochs(max(1, round(n_tokens)))
    shares = {name: times * corpus.sources[name].n_tokens for name, times in seen.items()}
    return sum(shares[name] * times for name, times in seen.items()) / sum(shares.values())


def most_tokens(corpus: Corpus, max_epochs: float) -> float:
    """The longest run of at most so many epochs."""
    low, high = 1.0, 1e18
    if epochs(corpus, high) <= max_epochs:
        return float("inf")
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if epochs(corpus, middle) <= max_epochs else (low, middle)
    return low


def members(family: ModelFamily, least: float, most: float) -> list[ModelConfig]:
    """Members with about so many parameters, the smallest first; widths as in `ModelFamily.for_params`."""
    smallest, largest = family.for_params(least), family.for_params(most)
    step = family.base.head_dim * family.base.queries_per_kv
    widths = range(smallest.d_model, largest.d_model + 1, step)
    return [family.at(width=width) for width in widths if float(width * family.base.mlp_ratio).is_integer()]
