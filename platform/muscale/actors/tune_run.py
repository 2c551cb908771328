"""Runs a work's jobs with Ray Tune: every proxy training is a Tune trial on its own resources.

If a job's process is lost, the work hands out the job again as another Tune trial, which starts from the ledger's last state.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from muscale.actors import stalls
from muscale.actors.cluster import cluster
from muscale.actors.work import LOSS, Steps, Work
from muscale.errors import StageError, first_line
from muscale.fingerprint import package_fingerprint
from muscale.interrupts import defer_sigint, interruptible
from muscale.ray_connection import alive_nodes, in_environment, may_grow, note_taken, require_room, room_for
from muscale.store.cancels import cancellable

if TYPE_CHECKING:
    from ray.tune import Callback

    from muscale.actors.trainable import Training
    from muscale.settings.tables import ResourceSettings
    from muscale.store.ledger import Ledger

_TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints tables that `verbose=0` does not silence
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a trainer's relative paths are those of this process
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # Tune's own state, which nobody reads
}
_MOST_PENDING = "TUNE_MAX_PENDING_TRIALS_PG"
_NODES_SECONDS = 5.0  # between two looks at the cluster's nodes


def run_with_tune(
    work: Work,
    steps: Steps,
    ledger: Ledger,
    resources: ResourceSettings,
    callbacks: Sequence[Callback] = (),
    trainable: type[Training] | None = None,
) -> None:
    """Train all jobs of a work. The first Ctrl-C lets those under way finish their step, and no more are begun.

    Args:
        steps: Trains one job in a worker's process; it is sent there by pickle.
        callbacks: Tune's, of the user.
        trainable: Class of the workers; `Training` by default.

    Raises:
        KeyboardInterrupt: If the user interrupted it; what was finished is recorded.
        StageError: If no worker can train or find room, or a job failed for another reason than divergence; all others have run.
        LedgerUnavailableError: If the driver can't record a result.
    """
    begun = time.time()
    settings = {**_TUNE, _MOST_PENDING: str(resources.workers + 1)}
    with cluster(resources), cancellable(ledger), in_environment(settings):
        require_room("resources", resources.ranks_per_trial, resources.worker)
        note_taken("resources", resources.ranks_per_trial, resources.worker)
        _fit(work, steps, ledger, resources, callbacks, trainable)
        if work.interrupted:
            raise KeyboardInterrupt  # here, so that an error in leaving the cluster is known to follow it
    if work.refusal:
        raise StageError(f"{work.stage}: {work.refusal}")
    if work.failure:
        raise StageError(f"{work.stage}: {work.failure}{stalls.hint(ledger.directory, begun)}")


def _fit(
    work: Work,
    steps: Steps,
    ledger: Ledger,
    resources: ResourceSettings,
    callbacks: Sequence[Callback],
    trainable: type[Training] | None,
) -> None:
    with defer_sigint():
        from ray import tune

        from muscale.actors.trainable import Training
        from muscale.actors.tune_adapter import MODE, Dispatcher, NoteStarts, RungScheduler

    dispatcher = Dispatcher(work, _Capacity(resources))
    scheduler = RungScheduler(dispatcher)
    parameters = {  # they go to the object store: the ledger's password belongs into no file of Tune's
        "steps": steps,
        "ledger": ledger.for_worker(),
        "resources": resources,
        "package": package_fingerprint(),
    }
    with tempfile.TemporaryDirectory(prefix="muscale-tune-") as scratch:
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(trainable or Training, **parameters),
                tune.PlacementGroupFactory([resources.worker] * resources.ranks_per_trial),
            ),
            tune_config=tune.TuneConfig(
                metric=LOSS, mode=MODE, search_alg=dispatcher, scheduler=scheduler, num_samples=-1, reuse_actors=True
            ),
            run_config=tune.RunConfig(
                name=Path(scratch).name, storage_path=scratch, verbose=0, callbacks=[NoteStarts(scheduler), *callbacks]
            ),
        )
        try:
            with interruptible(partial(_stop, work)):
                tuner.fit()
        except Exception as error:
            if work.interrupted:  # the caller ends in either case, and what was finished is recorded
                logging.getLogger(__name__).warning(
                    "Ray Tune ended with an error after the interruption: %s", first_line(error)
                )
            elif not dispatcher.broke:
                raise
    if dispatcher.broke:
        raise dispatcher.broke


class _Capacity:
    """Number of jobs that may run at once: [resources] workers, or as many as fit into the cluster if it can't grow."""

    def __init__(self, resources: ResourceSettings) -> None:
        self._resources, self._looked, self._room = resources, -_NODES_SECONDS, resources.workers

    def __call__(self) -> int:
        resources, now = self._resources, time.monotonic()
        if now - self._looked > _NODES_SECONDS and not may_grow():
            nodes = [node["Resources"] for node in alive_nodes()]
            self._looked, self._room = now, room_for(nodes, resources.worker) // resources.ranks_per_trial
        return min(resources.workers, max(1, self._room))


def _stop(work: Work) -> None:
    """Let what is under way finish its step; asked again, stop at once."""
    if work.interrupted:
        raise KeyboardInterrupt
    work.interrupted = True
    logging.getLogger(__name__).warning("interrupted: finishing the running work; press Ctrl-C again to stop at once")
