"""Averages of the weights along a run, evaluated at its end beside the last weights; training is not touched.

An average is a weight for each step as a function of the distance to the end, and nothing more: it needs no memory but one
sum, it is part of no training state, and where rungs lie does not change it.
"""

from __future__ import annotations

from dataclasses import dataclass

AVERAGED_SHARE = 0.15
"""Share of the tokens so far over which a rung's weights are averaged (measured here; Hägele et al., arXiv 2405.18392,
section 4, average a stretch without cooldown, too)."""
_HALF_LIVES = 10  # of an exponential average that are summed; the rest weighs less than 1/1000


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Uniform mean over the last `AVERAGED_SHARE` of all tokens, by which rungs rank."""

    def begins(self, end: int, batch_tokens: int) -> int:
        """Position of the first step whose weights count for the average at `end`."""
        return int(end * (1 - AVERAGED_SHARE)) // batch_tokens * batch_tokens

    def weight(self, _before_end: int) -> float:
        """Weight of the step that ended that many tokens before the end."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class ExponentialAverage:
    """Exponential moving average (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992, in its exponential form), by tokens.

    With a batch of B its usual decay per step is 2^(-B / half_life_tokens). The sum is cut off after ten half-lives.
    """

    half_life_tokens: int

    def __post_init__(self) -> None:
        if self.half_life_tokens < 1:
            raise ValueError(f"half_life_tokens must be positive, got {self.half_life_tokens}")

    def begins(self, end: int, batch_tokens: int) -> int:
        """Position of the first step whose weights count for the average at `end`."""
        return max(0, end - _HALF_LIVES * self.half_life_tokens) // batch_tokens * batch_tokens

    def weight(self, before_end: int) -> float:
        """Weight of the step that ended that many tokens before the end."""
        return float(2 ** (-before_end / self.half_life_tokens))


@dataclass(frozen=True, kw_only=True)
class LastCheckpoints:
    """Uniform mean of the weights at the end and at `n - 1` points before it, `every_tokens` apart (Li et al., arXiv 2505.12082).

    Fewer where the run is shorter.
    """

    n: int
    every_tokens: int

    def __post_init__(self) -> None:
        if self.n < 1 or self.every_tokens < 1:
            raise ValueError(f"n and every_tokens must be positive, got {self.n} and {self.every_tokens}")

    def begins(self, end: int, batch_tokens: int) -> int:
        """Position of the first step whose weights count for the average at `end`."""
        return max(0, end - (self.n - 1) * self.every_tokens - batch_tokens)

    def weight(self, before_end: int) -> float:
        """Weight of the step that ended that many tokens before the end."""
        return float(before_end % self.every_tokens == 0 and before_end < self.n * self.every_tokens)


Average = Tail | ExponentialAverage | LastCheckpoints
