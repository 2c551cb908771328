"""Which size, and on how many tokens: one verb for every kind of budget and limit.

    decide(fit, Budget(compute_flops=1e24))                            least loss for the compute
    decide(fit, Budget.of_dollars(2e6, "H100 SXM"))                    … for dollars, device-hours, days on so many devices
    decide(fit, loss=2.05)                                             least compute for a loss
    decide(fit, budget, served_tokens=2e13)                            training and serving out of one budget
    decide(fit, budget, unique_tokens=5e11)                            … with so much data
    decide(fit, budget, memory=MemoryLimit.serving("H100 SXM"))        … within a memory
    decide(fit, budget, sizes=configs)                                 … among shapes that can be built

They combine. The answer prints what was decided, how sure it is, and what was assumed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from scaling.accelerators import Budget, require_positive
from scaling.decision import Decision
from scaling.errors import ScalingError
from scaling.forms.form import Array
from scaling.law import FLOPS_PER_PARAM_TOKEN, Law
from scaling.memory import MemoryLimit
from scaling.result import ScalingFit
from scaling.spending import UNIQUE, Spending

QUANTITIES = ("n_params", "n_tokens", "tokens_per_param", "total_flops", "loss")


def decide(
    law: Law | ScalingFit,
    budget: Budget | float | None = None,
    *,
    loss: float | None = None,
    served_tokens: float = 0.0,
    serving_price: float = 1.0,
    unique_tokens: float | None = None,
    max_epochs: float | None = None,
    memory: MemoryLimit | Iterable[MemoryLimit] = (),
    sizes: Iterable[Any] | None = None,
    tolerance: float = 0.005,
    level: float = 0.9,
    **columns: float,
) -> Decision:
    """The best parameters N and tokens D under a budget, or the cheapest that reach a loss.

    Args:
        law: a fit, which also tells how sure the answer is, or a law alone.
        budget: of training and serving together; a number is FLOPs.
        loss: to reach with the least compute, nats per token, instead of a budget.
        served_tokens: tokens that the model will read and write over its life, at 2·N FLOPs each.
        serving_price: what a FLOP of serving costs in FLOPs of training: the ratio of price over MFU, which is above 1
            where answers are made one token at a time.
        unique_tokens: in the corpus. A law that knows nothing of repeats sees each once: D is at most so many.
        max_epochs: most times that each is seen, for a law with the column `unique_tokens`.
        memory: limits that the model must fit into.
        sizes: what N can be: numbers, or configurations with the attribute `n_params` (counted as the fit counts).
        tolerance: of the band of near-optimal sizes, a share of the loss.
        level: of the intervals.
        columns: other columns of the law's form.

    Raises:
        ValueError: an argument breaks its rule, or a column of the form is missing.
        ScalingError: nothing meets the conditions: the loss is out of reach, or serving alone costs the budget.
    """
    if (budget is None) == (loss is None):
        raise ValueError(f"give a budget or a loss, one of the two, got budget={budget!r} and loss={loss!r}")
    if loss is not None:
        require_positive("loss", loss)
    if budget is not None and not isinstance(budget, Budget):
        budget = Budget(compute_flops=float(budget))
    for name, value in (("served_tokens", served_tokens), ("tolerance", tolerance)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    require_positive("serving_price", serving_price)
    memory = (memory,) if isinstance(memory, MemoryLimit) else tuple(memory)
    point = law.law if isinstance(law, ScalingFit) else law
    spending, chosen = _spending(point, served_tokens, serving_price, unique_tokens, max_epochs, memory, sizes, columns)
    values = _stacked(point, np.array([[*point.parameters.values()]]))
    asked = math.nan if budget is None else budget.compute_flops
    if budget is None:
        budget = Budget(compute_flops=_least(spending, values, float(loss or 0)))
    fit = law if isinstance(law, ScalingFit) else None
    answer = _answers(spending, values, np.array([budget.compute_flops])).iloc[0]
    if not math.isfinite(answer["loss"]):
        raise ScalingError(
            f"serving {served_tokens:.4g} tokens alone costs more than {budget.compute_flops:.4g} FLOPs at every size"
        )
    forecasts = {*point.form.columns} == {"n_params", "n_tokens"}
    return Decision(
        law=point,
        n_params=answer["n_params"],
        n_tokens=answer["n_tokens"],
        loss=answer["loss"],
        served_tokens=served_tokens,
        serving_price=serving_price,
        unique_tokens=unique_tokens,
        budget=budget,
        target_loss=loss,
        config=None if chosen is None else chosen[float(answer["n_params"])],
        near=_near(spending, values, answer, budget.compute_flops, tolerance),
        tolerance=tolerance,
        intervals=_intervals(fit, spending, asked, loss, answer, level) if fit else None,
        size_by_fit=_size_by_fit(fit, spending, budget.compute_flops) if fit and forecasts else None,
        level=level,
        forecast=fit.forecast(answer["n_params"], answer["n_tokens"], level) if fit and forecasts else None,
        limits=_limits(spending, answer, memory),
        assumptions=_assumptions(law, spending, budget, memory),
    )


def _spending(
    law: Law,
    served_tokens: float,
    serving_price: float,
    unique_tokens: float | None,
    max_epochs: float | None,
    memory: Sequence[MemoryLimit],
    sizes: Iterable[Any] | None,
    columns: Mapping[str, float],
) -> tuple[Spending, dict[float, Any] | None]:
    """The conditions, and the configuration of each size that can be chosen."""
    for name, value in (("unique_tokens", unique_tokens), ("max_epochs", max_epochs)):
        if value is not None:
            require_positive(name, value)
    repeats = UNIQUE in law.form.columns
    if max_epochs is not None and not repeats:
        raise ValueError(
            f"max_epochs wants a law of {UNIQUE}: {law.form.name} knows nothing of repeats, so each token is seen once"
        )
    if max_epochs is not None and unique_tokens is None:
        raise ValueError(f"max_epochs wants unique_tokens, got max_epochs={max_epochs!r} alone")
    expected = {*law.form.columns} - {"n_params", "n_tokens", UNIQUE}
    if expected != {*columns}:
        named = ", ".join(sorted(expected)) or "no further columns"
        raise ValueError(f"{law.form.name} wants {named}, got {', '.join(columns) or 'none'}")
    max_params = min((limit.max_params for limit in memory), default=math.inf)
    unique = math.inf if unique_tokens is None else unique_tokens
    chosen = None
    if sizes is not None:
        chosen = {float(getattr(size, "n_params", size)): size for size in reversed([*sizes])}  # of equals the first
        for size in chosen:
            require_positive("sizes", size)
        if not chosen:
            raise ValueError("sizes must hold at least one size, got none")
        if not (fitting := sorted(size for size in chosen if size <= max_params)):
            raise ScalingError(
                f"the smallest of the sizes, {min(chosen):.4g}, is above the {max_params:.4g} of the memory"
            )
    spending = Spending(
        form=law.form,
        served_tokens=served_tokens,
        serving_price=serving_price,
        unique_tokens=unique,
        max_tokens=unique * (max_epochs or math.inf) if repeats else unique,
        max_params=max_params,
        sizes=None if chosen is None else np.array(fitting),
        columns=columns,
    )
    return spending, chosen


def _stacked(law: Law, parameters: Array) -> dict[str, Array]:
    """J parameter vectors, [J, n] in the form's order, as columns [J, 1] by name."""
    return dict(zip(law.form.parameters, parameters.T[:, :, None], strict=True))


