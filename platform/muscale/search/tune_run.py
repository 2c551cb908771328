"""Runs an engine's legs with Ray Tune: warm actors, fractional devices, every leg flown as a trial of Tune's.

A leg whose worker was lost is flown again by the engine, as another trial of Tune's: an actor that dies while it is reset
for another trial costs Tune that trial, whatever `max_failures` is.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from muscale.actors import stalls
from muscale.errors import StageError
from muscale.interrupts import defer_sigint, interruptible
from muscale.search.engine import Engine
from muscale.search.jobs import AnnealJob
from muscale.settings.tables import ResourceSettings

_TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints tables that `verbose=0` does not silence
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # Tune's own state, which nobody reads
}


def run_engine(
    engine: Engine, trainable: Any, parameters: dict[str, Any], resources: ResourceSettings, directory: Path
) -> None:
    """Run the engine until it has no more legs. The first Ctrl-C lets the legs at work come to their next rung.

    Args:
        engine: What is to be run.
        trainable: Tune's, which takes `parameters` at its setup.
        parameters: The same for every leg.
        resources: Of one training, and how many there are at a time.
        directory: The study's, where trainings that hung are told of.

    Raises:
        KeyboardInterrupt: If the user interrupted it; what was finished is recorded.
        StageError: If no worker can train, or a leg failed for another reason than divergence; all other legs have been run.
        LedgerUnavailableError: If the driver can't keep what it is told.
    """
    for name, value in _TUNE.items():
        os.environ.setdefault(name, value)
    with defer_sigint():
        from ray import tune

        from muscale.search.tune_adapter import METRIC, MODE, EngineSearcher, StopAtRung

    devices = {"cpu": resources.cpus_per_worker, "gpu": resources.gpus_per_worker}
    legs, begun = EngineSearcher(engine), time.time()
    with tempfile.TemporaryDirectory(prefix="muscale-tune-") as scratch:
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(trainable, **parameters), devices),
            tune_config=tune.TuneConfig(
                metric=METRIC,
                mode=MODE,
                search_alg=legs,
                scheduler=StopAtRung(engine, legs, resources.workers),
                num_samples=-1,
                max_concurrent_trials=resources.workers,
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
            if not legs.broke:
                raise
    if legs.broke:
        raise legs.broke
    if engine.interrupted:
        raise KeyboardInterrupt
    if engine.refusal:
        raise StageError(f"sweep: {engine.refusal}")
    if engine.failures:
        n, (what, why) = len(engine.failures), next(iter(engine.failures.items()))
        trial = what.trial if isinstance(what, AnnealJob) else what
        stalled = stalls.hint(directory, begun)
        raise StageError(f"sweep: {n} trial{'s' if n > 1 else ''} failed; trial {trial}: {why}{stalled}")


def _stop(engine: Engine) -> None:
    """Let what is at work come to a rung; asked again, stop at once."""
    if engine.interrupted:
        raise KeyboardInterrupt
    engine.interrupted = True
    logging.getLogger(__name__).warning("interrupted: finishing the running rungs; Ctrl-C again stops at once")
