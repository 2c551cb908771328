"""The pool of warm workers in which every proxy training runs: trials, grids and ladders, of one study after another."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from muscale.errors import StageError, WorkerLostError, last_line
from muscale.fingerprint import package_fingerprint, require_same_package
from muscale.ray_connection import note_taken

if TYPE_CHECKING:  # processes of Tune's trials import this module, and need no settings and no database
    from muscale.actors.ranks import Followers
    from muscale.actors.worker import Worker
    from muscale.settings.tables import ResourceSettings
    from muscale.store.ledger import Ledger
    from muscale.store.lineage import Chain
    from muscale.store.outcome import Outcome

IDLE_SECONDS = 20.0
"""Time that an idle worker stays warm while others work; somebody else may want its device."""
_STARTS = 3  # that may fail one after the other


class TrainingActor:
    """A worker in a process of its own, if that computes with the driver's code; it serves one study at a time.

    With several ranks to a trial it is the first of them.
    """

    def __init__(self, resources: ResourceSettings, package: str) -> None:
        require_same_package(package)
        import torch  # here, as the driver names this class and needs no torch

        self._resources = resources
        self._worker: Worker  # once it serves a study
        torch.set_num_threads(resources.threads)
        self._followers: Followers | None = None
        if resources.ranks_per_trial > 1:
            from muscale.actors.ranks import Followers

            self._followers = Followers(resources, package)

    def serve(self, ledger: Ledger) -> None:
        """Train for the study of this ledger from now on; the models of the study before are dropped."""
        from muscale.actors.worker import Worker

        resources = self._resources
        if hasattr(self, "_worker"):
            if self._worker.ledger.study == ledger.study:
                return
            self._worker.ledger.close()
            del self._worker  # before the next one takes memory
            if resources.compile:
                import torch._dynamo

                torch._dynamo.reset()
        self._worker = Worker(
            ledger,
            compiled=resources.compile,
            device=resources.device,
            device_share=resources.device_share,
            stall_seconds=60 * resources.stall_minutes,
            followers=self._followers,
        )

    def reach(self, chain: Chain) -> Outcome:
        """Train the chain to its end."""
        return self._worker.reach(chain)


@dataclass(eq=False, kw_only=True)
class PooledWorker:
    """One actor of the pool.

    Attributes:
        name: By which other processes of the driver's job find it.
        study: That it serves, or was asked to.
        placement: Placement group of a trial's ranks; None for one.
        has_started: Whether it ever answered.
        idle_since: By the monotonic clock, when it was given back.
    """

    name: str
    actor: Any
    study: tuple[str, Path] | None = None
    placement: PlacementGroup | None = None
    has_started: bool = False
    idle_since: float = 0.0

    def kill(self) -> None:
        """End its process, and those of a trial's other ranks."""
        ray.kill(self.actor)
        if self.placement:
            remove_placement_group(self.placement)


