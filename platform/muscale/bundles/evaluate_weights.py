"""Evaluation of the weights of a bundle, or of a checkpoint of a full run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from muscale.actors.cluster import cluster
from muscale.bundles.bundle import DATA, MODEL, SCHEDULE, Bundle
from muscale.bundles.bundle_files import MANIFEST
from muscale.errors import StageError, last_line
from muscale.fingerprint import package_fingerprint
from muscale.full_runs.checkpoints.evaluate import evaluate_checkpoint, evaluation_of, open_corpus
from muscale.full_runs.checkpoints.evaluation import CheckpointEvaluation
from muscale.full_runs.promote.async_evaluation import evaluate_in_task
from muscale.layout import CORPORA, CORPUS
from muscale.ray_connection import require_room
from muscale.settings.tables import ResourceSettings
from proxy_models.architecture.families import family_of
from proxy_models.data.corpus import Corpus
from proxy_models.data.sources import CorpusError
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
    workers: int = 1,
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
        workers: Ray workers over which a checkpoint's weights are sharded, each with a CPU, and on "cuda" with a GPU.

    Raises:
        StageError: If there is no intact checkpoint, or it is removed meanwhile; if the corpus is missing, differs from the run's,
            or has no tokenizer for a measure; if the loss is not finite; or if there is no room for the workers.
        BundleError: If a bundle is damaged, or its family can't be imported.
        ValueError: If there is no such device, `workers` is less than 1 or, for a bundle, not 1, or as the measures raise it.
    """
    where = Path(where)
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if not where.is_dir():
        raise StageError(f"{where}: must be the directory of a full run, one of its checkpoints, or a bundle")
    if not (where / MANIFEST).exists() or not (where / MODEL).exists():
        if workers > 1:
            options = {
                "measures": tuple(measures),
                "corpus": corpus and Path(corpus).resolve(),
                "keep_progress": keep_progress,
            }
            return _evaluate_on_workers(where.resolve(), options, device, workers)
        return evaluate_checkpoint(where, measures, corpus=corpus, device=device, keep_progress=keep_progress)
    if workers != 1:
        raise ValueError(
            f"workers must be 1 for a bundle, whose weights are read in one process; got {workers} for {where}"
        )
    began = time.perf_counter()
    bundle = Bundle.open(where)
    numerics = bundle.numerics
    folder = Path(corpus) if corpus else _corpus_of(where.resolve().parent.parent, numerics.corpus_key)
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
        position=int(bundle.read(DATA).get("position", 0)),
    )
    return evaluation_of(subject, measures, where, began)


def _corpus_of(study: Path, key: str) -> Path | None:
    """The folder of a corpus in the study's directory, also of a continuation's; None if it is not there."""
    for folder in (study / CORPUS, *sorted((study / CORPORA).glob("*"))):
        with suppress(CorpusError, OSError):
            if Corpus.open(folder).key == key:
                return folder
    return None


def _evaluate_on_workers(where: Path, options: dict[str, Any], device: str, workers: int) -> CheckpointEvaluation:
    """The evaluation of a checkpoint by Ray workers that share its weights."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda" with {workers} workers, got {device!r}')
    from ray.exceptions import RayError

    from muscale.actors.rank_tasks import RankTasks, reserved

    resources = ResourceSettings(workers=workers, gpus_per_worker=1.0 if device == "cuda" else 0.0)
    with cluster(resources):
        require_room("evaluate", workers, resources.worker)
        try:
            with reserved(resources.worker, workers) as group:
                given = (where, options, resources.threads, package_fingerprint())
                return CheckpointEvaluation.from_dict(
                    RankTasks(evaluate_in_task, *given, group=group, name="evaluate checkpoint").result()
                )
        except RayError as error:
            raise StageError(f"evaluate: {last_line(error)}") from error
