"""Asynchronous evaluation of a full run's checkpoints: Ray tasks on reserved resources, one checkpoint at a time.

The resources are reserved before the training takes the cluster. Ray Train counts all resources of the nodes, including reserved
ones, so the training gets no more workers than fit.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale import json_lines
from muscale.errors import StageError
from muscale.fingerprint import package_fingerprint, require_same_package
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, CheckpointFolder, tokens_of
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.records import retries
from muscale.full_runs.records.run_records import RunRecords
from muscale.layout import EVALUATIONS
from muscale.ray_connection import alive_nodes, format_resources, room_for
from muscale.settings.promote import PromoteSettings
from muscale.settings.tables import ResourceSettings
from proxy_models.evaluation.measure import Measure

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from muscale.actors.rank_tasks import RankTasks

_LOOK_SECONDS = 1.0  # interval between checks for a new checkpoint
_ROOM_SECONDS = 60.0  # time for others to free the resources (assumed)
_PATIENCE_SECONDS = 60.0  # time for an evaluation that still runs when the training has ended (assumed)
_log = logging.getLogger(__name__)

Fitting = Callable[[PromoteSettings], PromoteSettings]


@contextmanager
def async_evaluation_of(
    run: FullRun,
    settings: PromoteSettings,
    resources: ResourceSettings,
    measures: Sequence[Measure] = (),
    *,
    evaluators: int = 1,
) -> Iterator[Fitting]:
    """While a run is trained in the block, evaluate its newest checkpoints, one at a time.

    Results are appended to a file in the run's directory. The run itself evaluates its last checkpoint. When the block ends
    normally, a running evaluation gets one more minute; after an interruption or error, none.

    Args:
        resources: Resources of one worker of the training.
        measures: Taken of each evaluated checkpoint in addition to its loss.
        evaluators: Ranks that share the weights, each with the evaluator's resources.

    Yields:
        A function that limits settings to the workers that fit, for one attempt.

    Raises:
        StageError: If the cluster has no room for the evaluator and the fewest workers.
    """
    if settings.evaluation == "sync":
        yield lambda settings: settings
        return
    reservation = _Reservation(settings, measures, evaluators)
    try:
        reservation.wait()
        reservation.require_room(settings, resources)
        evaluator = _Evaluator(run.directory, run.n_tokens, reservation.submit)
        try:
            yield lambda given: reservation.fitting(given, resources)
            evaluator.end(patience=_PATIENCE_SECONDS)
        finally:
            evaluator.end(patience=0.0)
    finally:
        reservation.give_back()


def evaluate_in_task(
    checkpoint: Path, options: dict[str, Any], threads: int, package: str, *, mesh: DeviceMesh | None
) -> dict[str, Any]:
    """Evaluate a checkpoint in a Ray task, or on the ranks of a mesh, and return the row to record."""
    import torch

    from muscale.full_runs.checkpoints.evaluate import evaluate_checkpoint

    require_same_package(package)
    torch.set_num_threads(threads)
    return evaluate_checkpoint(checkpoint, **options, mesh=mesh).to_dict()


class _Reservation:
    """Reserved resources, each rank's on one node, and the tasks on them."""

    def __init__(self, settings: PromoteSettings, measures: Sequence[Measure] = (), ranks: int = 1) -> None:
        from ray.util.placement_group import placement_group

        self.taken = {"CPU": settings.evaluator_cpus} | (
            {"GPU": settings.evaluator_gpus} if settings.evaluator_gpus else {}
        )
        self._amount = f"{ranks} × {format_resources(self.taken)}" if ranks > 1 else format_resources(self.taken)
        if (room := room_for([node["Resources"] for node in alive_nodes()], self.taken)) < ranks:
            raise StageError(
                f'promote: evaluation = "async" needs {self._amount}, each on one node, and the nodes have room for {room}: lower '
                'promote.evaluator_cpus, promote.evaluator_gpus or scores.workers, or take evaluation = "sync"'
            )
        self._group = placement_group([self.taken] * ranks)
        self._threads = max(1, int(settings.evaluator_cpus))
        self._options = {
            "device": "cuda" if settings.evaluator_gpus else "cpu",
            "measures": tuple(measures),
            "keep_progress": True,
        }

    def wait(self) -> None:
        """Wait for the reservation; raise StageError if others occupy the resources."""
        if not self._group.wait(_ROOM_SECONDS):
            raise StageError(
                f'promote: evaluation = "async" needs {self._amount}, which stayed occupied for {_ROOM_SECONDS:.0f} s'
            )

    def room(self, resources: ResourceSettings) -> int:
        """Number of workers that fit on the nodes in addition to the reservation."""
        from ray.util import placement_group_table

        table = placement_group_table(self._group)
        on = Counter(table.get("bundles_to_node_id", {}).values())
        left = []
        for node in alive_nodes():
            there, ranks = node["Resources"], on[node["NodeID"]]
            left.append(there | {n: there.get(n, 0.0) - ranks * amount for n, amount in self.taken.items()})
        return room_for(left, resources.full_run_worker)

    def require_room(self, settings: PromoteSettings, resources: ResourceSettings) -> None:
        """Check that the training fits; raise StageError if its smallest number of workers would wait forever."""
        least, room = settings.workers_min or settings.workers, self.room(resources)
        if room < least:
            raise StageError(
                f'promote: evaluation = "async" reserves {self._amount}, which leaves the cluster room for {room} of '
                f"{least} workers with {resources.cpus_per_worker:g} CPUs each: add nodes, lower promote.workers, "
                'promote.evaluator_cpus or resources.cpus_per_worker, or take evaluation = "sync"'
            )

    def fitting(self, settings: PromoteSettings, resources: ResourceSettings) -> PromoteSettings:
        """The settings with at most as many workers as fit, if a range is allowed."""
        if settings.workers_min is None:
            return settings
        most = max(settings.workers_min, min(settings.workers, self.room(resources)))
        return settings.model_copy(update={"workers": most})

    def submit(self, checkpoint: Path) -> RankTasks:
        """Start an evaluation, whose result is its row."""
        from muscale.actors.rank_tasks import RankTasks

        given = (checkpoint, self._options, self._threads, package_fingerprint())
        return RankTasks(evaluate_in_task, *given, group=self._group, name="evaluate checkpoint")

    def give_back(self) -> None:
        """Free the resources, and end the tasks that use them."""
        import ray
        from ray.util import remove_placement_group

        if ray.is_initialized():
            remove_placement_group(self._group)


