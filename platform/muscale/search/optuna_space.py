"""A space as Optuna's distributions. Values are suggested one by one, so Optuna sees only active hyperparameters."""

from __future__ import annotations

from typing import Any, cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from search_spaces import (
    Choice,
    Config,
    Distribution,
    Fixed,
    Integer,
    LogUniform,
    Ordinal,
    Simplex,
    Space,
    Uniform,
    Value,
)


def optuna_distributions(name: str, distribution: Distribution) -> dict[str, BaseDistribution]:
    """A hyperparameter in Optuna's words, by Optuna's names: an ordinal by rank, a simplex by its places in the unit cube."""
    match distribution:
        case Uniform(low=low, high=high):
            return {name: FloatDistribution(low, high)}
        case LogUniform(low=low, high=high):
            return {name: FloatDistribution(low, high, log=True)}
        case Integer(low=low, high=high, log=log):
            return {name: IntDistribution(low, high, log=log)}
        case Ordinal(values=values):
            return {name: IntDistribution(0, len(values) - 1)}
        case Choice(values=values):
            return {name: CategoricalDistribution(values)}
        case Simplex():
            return {f"{name}.{place}": FloatDistribution(0.0, 1.0) for place in range(distribution.dimensions)}
        case Fixed():
            return {}
    raise TypeError(f"no Optuna distribution for {distribution!r}")


def suggest(trial: optuna.Trial, space: Space) -> Config:
    """A configuration asked from the trial; it may break a constraint, of which Optuna's samplers know nothing."""
    config: Config = {}
    for name in space.order:
        distribution = space[name]
        if distribution.when is None or distribution.when.holds(config):
            asked = optuna_distributions(name, distribution)
            config[name] = _value(distribution, [_ask(trial, key, entry) for key, entry in asked.items()])
    return {name: config[name] for name in space if name in config}


def _ask(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> Any:
    match distribution:
        case FloatDistribution(low=low, high=high, log=log):
            return trial.suggest_float(name, low, high, log=log)
        case IntDistribution(low=low, high=high, log=log):
            return trial.suggest_int(name, low, high, log=log)
        case CategoricalDistribution(choices=choices):
            return trial.suggest_categorical(name, choices)
    raise TypeError(f"Optuna cannot suggest a value for {distribution!r}")


def optuna_params_of(space: Space, config: Config) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """A configuration as the parameters and distributions that Optuna records."""
    params: dict[str, Any] = {}
    distributions: dict[str, BaseDistribution] = {}
    for name, value in config.items():
        asked = optuna_distributions(name, space[name])
        distributions |= asked
        params |= dict(zip(asked, _asked(space[name], value), strict=True))
    return params, distributions


def _value(distribution: Distribution, asked: list[Any]) -> Value:
    match distribution:
        case Fixed():
            return distribution.value
        case Ordinal(values=values):
            return cast(Value, values[asked[0]])
        case Simplex():
            return distribution.decode(asked)
    return cast(Value, asked[0])


def _asked(distribution: Distribution, value: Value) -> list[Any]:
    match distribution:
        case Fixed():
            return []
        case Ordinal(values=values):
            return [values.index(value)]
        case Simplex():
            return list(distribution.encode(value))
    return [value]
