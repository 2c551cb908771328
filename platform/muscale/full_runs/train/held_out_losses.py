"""The held-out losses of a run, which its ranks measure together between steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from muscale.full_runs.checkpoints.held_out import evaluation_of
from muscale.full_runs.full_run import FullRun
from proxy_models.architecture.families import family_of
from proxy_models.architecture.family import Loss
from proxy_models.data.batches import EvaluationSet, corpus_loss, evaluation_sets
from proxy_models.data.corpus import Corpus
from proxy_models.training.device import evaluation_batch
from proxy_models.training.fsdp import settle
from proxy_models.training.held_out_passes import source_losses

if TYPE_CHECKING:
    from proxy_models.training.pipeline import Pipeline


class Evaluation:
    """The held-out sequences of a run's corpus, and of earlier corpora of a continuation."""

    def __init__(
        self, run: FullRun, corpus: Corpus, *, device: torch.device, data_rank: int, data_ranks: int, compiled: bool
    ) -> None:
        """Open the sequences.

        Args:
            data_rank, data_ranks: Index and number of the shares of a batch.
        """
        numerics, length = run.numerics, run.numerics.model.context_length
        earlier = run.initial_state.earlier if run.initial_state else {}
        self._corpus, self._device, self._compiled = corpus, device, compiled
        self._rank, self._ranks, self._same_share = data_rank, data_ranks, run.parallelism.sequence_ranks
        self._loss = family_of(numerics.model).evaluation_loss
        self._sets = evaluation_sets(corpus, length, numerics.evaluation_tokens)
        self._earlier = {n: evaluation_sets(Corpus.open(h.corpus), length, h.n_tokens) for n, h in earlier.items()}

    def measure(self, model: nn.Module, micro_batch: int | None, pipeline: Pipeline | None) -> dict[str, Any]:
        """Mean loss over the held-out sequences; all ranks call this. The stages of a pipeline take the passes instead of the model.

        Returns:
            `val_loss`; for a mixture also `source_losses` by name; for a continuation on another corpus also `earlier_losses` by name;
            nats per token.
        """
        batch = evaluation_batch(self._device, micro_batch, stages=pipeline.n_ranks if pipeline else 1)
        measured = partial(self._losses, model, pipeline, batch)
        losses = evaluation_of(self._corpus, self._sets, measured(self._sets))
        earlier = {name: corpus_loss(sets, measured(sets)) for name, sets in self._earlier.items()}
        return losses | ({"earlier_losses": earlier} if earlier else {})

    def _losses(
        self, model: nn.Module, pipeline: Pipeline | None, batch: int, sets: Mapping[str, EvaluationSet]
    ) -> dict[str, float]:
        """Mean loss of each set, independent of the number of ranks; in the run's precision, not compiled, without dropout."""
        loss: Loss = (lambda _model, *sequences: pipeline.held_out_loss(*sequences)) if pipeline else self._loss
        with torch.compiler.set_stance("force_eager") if self._compiled else nullcontext():
            losses = source_losses(
                model, loss, sets, device=self._device, batch=batch, rank=self._rank, ranks=self._ranks
            )
        settle(*(pipeline.stages.values() if pipeline else (model,)))
        if dist.is_initialized():
            dist.all_reduce(losses)
            # Ranks that share products count a share several times; each of those that share sequences has a mean of its positions.
            losses /= self._same_share
        return dict(zip(sets, losses.tolist(), strict=True))
