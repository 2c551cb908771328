"""A batch that doubles during training: small at the beginning, when the critical batch is small.

Doubling follows Merrill et al. (arXiv 2505.23971); GPT-3 grew its batch linearly (arXiv 2005.14165, appendix B). Every part of the
ramp lasts whole final batches, so every multiple of the final batch is the end of a step and can have a rung, a branch or a
checkpoint. The schedule's factor does not depend on the batch: it is the same function of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MOST_DOUBLINGS = 62
"""Largest number of doublings, since a batch has at most 63 bits."""


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Batch of each step as a function of the tokens seen; without doublings it is constant.

    Attributes:
        batch_tokens: Tokens of a step after the ramp.
        doublings: Number of doublings; the first batch has batch_tokens / 2^doublings tokens.
        ramp_tokens: Tokens until the last doubling; a multiple of doublings · batch_tokens.
    """

    batch_tokens: int
    doublings: int = 0
    ramp_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.doublings, self.ramp_tokens) < 0 or (self.doublings == 0) != (self.ramp_tokens == 0):
            raise ValueError(
                f"a batch ramp needs batch_doublings and batch_ramp_tokens, got {self.doublings} and {self.ramp_tokens}"
            )
        if self.doublings > MOST_DOUBLINGS or self.batch_tokens % 2**self.doublings:
            raise ValueError(
                f"batch_tokens must be a multiple of 2^{self.doublings} to double {self.doublings} times, got {self.batch_tokens}"
            )
        if self.doublings and self.ramp_tokens % (self.doublings * self.batch_tokens):
            raise ValueError(
                f"each of the {self.doublings} parts of a batch ramp must last whole batches of {self.batch_tokens} "
                f"tokens, got {self.ramp_tokens} tokens in all"
            )

    @property
    def first_batch_tokens(self) -> int:
        """Tokens of the first step."""
        return self.batch_tokens >> self.doublings

    def batch_at(self, tokens: int) -> int:
        """Return the tokens of the step that starts after `tokens` tokens."""
        if tokens >= self.ramp_tokens:
            return self.batch_tokens
        return self.first_batch_tokens << (tokens * self.doublings // self.ramp_tokens)

    def ends_step(self, tokens: int) -> bool:
        """Return whether a step ends at `tokens` tokens, or the run begins there."""
        return tokens % self.batch_at(tokens) == 0  # a part of the ramp begins at a multiple of the final batch

    def n_steps(self, tokens: int) -> int:
        """Return the number of steps that end at or before `tokens`."""
        if not self.doublings:
            return tokens // self.batch_tokens
        part, count = self.ramp_tokens // self.doublings, 0
        for doubled in range(self.doublings):
            within = min(max(tokens - doubled * part, 0), part)
            count += within // (self.first_batch_tokens << doubled)
        return count + max(tokens - self.ramp_tokens, 0) // self.batch_tokens

    def steps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (tokens seen before, tokens of the step) for each step from `start` to `end`."""
        while start < end:
            batch = self.batch_at(start)
            yield start, batch
            start += batch
