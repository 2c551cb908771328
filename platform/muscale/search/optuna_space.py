"""A space in Optuna's words: the one place that knows both."""

from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from search_spaces import Choice, Config, Distribution, Fixed, Integer, LogUniform, Space, Uniform


def optuna_distribution(distribution: Distribution) -> BaseDistribution:
    """The distribution in Optuna's words."""
    match distribution:
        case Uniform(low=low, high=high):
            return FloatDistribution(low, high)
        case LogUniform(low=low, high=high):
            return FloatDistribution(low, high, log=True)
        case Integer(low=low, high=high, log=log):
            return IntDistribution(low, high, log=log)
        case Choice(values=values):
            return CategoricalDistribution(values)
        case Fixed(value=value):
            return CategoricalDistribution((value,))
    raise TypeError(f"no Optuna distribution for {distribution!r}")


def suggest(trial: optuna.Trial, space: Space) -> Config:
    """A configuration, each value asked from the trial in turn."""
    return {name: trial._suggest(name, optuna_distribution(distribution)) for name, distribution in space.items()}


def distributions(space: Space, config: Config) -> dict[str, BaseDistribution]:
    """Optuna's distributions of the values of a configuration, by Optuna's names."""
    return {name: optuna_distribution(space[name]) for name in config}


def values(space: Space, config: Config) -> dict[str, Any]:
    """The values of a configuration, by Optuna's names."""
    return dict(config)
