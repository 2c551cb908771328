"""Windows of training text by the number of times that a run has read them.

One pass over the token files hashes every window and its continuation. Only windows whose continuation has a hash below a limit are
kept, so that any corpus fits in memory. All occurrences of a text have the same hash. They are kept together, so that their count is
exact, and the chance of a text to be kept does not depend on how often it occurs. The tokens of the chosen windows are compared, since
other texts may have their hash.

A window may be rare although its continuation is not, as where a repeated passage begins. A model can give such a continuation
without ever having read the window, so these windows are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.tokenizer import Tokens

MEMORISATION = "memorisation"
"""Name of the measure of these windows."""
PREFIX_TOKENS = CONTINUATION_TOKENS = 32
"""Tokens of the two parts of a window, unless a measure states others."""
HELD_OUT = "held out"
"""Name of the control: held-out text that does not occur in the training tokens."""
MOST_WINDOWS = 1 << 23
"""Windows that are kept: 300 MB of hashes, positions and counts."""
_BLOCK = 1 << 16  # windows hashed at once, so that the arrays stay in a processor's cache
_BASE = np.uint64(0x9E3779B97F4A7C15)  # any odd number has an inverse modulo 2^64
_NONE = np.zeros(0, dtype=np.int64)


class ReadTokens(NamedTuple):
    """Tokens in which windows are counted.

    Attributes:
        starts: First token of every sequence that the run has read here; None if the tokens are held out.
    """

    tokens: Tokens
    starts: NDArray[np.int64] | None


class Windows(NamedTuple):
    """Windows that were read about equally often.

    Attributes:
        least: Smallest number of times, a power of two; 0 for held-out windows that do not occur in the training tokens.
        tokens: int64 (windows, length).
        times: Number of times that each window was read.
    """

    least: int
    tokens: NDArray[np.int64]
    times: NDArray[np.int64]


def repeated_windows(
    splits: Sequence[ReadTokens],
    prefix_tokens: int,
    continuation_tokens: int,
    *,
    vocab_size: int,
    context_length: int,
    end_of_document: int | None,
    n_each: int,
    seed: int,
) -> list[Windows]:
    """Return up to `n_each` windows for each power of two: windows that were read once, 2 or 3 times, 4 to 7 times and so on.

    A window is read each time that a sequence contains all of it; a window across the border of two sequences is not. Windows do not
    cross documents. Their continuation occurs only after their prefix. A split is divided into parts of a window's
    length, and no two windows of a range begin in the same part, since such windows share most of their tokens.

    Args:
        splits: Training splits of all sources, then held-out splits.
        prefix_tokens, continuation_tokens: Tokens of a window's two parts.
        vocab_size: Upper limit of token ids, exclusive.
        end_of_document: Token that closes documents, if known.
        n_each: Largest number of windows for each range.
        seed: Seed of the hash and of the choice.
    """
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 2**64, size=vocab_size, dtype=np.uint64)
    length = prefix_tokens + continuation_tokens
    n_windows = sum(max(0, len(split.tokens) - length + 1) for split in splits)
    highest = np.uint64((2**64 - 1) * min(MOST_WINDOWS, n_windows) // max(1, n_windows))
    found = [_kept(split.tokens, prefix_tokens, length, table, highest, end_of_document) for split in splits]
    hashes, tails, places, is_inside = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    origins = np.repeat(np.arange(len(splits)), [len(kept.places) for kept in found])
    times = np.concatenate(
        [_times_read(split, kept.places, length, context_length) for split, kept in zip(splits, found, strict=True)]
    )
    order = np.argsort(hashes, kind="stable")  # occurrences of a window lie next to each other, those in training first
    borders = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order[:1]])) if len(order) else _NONE
    total = np.add.reduceat(times[order], borders) if len(order) else _NONE
    first, ends = order[borders], np.append(borders[1:], len(order))
    _, tail_of, n_of_tail = np.unique(tails, return_inverse=True, return_counts=True)
    is_usable = is_inside[first] & (n_of_tail[tail_of[first]] == ends - borders)
    is_held_out = np.array([split.starts is None for split in splits])[origins[first]]
    exponents = np.where(is_held_out, 0, np.where(total > 0, np.frexp(total)[1], -1))
    exponents[~is_usable] = -1
    ranges = []
    for exponent in np.unique(exponents[exponents >= 0]).tolist():
        groups = rng.permutation(np.flatnonzero(exponents == exponent))
        blocks = (places[first[groups]] // length) * len(splits) + origins[first[groups]]
        _, one_each = np.unique(blocks, return_index=True)
        tokens, counts = [], []
        for group in groups[np.sort(one_each)][:n_each].tolist():
            members = order[borders[group] : ends[group]]
            if (text := _common_text(splits, origins[members], places[members], length)) is not None:
                tokens.append(text)
                counts.append(int(total[group]))
        ranges.append(Windows(2**exponent // 2, np.array(tokens).reshape(-1, length), np.array(counts, dtype=np.int64)))
    return ranges


def window_hashes(tokens: Tokens, length: int, table: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each window of `length` tokens: the sum over its tokens of table[token] · base^offset, modulo 2^64.

    A window's sum is the difference of two running sums divided by the power of its position, so the time does not depend on `length`.
    """
    powers, inverses = _powers(len(tokens))
    sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
    terms = table.take(tokens)
    terms *= powers
    np.cumsum(terms, out=sums[1:])
    hashes = sums[length:] - sums[:-length]
    hashes *= inverses[: len(hashes)]
    return hashes


