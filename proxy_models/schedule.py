"""Learning-rate schedules as phases: plain functions of the tokens seen, multiplicative on every group's own rate.

A run is a chain of phases. Warmup + constant followed by a cooldown is WSD (Hu et al., arXiv 2404.06395; Hägele et al.,
arXiv 2405.18392): its constant phase does not know how long the run will be, so one stem serves branches of many lengths.
Linear and cosine decay know their horizon, and are one phase each.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

ScheduleName = Literal["wsd", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Linear warmup over `warmup_tokens`, then rate 1."""

    warmup_tokens: int

    def factor(self, tokens: int, batch_tokens: int) -> float:
        """Factor on the rate of the step that starts after `tokens` tokens."""
        return warmup_factor(tokens, batch_tokens, self.warmup_tokens)


@dataclass(frozen=True, kw_only=True)
class Cooldown:
    """From 1 at `start` to 0 at `end` as 1 - sqrt(progress) (Hägele et al., section 4.1)."""

    start: int
    end: int

    def factor(self, tokens: int, batch_tokens: int) -> float:
        """Factor on the rate of the step that starts after `tokens` tokens."""
        return 1 - math.sqrt((tokens - self.start) / (self.end - self.start))


@dataclass(frozen=True, kw_only=True)
class LinearDecay:
    """Linear warmup, then linearly from 1 to 0 at `end`."""

    warmup_tokens: int
    end: int

    def factor(self, tokens: int, batch_tokens: int) -> float:
        """Factor on the rate of the step that starts after `tokens` tokens."""
        decayed = 1 - max(0, tokens - self.warmup_tokens) / (self.end - self.warmup_tokens)
        return warmup_factor(tokens, batch_tokens, self.warmup_tokens) * decayed


@dataclass(frozen=True, kw_only=True)
class CosineDecay:
    """Linear warmup, then half a cosine from 1 to `final_fraction` at `end`."""

    warmup_tokens: int
    end: int
    final_fraction: float = 0.1

    def factor(self, tokens: int, batch_tokens: int) -> float:
        """Factor on the rate of the step that starts after `tokens` tokens."""
        progress = max(0, tokens - self.warmup_tokens) / (self.end - self.warmup_tokens)
        decayed = self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))
        return warmup_factor(tokens, batch_tokens, self.warmup_tokens) * decayed


Phase = Constant | Cooldown | LinearDecay | CosineDecay


def warmup_factor(tokens: int, batch_tokens: int, warmup_tokens: int) -> float:
    """Linear warmup that reaches 1 with the step that ends at `warmup_tokens`; the first step is not wasted at rate 0."""
    return min(1.0, (tokens + batch_tokens) / warmup_tokens) if warmup_tokens else 1.0


def phase_to_dict(phase: Phase) -> dict[str, Any]:
    """The phase as plain values, its kind under "kind"."""
    return {"kind": type(phase).__name__, **asdict(phase)}


def phase_from_dict(values: dict[str, Any]) -> Phase:
    """Rebuild what `phase_to_dict` wrote."""
    kinds: dict[str, type[Phase]] = {kind.__name__: kind for kind in (Constant, Cooldown, LinearDecay, CosineDecay)}
    return kinds[values["kind"]](**{name: value for name, value in values.items() if name != "kind"})
