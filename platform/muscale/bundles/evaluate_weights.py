"""Evaluation of the weights of a bundle, or of a checkpoint of a full run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from muscale.bundles.bundle import MODEL, SCHEDULE, Bundle
from muscale.bundles.bundle_files import MANIFEST
from muscale.errors import StageError
from muscale.full_runs.checkpoints.evaluate import evaluate_checkpoint, evaluation_of, open_corpus
from muscale.full_runs.checkpoints.evaluation import CheckpointEvaluation
from muscale.layout import CORPUS
from proxy_models.architecture.families import family_of
from proxy_models.evaluation.measure import Measure, Subject
from proxy_models.training.device import usable
from proxy_models.training.precision import DTYPES


def evaluate(
    where: str | Path,
    measures: Sequence[Measure] = (),
    *,
    corpus: str | Path | None = None,
    device: str = "cpu",
    keep_progress: bool = False,
) -> CheckpointEvaluation:
    """Evaluate the weights of a full run, of one of its checkpoints, or of a bundle, by their held-out loss and further measures.

    Hashes are checked first. Nothing is unpickled but torch's own index of a checkpoint's shards. Weights of a custom family import
    it, and so run its code.

    Args:
        where: Directory of a full run, of which the newest intact checkpoint is used; the folder of a checkpoint; or a bundle.
        measures: Such as `Tasks`, `Samples` or `QuantisedLoss` of `proxy_models`.
        corpus: Folder of the corpus, if it was moved since the run began. A bundle without a corpus has no held-out loss.
        device: "cpu", "cuda" or "cuda:<number>".
        keep_progress: Keep what long measures have done in the run's directory, so that a later call continues there.

    Raises:
        StageError: If there is no intact checkpoint, or it is removed meanwhile; if the corpus is missing, differs from the run's,
            or has no tokenizer for a measure; or if the loss is not finite.
        BundleError: If a bundle is damaged, or its family can't be imported.
        ValueError: If there is no such device, or as the measures raise it.
    """
    where = Path(where)
    if not where.is_dir():
        raise StageError(f"{where}: must be the directory of a full run, one of its checkpoints, or a bundle")
    if not (where / MANIFEST).exists() or not (where / MODEL).exists():
        return evaluate_checkpoint(where, measures, corpus=corpus, device=device, keep_progress=keep_progress)
    began = time.perf_counter()
    bundle = Bundle.open(where)
    numerics, beside = bundle.numerics, where.resolve().parent.parent / CORPUS
    folder = Path(corpus) if corpus else beside if beside.exists() else None
    tokenizer = bundle.tokenizer()
    if tokenizer is None and measures and folder is None:
        raise StageError(f"{where}: its tokens are not from text; pass the folder of its corpus as corpus=…")
    model = bundle.module().to(usable(device))
    family_of(numerics.model).set_precision(model, DTYPES[numerics.precision])
    subject = Subject(
        model=model,
        numerics=numerics,
        text=open_corpus(folder, numerics.corpus_key) if folder else None,
        own_tokenizer=tokenizer,
        tokens=int(bundle.read(SCHEDULE)[-1]["end"]),
    )
    return evaluation_of(subject, measures, where, began)
