"""Scores of a finished full run: the measures of [scores], taken of its last checkpoint in Ray tasks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from muscale.actors.cluster import cluster
from muscale.errors import StageError, last_line
from muscale.fingerprint import package_fingerprint, require_same_package
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, CheckpointFolder
from muscale.ray_connection import require_room
from muscale.settings.tables import ResourceSettings
from muscale.store.evaluations import Evaluated, evaluation_key, missing, record, score_table
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain
from proxy_models.evaluation.measure import Measure

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def final_scores(
    chain: Chain,
    directory: Path,
    ledger: Ledger,
    measures: Sequence[Measure],
    resources: ResourceSettings,
    *,
    workers: int = 1,
) -> pd.DataFrame:
    """Return the scores of a finished run, rows of `score_table`; measures that the ledger lacks are taken.

    Args:
        chain: The run as it was trained.
        directory: Directory of the run.
        resources: The measures run on the resources of one of the run's workers.
        workers: Workers that share the weights, each with these resources.

    Raises:
        StageError: If there is no room for the workers, the last checkpoint is gone or damaged, or a measure can't be taken.
    """
    if left := missing(ledger, [Evaluated(chain=chain, measures=tuple(measures))]):
        from ray.exceptions import RayError

        from muscale.actors.rank_tasks import RankTasks, reserved

        checkpoint = CheckpointFolder(directory / CHECKPOINTS).path(chain.last.end)
        where = (checkpoint, resources.device, resources.threads)
        what = (left[0], ledger.for_worker(), package_fingerprint())
        with cluster(resources):
            require_room("scores", workers, resources.full_run_worker)
            try:
                with reserved(resources.full_run_worker, workers) as group:
                    RankTasks(
                        _measure_in_task, *where, *what, group=group, name="evaluate full run", max_retries=2
                    ).result()
            except RayError as error:
                raise StageError(f"scores: {last_line(error)}") from error
    return score_table(ledger, {evaluation_key(chain.key, measure) for measure in measures})


def _measure_in_task(
    checkpoint: Path,
    device: str,
    threads: int,
    point: Evaluated,
    ledger: Ledger,
    package: str,
    *,
    mesh: DeviceMesh | None,
) -> None:
    """Record each measure when it is taken, so that an interruption loses none."""
    import torch

    from muscale.full_runs.checkpoints.evaluate import subject_at

    require_same_package(package)
    torch.set_num_threads(threads)
    subject, _ = subject_at(checkpoint, device=device, keep_progress=True, mesh=mesh)
    for measure in point.measures:
        began = time.perf_counter()
        found = measure.measure(subject)
        if subject.ranks.rank == 0:
            record(ledger, point.chain, measure, found, seconds=time.perf_counter() - began)
