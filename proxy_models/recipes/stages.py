"""A schedule that changes more than the rate: at points of the stable part, training continues with other values.

A member of a population follows such a schedule (Jaderberg et al., arXiv 1711.09846, section 4.3, call it discovered). Stages
record the schedule, so that a run of any size and length can follow it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from cattrs.gen import make_dict_unstructure_fn

from proxy_models.serialization import Serializable, converter


@dataclass(frozen=True, kw_only=True)
class HyperparameterStage(Serializable):
    """Values that change at a point of the stable part; values that a stage leaves out stay the same.

    Attributes:
        after: Share of the tokens before the cooldown at which the stage begins.
        learning_rate: Factor on the run's rate (not on the previous stage's rate), so that the rules that carry the rate
            across width and length also carry its changes.
        weight_decay_tau, beta1, beta2, clip_norm, embedding_rate, output_rate: New values.
    """

    after: float
    learning_rate: float | None = None
    weight_decay_tau: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    clip_norm: float | None = None
    embedding_rate: float | None = None
    output_rate: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.after < 1:
            raise ValueError(f"after must lie in (0, 1), as a share of the stable part, got {self.after}")
        if not self.changes:
            raise ValueError(f"the stage after {self.after} changes nothing: give one of {', '.join(CHANGEABLE)}")

    @property
    def changes(self) -> dict[str, float]:
        """Values that the stage changes, by name; the rate's is a factor."""
        return {name: value for name in CHANGEABLE if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        changes = self.changes
        factor = [f"learning_rate × {changes.pop('learning_rate'):.4g}"] if "learning_rate" in changes else []
        return f"after {self.after:.0%}: " + ", ".join(
            [*factor, *(f"{name} = {value:.4g}" for name, value in changes.items())]
        )


CHANGEABLE = tuple(field.name for field in fields(HyperparameterStage) if field.name != "after")
"""Names of values that may change during a run without changing the function that the weights compute."""

converter.register_unstructure_hook(
    HyperparameterStage, make_dict_unstructure_fn(HyperparameterStage, converter, _cattrs_omit_if_default=True)
)