def _answers(spending: Spending, values: Mapping[str, Array], budget: Array) -> pd.DataFrame:
    """The best of each law's budget, [J]: a row each of `QUANTITIES`."""
    # A law that never reaches the loss has no budget; it is worked out at an arbitrary one and taken out below.
    finite = np.where(np.isfinite(budget), budget, 1.0)
    n_params = spending.best(values, finite)
    n_tokens = spending.tokens(n_params, finite)
    found = {
        "n_params": n_params,
        "n_tokens": n_tokens,
        "tokens_per_param": n_tokens / n_params,
        "total_flops": n_params * (FLOPS_PER_PARAM_TOKEN * n_tokens + spending.served_flops_per_param),
        "loss": spending.loss(values, n_params[:, None], n_tokens[:, None])[:, 0],
    }
    table = pd.DataFrame(found, columns=[*QUANTITIES])
    table[~np.isfinite(budget)] = np.inf
    return table


def _least(spending: Spending, values: Mapping[str, Array], loss: float) -> float:
    """The least compute that reaches a loss."""
    found = float(spending.least_budget(values, loss, 1)[0])
    if not math.isfinite(found):
        most = np.array([1e60])
        least = float(spending.at(values, spending.best(values, most)[:, None], most[:, None])[0, 0])
        raise ScalingError(
            f"the best allocations tend to a loss of {least:.4f} under these limits and never reach {loss:.4f}"
        )
    return found


