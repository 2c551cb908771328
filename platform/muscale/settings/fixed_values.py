"""Hyperparameters that a model can't vary because it lacks the tensors they act on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from proxy_models.architecture.families import family_of
from proxy_models.architecture.member import Member
from proxy_models.architecture.parametrization import TUNED
from proxy_models.recipes.hyperparameters import Hyperparameters

BY_TENSORS = ("zero_readout", "embedding_rate", *TUNED)
"""Hyperparameters that act on certain tensors (`Family.fixed_hyperparameters`)."""
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Hyperparameters)}


def unfit_values(model: Member, name: str, values: Iterable[Any]) -> str:
    """Return why a model can't have one of these values of a hyperparameter; "" if it can have all."""
    changed = [value for value in values if value != _DEFAULTS[name]]
    reason = family_of(model).fixed_hyperparameters(model).get(name) if changed else None
    return f"must be {json.dumps(_DEFAULTS[name])}, since {reason}; got {json.dumps(changed[0])}" if reason else ""
