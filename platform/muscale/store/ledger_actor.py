"""An SQLite ledger for several machines: a named Ray actor on the node that holds the file runs every transaction.

A write counts once the actor has acknowledged it. The actor is found by name, and created if it does not exist. If it dies with
its process or with the driver that created it, the next process that needs it creates it again on the same node. Without a
running cluster, a process on the file's machine opens the file itself.
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
_CALL_SECONDS = 60.0  # without an answer, after which the call is repeated


class LedgerActor:
    """Owns the file, inside Ray."""

    def __init__(self, path: Path) -> None:
        self._storage = SqliteStorage(path, must_exist=True)

    def run(self, package: str, function: Callable[..., Any], args: Any, kwargs: Any, write: bool) -> Any:
        """Run one transaction for a caller with the same package."""
        require_same_package(package)
        return self._storage.transact(function, args, kwargs, write=write)


class ActorStorage(Storage):
    """The file at a path of one host, reached through its actor.

    Args:
        host: Name of the machine that holds the file, as Ray reports it.
    """

    def __init__(self, host: str, path: Path) -> None:
        self.host, self.path = host, path
        self.name = f"{host}:{path}"
        self._file = SqliteStorage(path, must_exist=True)
        self._actor: tuple[Any, Any] | None = None  # with the connection to Ray for which it is valid

    def __reduce__(self) -> tuple[type[ActorStorage], tuple[str, Path]]:
        return type(self), (self.host, self.path)

    def transact(self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any], *, write: bool) -> T:
        """Run a transaction in the actor; on the file itself if no cluster runs and this is its host."""
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
        """Join the cluster, since the file is on another machine."""
        import ray

        from muscale.ray_connection import connect

        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            connect(address=address)
        except (ConnectionError, ray.exceptions.RaySystemError) as error:
            raise StudyDirectoryError(
                f"{self.name}: the ledger is on {self.host}, but this is {socket.gethostname()}: run there, or set "
                f"RAY_ADDRESS to a cluster that includes {self.host} ({error})"
            ) from None

    def actor(self) -> Any:
        """The actor's handle; raises StudyDirectoryError if no node of the cluster holds the file."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        context = ray.get_runtime_context()
        connection = (context.get_node_id(), context.get_job_id())  # both change when Ray is started again
        if self._actor is None or self._actor[0] != connection:
            name = f"ledger-{content_key([self.host, str(self.path)])}"
            try:
                actor = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:  # there is no such actor
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
        """The id of the host's node: this process's node, if there are several on the host."""
        from muscale.ray_connection import alive_nodes

        alive = alive_nodes()
        there = sorted(node["NodeID"] for node in alive if node["NodeManagerHostname"] == self.host)
        if not there:
            raise StudyDirectoryError(
                f"{self.name}: the ledger is on {self.host}, which is not a node of this cluster; its nodes are "
                f"{', '.join(sorted({node['NodeManagerHostname'] for node in alive}))}"
            )
        return mine if mine in there else there[0]

    def close(self) -> None:
        """Close this process's connections; the actor stays, since others may use it."""
        self._file.close()
        self._actor = None


def _connected() -> bool:
    """Whether this process is connected to Ray, without importing Ray; while another thread imports it, its functions are missing."""
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())
