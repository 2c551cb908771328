"""Evaluation of one checkpoint of a full run, in one process or on ranks that share the weights: held-out loss and further measures.

The evaluation needs the run's directory and corpus but neither Ray nor Lightning, and may run during the training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from muscale.errors import StageError, refusing
from muscale.full_runs.checkpoints.evaluation import CheckpointEvaluation
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, MANIFEST, require_intact, tokens_of
from muscale.full_runs.checkpoints.run_description import RunDescription
from muscale.full_runs.checkpoints.save import Checkpoints, damage_found_by_ranks
from muscale.full_runs.checkpoints.stored_weights import RecordReader, read_weights
from muscale.layout import EVALUATED, RUN
from proxy_models.architecture.families import import_family, weight_shapes
from proxy_models.data.corpus import Corpus
from proxy_models.data.sources import CorpusError
from proxy_models.evaluation.held_out_loss import HeldOutLoss
from proxy_models.evaluation.loaded_model import loaded_model, sharded_model
from proxy_models.evaluation.measure import Measure, Subject
from proxy_models.hashing import file_sha256
from proxy_models.training.device import usable


def evaluate_checkpoint(
    where: str | Path,
    measures: Sequence[Measure] = (),
    *,
    corpus: str | Path | None = None,
    device: str = "cpu",
    keep_progress: bool = False,
    mesh: DeviceMesh | None = None,
) -> CheckpointEvaluation:
    """Evaluate a checkpoint on the held-out sequences of its run, and take further measures of it.

    Hashes are checked first. Only weights are read from the shards, and only torch's index of the shards is unpickled.

    Args:
        where: Directory of a full run, of which the newest intact checkpoint is used, or the folder of a checkpoint.
        measures: Such as `Tasks` or `Samples` of `proxy_models`.
        corpus: Folder of the corpus, if it was moved since the run began.
        device: "cpu", "cuda" or "cuda:<number>".
        keep_progress: Keep what long measures have done in the run's directory, so that a later call continues there.
        mesh: Mesh of all ranks of the process group, with one dimension, over which the weights are sharded; they call this together.

    Raises:
        StageError: If there is no intact checkpoint, or it is removed meanwhile; if the corpus is missing, differs from the run's,
            or has no tokenizer for a measure; or if the loss is not finite.
        ValueError: If there is no such device, or as the measures raise it.
    """
    began = time.perf_counter()
    subject, path = subject_at(where, corpus=corpus, device=device, keep_progress=keep_progress, mesh=mesh)
    return evaluation_of(subject, measures, path, began)


def subject_at(
    where: str | Path,
    *,
    corpus: str | Path | None = None,
    device: str = "cpu",
    keep_progress: bool = False,
    mesh: DeviceMesh | None = None,
) -> tuple[Subject, Path]:
    """The weights of a checkpoint as measures see them, and its folder; arguments and errors as for `evaluate_checkpoint`."""
    directory, path = _located(Path(where), by_ranks=mesh is not None)
    run = RunDescription.read(directory)
    text = open_corpus(Path(corpus) if corpus else run.corpus, run.numerics.corpus_key)
    # by content: after a rollback another checkpoint may have the same tokens, and so the same name
    progress = directory / EVALUATED / file_sha256(path / MANIFEST) if keep_progress else None
    model = _model(run, path, mesh or usable(device))
    subject = Subject(
        model=model,
        numerics=run.numerics,
        text=text,
        tokens=tokens_of(path),
        position=run.position,
        progress=progress,
    )
    return subject, path


def evaluation_of(subject: Subject, measures: Sequence[Measure], where: Path, began: float) -> CheckpointEvaluation:
    """The evaluation of weights from a folder, begun at this `time.perf_counter`; raises as `evaluate_checkpoint`."""
    losses: dict[str, Any] = {"val_loss": None, "source_losses": {}}
    with refusing(where, CorpusError):
        if subject.text:
            of_loss = HeldOutLoss().measure(subject)
            by_source = {score.name: score.value for score in of_loss.scores if score.metric == "loss"}
            losses = {"val_loss": by_source.pop(""), "source_losses": by_source}
            if not math.isfinite(losses["val_loss"]):
                raise StageError(f"{where}: the held-out loss is not finite")
        found = [
            of_loss if subject.text and measure == HeldOutLoss() else measure.measure(subject) for measure in measures
        ]
    return CheckpointEvaluation(
        checkpoint=where.name,
        tokens=subject.tokens,
        **losses,
        scores=tuple(score for each in found for score in each.scores),
        samples=tuple(sample for each in found for sample in each.samples),
        seconds=time.perf_counter() - began,
    )


def _located(where: Path, *, by_ranks: bool) -> tuple[Path, Path]:
    """The run's directory and the folder of the intact checkpoint; ranks may divide the hashing."""
    if (where / RUN).exists() or (where / CHECKPOINTS).is_dir():
        checkpoints = Checkpoints(where / CHECKPOINTS)
        found = checkpoints.latest() if by_ranks else next(checkpoints.intact(), None)
        if found is None:
            raise StageError(f"{where / CHECKPOINTS}: there is no complete checkpoint yet")
        return where, found[1]
    require_intact(where, damage_found_by_ranks if by_ranks else None)
    return where.resolve().parent.parent, where


def open_corpus(folder: Path, key: str) -> Corpus:
    """Open the corpus that a run was trained on."""
    try:
        corpus = Corpus.open(folder)
    except (CorpusError, OSError) as error:
        raise StageError(f"{error}; pass the current location of the run's corpus as corpus=…") from error
    if corpus.key != key:
        raise StageError(f"{folder}: corpus {corpus.key}, the run was trained on {key}")
    return corpus


def _model(run: RunDescription, checkpoint: Path, where: torch.device | DeviceMesh) -> nn.Module:
    """The model with a checkpoint's weights, read onto a device or sharded over a mesh."""
    reader = RecordReader(checkpoint)
    member, found = run.numerics.model, reader.n_weights()
    if member.n_params_total > 4 * found:  # a model far too large would take long to describe
        raise StageError(
            f"{checkpoint}: weights of another model: {found:,} of them, the model of {RUN} has {member.n_params_total:,}"
        )
    with refusing(checkpoint):
        import_family(member)
    try:
        shapes = weight_shapes(member)
        if isinstance(where, torch.device):
            weights = read_weights(checkpoint, shapes, device=where)
            return loaded_model(weights, run.numerics, run.multipliers, device=where)
        reader.require_weights(shapes)
        return sharded_model(reader.fill_weights, run.numerics, run.multipliers, where)
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        raise StageError(f"{checkpoint}: {RUN} does not describe a valid model ({error})") from error
