"""Storages of a ledger: databases that run functions of a connection, each in one transaction.

A storage runs module-level functions with plain arguments, so that a process on another machine can run them
(`muscale.store.ledger_actor`). A write may run again if its answer was lost, so running a function twice must have the effect of
once: rows are inserted once by key, and the caller provides times.
"""

from __future__ import annotations

import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil
import sqlalchemy as sa

from muscale.errors import LedgerUnavailableError, StudyDirectoryError, first_line
from muscale.store.ledger_tables import SCHEMA, metadata

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_SECONDS = 120.0  # longer than a restart of a server or an actor (assumed)
_LONGEST_PAUSE = 1.0  # seconds between two attempts, at most
NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "glusterfs", "fuse.sshfs", "ceph"}
_BUSY_SECONDS = 60.0
_CACHE_KIB = 64 * 1024  # of SQLite, for the 30 MiB index of a million segments; the default is 2 MiB

_log = logging.getLogger(__name__)


class Storage(ABC):
    """A database that keeps a ledger; picklable, since each process opens its own connections.

    Attributes:
        name: Name in messages; never holds a password.
    """

    name: str

    def for_worker(self) -> Storage:
        """This storage as an argument of a worker's call; it may hold a password and must not be written to a file."""
        return self

    def read(self, function: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function on one snapshot of the database, and return its result."""
        return self.transact(function, args, kwargs, write=False)

    def write(self, function: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function while nobody else writes; its changes are kept when this returns, and discarded if it raises."""
        return self.transact(function, args, kwargs, write=True)

    @abstractmethod
    def transact(self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any], *, write: bool) -> T:
        """Call the function with a connection and these arguments, in one transaction, as for `read` and `write`."""

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        if engine := self.__dict__.pop("_engine", None):
            engine.dispose()


class SqliteStorage(Storage):
    """An SQLite file on a local disk, shared by the processes of one machine.

    Args:
        must_exist: Refuse to begin a new ledger.
    """

    def __init__(self, path: Path, *, must_exist: bool = False) -> None:
        self.path = path.absolute()
        self.name = str(self.path)
        self._must_exist = must_exist

    def __reduce__(self) -> tuple[Any, ...]:
        return _sqlite, (self.path, socket.gethostname())

    @cached_property
    def _engine(self) -> sa.Engine:
        if (kind := file_system(self.path.parent)) in NETWORK_FILE_SYSTEMS:
            raise StudyDirectoryError(
                f"{self.path}: SQLite can't keep a ledger on {kind}; put the study on a local disk, or set "
                'storage.ledger to "actor" with a storage.path on a local disk, or to "postgresql"'
            )
        if self._must_exist and not self.path.exists():
            raise StudyDirectoryError(
                f"{self.path}: the study's ledger is gone; restore the file, or start the study again"
            )
        url = sa.URL.create("sqlite", database=str(self.path))  # as text it would end at a question mark in the path
        engine = sa.create_engine(url, connect_args={"timeout": _BUSY_SECONDS})

        @sa.event.listens_for(engine, "connect")
        def _configure(connection: Any, _record: object) -> None:
            connection.isolation_level = None  # transactions begin in `transact`
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")

        try:
            with engine.connect() as connection:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                self._make_or_check(connection)
                connection.commit()
        except sa.exc.OperationalError as error:  # locked for the whole waiting time, or its folder is missing
            engine.dispose()
            raise LedgerUnavailableError(f"{self.name}: the ledger can't be opened: {first_line(error)}") from None
        except sa.exc.DatabaseError as error:
            engine.dispose()
            raise _with_advice(self.name, error) from None
        except BaseException:
            engine.dispose()
            raise
        return engine

    def _make_or_check(self, connection: sa.Connection) -> None:
        """Create the tables of a new ledger; refuse a ledger of another schema. SQLite stores the schema's number."""
        if sa.inspect(connection).get_table_names():
            require_schema(self.name, sqlite_schema(connection))
            return
        metadata.create_all(connection)
        connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA}")

    def transact(self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any], *, write: bool) -> T:
        """Run a transaction; a write has the lock from its start, so that what it reads can't change before it writes."""
        with self._engine.connect() as connection:
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    found = function(connection, *args, **kwargs)
                except BaseException:
                    connection.rollback()
                    raise
                connection.commit()
            except sa.exc.DatabaseError as error:
                raise _with_advice(self.name, error) from None
            return found


