"""What determines the numbers of a training besides its hyperparameters, and the hash of plain values that names it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from proxy_models.config import ModelConfig
from proxy_models.guard import GuardSettings
from proxy_models.parametrization import DecayScaling, OptimizerName, Parametrization, Scheme, parametrize

SEMANTICS = 1  # raise it when the same segment would train to another loss: older results are then not reused

Precision = Literal["fp32", "bf16", "fp16"]
"""What matrices are multiplied in; weights and moments are fp32 always, and fp16 scales the loss."""


def content_key(values: Any) -> str:
    """Hash of plain values by their canonical JSON, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """All that determines the numbers of a training, except its segments."""

    model: ModelConfig
    base: ModelConfig
    corpus_key: str
    seed: int
    evaluation_tokens: int
    scheme: Scheme = "mup"
    depth_exponent: float = 1.0
    decay_scaling: DecayScaling = "timescale"
    precision: Precision = "fp32"
    guard: GuardSettings | None = None
    semantics: int = SEMANTICS

    def parametrization(self, optimizer: OptimizerName) -> Parametrization:
        """The table of this shape against its base, for an optimizer."""
        return parametrize(
            self.model,
            self.base,
            scheme=self.scheme,
            depth_exponent=self.depth_exponent,
            optimizer=optimizer,
            decay_scaling=self.decay_scaling,
        )

    @property
    def key(self) -> str:
        """Hash of every field."""
        return content_key(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild what `to_dict` wrote."""
        shapes = {name: ModelConfig(**values[name]) for name in ("model", "base")}
        guard = GuardSettings(**values["guard"]) if values.get("guard") else None
        return cls(**{**values, **shapes, "guard": guard})
