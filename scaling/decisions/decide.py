"""Decide size and tokens, with one verb for every kind of budget and limit.

    decide(fit, Budget(compute_flops=1e24))                            lowest loss for the compute
    decide(fit, Budget.of_dollars(2e6, "H100 SXM"))                    … for dollars, device-hours, days on so many devices
    decide(fit, loss=2.05)                                             least compute for a loss
    decide(fit, budget, served_tokens=2e13)                            training and serving paid from one budget
    decide(fit, budget, tokens_per_param=20)                           … at this D/N, if the runs do not identify the best D/N
    decide(fit, budget, limits=Limits(…))                              within limits, which combine:
        unique_tokens=5e11                                             … with this much data
        memory=[MemoryLimit.serving("H100 SXM")]                       … within a memory
        deadline=Budget.of_days(30, "H100 SXM", 512)                   … in time
        sizes=configs                                                  … among shapes that can be built
        max_sparsity=64                                                … under a law of experts, with at most this total/active
    decide(fit, budget, sparsity=8)                                    … under a law of experts, at this total/active

The answer prints the decision, its intervals, and its assumptions.

A fit of a law in N and D decides by the law behind its forecast, the mean of several fits: on public ladders the mean errs less
than the fitted form alone, and decision and forecast agree. `decide(fit.law, …)` decides by the fitted form alone.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.decisions.accelerators import Budget, require_positive
from scaling.decisions.decision import Decision
from scaling.decisions.intervals import by_forecast, by_refits
from scaling.decisions.limits import Limits, as_number, n_params_of
from scaling.errors import ScalingError
from scaling.fits.forecast import Forecast
from scaling.fits.result import ScalingFit
from scaling.forms.expert_law import SPARSITY
from scaling.forms.law import FLOPS_PER_PARAM_TOKEN, Law
from scaling.forms.spending import LEAST_FLOPS, MOST_FLOPS, UNIQUE, Spending
from scaling.presentation import counted
from scaling.quantiles import tails

SANE_RATIO = (0.5, 2e4)
"""Range of tokens per parameter outside which a law alone warns (assumed)."""
USEFUL_EPOCHS = 40.0
"""Epochs from which a further repeat was found to be useless (Muennighoff et al. 2305.16264, fig. 1)."""
NO_LIMITS = Limits()
PLATEAU = 0.25
"""Share of the budget; if less already comes within the tolerance of the loss, most of the compute is wasted (assumed)."""


def decide(
    law: Law | ScalingFit,
    budget: Budget | float | None = None,
    *,
    loss: float | None = None,
    served_tokens: float = 0.0,
    serving_price: float = 1.0,
    limits: Limits = NO_LIMITS,
    tokens_per_param: float | None = None,
    tolerance: float = 0.005,
    level: float = 0.9,
    **columns: float,
) -> Decision:
    """Find the best parameters N and tokens D under a budget, or the cheapest that reach a loss.

    Args:
        law: a fit, which also gives intervals, or a law alone.
        budget: compute of training and serving together; a number is FLOPs.
        loss: loss to reach with the least compute, in the law's unit, instead of a budget.
        served_tokens: tokens that the model will read and write over its life, at 2·N FLOPs each.
        serving_price: cost of a FLOP of serving in FLOPs of training: the ratio of price over MFU, above 1 if answers are
            generated token by token.
        limits: data, memory, time, and the sizes that can be built.
        tokens_per_param: D/N, stated rather than decided; with `Limits.sizes`, the nearest size is taken. This needs a budget.
        tolerance: width of the band of near-optimal sizes, as a share of the loss.
        columns: the law's further columns. The sparsity of a law of experts is decided unless it is given here: it is the largest
            within the memory for all parameters, `Limits.max_sparsity` and the range of the fitted runs, or the one that the chosen
            of `Limits.sizes` states.

    Raises:
        ValueError: an argument breaks its rule, or a column of the form is missing.
        ScalingError: nothing meets the conditions: the loss is out of reach, or reached below 1e6 FLOPs, where no law was fitted; or
            the law is one of tokens only, and `limits` do not give its runs' own size alone; or
            serving alone uses up the budget; or the fit's runs do not identify the best D/N (`scaling.fits.identification`): then the
            message names two runs that would.
    """
    _require_one_question(budget, loss, tokens_per_param)
    for name, value in (("served_tokens", served_tokens), ("tolerance", tolerance)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
    tails(level)
    require_positive("serving_price", serving_price)
    fit = law if isinstance(law, ScalingFit) else None
    point = law if isinstance(law, Law) else law.best_law
    _require_choice_of_size(point, fit, limits)
    decides_sparsity = SPARSITY in point.form.columns and SPARSITY not in columns and not limits.states_sparsity
    if fit and decides_sparsity and limits.max_sparsity is None:
        limits = replace(limits, max_sparsity=float(fit.rows[SPARSITY].max()))
    spending = limits.spending(point.form, served_tokens, serving_price, columns)
    values = _stacked(point)
    if budget is None:
        given = Budget(compute_flops=_least(spending, values, float(loss or 0)))
    else:
        given = budget if isinstance(budget, Budget) else Budget(compute_flops=as_number("budget", budget))
        if given.compute_flops > MOST_FLOPS:
            raise ValueError(f"the budget must be at most {MOST_FLOPS:g} FLOPs, got {given.compute_flops:g}")
    if tokens_per_param is not None:
        spending = spending.at_ratio(tokens_per_param, given.compute_flops)
    elif fit and (spending.sizes is None or len(np.unique(spending.sizes)) > 1):
        _require_known_ratio(fit, given)
    case = _Case(
        law=law,
        spending=spending,
        values=values,
        budget=given.compute_flops,
        limits=limits,
        tolerance=tolerance,
        level=level,
    )
    stated = [] if tokens_per_param is None else [_stated(tokens_per_param, case.n_tokens / case.n_params)]
    return Decision(
        law=point,
        n_params=case.n_params,
        n_tokens=case.n_tokens,
        loss=float(case.answer["loss"]),
        sparsity=case.columns.get(SPARSITY),
        served_tokens=served_tokens,
        serving_price=serving_price,
        unique_tokens=limits.unique_tokens,
        budget=given,
        target_loss=loss,
        config=limits.config(case.n_params, case.columns.get(SPARSITY)),
        stated_ratio=tokens_per_param,
        near=case.near(),
        tolerance=tolerance,
        intervals=case.intervals(loss),
        size_by_fit=None if tokens_per_param else case.size_by_fit(),
        level=level,
        forecast=case.forecast,
        limits=tuple(case.binding()),
        warnings=(*stated, *case.warnings()),
        assumptions=tuple(case.assumptions()),
    )


def _require_one_question(budget: Budget | float | None, loss: float | None, tokens_per_param: float | None) -> None:
    """Raise ValueError unless there is either a budget or a loss, and D/N only with a budget."""
    if (budget is None) == (loss is None):
        raise ValueError(f"give either a budget or a loss, got budget={budget!r} and loss={loss!r}")
    if loss is not None:
        require_positive("loss", loss)
    if tokens_per_param is None:
        return
    if budget is None:
        raise ValueError(
            f"tokens_per_param is for a budget, got tokens_per_param={tokens_per_param!r} and loss={loss!r}"
        )
    require_positive("tokens_per_param", tokens_per_param)


def _require_choice_of_size(law: Law, fit: ScalingFit | None, limits: Limits) -> None:
    """Raise ScalingError if the law is one of tokens only, and the limits give another size than its runs'."""
    if law.form.tokens_only and not (fit and limits.sizes and {*map(n_params_of, limits.sizes)} == {fit.one_size}):
        size = f"{fit.one_size:.10g}" if fit else "the runs' N"
        raise ScalingError(
            f"{law.form.name}: a law of tokens only chooses no size, as it says nothing of other sizes; give the runs' own: "
            f"limits=Limits(sizes=[{size}])"
        )