def _near(
    spending: Spending, values: Mapping[str, Array], answer: pd.Series, budget: float, tolerance: float
) -> pd.DataFrame:
    """The ends of the band of near-optimal sizes with the best between them, or all of the sizes that lie in it."""
    best, loss = float(answer["n_params"]), float(answer["loss"])
    if spending.sizes is None:
        low, high = spending.band(values, best, budget, loss * (1 + tolerance))
        sizes = np.array([low, best, high])
    else:
        losses = spending.at(values, spending.sizes[None], budget)[0]
        sizes = spending.sizes[losses <= loss * (1 + tolerance)]
    tokens = spending.tokens(sizes, budget)
    losses = spending.loss(values, sizes[None], tokens[None])[0]
    return pd.DataFrame({"n_params": sizes, "n_tokens": tokens, "loss": losses, "loss_above_best": losses / loss - 1})


def _intervals(
    fit: ScalingFit, spending: Spending, budget: float, loss: float | None, answer: pd.Series, level: float
) -> pd.DataFrame:
    """Estimate, low, high of `QUANTITIES` over the bootstrap refits; infinite where refits never reach the loss."""
    values = _stacked(fit.law, fit.draws)
    n_laws = len(fit.draws)
    budgets = np.full(n_laws, budget) if loss is None else spending.least_budget(values, loss, n_laws)
    found = _answers(spending, values, budgets).to_numpy()
    # Ends are draws themselves: between two infinite ones there is nothing to interpolate.
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2], axis=0, method="nearest")
    return pd.DataFrame({"estimate": answer.to_numpy(), "low": low, "high": high}, index=[*QUANTITIES])


def _size_by_fit(fit: ScalingFit, spending: Spending, budget: float) -> pd.Series:
    """The best N under each fit that the forecast is a mean of."""
    variants = fit.ensemble.variants
    first = next(iter(variants.values()))
    values = _stacked(first, np.array([[*variant.parameters.values()] for variant in variants.values()]))
    found = replace(spending, form=first.form).best(values, np.full(len(variants), budget))
    return pd.Series(found, index=[*variants], name="n_params")


def _limits(spending: Spending, answer: pd.Series, memory: Sequence[MemoryLimit]) -> tuple[str, ...]:
    """What holds the answer back."""
    held = []
    if answer["n_tokens"] >= spending.max_tokens * (1 - 1e-6):
        epochs = spending.max_tokens / spending.unique_tokens
        held.append(f"data: all {spending.unique_tokens:.4g} unique tokens are used, {epochs:.3g} times each")
    tightest = min(memory, key=lambda limit: limit.max_params, default=None)
    if tightest is not None and answer["n_params"] >= tightest.max_params * (1 - 1e-6):
        held.append(f"memory of {tightest}")
    return tuple(held)


def _assumptions(
    law: Law | ScalingFit, spending: Spending, budget: Budget, memory: Sequence[MemoryLimit]
) -> tuple[str, ...]:
    counts = (
        f"N counted {law.n_params_convention}, as in the fit"
        if isinstance(law, ScalingFit)
        else "N counted as in the law"
    )
    said = [f"training costs 6·N·D FLOPs, {counts}"]
    if spending.served_tokens:
        said.append(
            f"serving costs 2·N FLOPs for each of {spending.served_tokens:.4g} tokens, a FLOP {spending.serving_price:g} "
            "times as dear as in training"
        )
    if budget.accelerator is not None:
        said.append(f"{budget.accelerator}: share of the peak and price are assumed unless you set them")
    if math.isfinite(spending.unique_tokens):
        repeats = UNIQUE in spending.form.columns
        said.append(
            "the law tells what repeats of a token are worth"
            if repeats
            else "no token is seen twice: the law knows no repeats"
        )
    if memory:
        said += [f"memory of {limit}" for limit in memory]
        said.append("memory holds every parameter, also those that N may not count")
    if isinstance(law, ScalingFit):
        said.append(
            f"intervals: {len(law.draws)} bootstrap refits, which take the form for right; the forecast's own does not"
        )
    return tuple(said)
