"""The stretch at a run's end whose averaged weights a rung ranks by; training is not touched.

The average needs no memory but one sum, it is part of no training state, and where rungs lie does not change it.
"""

from __future__ import annotations

AVERAGED_SHARE = 0.15
"""Of the tokens so far: the stretch whose averaged weights a rung ranks by (measured here; as Hägele et al., arXiv 2405.18392,
section 4, average a stretch without cooldown)."""


def averaging_begins(end: int, batch_tokens: int) -> int:
    """Position, in tokens, of the first step whose weights count for the average at `end`."""
    return int(end * (1 - AVERAGED_SHARE)) // batch_tokens * batch_tokens
