"""The plan of the full run: size, tokens, transferred hyperparameters, and the forecast that is registered before it starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from muscale.errors import StageError
from muscale.formatting import fold
from muscale.plans.batch import BY_BATCH, BatchChoice, choose_batch
from muscale.plans.expert_axes import AxisChange, axis_changes, laws_of
from muscale.plans.provenance import HyperparameterProvenance, provenance_of
from muscale.plans.sizing import size_for
from muscale.proxies.ladder import tuned_for
from muscale.serialization import Recorded
from muscale.settings.config import StudyConfig
from muscale.settings.plan import OF_MODEL, Shape, model_with_explicit, with_explicit
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import forecasts
from muscale.store.lineage import Chain, input_key
from muscale.store.statements import find
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Precision
from proxy_models.architecture.parametrization import CARRIED_EXPERTS
from proxy_models.data.corpus import Corpus
from proxy_models.data.mixture import MAX_EPOCHS
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import Segment, chain
from proxy_models.recipes.stages import HyperparameterStage
from proxy_models.training.numerics import Numerics
from scaling import AxisLaw, BatchLaw, Decision, Forecast, HorizonLaw, ScalingFit, StageLaw

FOLLOWED = 8.0
"""Factor beyond its longest grid at which a horizon law needs longer horizons: at 24× beyond grids of 64 to 256 steps its rate
was two octaves off (measured, widths 32 and 64)."""
_MOST_SIZES = 5  # sizes listed one by one
_OF_THE_PLAN = ("forecast", "n_params", "n_tokens")  # values for whole batches, unlike the decision's


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
    stages: tuple[StageForecast, ...] = ()
    no_stages: str = ""
    registered_at: str | None = None

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
            f"plan: width {model.d_model}, depth {model.n_layers}, N = {model.shown_params} "
            f"({forecast.n_params_convention or 'without the embedding table'}{optimal}), D = {self.n_tokens:,} tokens, "
            f"C = {self.compute_flops:.3g} FLOPs",
            f"  forecast {forecast.loss:.4f} {forecast.loss_unit}, {forecast.level:.0%} interval "
            f"[{forecast.low:.4f}, {forecast.high:.4f}], {forecast.extrapolation:.3g}× the largest run of the ladder",
            *(
                f"  {name} = {format_value(getattr(self.hyperparameters, name))}  ({rule})"
                for name, rule in self.rules.items()
            ),
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
    lines += [f"held by {limit}" for limit in decision["limits"]]
    lines += [f"doubtful: {warning}" for warning in decision["warnings"]]
    return lines + [f"assumed: {assumption}" for assumption in decision["assumptions"]]


def _shape(size: dict[str, Any]) -> str:
    """Return the width, and the depth of named shapes; other shapes have the base's depth."""
    return f"width {size['d_model']}" + (f", depth {size['n_layers']}" if "n_layers" in size else "")


