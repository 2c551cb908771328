"""The plan of the full run as a value, and its registration in the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from muscale.formatting import fold
from muscale.plans.batch import BatchChoice
from muscale.plans.provenance import HyperparameterProvenance
from muscale.serialization import Recorded
from muscale.settings.plan import OF_MODEL, model_with_explicit
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import forecasts
from muscale.store.lineage import Chain
from muscale.store.statements import find
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Precision
from proxy_models.architecture.parametrization import CARRIED_EXPERTS
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import Segment, chain
from proxy_models.recipes.stages import HyperparameterStage
from proxy_models.training.numerics import Numerics
from scaling import Forecast

_MOST_SIZES = 5  # sizes listed one by one


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """The forecast of the same run with another start of the corpus's last stage.

    Attributes:
        until_fraction: Share of the run at which the stage begins; 1: never.
        loss, low, high: As in the plan's forecast, at its level.
        reasons: Why the law of the ladder's branches is unsupported here, in addition to the reasons of the plan's forecast.
    """

    until_fraction: float
    loss: float
    low: float
    high: float
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        begins = "never" if self.until_fraction == 1 else f"at {self.until_fraction:.0%}"
        return f"{begins} {self.loss:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True, kw_only=True)
class Plan(Recorded):
    """The full run that promotion trains.

    Attributes:
        key: Hash of everything the plan was made from.
        model: The full-size shape.
        n_tokens: Training tokens D.
        seed: Seed of the initial values and the data order.
        spike_handling: Settings of [promote] about spikes that change what is computed.
        hyperparameters: Values at the base shape; the parametrization scales them to `model`.
        rules: Transfer rule of each tuned hyperparameter.
        wanted_n_params: Compute-optimal N by the law behind the forecast, with every token new; `model` is the best member of the
            family. If the ladder does not determine D/N, N at the ladder's own D/N. With a
            ladder of one size, this size.
        forecast: Forecast of the final annealed validation loss.
        decision: Reasons for this size: `scaling.Decision` as plain values, with the budget and the cost in words.
        provenance: Every hyperparameter with its rules and its source.
        data: Hashes of the `corpus` and of its `tokenizer`; empty without a corpus.
        batch: The run's batch, if it differs from the proxies'.
        off_policy: Reasons of the forecast, other than the law's and the epochs: how the run departs from the fitted runs.
        stages: Forecasts for other starts of the corpus's last stage, which [ladder] stage_branches give.
        no_stages: Why there are none, if the study has such branches.
        registered_at: Time at which the forecast was written to the ledger; None before.
    """

    DERIVED = ("n_params", "compute_flops")

    key: str
    model: Member
    n_tokens: int
    seed: int
    precision: Precision
    spike_handling: dict[str, Any]
    hyperparameters: Hyperparameters
    rules: dict[str, str]
    wanted_n_params: float
    forecast: Forecast
    decision: dict[str, Any]
    provenance: tuple[HyperparameterProvenance, ...]
    data: dict[str, str]
    batch: BatchChoice | None = None
    off_policy: tuple[str, ...] = ()
    stages: tuple[StageForecast, ...] = ()
    no_stages: str = ""
    registered_at: str | None = None

    @property
    def shape(self) -> str:
        """Width and depth, and a mixture's number of experts."""
        experts = getattr(self.model, "n_experts", None)
        return f"width {self.model.d_model}, depth {self.model.n_layers}" + (f", {experts} experts" if experts else "")

    @property
    def values(self) -> dict[str, Any]:
        """Value of each hyperparameter, or setting of the model, that has a rule."""
        owners = (self.hyperparameters, self.model)
        return {name: next(getattr(of, name) for of in owners if hasattr(of, name)) for name in self.rules}

    @property
    def n_params(self) -> int:
        """N as the law counts parameters: without the embedding table."""
        return self.model.n_params

    @property
    def compute_flops(self) -> float:
        """Training compute, 6·N·D."""
        return 6.0 * self.n_params * self.n_tokens

    def chain(self, numerics: Numerics) -> Chain:
        """Return the full run's chain of segments."""
        # The parametrization does not know these fields: the full run may have other values than its base.
        names = [name for name in OF_MODEL if name not in CARRIED_EXPERTS and hasattr(self.model, name)]
        own_values = {name: getattr(self.model, name) for name in names}
        base = model_with_explicit(numerics.base, own_values)
        own = replace(numerics, model=self.model, base=base, seed=self.seed, precision=self.precision)
        return Chain(numerics=own.for_run(self.n_tokens), segments=self.segments)

    @property
    def _reasons_of_stages(self) -> list[str]:
        return [*dict.fromkeys(reason for of in self.stages for reason in of.reasons)]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The full run's schedule and absolute hyperparameters at the base shape."""
        return chain(self.hyperparameters, self.n_tokens)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """Return the plan of a registered forecast, a row of the ledger."""
        return replace(cls.from_dict(row["payload"]), registered_at=row["registered_at"])

    def __str__(self) -> str:
        forecast, model = self.forecast, self.model
        same = self.wanted_n_params == self.n_params  # a size that was kept or stated is not called optimal
        optimal = "" if same else f"; compute-optimal {self.wanted_n_params:,.0f}"
        lines = [
            f"plan: {self.shape}, N = {model.shown_params} "
            f"({forecast.n_params_convention or 'without the embedding table'}{optimal}), D = {self.n_tokens:,} tokens, "
            f"C = {self.compute_flops:.3g} FLOPs",
            f"  forecast {forecast.loss:.4f} {forecast.loss_unit}, {forecast.level:.0%} interval "
            f"[{forecast.low:.4f}, {forecast.high:.4f}], {forecast.extrapolation:.3g}× the largest run of the ladder",
            *(f"  {name} = {format_value(value)}  ({self.rules[name]})" for name, value in self.values.items()),
            *([f"  batch_tokens = {self.batch}"] if self.batch else []),
            *([f"  if the last stage begins {'; '.join(map(str, self.stages))}"] if self.stages else []),
            *([f"  other starts of the last stage have no forecast: {self.no_stages}"] if self.no_stages else []),
            *(f"  outside declared support: {reason}" for reason in forecast.reasons),
            *(f"  outside declared support, other starts: {reason}" for reason in self._reasons_of_stages),
            *(f"  {line}" for line in format_decision(self.decision)),
        ]
        if self.registered_at:
            lines.append(f"  registered {self.registered_at}")
        return "\n".join(part for line in lines for part in fold(line, 4))


