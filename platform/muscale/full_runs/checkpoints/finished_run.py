"""A finished full run in one process: its last state, averaged weights, and held-out loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from muscale.errors import StageError
from muscale.full_runs.checkpoints.held_out import evaluate_unsharded
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.checkpoints.stored_weights import alone, read_weights
from proxy_models.architecture.decoder import Decoder
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize, make_optimizer
from proxy_models.training.step import Stepper


def last_state(checkpoints: Checkpoints, numerics: Numerics, segments: Sequence[Segment]) -> Stepper:
    """The final decoder and optimizer of a run, on the CPU and unsharded.

    Args:
        checkpoints: Of the run, at any world size; trusted, as torch unpickles their metadata.
        numerics: Of the run.
        segments: Its chain.

    Raises:
        StageError: If there is no intact checkpoint of the run's end.
    """
    end = segments[-1].end
    found = checkpoints.latest()
    if found is None or found[0] != end:
        at = f"the newest whole one is at {found[0]}" if found else "there is no whole one"
        raise StageError(f"{checkpoints.folder}: needs the checkpoint of the run's end at {end} tokens; {at}")
    decoder = Decoder(numerics.model)
    first, last = segments[0].recipe, segments[-1].recipe
    initialize(decoder, numerics.parametrization(first.optimizer), first, seed=numerics.seed)  # for the multipliers
    optimizer = make_optimizer(decoder, numerics.parametrization(last.optimizer), last)
    stepper = Stepper(decoder, optimizer, numerics, last)
    with alone():
        checkpoints.load(found[1], stepper)
    return stepper


def average_checkpoints(
    checkpoints: Checkpoints, decoder: Decoder, k: int
) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """The mean weights of the last `k` checkpoints, summed in fp32; the decoder is unchanged.

    Returns:
        The weights by parameter name, and the tokens of each checkpoint, newest first.

    Raises:
        StageError: If there are fewer intact checkpoints.
    """
    found = list(islice(checkpoints.intact(), k))
    if len(found) < k:
        raise StageError(
            f"{checkpoints.folder}: an average of {k} checkpoints needs as many, {len(found)} are whole; the newest "
            "promote.keep_last of a run are kept"
        )
    sums = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in decoder.named_parameters()}
    for _, path in found:
        weights = {name: torch.empty_like(tensor) for name, tensor in decoder.named_parameters()}
        read_weights(path, weights)
        for name, total in sums.items():
            total += weights[name]
    return {name: total / k for name, total in sums.items()}, tuple(tokens for tokens, _ in found)


def held_out_loss(decoder: Decoder, corpus: Corpus, numerics: Numerics) -> float:
    """The validation loss, nats per token, over the run's own held-out sequences; in its precision, without dropout."""
    return float(evaluate_unsharded(decoder, corpus, numerics)["val_loss"])
