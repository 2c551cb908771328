"""Launch of a full run under Ray Train, with retries."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from muscale.actors.cluster import cluster
from muscale.errors import PreemptedError, StageError, refusing
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.async_evaluation import Fitting, async_evaluation_of
from muscale.full_runs.records import retries
from muscale.full_runs.records.preemption import NOTICE, OBEYED
from muscale.interrupts import defer_sigint, interruptible
from muscale.layout import COLLECTIVES, FAILURE, METRICS, RESULT
from muscale.progress import Update, following
from muscale.ray_connection import alive_nodes, in_environment, note_taken, require_room, room_for
from muscale.settings.config import StudyConfig
from muscale.settings.promote import PromoteSettings
from muscale.settings.tables import ResourceSettings
from muscale.store.ledger import now
from proxy_models.evaluation.measure import Measure

_log = logging.getLogger(__name__)

Launcher = Callable[[FullRun], dict[str, Any]]
"""Trains a run to its end, and returns its result."""
_TRAIN = {
    "RAY_TRAIN_V2_ENABLED": "1",
    # Ray's watcher informs each worker's context when a node is about to leave; our workers save on SIGTERM or a notice instead.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


def launcher_of(config: StudyConfig, name: str, update: Update) -> Launcher:
    """A function that trains a run on the cluster as a study's [promote] and [resources] say, and shows its progress."""

    def launched(run: FullRun) -> dict[str, Any]:
        with following(run.directory / METRICS, run.n_tokens, update):
            return launch(run, config.promote, config.resources, name=name)

    return launched


def launch(
    run: FullRun,
    settings: PromoteSettings,
    resources: ResourceSettings,
    *,
    name: str,
    worker: Callable[[dict[str, Any]], None] | None = None,
    measures: Sequence[Measure] = (),
    evaluators: int = 1,
) -> dict[str, Any]:
    """Train a run to its end on `settings.workers` workers, or on fewer while the cluster has no room.

    Each attempt resumes from the last checkpoint. A finished run is not launched again.

    Args:
        run: Run to train; the driver does not import Lightning.
        worker: Function of each worker; default: `train_worker`.
        measures: For asynchronous evaluation, in addition to the loss.
        evaluators: Ranks of an asynchronous evaluation.

    Raises:
        StageError: If the run diverged, failed for good or more often than `settings.max_failures`, if there is no room for the
            workers or for asynchronous evaluation, or if the model of a pipeline has no stages.
        PreemptedError: If this process got SIGINT or SIGTERM, or the run's directory a file `preempt`; the workers have saved.
        KeyboardInterrupt: At a second SIGINT or SIGTERM, before they have saved.
    """
    directory = run.directory
    result = directory / RESULT
    if not result.exists():
        run.require_ranks(settings.sizes)
        _require_stages(run)
        directory.mkdir(parents=True, exist_ok=True)
        for previous in (FAILURE, NOTICE, OBEYED):
            (directory / previous).unlink(missing_ok=True)
        with cluster(resources), in_environment(_TRAIN):
            require_room("promote", settings.sizes[0], resources.full_run_worker)
            note_taken("promote", settings.sizes[0], resources.full_run_worker)
            with async_evaluation_of(run, settings, resources, measures, evaluators=evaluators) as fitting:
                _train_with_retries(run, settings, resources, name, worker or train_worker, fitting)
    if not result.exists():
        raise StageError(f"promote: the run ended without a loss; its records are in {directory}")
    return dict(json.loads(result.read_text()))


def _require_stages(run: FullRun) -> None:
    """Refuse a pipeline of a model that can't be cut into stages; raise StageError with the reason."""
    if run.parallelism.pipeline_parallel == 1:
        return
    from proxy_models.architecture.stage import edges_of  # imports torch

    with refusing(f"promote: pipeline_parallel = {run.parallelism.pipeline_parallel}"):
        edges_of(run.numerics.model)


