"""Runs wanted by a stage, and the warm Ray actors that train those that the ledger does not know."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from muscale.actors import stalls
from muscale.actors.corpus_hashes import require_unchanged
from muscale.cluster import cluster, staying
from muscale.errors import StageError, last_line
from muscale.fingerprint import package_fingerprint
from muscale.layout import CORPUS
from muscale.progress import Display
from muscale.settings.tables import ResourceSettings
from muscale.store.cancels import cancellable
from muscale.store.ledger import Ledger, Outcome
from muscale.store.lineage import Chain, stems
from muscale.store.tables import runs
from proxy_models.recipes.hyperparameters import Hyperparameters

_workers: list[Any] = []  # at rest between the stages of one study
_hired_for: list[Any] = []  # its directory and [resources]: another study's results belong into another ledger
IDLE_SECONDS = 20.0  # that workers without work are kept warm while others are at work
_RESTARTS = 2  # of an actor that died; what it had finished is in the ledger


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


OnTrained = Callable[[Job, Outcome], None]


def finish(jobs: Sequence[Job], ledger: Ledger, resources: ResourceSettings, on_trained: OnTrained) -> None:
    """Train what the ledger does not know of these runs, the largest first, and note every one as a run.

    Runs that share a stem are trained by one actor, the shortest first. Ray starts only where there is something to train.
    """
    wanted = {job.chain.key: job for job in jobs}
    unknown: list[Chain] = []
    for job in jobs:
        if outcome := ledger.outcome(job.chain):
            ledger.insert(runs, **job.row(outcome))
        else:
            unknown.append(job.chain)
    if not unknown:
        return
    require_unchanged(ledger.directory / CORPUS)
    groups = sorted(stems(unknown).values(), key=lambda group: group[-1].compute_flops, reverse=True)
    with cluster(resources), cancellable(ledger):
        try:
            for chain, outcome in _train(groups, ledger, resources):
                ledger.insert(runs, **wanted[chain.key].row(outcome))
                on_trained(wanted[chain.key], outcome)
        except BaseException:
            stop_workers()  # some of them are at work
            raise
        if stays := staying():  # later stages find them warm
            stays.callback(stop_workers)
        else:
            stop_workers()


def finish_stage(
    stage: str, jobs: Sequence[Job], ledger: Ledger, resources: ResourceSettings, display: Display
) -> None:
    """`finish`, with a bar that moves by compute."""
    total = sum(job.chain.compute_flops for job in jobs if not ledger.outcome(job.chain))
    done, best = 0.0, math.inf
    with display.stage(stage) as update:

        def on_trained(job: Job, outcome: Outcome) -> None:
            nonlocal done, best
            done += job.chain.compute_flops
            best = min(best, outcome.loss if outcome.loss is not None else best)
            update(round(done / total * 100), 100, f"{job.label}, best {best:.4f}")

        finish(jobs, ledger, resources, on_trained)


def _train(
    groups: Sequence[Sequence[Chain]], ledger: Ledger, resources: ResourceSettings
) -> Iterator[tuple[Chain, Outcome]]:
    import ray

    begun = time.time()
    actors = _hire(min(resources.workers, len(groups)), ledger, resources)
    # Work is for actors that run: where the cluster has fewer devices than workers, the others may never begin.
    starting = {actor.__ray_ready__.remote(): actor for actor in actors}
    idle: list[Any] = []
    waiting = [list(group) for group in groups]
    busy: dict[Any, tuple[Any, list[Chain]]] = {}
    while waiting or busy:
        while waiting and idle:
            actor, group = idle.pop(), waiting.pop(0)
            busy[actor.reach.remote(group[0])] = (actor, group)
        ended, _ = ray.wait([*busy, *starting], num_returns=1, timeout=IDLE_SECONDS if idle else None)
        if not ended:  # nothing waits: their devices may be what an actor needs that lost its node
            stop_workers(idle)
            idle.clear()
            continue
        (done,) = ended
        try:
            outcome = ray.get(done)
        except ray.exceptions.ActorDiedError as error:
            hint = stalls.hint(ledger.directory, begun)
            raise StageError(f"a worker died: {last_line(error)}{hint}") from error
        except ray.exceptions.RayTaskError as error:
            raise (error.cause or error) from None
        if done in starting:
            idle.append(starting.pop(done))
            continue
        actor, group = busy.pop(done)
        yield group[0], outcome
        if group[1:]:
            busy[actor.reach.remote(group[1])] = (actor, group[1:])
        else:
            idle.append(actor)


def _hire(count: int, ledger: Ledger, resources: ResourceSettings) -> list[Any]:
    """So many workers, those of the study's stage before first: their models are warm."""
    import ray

    from muscale.actors.actor import TrainingActor

    remote: Any = ray.remote(
        num_cpus=resources.cpus_per_worker,
        num_gpus=resources.gpus_per_worker,
        max_restarts=_RESTARTS,
        max_task_retries=_RESTARTS,
    )(TrainingActor)
    settings = (ledger, resources, package_fingerprint())
    if _hired_for != (wanted := [ledger.directory, resources]):
        stop_workers()
        _hired_for[:] = wanted
    while len(_workers) < count:
        _workers.append(remote.remote(*settings))
    return _workers[:count]


def stop_workers(these: Sequence[Any] | None = None) -> None:
    """End workers of the stages before, all by default, for whoever needs their processors and devices."""
    import ray

    for worker in list(_workers if these is None else these):
        ray.kill(worker)
        _workers.remove(worker)
