"""[plan.explicit]: what is stated for the full run alone, and not carried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_type_hints

import pydantic

from proxy_models.architecture.config import DROPPED, ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import TransferClass, transferability

REGULARIZERS = (*DROPPED, "label_smoothing", "z_loss")
"""Settings of the model that no rule carries; 0 is none of it."""


def checked(explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The values of [plan.explicit], each of its hyperparameter's type.

    Raises:
        ValueError: Naming the key, the rule and the value.
    """
    hints = get_type_hints(Hyperparameters) | dict.fromkeys(REGULARIZERS, float)
    found = {}
    for name, value in explicit.items():
        if name not in hints or name == "stages":
            known = ", ".join(sorted(set(hints) - {"stages"}))
            raise ValueError(f"explicit.{name}: not a value that a full run can state; those are {known}")
        if (known_as := transferability(name)).transfer is TransferClass.MUST_MATCH:
            raise ValueError(
                f"explicit.{name}: must be the proxies' own, or nothing tuned on them holds ({known_as.reason}), got {value!r}"
            )
        try:
            found[name] = pydantic.TypeAdapter(hints[name]).validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            raise ValueError(f"explicit.{name}: {error.errors()[0]['msg']}, got {value!r}") from error
    return found


def with_explicit(hyperparameters: Hyperparameters, explicit: Mapping[str, Any]) -> Hyperparameters:
    """The hyperparameters with those that are stated."""
    return replace(hyperparameters, **{name: v for name, v in explicit.items() if name not in REGULARIZERS})


def model_with_explicit(model: ModelConfig, explicit: Mapping[str, Any]) -> ModelConfig:
    """The model with the regularizers that are stated."""
    return replace(model, **{name: v for name, v in explicit.items() if name in REGULARIZERS})