def _with_advice(name: str, error: sa.exc.DatabaseError) -> Exception:
    """An SQLite error with advice on what to do; errors in statements stay unchanged."""
    match getattr(error.orig, "sqlite_errorname", "").split("_")[:2]:
        case ["SQLITE", "NOTADB"]:
            return StudyDirectoryError(
                f"{name}: is not a ledger: {first_line(error)}; restore it from a copy, or start the study again"
            )
        case ["SQLITE", "CORRUPT"]:
            return StudyDirectoryError(
                f"{name}: the ledger is damaged: {first_line(error)}; nothing was written; restore the file from a copy, or "
                "start the study again in another directory"
            )
        case ["SQLITE", "BUSY"]:  # it has waited for the lock as long as allowed
            return LedgerUnavailableError(
                f"{name}: another process has kept the ledger busy for {_BUSY_SECONDS:.0f} s ({first_line(error)})"
            )
        case ["SQLITE", "READONLY"]:
            return LedgerUnavailableError(
                f"{name}: the ledger can't be written: {first_line(error)}; check the permissions of the file and its folder, and run "
                "the same command again"
            )
        case ["SQLITE", "FULL" | "IOERR" | "CANTOPEN"]:
            return LedgerUnavailableError(
                f"{name}: the ledger can't be written: {first_line(error)}; check its disk and run the same command again to resume"
            )
    return error


def _sqlite(path: Path, host: str) -> SqliteStorage:
    """Unpickle a worker's storage, which never begins a ledger: on another machine the path would be another file."""
    if host != socket.gethostname():
        raise StudyDirectoryError(
            f"{path}: this ledger is SQLite on {host}, and the worker runs on {socket.gethostname()}; for several machines "
            'set storage.ledger to "actor" with a storage.path on a local disk, or to "postgresql"'
        )
    return SqliteStorage(path, must_exist=True)


def sqlite_schema(connection: sa.Connection) -> int:
    """The schema number of an SQLite ledger; 0 for a file that is no ledger."""
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar() or 0)


def require_schema(name: str, found: int) -> None:
    """Refuse a ledger of another schema; raise StudyDirectoryError with both numbers and advice."""
    if found != SCHEMA:
        raise StudyDirectoryError(
            f"{name}: the ledger has schema {found}, this version of muscale reads schema {SCHEMA}; open it with the version "
            "that wrote it, or start the study in a new directory"
        )


def persist(name: str, attempt: Callable[[], T], transient: Callable[[Exception], bool]) -> T:
    """Repeat an attempt while its errors are transient; raise LedgerUnavailableError if `name` is silent for `PATIENCE_SECONDS`."""
    begun, pause = time.monotonic(), 0.05
    while True:
        try:
            return attempt()
        except Exception as error:
            if not transient(error):
                raise
            if (waited := time.monotonic() - begun) > PATIENCE_SECONDS:
                raise LedgerUnavailableError(
                    f"{name}: the ledger has not answered for {waited:.0f} s; make it available and run the same command "
                    f"again to continue ({first_line(error)})"
                ) from None
            if pause < _LONGEST_PAUSE <= 2 * pause:  # only once
                _log.warning("%s: the ledger does not answer, trying again: %s", name, first_line(error))
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE, 2 * pause)


def file_system(path: Path) -> str:
    """Type of the file system that holds `path`, after following links."""
    path = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""
