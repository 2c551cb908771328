"""The average of the weights by which rungs rank, evaluated at the end of a segment together with the last weights.

The average needs memory for one sum only. It is not part of the training state and does not depend on where rungs lie.
"""

from __future__ import annotations

from dataclasses import dataclass

AVERAGED_SHARE = 0.15
"""Share of the tokens so far over which a rung's weights are averaged (measured here; Hägele et al., arXiv 2405.18392,
section 4, also average a part of the run without cooldown)."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Uniform mean over the last `AVERAGED_SHARE` of all tokens."""

    def begins(self, end: int, batch_tokens: int) -> int:
        """Position of the first step whose weights count for the average at `end`."""
        return int(end * (1 - AVERAGED_SHARE)) // batch_tokens * batch_tokens