class _Evaluator:
    """A thread of the driver that evaluates new checkpoints one by one and records the results."""

    def __init__(self, directory: Path, n_tokens: int, submit: Callable[[Path], RankTasks]) -> None:
        self._n_tokens, self._submit = n_tokens, submit
        self._file = directory / EVALUATIONS
        self._checkpoints, self._records = CheckpointFolder(directory / CHECKPOINTS), RunRecords(directory)
        self._failed: set[int] = set()  # tokens of checkpoints
        self._logged: set[str] = set()
        self._ends, self._patience_until = threading.Event(), float("inf")
        self._thread = threading.Thread(target=self._follow, name="evaluation", daemon=True)
        self._thread.start()

    def end(self, *, patience: float) -> None:
        """Start no further evaluation; a running evaluation gets this many seconds."""
        self._patience_until = time.monotonic() + patience
        self._ends.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ends.wait(_LOOK_SECONDS):
            try:
                if path := self._next():
                    self._evaluate(path)
            except OSError as error:  # an error of the file system; training matters more
                self._warn(f"the checkpoints can't be listed for now: {error}")

    def _next(self) -> Path | None:
        """The newest checkpoint, unless it is evaluated, has failed, or is the run's last."""
        newest = self._checkpoints.newest()
        if newest is None:
            return None
        tokens, path = newest
        known = tokens >= self._n_tokens or tokens in self._failed
        return None if known or (self._records.evaluations()["tokens"] == tokens).any() else path

    def _evaluate(self, path: Path) -> None:
        try:
            tasks = self._submit(path)
            while not tasks.ended(_LOOK_SECONDS):
                if self._ends.is_set() and time.monotonic() >= self._patience_until:
                    tasks.cancel()
                    return
            row = tasks.result()
        except Exception as error:  # the training continues after any error
            if path.exists() and not self._ends.is_set():  # else newer checkpoints replaced it, or the run has ended
                self._failed.add(tokens_of(path))
                self._warn(
                    f"the evaluation of {path} failed, the training continues: {retries.describe(error)['error']}"
                )
            return
        json_lines.append(self._file, row)

    def _warn(self, text: str) -> None:
        """Log a warning, once for all checkpoints."""
        reason = re.sub(r"\d+", "#", text)
        if reason not in self._logged:
            self._logged.add(reason)
            _log.warning("%s", text)
