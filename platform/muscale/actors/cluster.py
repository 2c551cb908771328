"""The Ray cluster on which the stages of a study train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from muscale.ray_connection import connected
from muscale.settings.tables import ResourceSettings

_staying: ContextVar[Cluster | None] = ContextVar("staying", default=None)


class Cluster:
    """Ray, connected once something is trained. Made by `staying_cluster`."""

    def __init__(self, at_exit: ExitStack) -> None:
        self._at_exit = at_exit

    def connect(self, resources: ResourceSettings) -> None:
        """Join Ray or start it, as `connected` does, until the cluster is left."""
        self._at_exit.enter_context(connected(resources))


@contextmanager
def staying_cluster() -> Iterator[Cluster]:
    """Keep one cluster for all stages within the block; Ray starts with the first stage that trains."""
    if known := _staying.get():
        yield known
        return
    with ExitStack() as at_exit:
        token = _staying.set(made := Cluster(at_exit))
        try:
            yield made
        finally:
            _staying.reset(token)


@contextmanager
def cluster(resources: ResourceSettings) -> Iterator[Cluster]:
    """Connect to the cluster of the `staying_cluster` around the block, or to one for the block; raise StageError if that fails."""
    with staying_cluster() as found:
        found.connect(resources)
        yield found
