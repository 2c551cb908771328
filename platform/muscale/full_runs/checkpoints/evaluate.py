"""Evaluation of one checkpoint of a full run in one process: held-out loss by source, and text samples.

The evaluation needs the run's directory and corpus but neither Ray nor Lightning, and may run during the training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from muscale.errors import StageError
from muscale.full_runs.checkpoints.evaluation import CheckpointEvaluation, Sample
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, require_intact, tokens_of
from muscale.full_runs.checkpoints.held_out import evaluate_unsharded
from muscale.full_runs.checkpoints.run_description import RunDescription
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.checkpoints.stored_weights import RecordReader, read_weights
from muscale.layout import RUN
from proxy_models.architecture.families import import_family, parameter_shapes, with_weights
from proxy_models.architecture.generate import continue_text
from proxy_models.data.corpus import Corpus
from proxy_models.data.sources import CorpusError
from proxy_models.training.device import usable
from proxy_models.training.optimizer import set_multipliers

SAMPLE_SEED = 0
"""Seed for sampling; it is the same for all checkpoints, so that samples differ only because of the weights."""


def evaluate_checkpoint(
    where: str | Path,
    *,
    corpus: str | Path | None = None,
    device: str = "cpu",
    prompts: Sequence[str] = (),
    sample_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = SAMPLE_SEED,
) -> CheckpointEvaluation:
    """Evaluate a checkpoint on the held-out sequences of its run, and generate samples from prompts.

    Hashes are checked first. Only weights are read from the shards, and only torch's index of the shards is unpickled.

    Args:
        where: Directory of a full run, of which the newest intact checkpoint is used, or the folder of a checkpoint.
        corpus: Folder of the corpus, if it was moved since the run began.
        device: "cpu", "cuda" or "cuda:<number>".
        prompts: Starts of the samples, one per sample.
        sample_tokens: Most tokens of a sample.
        temperature: 0 always takes the most likely token; otherwise tokens are sampled after dividing logits by the temperature.

    Raises:
        StageError: If there is no intact checkpoint, or it is removed meanwhile; if the corpus is missing, differs from the run's,
            or has no tokenizer for samples; or if the loss is not finite.
        ValueError: If there is no such device, or a sampling argument is out of range.
    """
    began = time.perf_counter()
    directory, path = _located(Path(where))
    run = RunDescription.read(directory)
    text = _opened(Path(corpus) if corpus else run.corpus, run.numerics.corpus_key)
    try:
        tokenizer = text.tokenizer() if prompts else None
    except CorpusError as error:
        raise StageError(f"prompts: {error}") from error
    model = _model(run, path, usable(device))
    losses = evaluate_unsharded(model, text, run.numerics)
    if not math.isfinite(losses["val_loss"]):
        raise StageError(f"{path}: the held-out loss is not finite")
    written = [
        continue_text(
            model, tokenizer, prompt, sample_tokens, member=run.numerics.model, temperature=temperature, seed=seed
        )
        for prompt in prompts
        if tokenizer
    ]
    return CheckpointEvaluation(
        checkpoint=path.name,
        tokens=tokens_of(path),
        **losses,
        samples=tuple(
            Sample(prompt=prompt, text=text, temperature=temperature, seed=seed)
            for prompt, text in zip(prompts, written, strict=True)
        ),
        seconds=time.perf_counter() - began,
    )


def _located(where: Path) -> tuple[Path, Path]:
    """The run's directory and the folder of the intact checkpoint."""
    if (where / RUN).exists() or (where / CHECKPOINTS).is_dir():
        found = next(Checkpoints(where / CHECKPOINTS).intact(), None)
        if found is None:
            raise StageError(f"{where / CHECKPOINTS}: there is no complete checkpoint yet")
        return where, found[1]
    require_intact(where)
    return where.resolve().parent.parent, where


def _opened(folder: Path, key: str) -> Corpus:
    """Open the corpus that a run was trained on."""
    try:
        corpus = Corpus.open(folder)
    except (CorpusError, OSError) as error:
        raise StageError(f"{error}; pass the current location of the run's corpus as corpus=…") from error
    if corpus.key != key:
        raise StageError(f"{folder}: corpus {corpus.key}, the run was trained on {key}")
    return corpus


def _model(run: RunDescription, checkpoint: Path, device: torch.device) -> nn.Module:
    """The unsharded model with a checkpoint's weights, read onto the device, in fp32."""
    member, found = run.numerics.model, RecordReader(checkpoint).n_weights()
    if member.n_params_total > 4 * found:  # a model far too large would take long to describe
        raise StageError(
            f"{checkpoint}: weights of another model: {found:,} of them, the model of {RUN} has {member.n_params_total:,}"
        )
    try:
        import_family(member)
    except ValueError as error:
        raise StageError(f"{checkpoint}: {error}") from error
    try:
        weights = read_weights(checkpoint, parameter_shapes(member), device=device)
        model = with_weights(member, weights).to(device)
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        raise StageError(f"{checkpoint}: {RUN} does not describe a valid model ({error})") from error
    set_multipliers(model, run.multipliers)
    return model.eval()