def _require_known_ratio(fit: ScalingFit, budget: Budget) -> None:
    """Raise ScalingError if the fit's runs do not identify the best D/N for the budget."""
    least, most = fit.n_tokens_range
    if least == most:
        raise ScalingError(
            f"all runs have {most:.4g} tokens, so they do not show the best D/N: set tokens_per_param=…, or add two lengths"
        )
    if doubt := fit.unidentified(budget.compute_flops):
        raise ScalingError(f"{doubt}; or set it: tokens_per_param={doubt.tokens_per_param:.3g}")


def _stated(given: float, found: float) -> str:
    said = f"D/N was given, {given:.4g}, not decided"
    return said if math.isclose(given, found, rel_tol=0.01) else f"{said}; at the nearest size it is {found:.4g}"


def _least(spending: Spending, values: Mapping[str, Array], loss: float) -> float:
    """The least compute that reaches a loss."""

    def best_loss(budget: float) -> float:
        budgets = np.array([budget])
        return float(spending.at(values, spending.best(values, budgets)[:, None], budgets[:, None])[0, 0])

    found = float(spending.least_budget(values, loss, 1)[0])
    if not math.isfinite(found):
        raise ScalingError(
            f"the best allocations tend to a loss of {best_loss(MOST_FLOPS):.4f} under these limits and never reach {loss:.4f}"
        )
    if best_loss(LEAST_FLOPS) <= loss:
        raise ScalingError(
            f"the best allocations reach {loss:.4f} with less than {LEAST_FLOPS:,.0f} FLOPs: no law was fitted there"
        )
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Case:
    """The best use of a budget under a law, and the findings about it.

    Attributes:
        law: a fit, or a law alone.
        values: parameters of the law, [1, 1] each.
        budget: FLOPs to spend.
    """

    law: Law | ScalingFit
    spending: Spending
    values: Mapping[str, Array]
    budget: float
    limits: Limits
    tolerance: float
    level: float

    @property
    def fit(self) -> ScalingFit | None:
        return self.law if isinstance(self.law, ScalingFit) else None

    @cached_property
    def answer(self) -> pd.Series:
        found = self.spending.answers(self.values, np.array([self.budget])).iloc[0]
        if not math.isfinite(found["loss"]):
            served = self.spending.served_tokens
            why = f"serving {served:.4g} tokens alone costs" if served else "one token of every size costs"
            raise ScalingError(f"{why} more than {self.budget:.4g} FLOPs")
        return found

    @property
    def n_params(self) -> float:
        return float(self.answer["n_params"])

    @property
    def n_tokens(self) -> float:
        return float(self.answer["n_tokens"])

    @cached_property
    def columns(self) -> dict[str, float]:
        """The law's further columns of the answer; unique tokens excepted."""
        if SPARSITY not in self.spending.form.columns:
            return dict(self.spending.columns)
        return {**self.spending.columns, SPARSITY: float(self.spending.sparsity(self.n_params))}

    @cached_property
    def forecast(self) -> Forecast | None:
        if self.fit is None or not self.fit.has_forecast:
            return None
        return self.fit.forecast(self.n_params, self.n_tokens, self.level, **self.columns)

    def intervals(self, loss: float | None) -> pd.DataFrame | None:
        """Intervals of the decision for a budget, or for a loss to reach; None for a law alone."""
        if self.fit is None:
            return None
        if self.forecast is None:
            return by_refits(self.fit, self.spending, self.answer, loss, self.budget, self.level)
        return by_forecast(self.fit.ensemble, self.spending, self.values, self.answer, loss, self.forecast)

    def near(self) -> pd.DataFrame:
        """Bounds of the band of near-optimal sizes with the best between them, or all of `sizes` in the band."""
        spending, loss = self.spending, float(self.answer["loss"])
        if spending.sizes is None:
            low, high = spending.band(self.values, self.n_params, self.budget, loss * (1 + self.tolerance))
            sizes = np.array([low, self.n_params, high])
        else:
            sizes = spending.sizes
        tokens = spending.tokens(sizes, self.budget)
        sparsity = spending.sparsity(sizes) if spending.sparsities is None else spending.sparsities
        losses = spending.loss(self.values, sizes[None], tokens[None], sparsity[None])[0]
        of_experts = {SPARSITY: sparsity} if SPARSITY in spending.form.columns else {}
        columns = {"n_params": sizes, **of_experts, "n_tokens": tokens, "loss": losses}
        table = pd.DataFrame({**columns, "loss_above_best": losses / loss - 1})
        return table if spending.sizes is None else table[losses <= loss * (1 + self.tolerance)].reset_index(drop=True)

    def size_by_fit(self) -> pd.Series | None:
        """Best N under each fit in the forecast's mean, and under the fitted form alone; None without a forecast."""
        if self.fit is None or self.forecast is None:
            return None
        laws = {**self.fit.ensemble.variants, f"{self.fit.law.form.name} alone": self.fit.law}
        budget = np.array([self.budget])
        found = [replace(self.spending, form=law.form).best(_stacked(law), budget) for law in laws.values()]
        return pd.Series(np.concatenate(found), index=[*laws], name="n_params")

    def binding(self) -> Iterator[str]:
        """Yield the limits that bind the answer."""
        spending = self.spending
        if self.n_tokens >= spending.max_tokens * (1 - 1e-6):
            epochs = spending.max_tokens / spending.unique_tokens
            yield f"data: all {spending.unique_tokens:.4g} unique tokens are used, {epochs:.3g} times each"
        tightest = min(self.limits.memory, key=lambda limit: limit.max_params, default=None)
        total = self.n_params * self.columns.get(SPARSITY, 1.0)
        if tightest is not None and total >= tightest.max_params * (1 - 1e-6):
            yield f"memory of {tightest}"
        if SPARSITY not in spending.columns and self.columns.get(SPARSITY, 0.0) >= spending.max_sparsity * (1 - 1e-6):
            yield f"sparsity: at most {spending.max_sparsity:.4g}"
        training = FLOPS_PER_PARAM_TOKEN * self.n_params * self.n_tokens
        if self.limits.deadline is not None and training >= self.limits.deadline.compute_flops * (1 - 1e-6):
            yield f"the deadline: {self.limits.deadline.terms or self.limits.deadline.worth}"

    def warnings(self) -> Iterator[str]:
        """Yield warnings about the answer itself; the forecast has further reasons."""
        fit, spending, (low, high) = self.fit, self.spending, SANE_RATIO
        ratio = self.n_tokens / self.n_params
        if fit and self.forecast is None:
            yield from (*fit.warnings, *fit.unsupported_reasons(self.n_params, self.n_tokens, **self.columns))
        if fit is None and not low <= ratio <= high:
            yield f"{ratio:.3g} tokens per parameter: no known ladder reaches that ratio"
        if UNIQUE in spending.form.columns and (epochs := self.n_tokens / spending.unique_tokens) > 1:
            seen = USEFUL_EPOCHS if fit is None else float((fit.rows["n_tokens"] / fit.rows[UNIQUE]).max())
            where = "repeats were found to be worthless" if fit is None else "the runs end"
            if epochs > seen:
                yield f"{epochs:.4g} epochs: {where} at {seen:.3g}"
        if spending.sizes is None and self.tolerance > 0:
            loss = float(self.answer["loss"]) * (1 + self.tolerance)
            enough = float(spending.least_budget(self.values, loss, 1)[0])
            if enough < PLATEAU * self.budget:
                yield (
                    f"{enough:.3g} FLOPs come within {self.tolerance:.2%} of this loss: the rest of {self.budget:.3g} buys "
                    "next to nothing"
                )

    def assumptions(self) -> Iterator[str]:
        """Yield the assumptions behind the answer."""
        spending = self.spending
        yield f"training costs 6·N·D FLOPs, N as in the law: {counted(self.law.n_params_convention)}"
        if spending.served_tokens:
            yield (
                f"serving costs 2·N FLOPs for each of {spending.served_tokens:.4g} tokens, a FLOP {spending.serving_price:g} "
                "times as dear as in training, out of one budget; a deadline for the training alone is `deadline`"
            )
        if math.isfinite(spending.unique_tokens):
            repeats = UNIQUE in spending.form.columns
            yield (
                "the law includes the value of repeated tokens"
                if repeats
                else "no token is seen twice: the law has no term for repeats"
            )
        if self.limits.memory:
            yield from (f"memory of {limit}" for limit in self.limits.memory)
            stated = all(hasattr(size, "n_params_total") for size in self.limits.sizes or (None,))
            yield (
                "memory holds every parameter, also those that N may not count"
                if stated
                else "memory counts N times the sparsity, without tables that N leaves out: give sizes with n_params_total"
            )
        if SPARSITY in spending.form.columns:
            yield "N counts the parameters that a token uses; experts that it does not use cost memory but no compute"
        if self.forecast:
            yield "decided by the mean of the forecast's fits; sizes by their spread and by resampled runs, the loss by the forecast"
        elif self.fit:
            yield f"intervals: {len(self.fit.draws)} bootstrap refits, which assume that the form is right"


def _stacked(law: Law) -> Mapping[str, Array]:
    return law.form.stacked(np.array([[*law.parameters.values()]]))
