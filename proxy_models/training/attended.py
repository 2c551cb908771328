"""Length over which attention reaches in a training that separates documents; its FLOPs depend on this length."""

from __future__ import annotations

import torch
from torch import Tensor

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.document_attention import number_documents
from proxy_models.architecture.member import Member
from proxy_models.data.batches import training_stream
from proxy_models.data.corpus import Corpus

_PLACES, _SEQUENCES = 64, 8
"""Positions in the run at which sequences are sampled, and sequences at each: 512 in all, 4 million tokens at a context of 8,192."""


def attended_length(model: Member, corpus: Corpus, n_tokens: int) -> float | None:
    """Return the length of a token's document within its sequence, averaged over tokens; None if attention crosses documents.

    Sequences are sampled evenly over a run of `n_tokens`, so that stages of a mixture count by their length.

    Raises:
        ValueError: If a source is shorter than one sequence.
    """
    if not isinstance(model, ModelConfig) or model.document_separator is None:
        return None
    length = model.context_length
    stream = training_stream(corpus, length, seed=0, run_tokens=n_tokens)
    n_sequences = max(1, n_tokens // length)
    some = min(_SEQUENCES, n_sequences)
    places = range(0, n_sequences - some + 1, max(some, n_sequences // _PLACES))
    found = [stream.batch(place * length, some * length)[:, :-1] for place in places]
    return mean_length(torch.cat(found), model.document_separator)


def mean_length(tokens: Tensor, separator: int) -> float:
    """Return the sum of squared document lengths over the sum of document lengths, in sequences (batch, time)."""
    numbers = number_documents(tokens, separator)
    rows = torch.arange(len(tokens)).unsqueeze(-1) * (tokens.shape[1] + 1)
    lengths = torch.bincount((rows + numbers).flatten()).double()
    return float(lengths.square().sum() / lengths.sum())
