"""Sequences that begin with a record: of text with prompts, whose completions mean little without the tokens before them.

A sequence holds as many whole records as fit, in the order of the file. It begins with the closing token of the record before, from
which the first token is predicted. The rest of the sequence shows tokens of the next record, which do not count there. A record that
is longer than the context is cut at the end of its sequence, and the tokens beyond are never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.tokenizer import Tokens
from proxy_models.data.uncounted import ids

_BLOCK_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Packing:
    """First and last positions of a split's sequences.

    Attributes:
        starts: First token of each sequence, ascending.
        stops: Token after the last that may count, for each sequence.
        n_records: Number of records.
        n_cut: Number of records that are longer than the context.
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    n_records: int
    n_cut: int

    @classmethod
    def of(cls, tokens: Tokens, context_length: int, end_of_document: int) -> Self:
        """Pack the records of a split, each of which ends with the id `end_of_document`."""
        blocks = range(0, len(tokens), _BLOCK_TOKENS)
        ends = np.concatenate([_ends(tokens[at : at + _BLOCK_TOKENS], end_of_document) + at for at in blocks])
        starts = np.maximum(np.append(0, ends[:-1]) - 1, 0)
        limits = starts + context_length + 1
        n_records = len(ends)
        following = np.maximum(np.searchsorted(ends, limits, side="right"), np.arange(1, n_records + 1)).tolist()
        first, chosen = 0, []
        while first < n_records:
            chosen.append(first)
            first = following[first]
        last = np.array([following[first] - 1 for first in chosen])
        return cls(
            starts=starts[chosen],
            stops=np.minimum(ends[last], limits[chosen]),
            n_records=n_records,
            n_cut=int(np.count_nonzero(ends > limits)),
        )

    def sequences(self, tokens: Tokens, starts: NDArray[np.int64], context_length: int) -> NDArray[np.int64]:
        """Return the sequences that begin at some of `starts`: (sequences, context_length + 1)."""
        positions = starts[:, None] + np.arange(context_length + 1)
        stops = self.stops[np.searchsorted(self.starts, starts)]
        found: NDArray[np.int64] = tokens[np.minimum(positions, len(tokens) - 1)].astype(np.int64)
        return np.where(positions < stops[:, None], found, np.minimum(found, ~found))


def _ends(block: NDArray[Any], end_of_document: int) -> NDArray[np.int64]:
    return np.flatnonzero(ids(block) == end_of_document) + 1
