"""Tokens that a model reads without being trained to predict them, such as prompts.

Token files and sequences hold such a token as ~id = -1 - id, so that a mask needs no file and no tensor of its own: slices, shares of
ranks and micro-batches of signed ids carry it along.
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxy_models.data.sources import TokenDtype

SIGNED = ("int16", "int32", "int64")


def signed(dtype: str) -> str:
    """Return the type of a file that holds ids of an unsigned type of token files and their complements."""
    return SIGNED[get_args(TokenDtype).index(dtype)]


def ids(tokens: NDArray[Any]) -> NDArray[Any]:
    """Return the ids of tokens, whether they count or not."""
    return np.maximum(tokens, ~tokens) if tokens.dtype.kind == "i" else tokens


def sequence_ids(sequences: Tensor) -> Tensor:
    """Return the ids of sequences, whether they count or not."""
    return torch.maximum(sequences, ~sequences)


def shifted(sequences: Tensor, scale: Tensor | float | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split sequences (batch, time + 1) into what a model reads, what it predicts, and the weight of each prediction.

    Args:
        scale: Weight of a token that counts; None: every token counts, and no sequence has to be checked.

    Returns:
        Ids (batch, time); ids (batch, time); and weights (batch, time) in fp32, 0 for tokens that do not count, or None.
    """
    if scale is None:
        return sequences[:, :-1], sequences[:, 1:], None
    tokens, targets = sequence_ids(sequences[:, :-1]), sequences[:, 1:]
    weight = torch.as_tensor(scale, dtype=torch.float32, device=sequences.device)
    return tokens, sequence_ids(targets), torch.where(targets < 0, 0.0, weight)


def n_counted(sequences: Tensor) -> Tensor:
    """Return how many predicted tokens of sequences (batch, time + 1) count, zero-dimensional."""
    return (sequences[:, 1:] >= 0).sum()