class WorkerPool:
    """Warm workers, at most `resources.workers`: started on demand, leased, given back, replaced when they die.

    They serve one study after another. Only those are leased that have started and serve the present one: where the cluster has
    fewer devices than workers, some may never start.

    Args:
        resources: Of one worker, and how many there may be.
        actor: The class of the workers; takes resources and the driver's package.
    """

    def __init__(self, ledger: Ledger, resources: ResourceSettings, actor: type = TrainingActor) -> None:
        self.ledger, self.resources = ledger, resources
        remote: Any = ray.remote(num_cpus=resources.cpus_per_worker, num_gpus=resources.gpus_per_worker)
        self._remote = remote(actor)
        self._starting: dict[Any, PooledWorker] = {}  # by the answer that each is to give
        self._idle: list[PooledWorker] = []
        self._leased: set[PooledWorker] = set()
        self._died_starting = 0  # one after the other

    def serve(self, ledger: Ledger, resources: ResourceSettings) -> bool:
        """Go on with the study of this ledger, while nothing is leased; False if it wants other workers, and nothing changes."""
        if resources.model_copy(update={"workers": self.resources.workers}) != self.resources:
            return False
        is_other = ledger.study != self.ledger.study
        self.ledger, self.resources = ledger, resources
        if is_other:
            self._await_idle()
        return True

    def lease(self, wanted: int = 1) -> PooledWorker | None:
        """The worker that was given back last; None while none is free.

        Args:
            wanted: How many would be leased now; the pool grows towards that.

        Raises:
            StageError: If workers can't start.
        """
        self.wait()
        unused = len(self._idle) + len(self._starting)
        for _ in range(min(wanted, self.resources.workers - len(self._leased)) - unused):
            self._start()
        if not self._idle or len(self._leased) >= self.resources.workers:
            return None
        worker = self._idle.pop()
        self._leased.add(worker)
        return worker

    def wait(self, tasks: Iterable[Any] = (), seconds: float = 0.0) -> list[Any]:
        """Wait until a task has ended, a worker has started or the time is over; the tasks that have ended.

        Raises:
            StageError: If workers can't start.
        """
        waited_for = [*tasks, *self._starting]
        if not waited_for:
            return []
        ended, _ = ray.wait(waited_for, timeout=seconds)
        for answer in ended:
            if worker := self._starting.pop(answer, None):
                self._note_started(answer, worker)
                return []
        return ended

    def give_back(self, worker: PooledWorker) -> None:
        """Take back a worker that has nothing to do."""
        self._leased.remove(worker)
        worker.idle_since = time.monotonic()
        self._idle.append(worker)

    def discard(self, worker: PooledWorker) -> None:
        """Take back a worker that was lost. Idle ones answer again before they are leased: a lost node had several."""
        self._leased.remove(worker)
        worker.kill()
        self._await_idle()

    def end_idle(self) -> None:
        """End workers that had nothing to do for `IDLE_SECONDS` while others have."""
        latest = time.monotonic() - IDLE_SECONDS
        if self._leased:
            self._end([worker for worker in self._idle if worker.idle_since < latest])

    def end_leased(self) -> None:
        """End workers that are at work, as nobody waits for them any more."""
        self._end(self._leased)

    def end(self) -> None:
        """End all workers."""
        self._end([*self._starting.values(), *self._idle, *self._leased])

    def _start(self) -> None:
        name = f"muscale-worker-{secrets.token_hex(8)}"
        options: dict[str, Any] = {"name": name}
        placement, n_ranks = None, self.resources.ranks_per_trial
        if not (self._starting or self._idle or self._leased):
            note_taken("resources", n_ranks, self.resources.worker)
        if n_ranks > 1:  # on one node, if one has room
            placement = placement_group([self.resources.worker] * n_ranks, strategy="PACK")
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(placement, 0)
        actor = self._remote.options(**options).remote(self.resources, package_fingerprint())
        self._await(PooledWorker(name=name, actor=actor, placement=placement))

    def _await_idle(self) -> None:
        while self._idle:
            self._await(self._idle.pop())

    def _await(self, worker: PooledWorker) -> None:
        worker.study = self.ledger.study
        self._starting[worker.actor.serve.remote(self.ledger.for_worker())] = worker

    def _note_started(self, answer: Any, worker: PooledWorker) -> None:
        try:
            ray.get(answer)
        except RayActorError as error:
            self._died_starting += not worker.has_started
            if error.actor_init_failed or self._died_starting == _STARTS:
                raise StageError(f"a worker can't start: {last_line(error)}") from error
            return
        except RayTaskError as error:
            if worker.study == self.ledger.study:
                worker.kill()
                raise StageError(f"a worker can't start: {last_line(error)}") from error
        worker.has_started, self._died_starting = True, 0
        if worker.study != self.ledger.study:
            self._await(worker)
            return
        worker.idle_since = time.monotonic()
        self._idle.append(worker)

    def _end(self, workers: Iterable[PooledWorker]) -> None:
        ended = set(workers)
        for worker in ended:
            worker.kill()
        self._starting = {answer: worker for answer, worker in self._starting.items() if worker not in ended}
        self._idle = [worker for worker in self._idle if worker not in ended]
        self._leased -= ended


def result_of(task: Any) -> Any:
    """The result of a worker's task.

    Raises:
        WorkerLostError: If the worker died.
        Exception: Whatever the task raised.
    """
    try:
        return ray.get(task)
    except RayActorError as error:
        raise WorkerLostError(last_line(error)) from error
    except RayTaskError as error:
        raise (error.cause or error) from None
