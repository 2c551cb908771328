"""Forward passes over held-out sequences; proxies, full runs, checkpoints and measures share this definition of the loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from proxy_models.architecture.family import Loss, weighted
from proxy_models.data.batches import EvaluationSet
from proxy_models.training.device import EVALUATION_BATCH, evaluation_batch, fitting_on
from proxy_models.training.numerics import Numerics


def _even_parts(sequences: Tensor, batch: int, ranks: int) -> list[Tensor]:
    """Cut sequences so that ranks get shares of the same size; only of the last few sequences some ranks get one and others none.

    Pipelines that gather weights together need the same number of micro-batches.
    """
    even = len(sequences) // ranks * ranks
    parts = [*torch.split(sequences[:even], batch * ranks), sequences[even:]]
    return [part for part in parts if len(part)]


@torch.no_grad()
def pass_losses(
    model: nn.Module,
    loss: Loss,
    sequences: Tensor,
    *,
    device: torch.device,
    batch: int,
    rank: int = 0,
    ranks: int = 1,
) -> list[tuple[Tensor, int]]:
    """Return the mean loss and the number of sequences of each pass of a rank, in the model's precision, without dropout.

    Each sequence belongs to one rank. A rank without a share of a pass has 0 sequences there.

    Args:
        model: Model on the device; if sharded, all its ranks call this function together.
        loss: `Family.evaluation_loss`, with the weight of tokens that count if others don't (`weighted`).
        sequences: Held-out sequences, (sequences, context_length + 1).
        batch: Sequences per pass on each rank.
        rank, ranks: Index and number of the shares of the sequences.
    """
    was_training = model.training
    model.eval()
    losses = []
    try:
        for part in _even_parts(sequences, batch, ranks):
            share = torch.tensor_split(part, ranks)[rank]
            # A rank without a share still runs the forward pass: gathering sharded weights takes all ranks.
            losses.append((loss(model, (share if len(share) else part[:1]).to(device)), len(share)))
    finally:
        model.train(was_training)
    return losses


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
    """Return a rank's part of the mean loss of each source, in nats per token, fp32.

    The sum over ranks is exact for any number of them. Arguments are those of `pass_losses`.
    """
    sums = torch.zeros(len(sets), device=device)
    for source, held_out in enumerate(sets.values()):
        n_sequences, of_source = len(held_out.sequences), weighted(loss, held_out.scale)
        passes = pass_losses(model, of_source, held_out.sequences, device=device, batch=batch, rank=rank, ranks=ranks)
        for mean, size in passes:
            sums[source] += size / n_sequences * mean
    return sums


def unsharded_batch(numerics: Numerics, device: torch.device) -> int:
    """Return the sequences in a pass of an unsharded model: on a GPU no more than a training step of the run would fit."""
    fitting, _ = fitting_on(device, numerics.model, EVALUATION_BATCH, precision=numerics.precision)
    return evaluation_batch(device, fitting)
