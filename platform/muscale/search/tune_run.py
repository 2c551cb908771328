"""Runs an engine's jobs with Ray Tune, each as a trial of Tune's that has a worker of the pool train.

A job whose worker was lost is run again by the engine, as another trial of Tune's: so what the ledger counts as an attempt
does not depend on which of the two processes died.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.actors import stalls
from muscale.errors import StageError
from muscale.interrupts import defer_sigint, interruptible
from muscale.ray_connection import alive_nodes
from muscale.search.engine import Engine
from muscale.search.jobs import AnnealJob

if TYPE_CHECKING:
    from ray import tune

    from muscale.actors.pool import WorkerPool

_TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints tables that `verbose=0` does not silence
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # Tune's own state, which nobody reads
}

_OF_THE_NODE = 0.0001  # of the one that Ray lets be taken of each node by its address; Ray's smallest share


def run_engine(engine: Engine, trainable: Any, parameters: dict[str, Any], pool: WorkerPool) -> None:
    """Run the engine until it has no more jobs. The first Ctrl-C lets those in flight come to their next rung.

    Args:
        trainable: Tune's, which takes `parameters` at its setup.
        parameters: The same for every job.

    Raises:
        KeyboardInterrupt: If the user interrupted it; what was finished is recorded.
        StageError: If no worker can train, or a job failed for another reason than divergence; all others have been run.
        LedgerUnavailableError: If the driver can't record a result.
    """
    for name, value in _TUNE.items():
        os.environ.setdefault(name, value)
    with defer_sigint():
        from ray import tune

        from muscale.search.trainable import METRIC, MODE
        from muscale.search.tune_adapter import PLACE, EngineSearcher, StopAtRung

    jobs, begun = EngineSearcher(engine, pool), time.time()
    places = places_on_driver_node(jobs.n_places)
    with tempfile.TemporaryDirectory(prefix="muscale-tune-") as scratch:
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(trainable, **parameters), lambda config: places[config[PLACE]]),
            tune_config=tune.TuneConfig(
                metric=METRIC,
                mode=MODE,
                search_alg=jobs,
                scheduler=StopAtRung(jobs, pool.resources.workers),
                num_samples=-1,
                max_concurrent_trials=pool.resources.workers,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=Path(scratch).name,
                storage_path=scratch,
                verbose=0,
            ),
        )
        try:
            with interruptible(partial(_stop, engine)):
                tuner.fit()
        except Exception:
            if not jobs.broke:
                raise
    if jobs.broke:
        raise jobs.broke
    if engine.interrupted:
        raise KeyboardInterrupt
    if engine.refusal:
        raise StageError(f"sweep: {engine.refusal}")
    if engine.failures:
        n, (what, why) = len(engine.failures), next(iter(engine.failures.items()))
        trial = what.trial if isinstance(what, AnnealJob) else what
        stalled = stalls.hint(pool.ledger.directory, begun)
        raise StageError(f"sweep: {n} trial{'s' if n > 1 else ''} failed; trial {trial}: {why}{stalled}")


def places_on_driver_node(count: int) -> list[tune.PlacementGroupFactory]:
    """Resources of Tune trials: places on the driver's node, and none of the CPUs and devices, which their workers hold.

    Each is larger than the one before, as Tune takes a process that asks for the same for the same process.
    """
    import ray
    from ray import tune

    here = ray.get_runtime_context().get_node_id()
    (address,) = {node["NodeManagerAddress"] for node in alive_nodes() if node["NodeID"] == here}
    return [tune.PlacementGroupFactory([{f"node:{address}": round(_OF_THE_NODE * n, 4)}]) for n in range(1, count + 1)]


def _stop(engine: Engine) -> None:
    """Let what is at work come to a rung; asked again, stop at once."""
    if engine.interrupted:
        raise KeyboardInterrupt
    engine.interrupted = True
    logging.getLogger(__name__).warning("interrupted: finishing the running rungs; Ctrl-C again stops at once")
