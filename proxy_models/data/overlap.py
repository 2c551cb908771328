"""Share of one corpus's held-out text that another corpus trains on; losses on this text would look too good."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.corpus import Corpus

WINDOW = 64
"""Tokens of a window: new text of this length seldom repeats a window by chance; in bytes about a line (assumed)."""
MAX_WINDOWS = 65_536  # largest number of windows of the held-out text, evenly spread
_BLOCK = 1 << 20  # training tokens that are hashed at a time
_BASE = 0x9E3779B97F4A7C15  # odd, so that powers never vanish modulo 2^64


def overlap(held_out: Corpus, training: Corpus) -> float:
    """Return the share of windows of the held-out splits that occur in the training splits, by hashes of 64 bits.

    Windows begin every `WINDOW` tokens of the held-out splits; they are compared with every position of the training splits.
    """
    wanted = [_hashes(np.asarray(files.validation))[::WINDOW] for files in held_out.sources.values()]
    every = np.concatenate(wanted)
    if not len(every):
        return 0.0
    every = np.unique(every[:: -(-len(every) // MAX_WINDOWS)])
    found = np.zeros(len(every), dtype=bool)
    for files in training.sources.values():
        for start in range(0, files.n_tokens, _BLOCK):
            found |= np.isin(every, _hashes(np.asarray(files.train[start : start + _BLOCK + WINDOW - 1])))
    return float(found.mean())


def _hashes(tokens: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Return the polynomial hash of the window at each position, modulo 2^64; doubles lengths, as `WINDOW` is a power of two."""
    hashes = tokens.astype(np.uint64) + np.uint64(1)
    length, power = 1, _BASE
    while length < WINDOW:
        if len(hashes) <= length:
            return np.zeros(0, dtype=np.uint64)
        hashes = hashes[:-length] * np.uint64(power) + hashes[length:]
        length, power = 2 * length, power * power % 2**64
    return hashes
