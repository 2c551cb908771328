"""[ablate] of the study file: the components that are swapped, and the runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, get_args

import pydantic
from pydantic import Field, PositiveInt

from muscale.settings.strict import StrictTable
from proxy_models.architecture.config import Activation, ModelConfig, Norm, Positions

CHOICES: dict[str, tuple[Any, ...]] = {
    "activation": get_args(Activation),
    "norm": get_args(Norm),
    "positions": get_args(Positions),
    "qk_norm": (False, True),
    "parallel": (False, True),
    "tied": (False, True),
    "biases": (False, True),
}
"""The values of each component of a model that can be swapped."""


class AblateSettings(StrictTable):
    """[ablate]: each component swapped alone, over seeds, at the base shape with the sweep's best hyperparameters."""

    components: Annotated[tuple[str, ...], Field(min_length=1)] = tuple(CHOICES)
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0, 1, 2)
    n_tokens: PositiveInt | None = None  # of each run; none: the sweep's

    @pydantic.field_validator("components")
    @classmethod
    def _known(cls, components: tuple[str, ...]) -> tuple[str, ...]:
        for name in components:
            if name not in CHOICES:
                raise ValueError(f"each must be one of {', '.join(CHOICES)}, got {name!r}")
        return components

    @pydantic.field_validator("seeds")
    @classmethod
    def _differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len({*seeds}) < len(seeds):
            raise ValueError("must all differ")
        return seeds


def swaps(model: ModelConfig, components: tuple[str, ...]) -> list[tuple[str, Any, ModelConfig]]:
    """(component, value, model) for every other value of each.

    An MLP without a gate has two matrices for three; it is widened by half where that is a whole number, so that both have as
    many parameters (Shazeer, arXiv 2002.05202, section 3, the other way round).
    """
    found: list[tuple[str, Any, ModelConfig]] = []
    for name in components:
        for value in CHOICES[name]:
            if value == getattr(model, name):
                continue
            changed: dict[str, Any] = {name: value}
            if name == "activation" and "swiglu" in (value, model.activation):
                ratio = model.mlp_ratio * (2 / 3 if value == "swiglu" else 3 / 2)
                if float(model.d_model * ratio).is_integer():
                    changed["mlp_ratio"] = ratio
            found.append((name, value, replace(model, **changed)))
    return found
