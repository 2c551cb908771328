"""Scores of a finished full run: the measures of [scores], taken of its last checkpoint in a Ray task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.actors.cluster import cluster
from muscale.fingerprint import package_fingerprint, require_same_package
from muscale.full_runs.full_run import FullRun
from muscale.store.evaluations import Evaluated, missing, record

if TYPE_CHECKING:
    from muscale.settings.tables import ResourceSettings
    from muscale.store.ledger import Ledger
    from muscale.store.lineage import Chain
    from proxy_models.evaluation.measure import Measure


def record_final_scores(
    run: FullRun, chain: Chain, measures: Sequence[Measure], resources: ResourceSettings, ledger: Ledger
) -> None:
    """Take the measures that the ledger lacks for the end of a run, on the resources of one of its workers.

    Args:
        chain: The run's, as the ledger records it.

    Raises:
        StageError: If there is no intact checkpoint; what a measure raises.
    """
    left = missing(ledger, [Evaluated(chain=chain, measures=tuple(measures))])
    if not left:
        return
    import ray

    with cluster(resources):
        each = resources.full_run_worker
        task: Any = ray.remote(_measure_in_task).options(
            num_cpus=each["CPU"], num_gpus=each.get("GPU", 0), max_retries=2, name="evaluate full run"
        )
        where = (run.directory, resources.device, resources.threads)
        ray.get(task.remote(*where, left[0], ledger.for_worker(), package_fingerprint()))


def _measure_in_task(
    directory: Path, device: str, threads: int, point: Evaluated, ledger: Ledger, package: str
) -> None:
    """Record each measure when it is taken, so that an interruption loses none."""
    import torch

    from muscale.full_runs.checkpoints.evaluate import subject_at

    require_same_package(package)
    torch.set_num_threads(threads)
    subject, _ = subject_at(directory, device=device, keep_progress=True)
    for measure in point.measures:
        began = time.perf_counter()
        found = measure.measure(subject)
        record(ledger, point.chain, measure, found, seconds=time.perf_counter() - began)
