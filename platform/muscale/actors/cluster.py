"""The cluster on which a study trains, and the pool of workers that its stages share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from muscale.interrupts import defer_sigint
from muscale.ray_connection import connected, require_room
from muscale.settings.tables import ResourceSettings
from muscale.store.ledger import Ledger

if TYPE_CHECKING:
    from muscale.actors.pool import WorkerPool

_staying: ContextVar[Cluster | None] = ContextVar("staying", default=None)


class Cluster:
    """Ray, connected once something is trained, and the warm workers on it. Made by `staying_cluster`."""

    def __init__(self, at_exit: ExitStack) -> None:
        self._at_exit = at_exit
        self._pool: WorkerPool | None = None

    def connect(self, resources: ResourceSettings) -> None:
        """Join Ray or start it, as `connected` does, until the cluster is left."""
        self._at_exit.enter_context(connected(resources))

    @contextmanager
    def workers(self, ledger: Ledger, resources: ResourceSettings) -> Iterator[WorkerPool]:
        """The pool, warm from stages before, whichever study they were of. Those with other [resources] end first.

        Workers that are still at work at the end of the block end with it.

        Raises:
            StageError: If no nodes could hold a worker, with all ranks of a trial, and no autoscaler may add them.
        """
        require_room("resources", resources.ranks_per_trial, resources.worker)
        with defer_sigint():
            from muscale.actors.pool import WorkerPool

        pool = self._pool
        if pool is None or not pool.serve(ledger, resources):
            self.end_workers()
            self._pool = pool = WorkerPool(ledger, resources)
            self._at_exit.callback(pool.end)
        try:
            yield pool
        finally:
            pool.end_leased()

    def end_workers(self) -> None:
        """End all workers, for whoever needs their processors and devices."""
        if self._pool:
            self._pool.end()


@contextmanager
def staying_cluster() -> Iterator[Cluster]:
    """Within it, cluster and workers of one stage serve the later ones too; without a stage that trains, none starts."""
    if known := _staying.get():
        yield known
        return
    with ExitStack() as at_exit:
        token = _staying.set(made := Cluster(at_exit))
        try:
            yield made
        finally:
            _staying.reset(token)


def end_staying_workers() -> None:
    """End the workers that the `staying_cluster` around keeps warm, if there is one, for whoever needs what they hold."""
    if known := _staying.get():
        known.end_workers()


@contextmanager
def cluster(resources: ResourceSettings) -> Iterator[Cluster]:
    """A cluster that is connected: that of the `staying_cluster` around it, else one for the block.

    Raises:
        StageError: If Ray can't be started, or the cluster not be joined.
    """
    with staying_cluster() as found:
        found.connect(resources)
        yield found
