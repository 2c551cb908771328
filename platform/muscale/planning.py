"""The plan of the full run: size, tokens, transferred hyperparameters, and the forecast that is registered before it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from muscale.config import StudyConfig
from muscale.ladder import tuned_for
from muscale.ledger import Ledger
from muscale.lineage import Chain, input_key
from muscale.tables import forecasts
from proxy_models.config import ModelConfig
from proxy_models.hyperparameters import Hyperparameters
from proxy_models.numerics import Numerics, Precision
from proxy_models.segments import chain
from proxy_models.stages import Stage
from scaling import Forecast, HorizonLaw, ScalingFit

_PLAIN = ("key", "n_tokens", "seed", "precision", "rules", "wanted_n_params", "registered_at")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What promotion takes.

    Attributes:
        key: Hash of everything the plan was made from.
        model: The full-size shape.
        n_tokens: Training tokens D.
        seed: Of the initial values and the data order.
        precision: Of the training.
        hyperparameters: At the base shape; the parametrization carries them to `model`.
        rules: For each tuned hyperparameter, the rule that carried it.
        wanted_n_params: The law's compute-optimal N, of which `model` is the nearest member of the family.
        forecast: Of the final annealed validation loss.
        registered_at: When the forecast was written to the ledger; None before.
    """

    key: str
    model: ModelConfig
    n_tokens: int
    seed: int
    precision: Precision
    hyperparameters: Hyperparameters
    rules: dict[str, str]
    wanted_n_params: float
    forecast: Forecast
    registered_at: str | None = None

    @property
    def n_params(self) -> int:
        """N as the law counts it: without the embedding table."""
        return self.model.n_params

    @property
    def compute_flops(self) -> float:
        """6·N·D."""
        return 6.0 * self.n_params * self.n_tokens

    def chain(self, numerics: Numerics) -> Chain:
        """The full run as a training like any other."""
        own = replace(numerics, model=self.model, seed=self.seed, precision=self.precision).for_run(self.n_tokens)
        return Chain(numerics=own, segments=chain(self.hyperparameters, self.n_tokens))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "model": self.model.to_dict(),
            "hyperparameters": self.hyperparameters.to_dict(),
            "forecast": self.forecast.to_dict(),
            "n_params": self.n_params,
            "compute_flops": self.compute_flops,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild what `to_dict` wrote."""
        return cls(
            **{name: values[name] for name in _PLAIN},
            model=ModelConfig(**values["model"]),
            hyperparameters=Hyperparameters(**values["hyperparameters"]),
            forecast=Forecast.from_dict(values["forecast"]),
        )

    def __str__(self) -> str:
        forecast, model = self.forecast, self.model
        lines = [
            f"plan: width {model.d_model}, depth {model.n_layers}, N = {self.n_params:,} "
            f"({forecast.n_params_convention or 'without the embedding table'}; compute-optimal "
            f"{self.wanted_n_params:,.0f}), D = {self.n_tokens:,} tokens, C = {self.compute_flops:.3g} FLOPs",
            f"  forecast {forecast.loss:.4f} nats per token, {forecast.level:.0%} interval "
            f"[{forecast.low:.4f}, {forecast.high:.4f}], {forecast.extrapolation:.1f}× the largest run of the ladder",
            *(f"  {name} = {told(getattr(self.hyperparameters, name))}  ({rule})" for name, rule in self.rules.items()),
            *(f"  outside declared support: {reason}" for reason in forecast.reasons),
        ]
        if self.registered_at:
            lines.append(f"  registered {self.registered_at}")
        return "\n".join(lines)


def told(value: Any) -> str:
    """A hyperparameter's value as people read it, stages as they are or as plain values."""
    if isinstance(value, tuple | list):
        return "; ".join(str(Stage(**entry) if isinstance(entry, dict) else entry) for entry in value)
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def make_plan(
    config: StudyConfig, best: Hyperparameters, horizon: HorizonLaw, fit: ScalingFit, *, winner: int | None = None
) -> Plan:
    """Spend the budget where the law says it buys the lowest loss, with the hyperparameters that hold there.

    `winner` is the trial that `best` is from.
    """
    allocation = fit.law.allocate(config.plan.compute_flops)
    model = config.family.for_params(allocation.n_params)
    n_tokens = best.whole_batches(config.plan.compute_flops / (6.0 * model.n_params))
    hyperparameters = tuned_for(best, horizon, n_tokens)
    capped = "" if horizon.supports(n_tokens) else ", beyond its supported range"
    rules = {
        name: "muP across width; timescale fixed across tokens"
        if name == "weight_decay_tau"
        else "muP across width; fixed across tokens"
        for name in config.sweep.space
    }
    rules["learning_rate"] = (
        f"muP across width; horizon law D^-{horizon.exponent:.2f} ± {horizon.stderr:.2f} across tokens{capped}"
    )
    if best.stages:
        course = f"schedule followed by trial {winner} of the population" if config.sweep.is_population else "as given"
        rules["stages"] = f"{course}; shares of the stable part, and factors on the rate, fixed across width and tokens"
    evidence = fit.rows.to_dict("list")
    key = input_key(
        asdict(config.model),
        hyperparameters.to_dict(),
        n_tokens,
        config.promote.seed,
        config.promote.precision,
        config.plan.level,
        config.fit.n_bootstrap,
        config.fit.seed,
        {k: list(map(str, v)) for k, v in evidence.items()},
    )
    return Plan(
        key=key,
        model=model,
        n_tokens=n_tokens,
        seed=config.promote.seed,
        precision=config.promote.precision,
        hyperparameters=hyperparameters,
        rules=rules,
        wanted_n_params=allocation.n_params,
        forecast=fit.forecast(model.n_params, n_tokens, level=config.plan.level),
    )


def register(plan: Plan, ledger: Ledger) -> Plan:
    """Write the forecast into the ledger, once and for all, and return the plan as registered."""
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
    row = ledger.forecast(plan.key) or {}
    return replace(Plan.from_dict(row["payload"]), registered_at=row["registered_at"])
