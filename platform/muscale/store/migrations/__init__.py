"""Brings the ledger of an older version to this one's schema, by revisions of alembic's that the package brings along.

A ledger's schema has a number, and so has each revision: the number that it leads to. The number in the database is the one
place that says where a ledger is; alembic's own table of versions, which could say otherwise, is not used. A revision runs in
the transaction, and under the lock, of whoever opens the ledger; to alter a table of SQLite it may not use alembic's batches on
`forecasts`, as a table that is made anew loses the triggers that make forecasts final.
"""

from __future__ import annotations

import logging
from importlib import resources

import sqlalchemy as sa

from muscale.errors import StudyDirectoryError, first_line
from muscale.store.tables import SCHEMA

OLDEST = 3
"""The first schema that migrates."""
_log = logging.getLogger(__name__)


def is_older(name: str, found: int) -> bool:
    """Whether a ledger with this schema has to be migrated first.

    Raises:
        StudyDirectoryError: If it can't be: it is too old, or newer than this version; with what to do.
    """
    if OLDEST <= found <= SCHEMA:
        return found < SCHEMA
    raise StudyDirectoryError(
        f"{name}: the ledger has schema {found}, this version of muscale needs {SCHEMA}"
        + (f" and migrates from {OLDEST} on" if found < OLDEST else "")
        + f": open it with the {'older' if found < OLDEST else 'newer'} version that wrote it, or begin the study in a new "
        "directory"
    )


def migrate(connection: sa.Connection, name: str, found: int) -> None:
    """Run every revision after the schema that was found, within the transaction of the connection.

    Raises:
        StudyDirectoryError: If one fails; the transaction is then not to be committed.
    """
    from alembic.operations import Operations  # a tenth of a second, which few openings need
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    with resources.as_file(resources.files(__name__)) as folder:
        revisions = [*ScriptDirectory(str(folder)).iterate_revisions(str(SCHEMA), str(found))]
        try:
            with Operations.context(MigrationContext.configure(connection)):
                for revision in reversed(revisions):
                    revision.module.upgrade()
        except sa.exc.DBAPIError as error:
            if error.connection_invalidated:  # a server that is away, of which the caller knows more
                raise
            raise StudyDirectoryError(
                f"{name}: the ledger can't be migrated from schema {found} to {SCHEMA}, and stays as it was: {first_line(error)}"
            ) from None


def tell(name: str, found: int, kept: str) -> None:
    """Say once that a ledger was migrated; `kept` says where it is kept as it was."""
    _log.warning("%s: the ledger was migrated from schema %d to %d%s", name, found, SCHEMA, kept)
