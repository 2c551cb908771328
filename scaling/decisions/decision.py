"""Decision on a size and its tokens, with intervals, near-optimal sizes and assumptions."""

from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from scaling.decisions.accelerators import Accelerator, Budget, accelerator
from scaling.decisions.limits import total_params_of
from scaling.fits.forecast import Forecast
from scaling.forms.law import Law, compute_flops
from scaling.forms.spending import FLOPS_PER_PARAM_SERVED
from scaling.presentation import Result, counted, lines, span
from scaling.serialization import TableLayout, converter


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision(Result):
    """The best parameters N and tokens D for a budget, or the cheapest ones that reach a loss.

    Attributes:
        law: the law behind the decision; it states what N counts, and the unit of the loss.
        loss: loss by the law at (N, D), in its unit.
        sparsity: total over active parameters, None under a law without this column.
        served_tokens: tokens served over the model's life.
        serving_price: price of a FLOP of serving, in FLOPs of training.
        unique_tokens: unique tokens in the corpus, None if not given.
        budget: budget to spend, or the least compute that reaches the loss.
        target_loss: the requested loss, None if a budget was given.
        config: the chosen configuration, if configurations were given.
        stated_ratio: D/N given by the caller, None if it was decided.
        near: sizes about as good at the same budget: n_params, n_tokens, loss, loss_above_best (a share), under a law of experts
            also sparsity; the bounds of the band with the best between them, or all given sizes in the band.
        tolerance: width of this band, as a share of the loss.
        intervals: estimate, low, high of n_params, n_tokens, tokens_per_param, total_flops, loss, by
            `scaling.decisions.intervals`; None for a law alone.
        size_by_fit: best N by each fit in the forecast's mean and by the fitted form alone, or None: shows how far the
            form matters.
        forecast: forecast of the chosen run, or None; its loss is the decision's.
        limits: limits that bind the answer, such as memory or data; empty if only the budget does.
        warnings: reasons to doubt the answer, in addition to the forecast's reasons.
        assumptions: assumptions behind the answer.
    """

    law: Law
    n_params: float
    n_tokens: float
    loss: float
    sparsity: float | None
    served_tokens: float
    serving_price: float
    unique_tokens: float | None
    budget: Budget
    target_loss: float | None
    config: Any
    stated_ratio: float | None
    near: pd.DataFrame = field(repr=False)
    tolerance: float
    intervals: pd.DataFrame | None = field(repr=False)
    size_by_fit: pd.Series | None = field(repr=False)
    level: float
    forecast: Forecast | None
    limits: tuple[str, ...]
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def tokens_per_param(self) -> float:
        """D / N."""
        return self.n_tokens / self.n_params

    @property
    def n_params_total(self) -> float:
        """Parameters with all experts: those that the size states, tables included, or sparsity · N."""
        return total_params_of(self.config, self.n_params, self.sparsity)

    @property
    def epochs(self) -> float | None:
        """Times that each unique token is seen, None if the number of unique tokens was not given."""
        return None if self.unique_tokens is None else self.n_tokens / self.unique_tokens

    @property
    def training_flops(self) -> float:
        """6·N·D."""
        return float(compute_flops(self.n_params, self.n_tokens))

    @property
    def serving_flops(self) -> float:
        """2·N for each served token, converted to FLOPs of training by `serving_price`."""
        return FLOPS_PER_PARAM_SERVED * self.serving_price * self.n_params * self.served_tokens

    @property
    def total_flops(self) -> float:
        """FLOPs of training and serving; less than the budget if another limit binds."""
        return self.training_flops + self.serving_flops

    @property
    def cost(self) -> Budget:
        return replace(self.budget, compute_flops=self.total_flops, terms="")

    def on(self, device: Accelerator | str, n_devices: int | None = None) -> "Decision":
        """Price the decision on other devices, by default on as many."""
        budget = replace(
            self.budget, accelerator=accelerator(device), n_devices=n_devices or self.budget.n_devices, terms=""
        )
        return replace(self, budget=budget)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready numbers, cost, band, intervals, and assumptions."""
        numbers = (
            "n_params",
            "n_tokens",
            "loss",
            *(("sparsity", "n_params_total") if self.sparsity else ()),
            "training_flops",
            "serving_flops",
            "epochs",
            "target_loss",
        )
        cost = ("gpu_hours", "dollars", "days")
        rest = ("size_by_fit", "forecast", "limits", "warnings", "assumptions")
        return (
            {name: converter.unstructure(getattr(self, name)) for name in numbers}
            | {"budget_flops": self.budget.compute_flops, **{name: getattr(self.cost, name) for name in cost}}
            | {name: converter.unstructure(getattr(self, name)) for name in ("law", "near", "tolerance", "level")}
            | {"intervals": None if self.intervals is None else TableLayout("index").to_json(self.intervals)}
            | {name: converter.unstructure(getattr(self, name)) for name in rest}
        )

    def __str__(self) -> str:
        low, high = self.near["n_params"].min(), self.near["n_params"].max()
        rows = {
            "decided": f"{self.n_params:.4g} parameters ({counted(self.law.n_params_convention)}), {self.n_tokens:.4g} tokens "
            f"({self.tokens_per_param:.4g} per parameter)"
            + ("" if self.sparsity is None else f", {self.n_params_total:.4g} in all (sparsity {self.sparsity:.4g})")
            + ("" if self.config is None or isinstance(self.config, float | int) else f": {self.config}"),
            "loss": f"{self.loss:.4f} {self.law.loss_unit}"
            + (" by the law" if self.forecast is None else f", {self.forecast.law_loss:.4f} by the one form fitted")
            + ("" if self.target_loss is None else f", the least compute for {self.target_loss:.4f}"),
            "budget": self.budget.terms or self.budget.worth,
            "cost": self.cost.worth
            + (f", {self.serving_flops / self.total_flops:.0%} of it for serving" if self.served_tokens else ""),
            "within": f"{self.tolerance:.2%} of the best loss: {span(low, high)} parameters",
        }
        if self.intervals is not None:
            last = "loss" if self.target_loss is None else "total_flops"
            shown = self.intervals.loc[["n_params", "n_tokens", last]]
            shown_ends = [f"{name} {span(row.low, row.high, 4)}" for name, row in shown.iterrows()]
            rows[f"{self.level:.0%} interval"] = "; ".join(shown_ends)
        if self.size_by_fit is not None:
            rows["other fits"] = f"would choose {span(self.size_by_fit.min(), self.size_by_fit.max())} parameters"
        if self.forecast is not None:
            status = "supported" if self.forecast.supported else "unsupported: " + "; ".join(self.forecast.reasons)
            rows["forecast"] = f"{self.level:.0%} within {self.forecast.low:.4f} to {self.forecast.high:.4f}, {status}"
        if self.epochs is not None:
            rows["data"] = f"{self.epochs:.3g} epochs of {self.unique_tokens:.4g} unique tokens"
        if self.limits:
            rows["limited by"] = "; ".join(self.limits)
        if self.warnings:
            rows["doubtful"] = "; ".join(self.warnings)
        device = self.budget.accelerator
        priced = (f"{device}: share of the peak and price are assumed unless you set them",) if device else ()
        return "\n- ".join([f"{lines(rows)}\nassumed", *self.assumptions, *priced])
