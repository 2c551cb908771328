"""Checks whether a study can be kept in a directory: free space, file system, writing, and the ledger's database."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from muscale.errors import StudyDirectoryError, first_line
from muscale.machine.diagnosis import Finding
from muscale.store.postgresql import URL_VARIABLE, shown, url_from_environment
from muscale.store.storage import NETWORK_FILE_SYSTEMS, file_system

if TYPE_CHECKING:
    from muscale.settings.tables import StorageSettings

LITTLE_BYTES, TOO_LITTLE_BYTES = 10e9, 0.2e9  # assumed: some checkpoints of a small run; less than a quickstart needs
_ANSWER_SECONDS = 5


def storage_findings(directory: Path, settings: StorageSettings | None = None) -> list[Finding]:
    """Findings about space and writing in the study's directory, and about its ledger's database; leaves no files behind.

    Args:
        settings: [storage]; None: its defaults.
    """
    kind = file_system(directory)
    local = kind not in NETWORK_FILE_SYSTEMS
    free = shutil.disk_usage(directory).free
    where = f"{directory} on {kind or 'an unknown file system'} ({'local' if local else 'network'})"
    findings = [
        Finding(
            what="disk",
            status="fail" if free < TOO_LITTLE_BYTES else "warning" if free < LITTLE_BYTES else "ok",
            found=f"{free / 1e9:.1f} GB free in {where}",
            do="free some space, or move the study; `muscale gc` removes states of old studies"
            if free < LITTLE_BYTES
            else "",
        )
    ]
    try:
        with tempfile.TemporaryDirectory(prefix=".muscale-doctor-", dir=directory) as folder:
            mode = _journal(Path(folder))
    except (OSError, sqlite3.Error) as error:
        do = f"make it writable for user {os.getuid()}, or move the study"
        return [*findings, Finding(what="writing", status="fail", found=f"{directory}: {error}", do=do)]
    findings.append(Finding(what="writing", status="ok", found=f"{directory} takes files"))
    if settings and settings.ledger == "postgresql":
        return [*findings, _postgresql()]
    if settings and settings.ledger == "actor":
        found = f"SQLite through an actor, at {settings.path or 'the study directory'}"
        return [*findings, Finding(what="ledger", status="ok", found=found)]
    do = 'set storage.ledger to "actor" with a storage.path on a local disk, or to "postgresql"'
    if not local:
        return [*findings, Finding(what="ledger", status="fail", found=f"SQLite can't keep a ledger on {kind}", do=do)]
    if mode != "wal":
        return [*findings, Finding(what="ledger", status="fail", found=f"SQLite has no WAL here, but {mode}", do=do)]
    return [*findings, Finding(what="ledger", status="ok", found="SQLite with a write-ahead log")]


def _journal(folder: Path) -> str:
    """The journal mode of SQLite after a request for WAL and a write."""
    connection = sqlite3.connect(folder / "try.sqlite")
    try:
        mode = str(connection.execute("PRAGMA journal_mode=WAL").fetchone()[0])
        connection.execute("CREATE TABLE tried (number INTEGER)")
        connection.commit()
    finally:
        connection.close()
    return mode


def _postgresql() -> Finding:
    """Check that the server named by the environment answers; never shows the password."""
    try:
        url = url_from_environment()
    except StudyDirectoryError as error:
        return Finding(what="ledger", status="fail", found=str(error), do=f"set {URL_VARIABLE}; docs/cluster.md")
    try:
        engine = sa.create_engine(url, connect_args={"connect_timeout": _ANSWER_SECONDS})
        with engine.connect() as connection:
            version = connection.execute(sa.text("SHOW server_version")).scalar()
        engine.dispose()
    except ModuleNotFoundError:
        return Finding(
            what="ledger", status="fail", found="psycopg is not installed", do="pip install 'muscale[postgresql]'"
        )
    except sa.exc.OperationalError as error:
        return Finding(
            what="ledger",
            status="fail",
            found=f"{shown(url)} refuses the connection: {first_line(error)}",
            do=f"check that the server is running and that user and password in {URL_VARIABLE} are right",
        )
    return Finding(what="ledger", status="ok", found=f"PostgreSQL {version} answers at {shown(url)}")
