"""Text as hashes of its words, so that case, punctuation, line breaks and typography make no difference.

The functions work on batches of texts with numpy, since a corpus has more words than Python can visit. A batch is one text whose
documents are closed by byte 0, which no text contains.
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Positions = NDArray[np.int64]

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 2**64)
_SPACE = 32
_FOLD = np.full(256, _SPACE, dtype=np.uint8)  # everything but letters and digits separates words
_FOLD[0] = 0
for _byte in (*b"0123456789abcdefghijklmnopqrstuvwxyz", *range(0x80, 0x100)):
    _FOLD[_byte] = _byte
for _byte in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ":
    _FOLD[_byte] = _byte + 32


def normalized(batch: bytes) -> bytes:
    """Return UTF-8 in form NFKC and lower case, so that typographic variants of a character are one; ASCII stays as it is.

    Newlines and bytes 0 keep their number and order.
    """
    return batch if batch.isascii() else unicodedata.normalize("NFKC", batch.decode()).lower().encode()


def fold(text: bytes) -> NDArray[np.uint8]:
    """Return normalized text in lower case with a space for each byte that separates words; bytes 0 stay."""
    folded = _FOLD[np.frombuffer(text, dtype=np.uint8)]
    if text.isascii():
        return folded
    second = np.append(folded[1:], np.uint8(0))
    marks = (folded == 0xE2) & ((second == 0x80) | (second == 0x81))  # U+2000 to U+207F: dashes, quotation marks
    marks |= (folded == 0xE3) & (second == 0x80)  # U+3000 to U+303F: marks of Chinese and Japanese
    latin = folded == 0xC2  # U+0080 to U+00BF: signs and spaces of Latin-1
    for is_mark, length in ((latin, 2), (marks, 3)):
        places = np.flatnonzero(is_mark)
        for offset in range(length):
            folded[places + offset] = _SPACE
    return folded


def word_starts(folded: NDArray[np.uint8]) -> Positions:
    """Return where each word begins; in scripts without spaces each character is a word."""
    letter = folded > _SPACE
    begins = letter.copy()
    begins[1:] &= ~letter[:-1]
    if folded.max(initial=0) >= 0xE0:
        alone = np.flatnonzero(_is_unspaced(folded))
        begins[alone] = True
        after = alone[alone + 3 < len(folded)] + 3
        begins[after] = letter[after]
    return np.flatnonzero(begins)


def letter_places(folded: NDArray[np.uint8]) -> Positions:
    """Return the positions of all bytes that belong to words."""
    return np.flatnonzero(folded > _SPACE)


def word_hashes(folded: NDArray[np.uint8], starts: Positions) -> Hashes:
    """Return a hash of 64 bits for each word; equal words have equal hashes."""
    values = np.where(folded > _SPACE, folded, 0).astype(np.uint64)
    sums = _prefix_sums(values)
    return _mixed((sums[np.append(starts[1:], len(folded))] - sums[starts]) * _inverse_powers(len(folded))[starts])


def windows(units: Hashes, length: int) -> Hashes:
    """Return a hash of the `length` units that begin at each position; empty if there are fewer."""
    if len(units) < length:
        return np.zeros(0, dtype=np.uint64)
    sums = _prefix_sums(units)
    return _mixed((sums[length:] - sums[:-length]) * _inverse_powers(len(units))[: len(units) - length + 1])


def _is_unspaced(folded: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """True at the first byte of characters of Thai, Lao, Burmese, Khmer, kana and Han, all of three bytes."""
    second = np.append(folded[1:], np.uint8(0))
    unspaced: NDArray[np.bool_] = (folded >= 0xE3) & (folded <= 0xE9)
    unspaced |= (folded == 0xE0) & (second >= 0xB8) & (second <= 0xBB)
    unspaced |= (folded == 0xE1) & ((second >= 0x80) & (second <= 0x82) | (second == 0x9E) | (second == 0x9F))
    return unspaced


def _prefix_sums(values: Hashes) -> Hashes:
    """Return sums of values times powers of the base, modulo 2^64, before each position and after the last."""
    sums = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values * _powers(len(values)), out=sums[1:])
    return sums


def _mixed(hashes: Hashes) -> Hashes:
    """Return the hashes with their high bits in the low ones, as sums modulo 2^64 have weak low bits."""
    hashes = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return hashes ^ (hashes >> np.uint64(32))


def _powers(n: int) -> Hashes:
    return _power_table(_BASE, 1 << max(16, (n - 1).bit_length()))[:n]


def _inverse_powers(n: int) -> Hashes:
    return _power_table(_INVERSE, 1 << max(16, (n - 1).bit_length()))[:n]


@cache
def _power_table(base: int, n: int) -> Hashes:
    table = np.full(n, np.uint64(base), dtype=np.uint64)
    table[0] = 1
    np.cumprod(table, out=table)
    return table
