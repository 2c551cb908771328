"""An SQLite ledger for several machines: one named Ray actor, pinned to the node that holds the file, runs every transaction.

A write counts once the actor has acknowledged it. The actor is found by its name, and made where it is not there; when it
dies with its process or with the driver that made it, whoever needs it next makes it again on the same node. Where no
cluster runs, a process of the file's own machine opens the file itself.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muscale.errors import StudyDirectoryError
from muscale.fingerprint import package_fingerprint, require_same_package
from muscale.store.storage import SqliteStorage, Storage, T, persist
from proxy_models.hashing import content_key

NAMESPACE = "muscale"
_CALL_SECONDS = 60.0  # without an answer: the call is made again


class LedgerActor:
    """Owns the file, inside Ray."""

    def __init__(self, path: Path) -> None:
        self._storage = SqliteStorage(path, must_exist=True)

    def run(self, package: str, function: Callable[..., Any], args: Any, kwargs: Any, write: bool) -> Any:
        """One transaction for a caller of the same package."""
        require_same_package(package)
        return self._storage.transact(function, args, kwargs, write=write)


class ActorStorage(Storage):
    """The file at a path of one host, reached through its actor.

    Args:
        host: Name of the machine that holds the file, as Ray tells it.
    """

    def __init__(self, host: str, path: Path) -> None:
        self.host, self.path = host, path
        self.name = f"{host}:{path}"
        self._file = SqliteStorage(path, must_exist=True)
        self._actor: tuple[Any, Any] | None = None  # of one connection to Ray

    def __reduce__(self) -> tuple[type[ActorStorage], tuple[str, Path]]:
        return type(self), (self.host, self.path)

    def transact(self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any], *, write: bool) -> T:
        """One transaction of the actor's; of the file itself where no cluster runs and this is its host."""
        if not _connected():
            if self.host == socket.gethostname():
                return self._file.transact(function, args, kwargs, write=write)
            self._connect()
        import ray

        def attempt() -> T:
            try:
                actor = self.actor()
                call = actor.run.remote(package_fingerprint(), function, args, kwargs, write)
                found: T = ray.get(call, timeout=_CALL_SECONDS)
            except ray.exceptions.RayTaskError as error:
                raise (error.cause or error) from None
            except lost:
                self._actor = None
                raise
            return found

        lost = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
        passing = (*lost, ray.exceptions.GetTimeoutError)
        return persist(self.name, attempt, lambda error: isinstance(error, passing))

    def _connect(self) -> None:
        """Join the cluster, as the file is on another machine."""
        import ray

        from muscale.ray_connection import connect

        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            connect(address=address)
        except (ConnectionError, ray.exceptions.RaySystemError) as error:
            raise StudyDirectoryError(
                f"{self.name}: the ledger lies on {self.host}, and this is {socket.gethostname()}: run there, or set "
                f"RAY_ADDRESS to a cluster that {self.host} is a node of ({error})"
            ) from None

    def actor(self) -> Any:
        """The actor's handle.

        Raises:
            StudyDirectoryError: If no node of the cluster holds the file.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        context = ray.get_runtime_context()
        connection = (context.get_node_id(), context.get_job_id())  # both new after Ray was shut down and started again
        if self._actor is None or self._actor[0] != connection:
            name = f"ledger-{content_key([self.host, str(self.path)])}"
            try:
                actor = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:  # not there
                remote: Any = ray.remote(num_cpus=0, max_restarts=-1)(LedgerActor)
                actor = remote.options(
                    name=name,
                    namespace=NAMESPACE,
                    get_if_exists=True,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(self._node(context.get_node_id()), soft=False),
                ).remote(self.path)
            self._actor = connection, actor
        return self._actor[1]

    def _node(self, mine: str) -> str:
        """The id of the host's node: this process's own, if it is one of several on the host."""
        from muscale.ray_connection import alive_nodes

        alive = alive_nodes()
        there = sorted(node["NodeID"] for node in alive if node["NodeManagerHostname"] == self.host)
        if not there:
            raise StudyDirectoryError(
                f"{self.name}: the ledger lies on {self.host}, which is no node of this cluster; its nodes are "
                f"{', '.join(sorted({node['NodeManagerHostname'] for node in alive}))}"
            )
        return mine if mine in there else there[0]

    def close(self) -> None:
        """Close this process's connections; the actor stays, as others may use it."""
        self._file.close()
        self._actor = None


def _connected() -> bool:
    """Whether this process is connected to Ray, without importing it; while another thread does, it has no functions yet."""
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())
