"""The held-out loss of a model by source, as runs, checkpoints and bundles record it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from proxy_models.architecture.families import family_of
from proxy_models.data.batches import EvaluationSet, corpus_loss, evaluation_sets
from proxy_models.data.corpus import Corpus
from proxy_models.training.held_out_passes import source_losses, unsharded_batch
from proxy_models.training.numerics import Numerics
from proxy_models.training.precision import DTYPES


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
    batch = unsharded_batch(numerics, device)
    losses = source_losses(model, family.evaluation_loss, sets, device=device, batch=batch)
    return evaluation_of(corpus, sets, dict(zip(sets, losses.tolist(), strict=True)))