def _span(low: float, high: float) -> str:
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def _first(sizes: list[str]) -> str:
    """Return a short list in full, and a long list as its first and last entries."""
    if len(sizes) <= _MOST_SIZES:
        return ", ".join(sizes)
    return f"{sizes[0]} to {sizes[-1]}, {len(sizes)} sizes"


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans the full run: at the size where the law predicts the lowest loss for the budget, with that size's hyperparameters.

    Attributes:
        best: Values that the sweep found, at the base shape.
        batches: Batch law of the study's own grids.
        axis_laws: Laws of the rate along axes of experts on which it does not transfer (`Verdict.axis_laws`).
        stages: Law of the share of tokens in the corpus's last stage, or why there is none.
        corpus: Data of the run; without it no epochs are counted.
        winner: Trial that `best` comes from.
    """

    config: StudyConfig
    best: Hyperparameters
    horizon: HorizonLaw
    fit: ScalingFit
    _: KW_ONLY
    batches: BatchLaw | None = None
    axis_laws: Mapping[str, AxisLaw | str] = field(default_factory=dict)
    stages: StageLaw | str = ""
    corpus: Corpus | None = None
    winner: int | None = None

    def plan(self) -> Plan:
        """Return the plan, not registered yet; raise StageError if the budget can't be spent (`size_for`) or pays for no batch."""
        config, decision, forecast = self.config, self.decision, self._forecast()
        kept = decision.stated_ratio or self.fit.one_size
        by_law = (
            decision.n_params if kept else self.fit.ensemble.law.allocate(config.plan.budget.compute_flops).n_params
        )
        return Plan(
            key=self._key(),
            model=self.model,
            n_tokens=self.n_tokens,
            seed=config.promote.seed,
            precision=config.full_run_precision,
            spike_handling=config.promote.spike_handling,
            hyperparameters=self.hyperparameters,
            rules=self._rules(),
            wanted_n_params=by_law,
            forecast=forecast,
            decision=_plain(decision, config.plan.shapes, self._family),
            provenance=self._provenance(),
            batch=self.batch,
            stages=tuple(self._stages(forecast)),
            no_stages=self.stages if isinstance(self.stages, str) and config.ladder.stage_branches else "",
            data={} if self.corpus is None else data_hashes(self.corpus),
        )

    @cached_property
    def decision(self) -> Decision:
        """Decision on size and tokens."""
        config, precision = self.config, self.config.full_run_precision
        return size_for(
            config.plan,
            self.fit,
            self._family,
            self.corpus,
            proxies=config.precision,
            precision=precision,
            shapes=config.ladder.stems,
        )

    @property
    def _family(self) -> ModelFamily[Member]:
        """Members of which the size is chosen: a mixture has the full run's experts."""
        explicit = {name: value for name, value in self.config.plan.explicit.items() if name in CARRIED_EXPERTS}
        return ModelFamily(base=model_with_explicit(self.config.model, explicit))

    @cached_property
    def batch(self) -> BatchChoice | None:
        """The run's batch, None if it is the proxies' and no law has a batch to compare."""
        return choose_batch(
            self.best,
            self.batches,
            self.decision.n_tokens,
            self.config.plan.explicit,
            sequence_tokens=self.config.model.context_length,
            ranks=self.config.promote.workers,
        )

    @cached_property
    def n_tokens(self) -> int:
        """Training tokens in whole batches."""
        decision = self.decision
        n_tokens = with_explicit(self._at_batch(self.best), self.config.plan.explicit).whole_batches(decision.n_tokens)
        if n_tokens > 2 * decision.n_tokens:  # a single batch: longer runs are rounded to whole ones
            raise StageError(
                f"plan: the budget must allow a batch of {n_tokens:,} tokens, got {decision.budget.worth}, which allows "
                f"{decision.n_tokens:,.0f} tokens of N = {decision.n_params:,.0f}; raise it, or list smaller plan.shapes"
            )
        return n_tokens

    @cached_property
    def by_policy(self) -> Hyperparameters:
        """Values by the policy under which the ladder was trained, at the run's tokens and batch."""
        tuned = self._at_batch(tuned_for(self.best, self.horizon, self.n_tokens))
        factor = math.prod(law.factor(change.full, change.proxies) for change, law in self._along.items())
        return replace(tuned, learning_rate=tuned.learning_rate * factor) if self._along else tuned

    @property
    def _along(self) -> dict[AxisChange, AxisLaw]:
        return laws_of(axis_changes(self.model, self.config.model), self.axis_laws)

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Values of the run: by the policy, or explicit."""
        return with_explicit(self.by_policy, self.config.plan.explicit)

    @cached_property
    def model(self) -> Member:
        """The full-size shape."""
        chosen: Member = self.decision.config
        return model_with_explicit(chosen, self.config.plan.explicit)

    @cached_property
    def by_batch(self) -> frozenset[str]:
        """Hyperparameters that the batch changes."""
        moved = self._at_batch(self.best)
        return frozenset(name for name in BY_BATCH if getattr(moved, name) != getattr(self.best, name))

    def _at_batch(self, tuned: Hyperparameters) -> Hyperparameters:
        return self.batch.transfer(tuned) if self.batch else tuned

    def _rules(self) -> dict[str, str]:
        """Describe the transfer rule of each hyperparameter that is tuned or stated, or follows the batch."""
        config, horizon, batch = self.config, self.horizon, self.batch
        over_width = "same shape" if config.initial_weights else "muP across width"
        rules = {
            name: f"{over_width}; {'timescale ' if name == 'weight_decay_tau' else ''}fixed across tokens"
            for name in config.sweep.space
        }
        rules["learning_rate"] = (
            f"{over_width}; horizon law D^{-horizon.exponent:.2f} ± {horizon.stderr:.2f} across tokens, "
            f"measured on {', '.join(horizon.measured_on)}{_beyond(self.n_tokens, horizon, config.transfer.n_tokens)}"
        )
        for change, law in self._along.items():
            rules["learning_rate"] += f"; {change}: {law}"
        if self.best.stages:
            of_trial = f"schedule followed by trial {self.winner} of the population"
            course = of_trial if config.sweep.is_population else "as given"
            rules["stages"] = (
                f"{course}; shares of the stable part, and factors on the rate, fixed across width and tokens"
            )
        if batch and self.by_batch:
            rules["learning_rate"] += f"; batch^{batch.rate_exponent[0]:.2f} ± {batch.rate_exponent[1]:.2f}"
            rules |= dict.fromkeys(self.by_batch - {"learning_rate"}, "transferred to the batch")
        return rules | dict.fromkeys(config.plan.explicit, "explicit")

    def _provenance(self) -> tuple[HyperparameterProvenance, ...]:
        config = self.config
        return provenance_of(
            self.hyperparameters,
            self.model,
            config.model,
            searched=frozenset(config.sweep.space.searched) | ({"stages"} if config.sweep.is_population else set()),
            explicit=frozenset(config.plan.explicit),
            by_mup=config.parametrization == "mup" and not config.initial_weights,
            trial="the sweep's winner" if self.winner is None else f"trial {self.winner} of the sweep",
            by_batch=self.by_batch,
            batch_source=self.batch.source if self.batch else "",
        )

    def _key(self) -> str:
        """Return the key of the plan: a hash of what determines the run and its forecast."""
        config, fit = self.config, self.fit
        evidence = fit.rows.to_dict("list")
        chosen_by_law = None
        if fit.one_size is None:
            chosen_by_law = config.family.for_params(fit.law.allocate(config.plan.budget.compute_flops).n_params)
        return input_key(
            config.model.to_dict(),
            self.hyperparameters.to_dict(),
            self.n_tokens,
            config.promote.seed,
            config.full_run_precision,
            config.plan.level,
            config.fit.n_bootstrap,
            config.fit.seed,
            {k: list(map(str, v)) for k, v in evidence.items()},
            # The size that the single fitted form would choose keeps its original key, and so the run that was promoted with it.
            *([] if self.model == chosen_by_law else [self.model.to_dict()]),
            *([] if config.promote.on_spike == "stop" else [config.promote.spike_handling]),
        )

    def _forecast(self) -> Forecast:
        """Return the fit's forecast with a reason for each way in which the run differs from the fitted runs.

        A different batch extends the interval on both sides by its possible effect.
        """
        found = self.fit.forecast(self.model.n_params, self.n_tokens, level=self.config.plan.level)
        wider = math.exp(self.batch.effect) if self.batch else 1.0
        return replace(
            found, low=found.low / wider, high=found.high * wider, reasons=(*found.reasons, *self._off_policy())
        )

    def _stages(self, planned: Forecast) -> Iterator[StageForecast]:
        """Forecasts for the starts of the last stage that the ladder's runs have."""
        if isinstance(self.stages, str):
            return
        level = self.config.plan.level
        for share in reversed(self.stages.shares):
            effect = self.stages.effect(self.model.n_params, self.n_tokens, share, level=level)
            loss = planned.loss * math.exp(effect.log_ratio)
            low, high = (
                loss * math.exp(sign * math.hypot(math.log(bound / planned.loss), effect.half_width))
                for sign, bound in ((-1, planned.low), (1, planned.high))
            )
            yield StageForecast(
                until_fraction=round(1 - share, 4), loss=loss, low=low, high=high, reasons=effect.reasons
            )

    def _off_policy(self) -> list[str]:
        """Return how the run departs from the fitted runs and from the policy under which they were trained."""
        config, epochs, depth, batch = self.config, self.decision.epochs, self.model.n_layers, self.batch
        reasons = []
        if epochs is not None and epochs > MAX_EPOCHS:
            reasons.append(
                f"{epochs:.3g} epochs over the corpus: tested with new tokens, which up to {MAX_EPOCHS:g} are nearly equalled"
            )
        depths = {config.model.n_layers} | {stem.of(config.family).n_layers for stem in config.ladder.stems}
        if depth not in depths:
            fitted = ", ".join(map(str, sorted(depths)))
            reasons.append(f"depth {depth}: the runs fitted have {fitted}; add ladder.stems of that depth")
        for name, value in config.plan.explicit.items():
            policy = getattr(self.by_policy, name, getattr(config.model, name, None))
            if value != policy:
                reasons.append(
                    f"{name} = {format_value(value)} is stated; the runs fitted follow a policy that has {format_value(policy)}"
                )
        if batch and (batch.is_far or batch.best_tokens is None):
            reasons.append(f"batch {batch}; the runs fitted have {batch.tuned_tokens:,}")
        return reasons