def _train_with_retries(
    run: FullRun,
    settings: PromoteSettings,
    resources: ResourceSettings,
    name: str,
    worker: Callable[[dict[str, Any]], None],
    fitting: Fitting,
) -> None:
    with defer_sigint():
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer

        from muscale.full_runs.distributed import flight_recorder

    directory = run.directory
    # Ray joins the group before the worker's function runs, so NCCL's variables must be set when the worker starts.
    variables = flight_recorder(directory / COLLECTIVES) if resources.gpus_per_worker else {}
    if variables:
        (directory / COLLECTIVES).mkdir(exist_ok=True)
    each = resources.full_run_worker

    class Trainer(TorchTrainer):
        def _register_sigint_handler(self, *_: object) -> None:
            """Leave SIGINT to `interruptible`: Ray's handler aborts the workers before they can save."""

    never: dict[str, Any] = {"max_failures": 0, "controller_failure_limit": 0, "max_preemption_failures": 0}

    def attempt() -> None:
        if any((directory / notice).exists() for notice in (NOTICE, OBEYED)):
            raise PreemptedError("promote: preempted; the run has saved, run the same command again to resume")
        # Ray would copy a reported checkpoint, so none is reported and Ray keeps no state. Retries are decided here, since Ray would
        # treat a divergence or a preemption like a lost worker.
        Trainer(
            worker,
            train_loop_config={"threads": resources.threads, "run": run},
            torch_config=TorchConfig(timeout_s=int(60 * settings.start_timeout_minutes)),
            scaling_config=ScalingConfig(
                num_workers=_workers(fitting(settings), run, each),
                use_gpu=resources.gpus_per_worker > 0,
                resources_per_worker=each,
            ),
            run_config=RunConfig(  # type: ignore[call-arg]  # typed as of the first version
                name=f"{name}-{now().replace(':', '')}",
                storage_path=str(directory / "ray"),
                failure_config=FailureConfig(**never),
                worker_runtime_env={"env_vars": variables},
            ),
        ).fit()

    asked = False

    def stop() -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        (directory / NOTICE).touch()
        _log.warning("interrupted: the run saves and ends; interrupt it again to end it without saving")

    with interruptible(stop):
        retries.train_with_retries(attempt, directory, max_failures=settings.max_failures, failed=TrainingFailedError)
    if (directory / FAILURE).exists():
        raise StageError(f"{(directory / FAILURE).read_text()}; the run's records are in {directory}")


def _workers(settings: PromoteSettings, run: FullRun, each: Mapping[str, float]) -> Any:
    """Number of workers, or a range from which Ray Train chooses by the cluster's resources, also during the run.

    Ray would choose any number in the range. If only some numbers are valid, the largest that fits is chosen here at each start; a
    run on fewer workers then grows only at its next start.
    """
    sizes = tuple(size for size in settings.sizes if not any(run.unfit(size)))
    if len(sizes) == 1:
        return sizes[0]
    if sizes == tuple(range(sizes[0], sizes[-1] + 1)) and settings.parallelism.sharding != "hybrid":
        return sizes[0], sizes[-1]
    return largest_fitting(sizes, [node["Resources"] for node in alive_nodes()], each)


def largest_fitting(sizes: Sequence[int], nodes: Iterable[Mapping[str, float]], each: Mapping[str, float]) -> int:
    """The largest number of workers that fits on the nodes' total resources, as Ray Train counts them; otherwise the smallest.

    Args:
        sizes: Possible numbers, ascending.
    """
    most = room_for(nodes, each)
    return max((size for size in sizes if size <= most), default=sizes[0])


def train_worker(config: dict[str, Any]) -> None:
    """Run one worker of the full run in Ray Train.

    An error that is not retryable, such as a divergence, is written to a file; it is also raised if all other workers would wait for
    this one.
    """
    import ray.train
    import torch
    from ray.train.torch import get_device

    from muscale.full_runs.records.attempts import keep_failure
    from muscale.full_runs.train.attempt import train

    torch.set_num_threads(config["threads"])
    run: FullRun = config["run"]
    try:
        train(run, device=get_device())
    except StageError as error:  # the same error on all workers
        if ray.train.get_context().get_world_rank() == 0:
            keep_failure(run.directory, error)
