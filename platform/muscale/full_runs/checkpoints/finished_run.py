"""The end of a full run in one process: its last checkpoint, the mean of the last ones, and held-out loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from muscale.errors import StageError
from muscale.full_runs.checkpoints.folder import CheckpointFolder
from muscale.full_runs.checkpoints.held_out import evaluate_unsharded
from muscale.full_runs.checkpoints.stored_weights import READ_BYTES, read_weights
from proxy_models.data.corpus import Corpus
from proxy_models.tensor_files import cut
from proxy_models.training.numerics import Numerics


def last_checkpoint(checkpoints: CheckpointFolder, end: int) -> Path:
    """The intact checkpoint of a run's end.

    Raises:
        StageError: If there is none after `end` tokens.
    """
    found = next(checkpoints.intact(), None)
    if found is None or found[0] != end:
        at = f"the newest whole one is at {found[0]}" if found else "there is no whole one"
        raise StageError(f"{checkpoints.folder}: needs the checkpoint of the run's end at {end} tokens; {at}")
    return found[1]


def newest_checkpoints(checkpoints: CheckpointFolder, k: int) -> list[tuple[int, Path]]:
    """Tokens and paths of the last `k` intact checkpoints, newest first.

    Raises:
        StageError: If there are fewer.
    """
    found = list(islice(checkpoints.intact(), k))
    if len(found) < k:
        raise StageError(
            f"{checkpoints.folder}: an average of {k} checkpoints needs as many, {len(found)} are whole; the newest "
            "promote.keep_last of a run are kept"
        )
    return found


def averaged(checkpoints: list[Path], shapes: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The mean weights of checkpoints by name, summed in fp32; twice `READ_BYTES` are in memory at a time.

    Raises:
        StageError: If a checkpoint can't be read, or its weights are another model's.
    """
    for names in cut({name: shape.nbytes for name, shape in shapes.items()}, READ_BYTES):
        part = {name: shapes[name] for name in names}
        sums = {name: torch.zeros_like(shape, dtype=torch.float32, device="cpu") for name, shape in part.items()}
        for checkpoint in checkpoints:
            for name, tensor in read_weights(checkpoint, part).items():
                sums[name] += tensor
        for name, total in sums.items():
            yield name, total.div_(len(checkpoints))


def held_out_loss(model: nn.Module, corpus: Corpus, numerics: Numerics) -> float:
    """The validation loss, nats per token, over the run's own held-out sequences; in its precision, without dropout."""
    return float(evaluate_unsharded(model, corpus, numerics)["val_loss"])
