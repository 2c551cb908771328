"""Source of each hyperparameter of the full run, and the rules that transferred it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal

from muscale.settings.plan import DECLARED, REGULARIZERS
from proxy_models.architecture.member import Member
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import TRANSFERABILITY, TransferClass

Rule = Literal["muP width", "muP depth", "horizon law", "batch law", "fixed", "explicit"]
"""A rule that takes a value from the proxy to the full run; several may apply."""

SCALED = (
    "learning_rate",
    "swap_learning_rate",
    "embedding_rate",
    "output_rate",
    "init_scale",
    "weight_decay_tau",
    "eps",
    "embedding_multiplier",
    "output_multiplier",
    "attention_multiplier",
)
"""Values that the parametrization scales with the shape; every other value is the same at every size."""
_OF_THE_STUDY = "the study file"
_EXPLICIT = "[plan.explicit]"


@dataclass(frozen=True, kw_only=True)
class HyperparameterProvenance:
    """One value of the full run, at the base shape.

    Attributes:
        rules: Rules that transferred the value.
        source: Trial or file that the value comes from.
    """

    name: str
    value: Any
    rules: tuple[Rule, ...]
    source: str
    searched: bool = False

    @property
    def transfer(self) -> TransferClass | None:
        """The hyperparameter's class; None for a name that has none."""
        return TRANSFERABILITY[self.name].transfer if self.name in TRANSFERABILITY else None

    @property
    def is_silent(self) -> bool:
        """Whether the value came from a smaller model although no rule supports its transfer."""
        stated = "explicit" in self.rules or self.value == 0
        return not stated and (self.transfer is None or (self.transfer is TransferClass.NEVER and self.searched))


def provenance_of(
    hyperparameters: Hyperparameters,
    model: Member,
    base: Member,
    *,
    searched: frozenset[str],
    explicit: frozenset[str],
    by_mup: bool,
    trial: str,
    by_batch: frozenset[str] = frozenset(),
    batch_source: str = "",
) -> tuple[HyperparameterProvenance, ...]:
    """Return every hyperparameter and regularizer of the full run with its rules and its source.

    Args:
        hyperparameters: Values for the full run, at the base shape.
        model, base: The full-size shape and the proxy's.
        searched: Names that the sweep varied.
        explicit: Names stated for the full run alone.
        by_batch: Names whose values changed because the batch differs from the proxies'.
    """
    scaled: list[Rule] = ["muP width"] if by_mup else []
    if by_mup and model.n_layers != base.n_layers:
        scaled.append("muP depth")
    values: dict[str, Any] = json.loads(json.dumps(hyperparameters.to_dict()))
    values |= {
        name: getattr(model, name) for name in (*REGULARIZERS, *explicit.intersection(DECLARED)) if hasattr(model, name)
    }
    defaults = {field.name: field.default for kind in (Hyperparameters, type(model)) for field in fields(kind)}
    found = []
    for name, value in values.items():
        if value is None or (name.startswith("swap_") and hyperparameters.swap_optimizer is None):
            continue
        rules: list[Rule] = list(scaled) if name in SCALED else []
        if name in explicit:
            rules, source = ["explicit"], _EXPLICIT
        elif name == "learning_rate":
            rules.append("horizon law")
            source = f"{trial} and the grids of the transfer check"
        elif name in searched:
            source = trial
        elif name == "batch_tokens" and name in by_batch:
            source = batch_source
        else:
            same = value == (list(default) if isinstance(default := defaults[name], tuple) else default)
            source = "default" if same else _OF_THE_STUDY
        if name in by_batch and name not in explicit:
            rules.append("batch law")
        found.append(
            HyperparameterProvenance(
                name=name, value=value, rules=tuple(rules) or ("fixed",), source=source, searched=name in searched
            )
        )
    return tuple(found)
