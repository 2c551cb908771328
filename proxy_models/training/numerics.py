"""Inputs that determine the numbers of a training, except its hyperparameters."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from cattrs.gen import make_dict_unstructure_fn

from proxy_models.architecture.families import family_of
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Precision
from proxy_models.architecture.parametrization import DecayScaling, OptimizerName, Parametrization, Scheme
from proxy_models.hashing import content_key
from proxy_models.serialization import Serializable, converter
from proxy_models.training.guard_settings import GuardSettings

SEMANTICS = 1
"""Version of the computation. Raise it with any change after which the same segment trains to another loss beyond rounding (as by
another kernel or order of a sum). Results of other versions are not reused; tests/muscale/golden.json holds this version's losses."""
ROUNDING = 2
"""Version of the values that are rounded to bf16 or fp16, as `SEMANTICS`; fp32 keys do not contain it. Version 1 was autocast."""
WEIGHTS_MANIFEST = "manifest.json"
"""File with the key in a folder of given weights (`proxy_models.training.initial_weights`)."""
DEPTH_DECAY = 2
"""Version of the decay in depth, as `SEMANTICS`, for exponents below 1. Version 1 did not scale decay, so rate × decay moved."""


@dataclass(frozen=True, kw_only=True)
class Numerics(Serializable):
    """Inputs that determine the numbers of a training, except its segments.

    Attributes:
        model, base: The shape, and the shape at which its hyperparameters are given.
        seed: Seed of the initial values, the data order and dropout.
        scheme, depth_exponent, decay_scaling: Arguments of `Family.parametrization`.
        guard: Settings of the stability guard; None: every step is taken.
        stages_by_fraction: True if stages of the corpus end at fractions of the run.
        run_tokens: Length of the run, set by `for_run`; None if no stage ends at a fraction of the run, so that runs of several
            lengths can share their beginning.
        initial_weights: Key of the weights at which training starts (`proxy_models.training.initial_weights`); None, which is neither
            written nor part of the key: random values.
        rounding: Value of `ROUNDING`; in fp32 neither written nor part of the key.
        depth_decay: Value of `DEPTH_DECAY`; at a depth exponent of 1 neither written nor part of the key.
    """

    model: Member
    base: Member
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
    initial_weights: str | None = None
    semantics: int = SEMANTICS
    rounding: int = ROUNDING
    depth_decay: int = DEPTH_DECAY

    def __post_init__(self) -> None:
        if self.run_tokens is not None and not self.stages_by_fraction:
            raise ValueError(
                f"run_tokens is only for a corpus whose stages end at fractions of the run, got {self.run_tokens}"
            )

    def for_run(self, n_tokens: int) -> Self:
        """Return the numerics of a run of `n_tokens`; they differ only if the corpus's stages end at fractions of the run."""
        return replace(self, run_tokens=n_tokens) if self.stages_by_fraction else self

    def require_length(self, end: int) -> None:
        """Require that training may continue to `end` tokens; raise ValueError if the run's known length is needed, and is shorter."""
        self.require_known_length()
        if self.run_tokens is not None and end > self.run_tokens:
            raise ValueError(
                f"the corpus's stages are those of a run of {self.run_tokens} tokens, which can't be trained to {end}"
            )

    def require_known_length(self) -> None:
        """Raise ValueError if the run's length is needed and not known."""
        if self.stages_by_fraction and self.run_tokens is None:
            raise ValueError("the corpus's stages end at fractions of the run: set its length by for_run(n_tokens)")

    def parametrization(self, optimizer: OptimizerName) -> Parametrization:
        """Return the table of this shape relative to its base, for an optimizer."""
        return family_of(self.base).parametrization(
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


def key_of_weights(folder: Path) -> str | None:
    """Return the key of the given weights in a folder; None if it holds none."""
    path = folder / WEIGHTS_MANIFEST
    return str(json.loads(path.read_text())["key"]) if path.exists() else None


_every_field = make_dict_unstructure_fn(Numerics, converter)


def _written(numerics: Numerics) -> dict[str, Any]:
    fields = _every_field(numerics)
    if numerics.initial_weights is None:
        del fields["initial_weights"]
    if numerics.precision == "fp32":
        del fields["rounding"]
    if numerics.depth_exponent == 1:
        del fields["depth_decay"]
    return fields


converter.register_unstructure_hook(Numerics, _written)
