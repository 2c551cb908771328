"""Hyperparameters of a training, given at the base shape."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from cattrs.gen import make_dict_unstructure_fn, override

from proxy_models.architecture.parametrization import RATE_EXPONENT, OptimizerName
from proxy_models.recipes.batch_ramp import BatchRamp
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.schedule import ScheduleName
from proxy_models.recipes.stages import HyperparameterStage
from proxy_models.serialization import Serializable, converter

_COOLED_AT_THE_END: tuple[ScheduleName, ...] = ("wsd", "wsd_linear", "inverse_sqrt")
_OF_SCHEDULES: dict[str, tuple[ScheduleName, ...]] = {
    "final_fraction": ("cosine", "exponential", "cosine_cycles"),
    "milestones": ("step",),
    "step_factor": ("step",),
    "cycles": ("cosine_cycles",),
    "stages": _COOLED_AT_THE_END,
}
OPTIMIZERS_THAT_READ: dict[str, tuple[OptimizerName, ...]] = {
    "weight_decay_tau": ("adamw", "lion", "adafactor", "muon", "lamb", "soap"),
    "beta1": ("adamw", "adam", "lion", "muon", "lamb", "soap"),
    "beta2": ("adamw", "adam", "lion", "muon", "lamb", "soap"),
    "eps": ("adamw", "adam", "muon", "lamb", "soap"),
}
"""Settings that only some schedules or optimizers read; under any other they are refused, since they would be ignored."""


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(Serializable):
    """Values tuned at the base shape; the parametrization and the horizon law transfer them.

    Attributes:
        learning_rate: Peak rate at the base shape.
        init_scale: Factor on every initial standard deviation of the parametrization's table.
        zero_readout: True to start an untied readout at zero instead (Tensor Programs V, arXiv 2203.03466, section D.2).
        weight_decay_tau: Timescale of the weights' average as a fraction of the run, B / (eta·lambda·D)
            (Wang and Aitchison, arXiv 2405.13698; Bergsma et al., arXiv 2505.13738). "adam" does not decay; under "lamb" this sets
            lambda alone, since the ratio of norms multiplies the speed of decay.
        batch_tokens: Tokens per optimizer step, over all devices, after the ramp.
        batch_doublings: Number of doublings before the batch reaches `batch_tokens`.
        batch_ramp_tokens: Tokens until the last doubling, in equal parts, each rounded to whole batches.
        warmup_fraction: Warmup as a fraction of the run's tokens.
        warmup_floor_tokens: Smallest warmup, even if the fraction gives less.
        schedule: After a warmup: "wsd": constant, then 1 − √ to zero; "wsd_linear": constant, then linear to zero; "constant": never
            annealed; "linear": to zero; "cosine": half a cosine; "exponential": the same share lost with every token; "step": times
            `step_factor` at each of `milestones`; "inverse_sqrt": 1/√tokens, then linear to zero; "cosine_cycles": `cycles` cosines.
        cooldown_fraction: Share of the run that cools down, under "wsd", "wsd_linear" and "inverse_sqrt".
        final_fraction: Factor on the rate at the end of "cosine", "exponential" and of each cycle; 0 anneals to zero.
        milestones: Fractions of the run at which "step" multiplies the rate (both default to DeepSeek LLM's, arXiv 2401.02954,
            section 2.3: 31.6 % after 80 %, 10 % after 90 %).
        step_factor: Factor on the rate at each of `milestones`.
        cycles: Number of equal cycles of "cosine_cycles"; each warms up.
        optimizer: Any optimizer that the parametrization has rules for.
        beta1: Decay of the first moment of Adam, AdamW, LAMB and SOAP, also of the AdamW next to Muon. Lion's update is the sign of
            beta1 · momentum + (1 - beta1) · gradient.
        beta2: Decay of their second moment, and of Lion's momentum.
        eps: Term of their denominator; Lion and Adafactor have none.
        clip_norm: Global gradient norm above which gradients are scaled down.
        embedding_multiplier: Factor on the embedding's forward multiplier.
        output_multiplier: Factor on the readout's forward multiplier.
        attention_multiplier: Factor on the scale of attention's logits.
        embedding_rate: Factor on the rate of the embedding tables.
        output_rate: Factor on the rate of the readout, or of a tied table.
        swap_optimizer: Optimizer that takes over during the run, with new moments and another warmup; None: no swap. The
            timescale of the decay stays, and so do all other values.
        swap_fraction: Share of the run's tokens before the swap.
        swap_learning_rate: Peak rate of that optimizer at the base shape; the rest of the schedule is the same.
        stages: Changes of values at points of the stable part, under a schedule with a cooldown; the cooldown keeps the last values.
    """

    learning_rate: float
    batch_tokens: int
    init_scale: float = 1.0
    zero_readout: bool = False
    weight_decay_tau: float = 0.5
    warmup_fraction: float = 0.05
    warmup_floor_tokens: int = 0
    schedule: ScheduleName = "wsd"
    cooldown_fraction: float = 0.15
    optimizer: OptimizerName = "adamw"
    final_fraction: float = 0.1
    milestones: tuple[float, ...] = (0.8, 0.9)
    step_factor: float = 0.316
    cycles: int = 2
    batch_doublings: int = 0
    batch_ramp_tokens: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    clip_norm: float = 1.0
    embedding_multiplier: float = 1.0
    output_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    embedding_rate: float = 1.0
    output_rate: float = 1.0
    swap_optimizer: OptimizerName | None = None
    swap_fraction: float = 0.0
    swap_learning_rate: float = 0.0
    stages: tuple[HyperparameterStage, ...] = ()

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
        self._validate_schedule()
        for name in ("optimizer", "swap_optimizer"):
            if (value := getattr(self, name)) not in (*RATE_EXPONENT, None):
                raise ValueError(f"{name} must have transfer rules, one of {', '.join(RATE_EXPONENT)}; got {value!r}")
        self._validate_swap()
        self._refuse_ignored("optimizer", OPTIMIZERS_THAT_READ, {self.optimizer, self.swap_optimizer})
        _ = self._ramp
        self._validate_stages()

    def _validate_schedule(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        object.__setattr__(self, "stages", tuple(self.stages))
        if self.schedule not in get_args(ScheduleName):
            raise ValueError(f"schedule must be one of {', '.join(get_args(ScheduleName))}, got {self.schedule!r}")
        self._refuse_ignored("schedule", _OF_SCHEDULES, {self.schedule})
        if not 0 <= self.final_fraction < 1 or (self.schedule == "exponential" and self.final_fraction == 0):
            raise ValueError(
                f"final_fraction must lie in [0, 1), and above 0 for an exponential, got {self.final_fraction}"
            )
        if list(self.milestones) != sorted(set(self.milestones)) or not all(0 < m < 1 for m in self.milestones):
            raise ValueError(f"milestones must rise and lie in (0, 1), got {self.milestones}")
        if not 0 < self.step_factor < 1:
            raise ValueError(f"step_factor must lie in (0, 1), got {self.step_factor}")
        if self.cycles < 1:
            raise ValueError(f"cycles must be at least 1, got {self.cycles}")

    def _refuse_ignored(self, kind: str, users: Mapping[str, tuple[str, ...]], chosen: Set[str | None]) -> None:
        """Refuse a setting that differs from its default if nothing in `chosen` would read it."""
        for field in fields(self):
            readers = users.get(field.name)
            if readers and not chosen & set(readers) and getattr(self, field.name) != field.default:
                raise ValueError(
                    f'{field.name} is a setting of {" and ".join(readers)}: {kind} "{getattr(self, kind)}" would ignore '
                    f"{getattr(self, field.name)}"
                )

    def _validate_swap(self) -> None:
        if self.swap_optimizer == self.optimizer:
            raise ValueError(f"swap_optimizer must differ from optimizer, got {self.optimizer!r} for both")
        needed = (self.swap_fraction, self.swap_learning_rate)
        if any(not (value > 0 if self.swap_optimizer else value == 0) for value in needed):
            raise ValueError(
                f"a swap needs swap_optimizer, swap_fraction and swap_learning_rate, got {self.swap_optimizer!r}, "
                f"{self.swap_fraction} and {self.swap_learning_rate}"
            )

    def _validate_stages(self) -> None:
        if not self.stages:
            return
        if self.swap_optimizer:
            raise ValueError(f"stages cannot be combined with swap_optimizer, got {self.swap_optimizer!r}")
        begins = [stage.after for stage in self.stages]
        if begins != sorted(set(begins)):
            raise ValueError(f"stages must start one after the other, got {begins}")
        try:
            _ = self.stretches
        except ValueError as error:
            raise ValueError(f"stages: {error}") from error

    @property
    def stretches(self) -> tuple[Hyperparameters, ...]:
        """Hyperparameters from the start and from each stage on, each without stages."""
        found = [replace(self, stages=())]
        for stage in self.stages:
            changes: dict[str, Any] = {**stage.changes}
            if factor := changes.get("learning_rate"):
                changes["learning_rate"] = factor * self.learning_rate
            found.append(replace(found[-1], **changes))
        return tuple(found)

    @property
    def set_by_stages(self) -> frozenset[str]:
        """Names of the values that stages overwrite; the rate is not among them, since stages state factors on it."""
        return frozenset(name for stage in self.stages for name in stage.changes) - {"learning_rate"}

    def whole_batches(self, n_tokens: float) -> int:
        """Return the multiple of `batch_tokens` nearest to `n_tokens`, at least one batch."""
        return max(1, round(n_tokens / self.batch_tokens)) * self.batch_tokens

    def stable_tokens(self, n_tokens: int) -> int:
        """Return the tokens of a WSD run of `n_tokens` before the cooldown, which lasts at least one batch."""
        return min(self.whole_batches(n_tokens * (1 - self.cooldown_fraction)), n_tokens - self.batch_tokens)

    def annealed_tokens(self, stable_tokens: int) -> int:
        """Return D of the run that cools down from `stable_tokens`: S / (1 - f) in whole batches, with at least one of cooldown."""
        return max(self.whole_batches(stable_tokens / (1 - self.cooldown_fraction)), stable_tokens + self.batch_tokens)

    @property
    def _ramp(self) -> BatchRamp:
        """Ramp with each of its parts rounded to whole batches; invalid values are passed on, so that BatchRamp refuses them."""
        doublings, ramp = self.batch_doublings, self.batch_ramp_tokens
        if doublings > 0 and ramp > 0:
            ramp = doublings * self.whole_batches(ramp / doublings)
        return BatchRamp(batch_tokens=self.batch_tokens, doublings=doublings, ramp_tokens=ramp)

    def resolve(self, n_tokens: int) -> Recipe:
        """Return the absolute values of a run of `n_tokens`; raise ValueError if warmup or batch ramp do not fit into it."""
        warmup = self.whole_batches(max(self.warmup_floor_tokens, self.warmup_fraction * n_tokens))
        cooldown = self.cooldown_fraction if self.schedule in _COOLED_AT_THE_END else 0.0
        for name, length in (("warmup", warmup), ("batch ramp", self._ramp.ramp_tokens)):
            if length >= (before := n_tokens * (1 - cooldown)):
                where = f"the first {before:.0f} of " if cooldown else ""
                raise ValueError(f"a {name} of {length} tokens does not fit into {where}a run of {n_tokens} tokens")
        resolved: dict[str, Any] = {
            "weight_decay": self.batch_tokens / (self.learning_rate * self.weight_decay_tau * n_tokens),
            "warmup_tokens": warmup,
            "batch_ramp_tokens": self._ramp.ramp_tokens,
        }
        as_here = {field.name: getattr(self, field.name) for field in fields(Recipe) if field.name not in resolved}
        return Recipe(**as_here, **resolved)


# Values without stages are written as before stages existed, so that their hashes stay the same.
converter.register_unstructure_hook(
    Hyperparameters, make_dict_unstructure_fn(Hyperparameters, converter, stages=override(omit_if_default=True))
)
