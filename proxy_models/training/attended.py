"""Length over which attention reaches in a training that separates documents; its FLOPs depend on this length."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.member import Member
from proxy_models.architecture.sparse_attention import number_documents
from proxy_models.data.batches import training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.data.uncounted import sequence_ids

_PLACES, _SEQUENCES = 64, 8
"""Positions in the run at which sequences are sampled, and sequences at each: 512 in all, 4 million tokens at a context of 8,192."""


def attended_length(model: Member, corpus: Corpus, n_tokens: int) -> float | None:
    """Return the tokens that attention is counted over within documents, averaged over tokens; None if attention crosses documents.

    Without a window, it is the length of a token's document within its sequence.

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
    return mean_attended(sequence_ids(torch.cat(found)), model)


def mean_attended(tokens: Tensor, model: ModelConfig) -> float:
    """Return `attended_within` of each token's document in sequences (batch, time), averaged over tokens."""
    numbers = number_documents(tokens, cast(int, model.document_separator))
    rows = torch.arange(len(tokens)).unsqueeze(-1) * (tokens.shape[1] + 1)
    lengths = torch.bincount((rows + numbers).flatten()).tolist()
    return float(sum(length * model.attended_within(length) for length in lengths if length) / tokens.numel())