def format_value(value: Any) -> str:
    """Format a hyperparameter's value for reading; stages may be objects or plain values."""
    if isinstance(value, tuple | list):
        return "; ".join(str(HyperparameterStage(**entry) if isinstance(entry, dict) else entry) for entry in value)
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def format_decision(decision: dict[str, Any]) -> list[str]:
    """Return the reasons for a plan's size, a line each."""
    near = [f"{size['n_params']:,.0f} ({_shape(size)}, +{size['loss_above_best']:.2%})" for size in decision["near"]]
    sizes = decision["intervals"]["n_params"] if decision["intervals"] else None
    by_fit = [*decision["size_by_fit"].values()] if decision["size_by_fit"] else []
    budget, cost = decision["budget"], decision["cost"]
    lines = [
        f"cost: {cost}" if budget == cost else f"budget: {budget}; cost: {cost}",
        f"within {decision['tolerance']:.2%} of the best loss: N = {_first(near)}",
    ]
    if sizes:
        lines.append(
            f"{decision['level']:.0%} interval of the best N: {_span(sizes['low'], sizes['high'])}"
            + (f"; each fit alone would choose {_span(min(by_fit), max(by_fit))}" if by_fit else "")
        )
    if decision["epochs"] is not None:
        lines.append(f"data: {decision['epochs']:.3g} epochs over the corpus")
    lines += [f"limited by {limit}" for limit in decision["limits"]]
    lines += [f"doubtful: {warning}" for warning in decision["warnings"]]
    return lines + [f"assumed: {assumption}" for assumption in decision["assumptions"]]


def _shape(size: dict[str, Any]) -> str:
    """Return the width, and the depth and experts of named shapes; other shapes have those of the base."""
    named = {"width": "d_model", "depth": "n_layers", "experts": "n_experts"}
    return ", ".join(f"{name} {size[key]}" for name, key in named.items() if size.get(key) is not None)


def _span(low: float, high: float) -> str:
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def _first(sizes: list[str]) -> str:
    """Return a short list in full, and a long list as its first and last entries."""
    if len(sizes) <= _MOST_SIZES:
        return ", ".join(sizes)
    return f"{sizes[0]} to {sizes[-1]}, {len(sizes)} sizes"


def register(plan: Plan, ledger: Ledger) -> Plan:
    """Write a plan with its forecast into the ledger, once, and return the registered plan."""
    forecast = plan.forecast
    ledger.insert(
        forecasts,
        plan=plan.key,
        loss=forecast.loss,
        low=forecast.low,
        high=forecast.high,
        level=forecast.level,
        payload=plan.to_dict(),
    )
    return as_registered(plan, ledger)


def replaced_by(plan: Plan, ledger: Ledger) -> Plan | None:
    """Return the newest plan registered for the budget of a plan that is not registered yet; None if there is none."""
    if ledger.forecast(plan.key) is not None:
        return None
    earlier = map(Plan.of_row, ledger.read(find, "forecasts", order=("-registered_at",)))
    return next((other for other in earlier if other.decision["budget"] == plan.decision["budget"]), None)


def as_registered(plan: Plan, ledger: Ledger) -> Plan:
    """Return the plan as registered, or unchanged if it is not registered.

    The decision keeps today's prices and nearby sizes, which are not part of the registration.
    """
    row = ledger.forecast(plan.key)
    return replace(Plan.of_row(row), decision=plan.decision) if row else plan
