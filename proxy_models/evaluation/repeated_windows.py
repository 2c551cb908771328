"""Windows of training text by the number of times that a run has read them.

One pass over the token files hashes every window. Only windows with a hash below a limit are kept, so that any corpus fits in
memory. All occurrences of a text have the same hash. They are kept together, so that their count is exact, and the chance of a text to
be kept does not depend on how often it occurs. The tokens of the chosen windows are compared, since other texts may have their hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.tokenizer import Tokens

MOST_WINDOWS = 1 << 23
"""Windows that are kept: 200 MB of hashes, positions and counts."""
_BLOCK = 1 << 15  # windows hashed at once, so that the arrays stay in a processor's cache
_BASE = np.uint64(0x9E3779B97F4A7C15)  # any odd number has an inverse modulo 2^64
_NONE = np.zeros(0, dtype=np.int64)


class Split(NamedTuple):
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
    splits: Sequence[Split],
    length: int,
    *,
    vocab_size: int,
    context_length: int,
    end_of_document: int | None,
    n_each: int,
    seed: int,
) -> list[Windows]:
    """Return up to `n_each` windows for each power of two: windows that were read once, 2 or 3 times, 4 to 7 times and so on.

    A window is read each time that a sequence contains all of it; a window across the border of two sequences is not. Windows do not
    cross documents, and no two of a range begin within the same `length` tokens, since such windows share most of their tokens.

    Args:
        splits: Training splits of all sources, then held-out splits.
        length: Tokens of a window.
        vocab_size: Upper limit of token ids, exclusive.
        end_of_document: Token that closes documents, if known.
        n_each: Largest number of windows for each range.
        seed: Seed of the hash and of the choice.
    """
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 2**64, size=vocab_size, dtype=np.uint64)
    n_windows = sum(max(0, len(split.tokens) - length + 1) for split in splits)
    highest = np.uint64((2**64 - 1) * min(MOST_WINDOWS, n_windows) // max(1, n_windows))
    found = [_kept(split.tokens, length, table, highest, end_of_document) for split in splits]
    hashes = np.concatenate([kept for kept, _ in found])
    places = np.concatenate([positions for _, positions in found])
    origins = np.repeat(np.arange(len(splits)), [len(positions) for _, positions in found])
    times = np.concatenate(
        [
            _times_read(split, positions, length, context_length)
            for split, (_, positions) in zip(splits, found, strict=True)
        ]
    )
    order = np.argsort(hashes, kind="stable")  # occurrences of a window lie next to each other, those in training first
    borders = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order[:1]])) if len(order) else _NONE
    total = np.add.reduceat(times[order], borders) if len(order) else _NONE
    first = order[borders]
    is_held_out = np.array([split.starts is None for split in splits])[origins[first]]
    exponents = np.where(is_held_out, 0, np.where(total > 0, np.frexp(total)[1], -1))
    ends = np.append(borders[1:], len(order))
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


@lru_cache(maxsize=2)
def _powers(n: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the first `n` powers of the base and of its inverse, modulo 2^64."""
    inverse = np.uint64(pow(int(_BASE), -1, 2**64))
    powers = [np.cumprod(np.append(np.uint64(1), np.full(n - 1, factor))) for factor in (_BASE, inverse)]
    return powers[0], powers[1]


def _kept(
    tokens: Tokens, length: int, table: NDArray[np.uint64], highest: np.uint64, end_of_document: int | None
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the hashes up to `highest` of windows within documents, and the first tokens of these windows."""
    hashes, positions = [np.zeros(0, dtype=np.uint64)], [_NONE]
    for begin in range(0, len(tokens) - length + 1, _BLOCK):
        block = np.asarray(tokens[begin : begin + _BLOCK + length - 1])
        found = window_hashes(block, length, table)
        kept = np.flatnonzero(found <= highest)
        if end_of_document is not None:
            ends = np.flatnonzero(block == end_of_document)
            kept = kept[np.searchsorted(ends, kept) == np.searchsorted(ends, kept + length)]
        hashes.append(found[kept])
        positions.append(begin + kept)
    return np.concatenate(hashes), np.concatenate(positions)


def _times_read(split: Split, positions: NDArray[np.int64], length: int, context_length: int) -> NDArray[np.int64]:
    """Return how many of the sequences read, of context_length + 1 tokens each, contain the window at each position."""
    if split.starts is None:
        return np.zeros(len(positions), dtype=np.int64)
    starts = np.sort(split.starts)
    before = np.searchsorted(starts, positions + length - context_length - 1, side="left")
    return np.searchsorted(starts, positions, side="right") - before


def _common_text(
    splits: Sequence[Split], origins: NDArray[np.int64], places: NDArray[np.int64], length: int
) -> NDArray[np.int64] | None:
    """Return the text of windows with the same hash, or None if their texts differ."""
    text = splits[origins[0]].tokens[places[0] : places[0] + length]
    for origin in np.unique(origins).tolist():
        tokens, own = splits[origin].tokens, places[origins == origin]
        if any((tokens[own + offset] != token).any() for offset, token in enumerate(text)):
            return None
    return text.astype(np.int64)
