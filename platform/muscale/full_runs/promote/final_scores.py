"""Scores of a finished full run: the measures of [scores], taken of its last checkpoint in a Ray task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from muscale.actors.cluster import cluster
from muscale.errors import StageError, last_line
from muscale.fingerprint import package_fingerprint, require_same_package
from muscale.full_runs.promote.promotion import Promotion, trained_chain
from muscale.layout import FULL_RUNS
from muscale.plans.planning import Plan
from muscale.settings.config import StudyConfig
from muscale.store.evaluations import Evaluated, evaluation_key, missing, record, score_table
from muscale.store.ledger import Ledger
from proxy_models.evaluation.measure import Measure
from proxy_models.training.numerics import Numerics


def final_scores(
    plan: Plan,
    config: StudyConfig,
    ledger: Ledger,
    numerics: Numerics,
    promotion: Promotion,
    measures: Sequence[Measure],
) -> pd.DataFrame:
    """Return the scores of a plan's finished run, rows of `score_table`; measures that the ledger lacks are taken.

    They run on the resources of one of the run's workers.

    Raises:
        StageError: If there is no intact checkpoint, or a measure can't be taken.
    """
    chain = trained_chain(plan, config, numerics, promotion)
    point = Evaluated(chain=chain, measures=tuple(measures))
    if left := missing(ledger, [point]):
        import ray

        resources, directory = config.resources, ledger.directory / FULL_RUNS / plan.key
        with cluster(resources):
            each = resources.full_run_worker
            task: Any = ray.remote(_measure_in_task).options(
                num_cpus=each["CPU"], num_gpus=each.get("GPU", 0), max_retries=2, name="evaluate full run"
            )
            where = (directory, resources.device, resources.threads)
            try:
                ray.get(task.remote(*where, left[0], ledger.for_worker(), package_fingerprint()))
            except ray.exceptions.RayError as error:
                raise StageError(f"scores: {last_line(error)}") from error
    return score_table(ledger, {evaluation_key(chain.key, measure) for measure in measures})


def _measure_in_task(
    directory: Path, device: str, threads: int, point: Evaluated, ledger: Ledger, package: str
) -> None:
    """Record each measure when it is taken, so that an interruption loses none."""
    import torch

    from muscale.full_runs.checkpoints.evaluate import subject_at

    require_same_package(package)
    torch.set_num_threads(threads)
    subject, path = subject_at(directory, device=device, keep_progress=True)
    if subject.tokens != point.chain.last.end:
        raise StageError(f"{path}: the run's last checkpoint, at {point.chain.last.end:,} tokens, is gone or damaged")
    for measure in point.measures:
        began = time.perf_counter()
        found = measure.measure(subject)
        record(ledger, point.chain, measure, found, seconds=time.perf_counter() - began)
