"""Absolute values of one run at the base shape, which `Hyperparameters.resolve` computes from the run's length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.recipes.batch_ramp import BatchRamp
from proxy_models.serialization import Serializable


@dataclass(frozen=True, kw_only=True)
class Recipe(Serializable):
    """Absolute hyperparameters of one run at the base shape; none depends on the planned length."""

    learning_rate: float
    weight_decay: float
    batch_tokens: int
    init_scale: float
    warmup_tokens: int
    optimizer: OptimizerName
    beta1: float
    beta2: float
    eps: float
    clip_norm: float
    embedding_multiplier: float
    output_multiplier: float
    attention_multiplier: float
    embedding_rate: float
    output_rate: float
    zero_readout: bool = False
    batch_doublings: int = 0
    batch_ramp_tokens: int = 0

    def __post_init__(self) -> None:
        _ = self.ramp  # raises for an invalid ramp

    @cached_property
    def ramp(self) -> BatchRamp:
        return BatchRamp(
            batch_tokens=self.batch_tokens, doublings=self.batch_doublings, ramp_tokens=self.batch_ramp_tokens
        )

    def swapped(self, optimizer: OptimizerName, learning_rate: float) -> Recipe:
        """Return the recipe for another optimizer; rate · decay stays, and so does the decay's timescale."""
        decay = self.weight_decay * self.learning_rate / learning_rate
        return replace(self, optimizer=optimizer, learning_rate=learning_rate, weight_decay=decay)

    def weight_decay_tau(self, n_tokens: int) -> float:
        """Return B / (eta·lambda·D) of a run that ends at `n_tokens`."""
        return self.batch_tokens / (self.learning_rate * self.weight_decay * n_tokens)
