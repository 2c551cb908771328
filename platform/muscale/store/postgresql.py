"""The ledger in PostgreSQL: one database for all studies, with a schema (a namespace of tables) for each study.

The URL comes only from the environment, never from a study file; no message, log or file of muscale holds its password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import sqlalchemy as sa

from muscale.errors import LedgerUnavailableError, StudyDirectoryError, first_line
from muscale.store.ledger_tables import SCHEMA, metadata, studies
from muscale.store.storage import Storage, T, persist, require_schema

URL_VARIABLE = "MUSCALE_LEDGER_URL"
_DRIVERS = ("postgresql", "postgres", "postgresql+psycopg")
_IDLE_SECONDS = 60  # after which a client that vanished during a write no longer blocks others
_number = sa.Table("schema_number", sa.MetaData(), sa.Column("number", sa.Integer, nullable=False))


def url_from_environment() -> sa.URL:
    """The database's URL; raises StudyDirectoryError if it is missing or not PostgreSQL's, without its password."""
    if not (value := os.environ.get(URL_VARIABLE)):
        raise StudyDirectoryError(
            f'storage.ledger: "postgresql" takes its URL from the environment variable {URL_VARIABLE}, such as '
            "postgresql://user:password@host:5432/database; it is not set"
        )
    try:
        url = sa.make_url(value)
    except (sa.exc.ArgumentError, ValueError):
        raise StudyDirectoryError(
            f"{URL_VARIABLE}: must be a URL such as postgresql://user:password@host:5432/database"
        ) from None
    if url.drivername not in _DRIVERS:
        raise StudyDirectoryError(f"{URL_VARIABLE}: must begin with postgresql://, got {url.drivername}://")
    return url.set(drivername="postgresql+psycopg")


def shown(url: sa.URL) -> str:
    """The URL without password and options."""
    user = f"{url.username}@" if url.username else ""
    host = url.host or str(url.query.get("host", ""))
    return f"postgresql://{user}{host}{f':{url.port}' if url.port else ''}/{url.database or ''}"


SCHEMA_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


class PostgresStorage(Storage):
    """One schema of a PostgreSQL database.

    Args:
        url: URL of the database; None: the URL in the environment.
        must_exist: Refuse to begin a new ledger.
        read_only: Refuse to write.
    """

    def __init__(self, url: sa.URL | None, schema: str, *, must_exist: bool = False, read_only: bool = False) -> None:
        if not SCHEMA_NAME.fullmatch(schema):
            raise ValueError(
                f"a schema's name must consist of lower-case letters, digits and underscores, got {schema!r}"
            )
        self._url = url or url_from_environment()
        self.schema = schema
        self.name = f"{shown(self._url)} (schema {schema})"
        self._must_exist, self._read_only = must_exist, read_only
        self._answered = self._carries_url = False

    def for_worker(self) -> PostgresStorage:
        """This storage, pickled with its URL; otherwise a pickle has no URL, since it may end up in a file."""
        carrying = PostgresStorage(self._url, self.schema, must_exist=self._must_exist, read_only=self._read_only)
        carrying._carries_url = True
        return carrying

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._url if self._carries_url else None, self.schema, self._must_exist, self._read_only)

    def __repr__(self) -> str:
        return f"PostgresStorage({self.name})"

    @cached_property
    def _engine(self) -> sa.Engine:
        try:
            # A worker needs one connection, and sometimes another for its heartbeat. The isolation level is set because a server's
            # default may differ; a write would then see the state from before it waited for the lock.
            engine = sa.create_engine(self._url, pool_size=1, max_overflow=3, isolation_level="READ COMMITTED")
        except ModuleNotFoundError as error:
            raise StudyDirectoryError(
                f"storage.ledger: \"postgresql\" needs psycopg, install it with: pip install 'muscale[postgresql]' ({error})"
            ) from None

        @sa.event.listens_for(engine, "connect")
        def _configure(connection: Any, _record: object) -> None:
            connection.autocommit = True
            connection.execute(f'SET search_path TO "{self.schema}"')
            connection.execute(f"SET idle_in_transaction_session_timeout = '{_IDLE_SECONDS}s'")
            if self._read_only:
                connection.execute("SET default_transaction_read_only = on")
            connection.autocommit = False

        try:
            with engine.connect() as connection:
                self._make_or_check(connection)
                connection.commit()
        except BaseException:
            engine.dispose()
            raise
        return engine

    def _make_or_check(self, connection: sa.Connection) -> None:
        """Create the schema and tables of a new ledger; refuse a ledger of another version."""
        tables = sa.inspect(connection).get_table_names(schema=self.schema)
        if not tables and (self._must_exist or self._read_only):
            raise StudyDirectoryError(
                f"{self.name}: the study's ledger is not in this database; check whether {URL_VARIABLE} has changed"
            )
        if not tables:
            self._lock(connection)
            tables = sa.inspect(connection).get_table_names(schema=self.schema)  # another process may have been faster
        if tables:
            number = connection.execute(sa.select(_number.c.number)).scalar() if _number.name in tables else 0
            require_schema(self.name, int(number or 0))
            return
        connection.execute(sa.schema.CreateSchema(self.schema, if_not_exists=True))
        metadata.create_all(connection)
        _number.create(connection)
        connection.execute(sa.insert(_number).values(number=SCHEMA))

    def _lock(self, connection: sa.Connection) -> None:
        """Let only one transaction of this study write at a time, until it ends."""
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": self.schema})

    def transact(self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any], *, write: bool) -> T:
        """Run a transaction; a write locks the study from its start. An unreachable server is waited for if it answered before."""

        def attempt() -> T:
            try:
                with self._engine.connect() as connection:
                    if write:
                        self._lock(connection)
                    else:
                        connection = connection.execution_options(isolation_level="REPEATABLE READ")
                    found = function(connection, *args, **kwargs)
                    connection.commit()
            except sa.exc.OperationalError as error:
                if self._answered:
                    raise
                raise LedgerUnavailableError(f"{self.name}: {first_line(error)}") from None
            self._answered = True
            return found

        return persist(self.name, attempt, _is_passing)

    @contextmanager
    def snapshot(self) -> Iterator[Callable[..., Any]]:
        """Yield a `read` that sees one state of the database, however often and for how long it is called.

        Raises:
            LedgerUnavailableError: If the server can't be reached; from the `read`, if the connection is lost later.
        """

        def call_checked(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
            try:
                return call(*args, **kwargs)
            except sa.exc.OperationalError as error:
                raise LedgerUnavailableError(f"{self.name}: {first_line(error)}") from None

        with call_checked(lambda: self._engine.connect()) as connection:
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
            # The snapshot blocks no writes, and the caller may take long between two reads.
            call_checked(connection.exec_driver_sql, "SET LOCAL idle_in_transaction_session_timeout = 0")
            yield lambda function, *args, **kwargs: call_checked(function, connection, *args, **kwargs)

    def drop_unclaimed(self) -> None:
        """Remove the schema, unless it belongs to a study."""
        self.write(_drop_unclaimed, self.schema)


def _drop_unclaimed(connection: sa.Connection, schema: str) -> None:
    if connection.execute(sa.select(studies)).first() is None:
        connection.execute(sa.schema.DropSchema(schema, cascade=True))


def _is_passing(error: Exception) -> bool:
    """Whether the server may be back soon: a lost or refused connection, not a refused statement."""
    return isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError) or (
        isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated
    )


def _reopen(url: sa.URL | None, schema: str, must_exist: bool, read_only: bool) -> PostgresStorage:
    storage = PostgresStorage(url, schema, must_exist=must_exist, read_only=read_only)
    storage._answered = url is not None  # the driver's storage was answered, so a worker may wait for the server
    return storage
