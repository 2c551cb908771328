"""The held-out loss of a decoder, source by source: one definition for a run, for its checkpoints, and for what is left of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.data.batches import EvaluationSet, corpus_loss, evaluation_sets
from proxy_models.data.corpus import Corpus
from proxy_models.training.numerics import Numerics

_BATCH = 64  # sequences of a forward pass on each rank


@torch.no_grad()
def source_losses(
    decoder: Decoder, sets: Mapping[str, EvaluationSet], *, device: torch.device, rank: int = 0, ranks: int = 1
) -> Tensor:
    """A rank's part of the mean loss over each source's held-out sequences; in fp32, without dropout.

    Every sequence is one rank's, so that the sum over the ranks is exact whatever their number.

    Args:
        decoder: On the device, whole or sharded; ranks that share it call this together.
        sets: By source.
        device: Of this rank.
        rank, ranks: Which of how many shares of the sequences.

    Returns:
        Nats per token, fp32, one for each source.
    """
    sums = torch.zeros(len(sets), device=device)
    was_training = decoder.training
    decoder.eval()
    for source, held_out in enumerate(sets.values()):
        for batch in torch.split(held_out.sequences, _BATCH * ranks):
            share = torch.tensor_split(batch, ranks)[rank]
            # A rank without a share takes part in the forward pass, as sharded weights are gathered by all.
            loss = next_token_loss(decoder, (share if len(share) else batch[:1]).to(device))
            sums[source] += len(share) / len(held_out.sequences) * loss
    decoder.train(was_training)
    return sums


def evaluation_of(corpus: Corpus, sets: Mapping[str, EvaluationSet], losses: Mapping[str, float]) -> dict[str, Any]:
    """What is recorded of an evaluation: `val_loss`, and of a mixture `source_losses` by name; nats per token.

    Args:
        corpus: That the sets are of.
        sets, losses: Of each source.
    """
    return {"val_loss": corpus_loss(sets, losses), "source_losses": dict(losses) if corpus.mixture else {}}


def evaluate_whole(decoder: Decoder, corpus: Corpus, numerics: Numerics) -> dict[str, Any]:
    """The evaluation of a decoder that is whole on one device, over the same sequences as its run's own.

    Raises:
        ValueError: If the corpus has not so many held-out tokens.
    """
    sets = evaluation_sets(corpus, numerics.model.context_length, numerics.evaluation_tokens)
    losses = source_losses(decoder, sets, device=decoder.embedding.weight.device)
    return evaluation_of(corpus, sets, dict(zip(sets, losses.tolist(), strict=True)))
