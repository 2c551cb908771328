"""Read access to another study's ledger, for `learn_from` and `calibration`: executes and writes nothing.

An SQLite file from somebody else may define code that runs when it is read: a view that never ends, a generated column, a
virtual table. Its pages may also point at each other so that a walk through them does not end. `require_safe` follows SQLite's
advice for untrusted files (https://sqlite.org/security.html, section 2).
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
from muscale.store.ledger_tables import REFUSALS
from muscale.store.open_ledger import read_place
from muscale.store.postgresql import PostgresStorage
from muscale.store.storage import require_schema, sqlite_schema

MAX_VALUE_BYTES = 1 << 28
"""Largest size of one value; a fit with its bootstrap takes some megabytes (assumed)."""
_GENERATED = (2, 3)  # `hidden` in `table_xinfo`: computed when the column is read, or when it is written

Read = Callable[..., Any]
"""Function that calls another with a connection and further arguments, as `Storage.read` does."""


@contextmanager
def open_read_only(source: Path) -> Iterator[tuple[str, Read]]:
    """Open the ledger of a study's file or directory, or an SQLite file; yield its name for messages and its `read` on one snapshot.

    Raises:
        StudyDirectoryError: If there is no ledger, it has another schema, it is on another machine, or its file is damaged or
            defines code that would run.
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
        raise StudyDirectoryError(f"{path}: the ledger is on {place['host']}; copy it from there")
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
            connection.exec_driver_sql("BEGIN")  # one snapshot for all reads
            yield name, _refusing(name, lambda function, *args, **kwargs: function(connection, *args, **kwargs))
    finally:
        engine.dispose()


def connect(uri: str) -> sqlite3.Connection:
    """Open a connection to an untrusted file; any thread may use it; `uri` comes from `read_only_uri`."""
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "ignore_check_constraints = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def read_only_uri(path: Path) -> str:
    """The URI with which SQLite only reads a file.

    A write-ahead log in use has to be read through SQLite's locks; without a log, SQLite creates no files next to the database.
    """
    log = path.with_name(f"{path.name}-wal")
    unwritten = log.exists() and log.stat().st_size > 0
    return f"{path.as_uri()}?mode=ro" + ("" if unwritten else "&immutable=1")


def fault_of(connection: sqlite3.Connection, triggers: Collection[str] = ()) -> str:
    """The reason why an untrusted SQLite file must not be read; "" if it may be read.

    Args:
        triggers: SQL of the triggers that the file may have, as SQLite stores it.

    Raises:
        sqlite3.DatabaseError: If the file is not a database, or too damaged to be checked.
    """
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        text = " ".join(str(sql or "").split())
        if kind == "view" or (kind == "trigger" and text not in triggers):
            return f"{name}: must be a table, got a {kind}, which could run when it is read"
        if kind == "table" and text.upper().startswith("CREATE VIRTUAL"):
            return f"{name}: must be an ordinary table, got {text[:60]!r}"
        if kind == "table":
            columns = connection.execute("SELECT name, hidden FROM pragma_table_xinfo(?)", (name,)).fetchall()
            if generated := [column for column, hidden in columns if hidden in _GENERATED]:
                return f"{name}.{generated[0]}: must be a stored column, got a generated one"
    check = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    return "" if check == "ok" else f"is damaged: {' '.join(check.split())[:200]}"


def _refusing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call so that its errors are reported as faults of the source."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except (sa.exc.DBAPIError, sqlite3.Error) as error:
            raise StudyDirectoryError(f"{name}: can't be read as a ledger: {first_line(error)}") from None
        except (ValueError, TypeError, LookupError, RecursionError) as error:  # a value is not JSON, or other JSON
            raise StudyDirectoryError(f"{name}: can't be read as a ledger: {type(error).__name__}: {error}") from None

    return checked
