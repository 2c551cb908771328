"""Read access to another study's ledger, for `learn_from` and `calibration`: nothing in it is run, and nothing is written.

An SQLite file that somebody else made may define what is computed as it is read: a view that never ends, a generated column, a
virtual table. Or its pages may point at each other so that a walk through them does not end. `require_safe` follows what SQLite
advises for files that are not trusted (https://sqlite.org/security.html, section 2).
"""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa

from muscale.errors import StudyDirectoryError, first_line
from muscale.layout import LEDGER
from muscale.store.open_ledger import read_place
from muscale.store.postgresql import PostgresStorage
from muscale.store.storage import require_schema, sqlite_schema
from muscale.store.tables import REFUSALS

MAX_VALUE_BYTES = 1 << 28
"""Largest size of one value; a fit with its bootstrap takes some megabytes (assumed)."""
_GENERATED = (2, 3)  # `hidden` in `table_xinfo`: computed when the column is read, or when it was written

Read = Callable[..., Any]
"""Calls a function with a connection and further arguments, as `Storage.read` does."""


@contextmanager
def open_read_only(source: Path) -> Iterator[tuple[str, Read]]:
    """The ledger of a study's file or directory, or an SQLite file: its name for messages, and its `read` in one snapshot.

    Raises:
        StudyDirectoryError: If there is no ledger, it has another schema, it lies on another machine, or its file is damaged or
            defines something that would run.
        LedgerUnavailableError: If its database does not answer.
    """
    source = (source.parent if source.suffix == ".toml" else source).absolute()  # SQLite's URIs are absolute
    place = read_place(source) if source.is_dir() else None
    if place and place["ledger"] == "postgresql":
        storage = PostgresStorage(None, place["schema"], read_only=True)
        try:
            with storage.snapshot() as read:
                yield storage.name, _refusing(storage.name, read)
        finally:
            storage.close()
        return
    path = Path(place["path"]) if place else source / LEDGER if source.is_dir() else source
    if place and place["host"] != socket.gethostname():
        raise StudyDirectoryError(f"{path}: lies on {place['host']}; copy it from there")
    if not path.is_file():
        raise StudyDirectoryError(f"{path}: no such ledger")
    uri, name = read_only_uri(path), str(path)
    engine = sa.create_engine("sqlite://", creator=lambda: connect(uri), poolclass=sa.pool.StaticPool)
    try:
        with _refusing(name, engine.connect)() as connection:
            driver = cast(sqlite3.Connection, connection.connection.driver_connection)
            if fault := _refusing(name, fault_of)(driver, REFUSALS["sqlite"]):
                raise StudyDirectoryError(f"{name}: can't be read as a ledger: {fault}")
            require_schema(name, _refusing(name, sqlite_schema)(connection))
            connection.exec_driver_sql("BEGIN")  # one snapshot for all that is read
            yield name, _refusing(name, lambda function, *args, **kwargs: function(connection, *args, **kwargs))
    finally:
        engine.dispose()


def connect(uri: str) -> sqlite3.Connection:
    """A connection to an untrusted file, which any thread may use; `uri` is as `read_only_uri` returns it."""
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "ignore_check_constraints = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def read_only_uri(path: Path) -> str:
    """The URI by which SQLite only reads a file.

    A log that others are writing has to be read through SQLite's own locks; without one, nothing is made beside the file.
    """
    log = path.with_name(f"{path.name}-wal")
    unwritten = log.exists() and log.stat().st_size > 0
    return f"{path.as_uri()}?mode=ro" + ("" if unwritten else "&immutable=1")


def fault_of(connection: sqlite3.Connection, triggers: Collection[str] = ()) -> str:
    """The reason why an untrusted SQLite file must not be read, or "".

    Args:
        connection: Of `connect`.
        triggers: Triggers that the file may have, as SQLite keeps them.

    Raises:
        sqlite3.DatabaseError: If it is no database, or too damaged to be checked.
    """
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        text = " ".join(str(sql or "").split())
        if kind == "view" or (kind == "trigger" and text not in triggers):
            return f"{name}: must be a table, got a {kind}, which could run when it is read"
        if kind == "table" and text.upper().startswith("CREATE VIRTUAL"):
            return f"{name}: must be a table with rows of its own, got {text[:60]!r}"
        if kind == "table":
            columns = connection.execute("SELECT name, hidden FROM pragma_table_xinfo(?)", (name,)).fetchall()
            if generated := [column for column, hidden in columns if hidden in _GENERATED]:
                return f"{name}.{generated[0]}: must be a column with values of its own, got one that is computed"
    check = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    return "" if check == "ok" else f"is damaged: {' '.join(check.split())[:200]}"


def _refusing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Make the call; its errors are refused as faults of the source."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except (sa.exc.DBAPIError, sqlite3.Error) as error:
            raise StudyDirectoryError(f"{name}: can't be read as a ledger: {first_line(error)}") from None
        except (ValueError, TypeError, LookupError, RecursionError) as error:  # what should be JSON, or in it, is not
            raise StudyDirectoryError(f"{name}: can't be read as a ledger: {type(error).__name__}: {error}") from None

    return checked
