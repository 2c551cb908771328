"""Runs wanted by a stage; those that the ledger does not know are trained in the pool."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muscale.actors import stalls
from muscale.actors.cluster import cluster
from muscale.actors.corpus_hashes import require_unchanged
from muscale.actors.retries import LostWorkers
from muscale.errors import MuscaleError, StageError, WorkerLostError, of_storage
from muscale.layout import CORPUS
from muscale.progress import Display
from muscale.settings.tables import ResourceSettings
from muscale.store.cancels import cancellable
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain, stems
from muscale.store.outcome import Outcome
from muscale.store.tables import runs
from proxy_models.recipes.hyperparameters import Hyperparameters

if TYPE_CHECKING:
    from muscale.actors.pool import PooledWorker, WorkerPool


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to its annealed end, and why it is wanted."""

    purpose: str
    label: str
    hyperparameters: Hyperparameters
    chain: Chain

    def row(self, outcome: Outcome) -> dict[str, Any]:
        """The run as a row of the ledger."""
        model = self.chain.numerics.model
        return {
            "purpose": self.purpose,
            "key": outcome.key,
            "stem": self.chain.stem,
            "d_model": model.d_model,
            "n_layers": model.n_layers,
            "n_params": model.n_params,
            "n_tokens": self.chain.last.end,
            "seed": self.chain.numerics.seed,
            "learning_rate": self.hyperparameters.learning_rate,
            "hyperparameters": self.hyperparameters.to_dict(),
            "label": self.label,
        }


def finish_stage(
    stage: str, jobs: Sequence[Job], ledger: Ledger, resources: ResourceSettings, display: Display
) -> None:
    """Train what the ledger does not know of these runs, the largest first, and note every one.

    Progress counts all the runs of the stage, and its bar moves by their compute.

    Runs that share a stem are trained by one actor, the shortest first. Ray starts only where there is something to train.

    Raises:
        StageError: If a run lost too many workers, once all others have been trained.
        Exception: What the training of a run raised, likewise. After an error of muscale's own or of a disk no further run begins.
    """
    wanted = {job.chain.key: job for job in jobs}
    known = ledger.outcomes(job.chain for job in wanted.values())
    for key, outcome in known.items():
        ledger.insert(runs, **wanted[key].row(outcome))
    unknown = [job.chain for key, job in wanted.items() if key not in known]
    if not unknown:
        return
    require_unchanged(ledger.directory / CORPUS)
    groups = sorted(stems(unknown).values(), key=lambda group: group[-1].compute_flops, reverse=True)
    total = sum(job.chain.compute_flops for job in wanted.values())
    left, n_done, best = sum(chain.compute_flops for chain in unknown), len(known), math.inf
    with display.stage(stage) as update:
        update(n_done, len(wanted), "runs; waiting for workers", share=1 - left / total)
        with cluster(resources) as joined, joined.workers(ledger, resources) as pool, cancellable(ledger):
            update(n_done, len(wanted), "runs; training", share=1 - left / total)
            for chain, outcome in _train(groups, wanted, pool):
                job = wanted[chain.key]
                ledger.insert(runs, **job.row(outcome))
                left, n_done = left - chain.compute_flops, n_done + 1
                best = min(best, outcome.loss if outcome.loss is not None else best)
                note = f"runs; last {job.label}" + (f", best loss {best:.4f}" if best < math.inf else "")
                update(n_done, len(wanted), note, share=1 - left / total)


def _train(
    groups: Sequence[Sequence[Chain]], jobs: Mapping[str, Job], pool: WorkerPool
) -> Iterator[tuple[Chain, Outcome]]:
    from muscale.actors.pool import IDLE_SECONDS, result_of

    begun = time.time()
    waiting = deque(list(group) for group in groups)
    busy: dict[Any, tuple[PooledWorker, list[Chain]]] = {}
    lost_workers, errors = LostWorkers(), list[Exception]()

    def train(worker: PooledWorker, group: list[Chain]) -> None:
        busy[worker.actor.reach.remote(group[0])] = worker, group

    def fail(group: list[Chain], error: Exception) -> None:
        """Keep an error until the others have ended; the longer runs of the same stem are not trained."""
        errors.append(error)
        first, longer = jobs[group[0].key].label, f", and {len(group) - 1} longer runs of its stem" if group[1:] else ""
        logging.getLogger(__name__).warning("%s failed%s: %s; the other runs are finished first", first, longer, error)

    while waiting or busy:
        try:
            while waiting and (free := pool.lease(len(waiting))):
                train(free, waiting.popleft())
        except MuscaleError as error:  # no worker can train
            fail(waiting.popleft(), error)
            waiting.clear()
        for task in pool.wait(busy, IDLE_SECONDS):
            worker, group = busy.pop(task)
            try:
                outcome = result_of(task)
            except WorkerLostError as error:
                pool.discard(worker)
                label = jobs[group[0].key].label
                if given_up := lost_workers.lost(group[0].key, label, str(error)):
                    fail(group, StageError(f"{label}: {given_up}{stalls.hint(pool.ledger.directory, begun)}"))
                else:
                    waiting.appendleft(group)
                continue
            except Exception as error:
                if pool.resources.ranks_per_trial > 1:  # an error in the middle of a pass leaves them unusable
                    pool.discard(worker)
                else:
                    pool.give_back(worker)
                fail(group, error)
                if isinstance(error, MuscaleError) or of_storage(error):  # what others train would not be kept either
                    waiting.clear()
                continue
            yield group[0], outcome
            if group[1:]:
                train(worker, group[1:])
            else:
                pool.give_back(worker)
        pool.end_idle()
    if errors:
        raise errors[0]
