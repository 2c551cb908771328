"""Learning-rate schedules as phases: plain functions of the tokens seen that return a factor on every group's rate.

A run is a chain of phases. Warmup and constant rate followed by a cooldown is WSD (Hu et al., arXiv 2404.06395; Hägele et al.,
arXiv 2405.18392). Its constant phase does not depend on the run's length, so one run before cooldown (the stem) serves branches of
many lengths; the same holds for the inverse square root. A decay that depends on the length is one phase, as is each cycle.

Every phase computes the factor, in (0, 1], on the rate of the step that starts after `tokens` tokens and takes
`batch_tokens`.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from proxy_models.serialization import converter

ScheduleName = Literal[
    "wsd",  # warmup, constant, 1 - sqrt cooldown to zero
    "wsd_linear",  # warmup, constant, linear cooldown to zero
    "constant",  # warmup, constant; never annealed
    "linear",  # warmup, linear to zero
    "cosine",  # warmup, half a cosine to `final_fraction`
    "exponential",  # warmup, the same share lost with every token, to `final_fraction`
    "step",  # warmup, constant, times `step_factor` at each of `milestones`
    "inverse_sqrt",  # warmup, 1/sqrt(tokens), linear cooldown to zero
    "cosine_cycles",  # `cycles` times: (re-)warmup, half a cosine to `final_fraction`
]
COOLING = ("wsd", "wsd_linear")
"""Schedules that hold the rate and then cool it down to zero; runs of several lengths share their beginning."""


def warmup_factor(tokens: int, batch_tokens: int, warmup_tokens: int) -> float:
    """Return the factor of a linear warmup that reaches 1 at the step that ends at `warmup_tokens`; the first step is above 0."""
    return min(1.0, (tokens + batch_tokens) / warmup_tokens) if warmup_tokens else 1.0


def _progress(tokens: int, start: int, end: int) -> float:
    """Return the progress from `start` to `end`, 0 before `start`."""
    return max(0, tokens - start) / (end - start)


def _half_cosine(progress: float, final_fraction: float) -> float:
    """Return half a cosine from 1 to `final_fraction` (Loshchilov and Hutter, arXiv 1608.03983, section 3)."""
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Linear warmup over `warmup_tokens`, then rate 1."""

    warmup_tokens: int

    def factor(self, tokens: int, batch_tokens: int) -> float:
        return warmup_factor(tokens, batch_tokens, self.warmup_tokens)


@dataclass(frozen=True, kw_only=True)
class InverseSqrt:
    """Linear warmup, then 1/sqrt(tokens / warmup tokens) (Vaswani et al., arXiv 1706.03762, section 5.3)."""

    warmup_tokens: int

    def __post_init__(self) -> None:
        if self.warmup_tokens < 1:
            raise ValueError(f"warmup_tokens must be at least 1 for the inverse square root, got {self.warmup_tokens}")

    def factor(self, tokens: int, batch_tokens: int) -> float:
        warmups = (tokens + batch_tokens) / self.warmup_tokens
        return min(warmups, 1 / math.sqrt(warmups))


@dataclass(frozen=True, kw_only=True)
class Cooldown:
    """Cooldown from 1 at `start` to 0 at `end` as 1 - sqrt(progress) (Hägele et al., section 3)."""

    start: int
    end: int

    def factor(self, tokens: int, batch_tokens: int) -> float:
        return 1 - math.sqrt(_progress(tokens, self.start, self.end))


@dataclass(frozen=True, kw_only=True)
class LinearCooldown:
    """Linear cooldown from `start_factor` at `start` to 0 at `end`.

    It follows a constant phase (Hägele et al., section 3) or an inverse square root (Zhai et al., arXiv 2106.04560).
    """

    start: int
    end: int
    start_factor: float = 1.0

    def factor(self, tokens: int, batch_tokens: int) -> float:
        return self.start_factor * (1 - _progress(tokens, self.start, self.end))


@dataclass(frozen=True, kw_only=True)
class LinearDecay:
    """Linear warmup, then linearly from 1 to 0 at `end` (Bergsma et al., arXiv 2502.15938)."""

    warmup_tokens: int
    end: int

    def factor(self, tokens: int, batch_tokens: int) -> float:
        decayed = 1 - _progress(tokens, self.warmup_tokens, self.end)
        return warmup_factor(tokens, batch_tokens, self.warmup_tokens) * decayed


