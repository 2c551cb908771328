"""Planning the full run: size, tokens and transferred hyperparameters, and the forecast of its loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

from muscale.errors import StageError
from muscale.plans.batch import BY_BATCH, BatchChoice, choose_batch
from muscale.plans.plan import Plan, StageForecast, format_value
from muscale.plans.provenance import HyperparameterProvenance, provenance_of
from muscale.plans.sizing import planned_family, repeats, size_for
from muscale.proxies.expert_axes import AxisChange, AxisLaws, axis_changes, laws_of, rate_factor
from muscale.proxies.ladder import ladder_models, law_columns, mixtures_of, tuned_for
from muscale.settings.config import StudyConfig
from muscale.settings.plan import Shape, model_with_explicit, with_explicit
from muscale.store.lineage import input_key
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from scaling import AxisLaw, BatchLaw, Decision, Forecast, HorizonLaw, ScalingFit, StageLaw
from scaling.fits.forecast import interval_factor

FOLLOWED = 8.0
"""Factor beyond its longest grid at which a horizon law needs longer horizons: at 24× beyond grids of 64 to 256 steps its rate
was two octaves off (measured, widths 32 and 64)."""
_OF_THE_PLAN = ("forecast", "n_params", "n_tokens")  # values for whole batches, unlike the decision's


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
    axis_laws: AxisLaws = field(default_factory=dict)
    stages: StageLaw | str = ""
    corpus: Corpus | None = None
    winner: int | None = None

    def plan(self) -> Plan:
        """Return the plan, not registered yet; raise StageError if the budget can't be spent (`size_for`) or pays for no batch."""
        config, decision, forecast = self.config, self.decision, self._forecast()
        kept = decision.stated_ratio or self.fit.one_size
        by_law = (
            decision.n_params
            if kept
            else self.fit.ensemble.law.allocate(config.plan.budget.compute_flops, **self._columns).n_params
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
            decision=_plain(decision, config.plan.shapes, planned_family(config)),
            provenance=self._provenance(),
            batch=self.batch,
            off_policy=self._off_policy,
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
            planned_family(config),
            self.corpus,
            proxies=config.precision,
            precision=precision,
            shapes=config.ladder.stems,
        )

    @cached_property
    def batch(self) -> BatchChoice | None:
        """The run's batch, None if it is the proxies' and no law has a batch to compare."""
        explicit = self.config.plan.explicit
        return choose_batch(
            self.best,
            self.batches,
            self.decision.n_tokens,
            explicit,
            sequence_tokens=explicit.get("context_length", self.config.model.context_length),
            least_sequences=self.config.promote.least_sequences,
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
        factor = rate_factor(self.model, self.config.model, self.axis_laws)
        return self._at_batch(tuned_for(self.best, self.horizon, self.n_tokens, factor=factor))

    @property
    def _columns(self) -> dict[str, float]:
        return law_columns(self.fit, self.model)

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
            wanted = fit.law.allocate(config.plan.budget.compute_flops, **self._columns).n_params
            chosen_by_law = config.family.for_params(wanted)
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
        found = self.fit.forecast(self.model.n_params, self.n_tokens, level=self.config.plan.level, **self._columns)
        wider = math.exp(self.batch.effect) if self.batch else 1.0
        reasons = (*found.reasons, *repeats(self.decision.epochs), *self._off_policy)
        scale = found.log_scale + math.log(wider) / interval_factor(found.level)
        return replace(found, low=found.low / wider, high=found.high * wider, log_scale=scale, reasons=reasons)

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

    @cached_property
    def _off_policy(self) -> tuple[str, ...]:
        """How the run departs from the fitted runs and from the policy under which they were trained, other than by its tokens."""
        config, depth, batch, fitted = self.config, self.model.n_layers, self.batch, ladder_models(self.config)
        reasons, depths = [], {model.n_layers for model in fitted}
        if depth not in depths:
            found = ", ".join(map(str, sorted(depths)))
            reasons.append(f"depth {depth}: the runs fitted have {found}; add ladder.stems of that depth")
        if (experts := mixtures_of([self.model])) != mixtures_of(fitted) and not self._columns:
            found, own = (", ".join(map(str, each)) for each in (mixtures_of(fitted), experts))
            reasons.append(f"n_experts {own}: the runs fitted have {found}; add ladder.stems with other n_experts")
        for name, value in config.plan.explicit.items():
            if name == "n_experts":
                continue
            policy = getattr(self.by_policy, name, getattr(config.model, name, None))
            if value != policy:
                reasons.append(
                    f"{name} = {format_value(value)} is stated; the runs fitted follow a policy that has {format_value(policy)}"
                )
        if batch and (batch.is_far or batch.best_tokens is None):
            reasons.append(f"batch {batch}; the runs fitted have {batch.tuned_tokens:,}")
        return tuple(reasons)


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
        shape: dict[str, Any] = {"d_model": width} | ({"n_layers": model.n_layers} if model else {})
        experts = {"n_experts": getattr(model, "n_experts", None)}
        near.append({**size, **shape, **(experts if any(named.n_experts for named in shapes) else {})})
    return facts | {
        "near": near,
        "budget": decision.budget.terms or decision.budget.worth,
        "cost": decision.cost.worth,
        "served_tokens": decision.served_tokens,
        "unique_tokens": decision.unique_tokens,
    }