@lru_cache(maxsize=4)
def _powers(n: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the first `n` powers of the base and of its inverse, modulo 2^64."""
    inverse = np.uint64(pow(int(_BASE), -1, 2**64))
    factors = np.full((2, n), [[_BASE], [inverse]], dtype=np.uint64)
    factors[:, :1] = 1
    powers, inverses = np.cumprod(factors, axis=1, dtype=np.uint64)
    return powers, inverses


class _Kept(NamedTuple):
    """Windows of one split: hashes of them and of their continuations, first tokens, and whether they lie within a document."""

    hashes: NDArray[np.uint64]
    tails: NDArray[np.uint64]
    places: NDArray[np.int64]
    is_inside: NDArray[np.bool_]


def _kept(
    tokens: Tokens,
    prefix_tokens: int,
    length: int,
    table: NDArray[np.uint64],
    highest: np.uint64,
    end_of_document: int | None,
) -> _Kept:
    """Return the windows whose continuation has a hash up to `highest`."""
    found = []
    for begin in range(0, max(1, len(tokens) - length + 1), _BLOCK):
        block = np.asarray(tokens[begin : begin + _BLOCK + length - 1])
        tails = window_hashes(block[prefix_tokens:], length - prefix_tokens, table)
        kept = np.flatnonzero(tails <= highest)
        ends = np.flatnonzero(block == end_of_document) if end_of_document is not None else _NONE
        is_inside = np.searchsorted(ends, kept) == np.searchsorted(ends, kept + length)
        found.append(_Kept(window_hashes(block, length, table)[kept], tails[kept], begin + kept, is_inside))
    return _Kept(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


def _times_read(split: ReadTokens, positions: NDArray[np.int64], length: int, context_length: int) -> NDArray[np.int64]:
    """Return how many of the sequences read, of context_length + 1 tokens each, contain the window at each position."""
    if split.starts is None:
        return np.zeros(len(positions), dtype=np.int64)
    starts = np.sort(split.starts)
    before = np.searchsorted(starts, positions + length - context_length - 1, side="left")
    return np.searchsorted(starts, positions, side="right") - before


def _common_text(
    splits: Sequence[ReadTokens], origins: NDArray[np.int64], places: NDArray[np.int64], length: int
) -> NDArray[np.int64] | None:
    """Return the text of windows with the same hash, or None if their texts differ."""
    text = splits[origins[0]].tokens[places[0] : places[0] + length]
    for origin in np.unique(origins).tolist():
        tokens, own = splits[origin].tokens, places[origins == origin]
        if any((tokens[own + offset] != token).any() for offset, token in enumerate(text)):
            return None
    return np.asarray(text, dtype=np.int64)


def times_read(least: int) -> str:
    """Return the name of windows that were read `least` to 2·least − 1 times."""
    if least < 2:
        return "1 time" if least else HELD_OUT
    return f"{least}–{2 * least - 1} times"
