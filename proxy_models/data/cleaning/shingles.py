"""Shingles of a text: hashes of runs of five words, whose sets are compared by their Jaccard similarity.

Case, white space and punctuation do not count. A word is a run of letters and digits; each character from U+0800, such as those
of Chinese and Japanese, is a word, since these scripts have no spaces.
"""

from __future__ import annotations

import string

import numpy as np
from numpy.typing import NDArray

WORDS = 5  # as in Lee et al., arXiv 2107.06499, section 4.2
Hashes = NDArray[np.uint64]
_IS_WORD = np.isin(np.arange(256), list((string.ascii_lowercase + string.digits).encode())) | (np.arange(256) >= 0x80)
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that powers never vanish modulo 2^64
_THREE_BYTES = 0xE0  # first byte of a character from U+0800


def shingles(text: str) -> Hashes:
    """Return the distinct hashes of all runs of `WORDS` words, sorted; of all words if the text has fewer."""
    words, _ = word_hashes(text)
    return np.unique(runs_of(words, min(WORDS, len(words))))


def runs_of(words: Hashes, length: int) -> Hashes:
    """Return the hash of every run of `length` words."""
    if not 0 < length <= len(words):
        return words[:0]
    runs = np.zeros(len(words) - length + 1, dtype=np.uint64)
    for offset in range(length):
        runs = runs * _BASE + words[offset : offset + len(runs)]
    return mixed(runs)


def jaccard(one: Hashes, other: Hashes) -> float:
    """Return the share of the distinct shingles of two texts that both have."""
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / max(1, len(one) + len(other) - both)


def mixed(hashes: Hashes) -> Hashes:
    """Return well-distributed hashes: every bit depends on every bit (finalizer of splitmix64, Steele et al., 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
    return hashes ^ (hashes >> np.uint64(31))


def word_hashes(text: str) -> tuple[Hashes, NDArray[np.int64]]:
    """Return the hash of every word, and its length in bytes of UTF-8."""
    data = np.frombuffer(text.lower().encode(), dtype=np.uint8)
    in_word = _IS_WORD[data]
    starts = in_word & (data >= _THREE_BYTES)
    starts[:1] |= in_word[:1]
    starts[1:] |= in_word[1:] & ~in_word[:-1]
    letters, first = data[in_word], np.flatnonzero(starts[in_word])
    lengths = np.diff(np.append(first, len(letters)))
    if not len(first):
        return np.zeros(0, dtype=np.uint64), lengths[:0]
    place = np.arange(len(letters)) - np.repeat(first, lengths)
    powers = np.cumprod(np.full(lengths.max(), _BASE))
    return mixed(np.add.reduceat((letters.astype(np.uint64) + np.uint64(1)) * powers[place], first)), lengths