@dataclass(frozen=True, kw_only=True)
class CosineDecay:
    """Linear warmup, then half a cosine from 1 to `final_fraction` at `end`; GPT-3's ends at .1 (arXiv 2005.14165, appendix B)."""

    warmup_tokens: int
    end: int
    final_fraction: float = 0.1

    def factor(self, tokens: int, batch_tokens: int) -> float:
        decayed = _half_cosine(_progress(tokens, self.warmup_tokens, self.end), self.final_fraction)
        return warmup_factor(tokens, batch_tokens, self.warmup_tokens) * decayed


@dataclass(frozen=True, kw_only=True)
class ExponentialDecay:
    """Linear warmup, then exponential decay from 1 to `final_fraction` at `end` (as in Li et al., arXiv 1905.04753)."""

    warmup_tokens: int
    end: int
    final_fraction: float

    def factor(self, tokens: int, batch_tokens: int) -> float:
        decayed = float(self.final_fraction ** _progress(tokens, self.warmup_tokens, self.end))
        return warmup_factor(tokens, batch_tokens, self.warmup_tokens) * decayed


@dataclass(frozen=True, kw_only=True)
class StepDecay:
    """Linear warmup, then 1, multiplied by `step_factor` at each of `milestones` (tokens) (arXiv 2401.02954, section 2.3)."""

    warmup_tokens: int
    end: int
    milestones: tuple[int, ...]
    step_factor: float

    def factor(self, tokens: int, batch_tokens: int) -> float:
        passed = bisect.bisect_right(self.milestones, tokens)
        return warmup_factor(tokens, batch_tokens, self.warmup_tokens) * float(self.step_factor**passed)


@dataclass(frozen=True, kw_only=True)
class CosineCycle:
    """One cycle of several: linear warmup from `start_factor` to 1, then half a cosine to `final_fraction` at `end`.

    Restarts follow Loshchilov and Hutter (arXiv 1608.03983, section 3). The warmup after a restart of a language model follows
    Gupta et al. (arXiv 2308.04014) and Ibrahim et al. (arXiv 2403.08763).
    """

    start: int
    end: int
    warmup_tokens: int
    start_factor: float
    final_fraction: float

    def factor(self, tokens: int, batch_tokens: int) -> float:
        warm = warmup_factor(tokens - self.start, batch_tokens, self.warmup_tokens)
        decayed = _half_cosine(_progress(tokens, self.start + self.warmup_tokens, self.end), self.final_fraction)
        return (self.start_factor + (1 - self.start_factor) * warm) * decayed


@dataclass(frozen=True, kw_only=True)
class Rewarmed:
    """The rest of a phase for an optimizer that takes over at `start`: its factor times a linear warmup from `start`."""

    phase: Phase
    start: int
    warmup_tokens: int

    @property
    def end(self) -> int | None:
        """Tokens at which the phase's decay ends, or None for a phase without an end."""
        return getattr(self.phase, "end", None)

    def factor(self, tokens: int, batch_tokens: int) -> float:
        rewarmed = warmup_factor(tokens - self.start, batch_tokens, self.warmup_tokens)
        return rewarmed * self.phase.factor(tokens, batch_tokens)


@dataclass(frozen=True, kw_only=True)
class Shifted:
    """A phase from `tokens` on, for a run that counts from there: its factor times `scale`, after a linear warmup.

    An amended run follows the rest of its parent's schedule this way, and a new schedule that begins at the rate the parent had.
    """

    phase: Phase
    tokens: int = 0
    scale: float = 1.0
    warmup_tokens: int = 0

    @property
    def end(self) -> int | None:
        """Tokens at which the phase's decay ends, or None for a phase without an end."""
        end: int | None = getattr(self.phase, "end", None)
        return None if end is None else end - self.tokens

    def factor(self, tokens: int, batch_tokens: int) -> float:
        warm = warmup_factor(tokens, batch_tokens, self.warmup_tokens)
        return warm * self.scale * self.phase.factor(tokens + self.tokens, batch_tokens)


Phase = (
    Constant
    | InverseSqrt
    | Cooldown
    | LinearCooldown
    | LinearDecay
    | CosineDecay
    | ExponentialDecay
    | StepDecay
    | CosineCycle
    | Rewarmed
    | Shifted
)

_KINDS: dict[str, type[Phase]] = {kind.__name__: kind for kind in get_args(Phase)}


def _to_dict(phase: Phase) -> dict[str, Any]:
    return {"kind": type(phase).__name__, **converter.unstructure(phase)}


def _from_dict(values: dict[str, Any], _: Any) -> Phase:
    rest = dict(values)
    if (kind := rest.pop("kind", None)) not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(_KINDS)}, got {kind!r}")
    return converter.structure(rest, _KINDS[kind])


converter.register_unstructure_hook(Phase, _to_dict)
converter.register_structure_hook(Phase, _from_dict)
