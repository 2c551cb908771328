"""What training is given at the base shape, and the absolute values that one run of a given length makes of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from proxy_models.parametrization import OptimizerName
from proxy_models.schedule import Constant, Cooldown, CosineDecay, LinearDecay, Phase, ScheduleName


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Tuned at the base shape, transferable by the parametrization and the horizon law.

    Attributes:
        learning_rate: Peak rate at the base shape.
        init_scale: Factor on every initial standard deviation of the parametrization's table.
        weight_decay_tau: Timescale of AdamW's weight average as a fraction of the run, B / (eta·lambda·D)
            (Wang and Aitchison, arXiv 2405.13698; Bergsma et al., arXiv 2505.13738).
        batch_tokens: Tokens per optimizer step, over all devices.
        warmup_fraction: Warmup as a fraction of the run's tokens.
        warmup_floor_tokens: Least warmup, whatever the fraction says.
        schedule: "wsd", "linear" or "cosine".
        cooldown_fraction: Share of a WSD run that cools down.
        optimizer: One that the parametrization has rules for.
        beta1, beta2, eps: Adam's and AdamW's; Lion takes the betas, Adafactor none of them.
        clip_norm: Global gradient norm above which gradients are scaled down.
        embedding_multiplier, output_multiplier, attention_multiplier: Factors on the forward multipliers.
        embedding_rate, output_rate: Factors on the rate of the embedding tables and of the readout.
    """

    learning_rate: float
    batch_tokens: int
    init_scale: float = 1.0
    weight_decay_tau: float = 0.5
    warmup_fraction: float = 0.05
    warmup_floor_tokens: int = 0
    schedule: ScheduleName = "wsd"
    cooldown_fraction: float = 0.15
    optimizer: OptimizerName = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    clip_norm: float = 1.0
    embedding_multiplier: float = 1.0
    output_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    embedding_rate: float = 1.0
    output_rate: float = 1.0

    def __post_init__(self) -> None:
        positive = ("learning_rate", "batch_tokens", "init_scale", "weight_decay_tau", "eps", "clip_norm")
        multipliers = ("embedding_multiplier", "output_multiplier", "attention_multiplier")
        for name in (*positive, *multipliers, "embedding_rate", "output_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("warmup_fraction", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if not 0 < self.cooldown_fraction < 1:
            raise ValueError(f"cooldown_fraction must lie in (0, 1), got {self.cooldown_fraction}")
        if self.warmup_floor_tokens < 0:
            raise ValueError(f"warmup_floor_tokens must not be negative, got {self.warmup_floor_tokens}")

    def whole_batches(self, n_tokens: float) -> int:
        """The multiple of `batch_tokens` nearest to `n_tokens`, at least one batch."""
        return max(1, round(n_tokens / self.batch_tokens)) * self.batch_tokens

    def stable_tokens(self, n_tokens: int) -> int:
        """Tokens before the cooldown of a WSD run of `n_tokens`, which lasts one batch at least."""
        return min(self.whole_batches(n_tokens * (1 - self.cooldown_fraction)), n_tokens - self.batch_tokens)

    def annealed_tokens(self, stable_tokens: int) -> int:
        """D of the run that cools down from `stable_tokens`: S / (1 - f), in whole batches and at least one of cooldown."""
        return max(self.whole_batches(stable_tokens / (1 - self.cooldown_fraction)), stable_tokens + self.batch_tokens)

    def resolve(self, n_tokens: int) -> Recipe:
        """The absolute values of a run of `n_tokens`; a branch of it keeps them.

        Raises:
            ValueError: If the warmup does not fit into the run.
        """
        warmup = self.whole_batches(max(self.warmup_floor_tokens, self.warmup_fraction * n_tokens))
        if warmup >= n_tokens * (1 - self.cooldown_fraction):
            raise ValueError(
                f"a warmup of {warmup} tokens does not fit into the stable part of a run of {n_tokens} tokens"
            )
        return Recipe(
            learning_rate=self.learning_rate,
            weight_decay=self.batch_tokens / (self.learning_rate * self.weight_decay_tau * n_tokens),
            batch_tokens=self.batch_tokens,
            init_scale=self.init_scale,
            warmup_tokens=warmup,
            optimizer=self.optimizer,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            clip_norm=self.clip_norm,
            embedding_multiplier=self.embedding_multiplier,
            output_multiplier=self.output_multiplier,
            attention_multiplier=self.attention_multiplier,
            embedding_rate=self.embedding_rate,
            output_rate=self.output_rate,
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Absolute hyperparameters of one run at the base shape: nothing in it depends on what length was meant any more."""

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

    def weight_decay_tau(self, n_tokens: int) -> float:
        """B / (eta·lambda·D) of a run that ends at `n_tokens`."""
        return self.batch_tokens / (self.learning_rate * self.weight_decay * n_tokens)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Training from `start` to `end` tokens under one recipe and one phase of the schedule."""

    recipe: Recipe
    phase: Phase
    start: int
    end: int

    def __post_init__(self) -> None:
        batch = self.recipe.batch_tokens
        if not 0 <= self.start < self.end or self.start % batch or self.end % batch:
            raise ValueError(
                f"a segment runs over whole batches of {batch} tokens from start to a later end, "
                f"got {self.start} to {self.end}"
            )

    @property
    def n_steps(self) -> int:
        """Optimizer steps."""
        return (self.end - self.start) // self.recipe.batch_tokens

    def rate_factor(self, tokens: int) -> float:
        """Schedule factor of the step that starts after `tokens` tokens of the run."""
        return self.phase.factor(tokens, self.recipe.batch_tokens)


def stem(recipe: Recipe, stable_tokens: int) -> Segment:
    """The warmup and constant phase of a WSD run, up to `stable_tokens`."""
    return Segment(recipe=recipe, phase=Constant(warmup_tokens=recipe.warmup_tokens), start=0, end=stable_tokens)


def branch(recipe: Recipe, stable_tokens: int, n_tokens: int) -> tuple[Segment, Segment]:
    """A whole WSD run: the stem to `stable_tokens`, then the cooldown to `n_tokens`."""
    cooldown = Cooldown(start=stable_tokens, end=n_tokens)
    return (
        stem(recipe, stable_tokens),
        Segment(recipe=recipe, phase=cooldown, start=stable_tokens, end=n_tokens),
    )


def chain(hyperparameters: Hyperparameters, n_tokens: int) -> tuple[Segment, ...]:
    """The segments of a run of `n_tokens` (whole batches) to its annealed end.

    Raises:
        ValueError: If the run is too short for its warmup and cooldown.
    """
    recipe = hyperparameters.resolve(n_tokens)
    if hyperparameters.schedule == "wsd":
        return branch(recipe, hyperparameters.stable_tokens(n_tokens), n_tokens)
    phase: Phase
    if hyperparameters.schedule == "linear":
        phase = LinearDecay(warmup_tokens=recipe.warmup_tokens, end=n_tokens)
    else:
        phase = CosineDecay(warmup_tokens=recipe.warmup_tokens, end=n_tokens)
    return (Segment(recipe=recipe, phase=phase, start=0, end=n_tokens),)
