"""Tokens that a model reads without being trained to predict them, such as prompts.

Token files and sequences hold such a token as ~id = -1 - id. The mask then needs no separate file or tensor: slices, shares of ranks
and micro-batches carry it along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.sources import TokenDtype

if TYPE_CHECKING:
    from torch import Tensor  # slow to import

SIGNED = ("int16", "int32", "int64")


def signed(dtype: str) -> str:
    """Return the type of a file that holds ids of an unsigned type of token files and their complements."""
    return SIGNED[get_args(TokenDtype).index(dtype)]


def ids(tokens: NDArray[Any]) -> NDArray[Any]:
    """Return the ids of tokens, whether they count or not."""
    return np.maximum(tokens, ~tokens) if tokens.dtype.kind == "i" else tokens


def sequence_ids(sequences: Tensor) -> Tensor:
    """Return the ids of sequences, whether they count or not."""
    return sequences.maximum(~sequences)


def n_counted(sequences: Tensor) -> Tensor:
    """Return how many predicted tokens of sequences (batch, time + 1) count, zero-dimensional."""
    return (sequences[:, 1:] >= 0).sum()
