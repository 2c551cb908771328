"""Rules of [sweep.space]: hyperparameters and values that the trials of a study can search, given its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from muscale.settings.fixed_values import BY_TENSORS, unfit_values
from muscale.settings.tables import StudyTables
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import Choice, Fixed, Ordinal, Space

FIXED_IN_A_SWEEP = ("batch_doublings", "batch_ramp_tokens", "schedule", "cooldown_fraction", "stages")
_NO_SWAP = (
    "swapping the optimizer is for a single run; here runs of several lengths share a stem, and a law is fitted to them"
)


def invalid_batches(config: StudyTables) -> Iterator[str]:
    """Values of the sweep's batch that are not numbers of tokens."""
    match config.sweep.space.get("batch_tokens"):
        case Choice(values=values) | Ordinal(values=values):
            offered = values
        case Fixed(value=value):
            offered = (value,)
        case _:
            return
    for value in offered:
        if type(value) is not int or value < 1:
            yield f"sweep.space.batch_tokens: a batch must be a whole number of tokens, at least 1, got {value!r}"


def space_errors(config: StudyTables) -> Iterator[str]:
    """Hyperparameters and values of [sweep.space] that can't be searched."""
    h, space = config.hyperparameters, config.sweep.space
    for name in space:
        if name not in {field.name for field in fields(Hyperparameters)}:
            yield f"sweep.space.{name}: not a training hyperparameter"
        elif name in FIXED_IN_A_SWEEP:
            yield f"sweep.space.{name}: rungs are compared at equal {name}; set it in [hyperparameters]"
        elif name in h.set_by_stages:
            yield f"sweep.space.{name}: hyperparameters.stages change it during the run; remove it from one of the two"
        elif name.startswith("swap_"):
            yield f"sweep.space.{name}: {_NO_SWAP}"
        else:
            yield from _unsearchable(h, name, space)
    if h.swap_optimizer:
        yield f"hyperparameters.swap_optimizer: {_NO_SWAP}, got {h.swap_optimizer!r}"


def model_errors(config: StudyTables) -> Iterator[str]:
    """Values, given or searched, that the study's model or its decay_scaling exclude."""
    for name in BY_TENSORS:
        for key, values in _given(config, name).items():
            if unfit := unfit_values(config.model, name, values):
                yield f"{key}: {unfit}"
    for key, values in _given(config, "optimizer").items():
        if config.decay_scaling == "sublayer_gain" and set(values) != {"adamw"}:
            yield f'{key}: decay_scaling "sublayer_gain" is available for adamw only, got {", ".join(values)}'


def _given(config: StudyTables, name: str) -> dict[str, Sequence[Any]]:
    """The values of a hyperparameter, of a space both bounds or every value, by the key in the file."""
    h, over = config.hyperparameters, config.transfer.over.get(name)
    given: dict[str, Sequence[Any]] = {f"hyperparameters.{name}": [getattr(h, name)]}
    if h.stages:
        given["hyperparameters.stages"] = [getattr(part, name) for part in h.stretches[1:]]
    if name in config.sweep.space:
        given[f"sweep.space.{name}"] = config.sweep.space[name].grid(2)
    if name in config.plan.explicit:
        given[f"plan.explicit.{name}"] = [config.plan.explicit[name]]
    if over:
        given[f"transfer.over.{name}"] = over.at or ["values around the best"]
    return given


def _unsearchable(h: Hyperparameters, name: str, space: Space) -> list[str]:
    """Reasons why a hyperparameter can't take its space's bounds, or one of its choices, under an optimizer of its trials."""
    offered = space["optimizer"].grid(2) if "optimizer" in space and name != "optimizer" else [h.optimizer]
    for optimizer in offered:
        if not _may_be_active(name, optimizer, space) or (optimizer != h.optimizer and _reason(h, optimizer=optimizer)):
            continue
        for value in space[name].grid(2):  # both bounds, or every value
            if reason := _reason(h, **{"optimizer": optimizer, name: value}):
                remedy = (
                    '; give it a "when" with the optimizers that use it'
                    if "would ignore" in reason and len(offered) > 1
                    else ""
                )
                return [f"sweep.space.{name}: {reason}{remedy}"]
    return []


def _reason(h: Hyperparameters, **given: Any) -> str:
    """The reason why hyperparameters can't have these values; "" if they can."""
    try:
        replace(h, **given)
    except ValueError as error:
        return str(error)
    except TypeError:
        return f"each of its values must be allowed in [hyperparameters], got {list(given.values())[-1]!r}"
    return ""


def _may_be_active(name: str, optimizer: Any, space: Space) -> bool:
    """Whether some trial with this optimizer has the hyperparameter."""
    condition = space[name].when
    return condition is None or all(
        allowed.holds(optimizer) if parent == "optimizer" else _may_be_active(parent, optimizer, space)
        for parent, allowed in condition.parents
    )