def _beyond(n_tokens: int, horizon: HorizonLaw, unit: int) -> str:
    """Describe how far beyond its grids the horizon law is used, and the horizon that would extend them; "" within the grids."""
    times = n_tokens / horizon.n_tokens_range[1]
    if times <= 1:
        return ""
    distance = f", {times:.3g}× beyond its grids" + ("" if horizon.supports(n_tokens) else " and its supported range")
    wanted = math.ceil(n_tokens / FOLLOWED / unit)
    return (
        distance
        if times <= FOLLOWED
        else f"{distance}: {wanted} among transfer.horizons would bring them within {FOLLOWED:g}×"
    )


def data_hashes(corpus: Corpus) -> dict[str, str]:
    """Return the hashes of the corpus and of its tokenizers; a mixture has one tokenizer per source."""
    tokenizers = sorted({str(files.manifest["tokenizer"]) for files in corpus.sources.values()})
    return {"corpus": corpus.key, "tokenizer": ", ".join(tokenizers)}


def _plain(decision: Decision, shapes: Sequence[Shape], family: ModelFamily[Member]) -> dict[str, Any]:
    """Return the decision's facts as JSON values."""
    named = {(member := shape.of(family)).n_params: member for shape in shapes}
    facts = {name: value for name, value in decision.to_dict().items() if name not in _OF_THE_PLAN}
    near = []
    for size in facts["near"]:
        model = named.get(size["n_params"])
        width = (model or family.for_params(size["n_params"])).d_model
        near.append({**size, "d_model": width} | ({"n_layers": model.n_layers} if model else {}))
    return facts | {
        "near": near,
        "budget": decision.budget.terms or decision.budget.worth,
        "cost": decision.cost.worth,
        "served_tokens": decision.served_tokens,
        "unique_tokens": decision.unique_tokens,
    }


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
