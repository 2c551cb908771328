"""The held-out loss of a model by source; runs, checkpoints and bundles share this definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from proxy_models.architecture.families import family_of
from proxy_models.architecture.family import Loss
from proxy_models.data.batches import EvaluationSet, corpus_loss, evaluation_sets
from proxy_models.data.corpus import Corpus
from proxy_models.training.device import EVALUATION_BATCH, evaluation_batch, fitting_on
from proxy_models.training.numerics import Numerics
from proxy_models.training.precision import DTYPES


@torch.no_grad()
def source_losses(
    model: nn.Module,
    loss: Loss,
    sets: Mapping[str, EvaluationSet],
    *,
    device: torch.device,
    batch: int,
    rank: int = 0,
    ranks: int = 1,
) -> Tensor:
    """A rank's part of the mean loss over each source's held-out sequences, in the model's precision, without dropout.

    Each sequence belongs to one rank, so the sum over ranks is exact for any number of them.

    Args:
        model: Model on the device; if sharded, all its ranks call this together.
        loss: `Family.evaluation_loss`.
        sets: Held-out sequences by source.
        batch: Sequences per forward pass on each rank.
        rank, ranks: Index and number of the shares of the sequences.

    Returns:
        Losses in nats per token, fp32, one for each source.
    """
    sums = torch.zeros(len(sets), device=device)
    was_training = model.training
    model.eval()
    for source, held_out in enumerate(sets.values()):
        for part in torch.split(held_out.sequences, batch * ranks):
            share = torch.tensor_split(part, ranks)[rank]
            # A rank without a share still runs the forward pass, since gathering sharded weights takes all ranks.
            mean = loss(model, (share if len(share) else part[:1]).to(device))
            sums[source] += len(share) / len(held_out.sequences) * mean
    model.train(was_training)
    return sums


def evaluation_of(corpus: Corpus, sets: Mapping[str, EvaluationSet], losses: Mapping[str, float]) -> dict[str, Any]:
    """The record of an evaluation: `val_loss`, and for a mixture `source_losses` by name; nats per token."""
    return {"val_loss": corpus_loss(sets, losses), "source_losses": dict(losses) if corpus.mixture else {}}


def evaluate_unsharded(model: nn.Module, corpus: Corpus, numerics: Numerics) -> dict[str, Any]:
    """Evaluate an unsharded model on the run's held-out sequences, in the run's precision; the model is left in that precision.

    Raises:
        ValueError: If the corpus has fewer held-out tokens.
    """
    sets = evaluation_sets(corpus, numerics.model.context_length, numerics.evaluation_tokens)
    family, device = family_of(numerics.model), next(model.parameters()).device
    family.set_precision(model, DTYPES[numerics.precision])
    fitting, _ = fitting_on(device, numerics.model, EVALUATION_BATCH, precision=numerics.precision)
    losses = source_losses(model, family.evaluation_loss, sets, device=device, batch=evaluation_batch(device, fitting))
    return evaluation_of(corpus, sets, dict(zip(sets, losses.tolist(), strict=True)))
