"""What determines the numbers of a training besides its hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import Precision
from proxy_models.architecture.parametrization import DecayScaling, OptimizerName, Parametrization, Scheme, parametrize
from proxy_models.hashing import content_key
from proxy_models.serialization import Serializable
from proxy_models.training.guard import GuardSettings

SEMANTICS = 1
"""Raise it with any change after which the same segment trains to another loss, but for rounding (another kernel, another order of
a sum): results of another number are not reused. tests/muscale/golden.json holds what must be the same under one number."""


@dataclass(frozen=True, kw_only=True)
class Numerics(Serializable):
    """All that determines the numbers of a training, except its segments.

    Attributes:
        model, base: The shape, and the one that its hyperparameters are given at.
        corpus_key: `Corpus.key`.
        seed: Of the initial values, the data order and dropout.
        evaluation_tokens: Held out.
        scheme, depth_exponent, decay_scaling: Of the parametrization.
        precision: Of the matrices.
        guard: None: every step is taken.
        stages_by_fraction: The corpus's.
        run_tokens: Length of the run whose stages are meant, from `for_run`; None where no stage ends at a fraction of it,
            so that there runs of several lengths may begin alike.
        semantics: Of the code.
    """

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
    stages_by_fraction: bool = False
    run_tokens: int | None = None
    semantics: int = SEMANTICS

    def __post_init__(self) -> None:
        if self.run_tokens is not None and not self.stages_by_fraction:
            raise ValueError(
                f"run_tokens is for a corpus whose stages end at fractions of the run, got {self.run_tokens} for another"
            )

    def for_run(self, n_tokens: int) -> Self:
        """The same for a run of `n_tokens`; another only where the corpus's stages end at fractions of it."""
        return replace(self, run_tokens=n_tokens) if self.stages_by_fraction else self

    def require_length(self, end: int) -> None:
        """Let training go up to `end` tokens.

        Raises:
            ValueError: If it has to be known how long the run is, and it is not known or shorter.
        """
        if not self.stages_by_fraction:
            return
        if self.run_tokens is None:
            raise ValueError("the corpus's stages end at fractions of the run: set its length by for_run(n_tokens)")
        if end > self.run_tokens:
            raise ValueError(
                f"the corpus's stages are those of a run of {self.run_tokens} tokens, which can't be trained to {end}"
            )

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
