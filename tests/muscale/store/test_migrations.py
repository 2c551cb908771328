"""A ledger of an older version is brought to this one's schema once, as a whole or not at all, and loses nothing."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from muscale import StudyDirectoryError
from muscale.layout import LEDGER, LEDGER_PLACE
from muscale.settings.config import StorageSettings
from muscale.store.ledger import Ledger
from muscale.store.open_ledger import open_ledger
from muscale.store.postgresql import PostgresStorage
from muscale.store.tables import SCHEMA, metadata

KEPT = Path(__file__).parent / "schema_3"
POSTGRESQL = StorageSettings(ledger="postgresql")
Rows = dict[str, list[tuple[Any, ...]]]

OPEN_AND_DIE = """
import os, signal, sys
import sqlalchemy as sa
from pathlib import Path
from muscale.settings.config import StorageSettings
from muscale.store.open_ledger import open_ledger
sa.event.listen(sa.Engine, "commit", lambda connection: os.kill(os.getpid(), signal.SIGKILL))
open_ledger(StorageSettings(ledger=sys.argv[2]), Path(sys.argv[1]), "s").trials("s")
"""


class OldSqlite:
    """A study's directory with an SQLite ledger of schema 3."""

    kind = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.directory = folder
        folder.mkdir()
        with closing(sqlite3.connect(folder / LEDGER)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            for script in ("sqlite", "rows"):
                connection.executescript((KEPT / f"{script}.sql").read_text())

    def open(self) -> Ledger:
        return open_ledger(StorageSettings(), self.directory, "s")

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.directory / LEDGER)) as connection, connection:
            return connection.execute(statement).fetchall()

    def number(self) -> int:
        return int(self.run("PRAGMA user_version")[0][0])

    def made_of(self) -> set[tuple[str, ...]]:
        """Tables, indexes and triggers, as they were made."""
        found = self.run("SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        return {(*names, re.sub(r"\s+", " ", sql).replace("( ", "(").replace(" )", ")")) for *names, sql in found}


class OldPostgres:
    """A study's directory whose ledger is of schema 3 in a PostgreSQL database."""

    kind = "postgresql"

    def __init__(self, folder: Path, url: str) -> None:
        self.directory, self._url, self.schema = folder, url, f"study_{folder.name}_{abs(hash(folder)):x}"
        folder.mkdir()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {self.schema}")
        for script in ("postgresql", "rows"):
            self.run((KEPT / f"{script}.sql").read_text())
        place = {"ledger": "postgresql", "schema": self.schema}
        (folder / LEDGER_PLACE).write_text(json.dumps(place))

    def open(self) -> Ledger:
        return open_ledger(POSTGRESQL, self.directory, "s")

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._url) as connection:
            connection.execute(f"SET search_path TO {self.schema}")
            found = connection.execute(statement.encode())
            return found.fetchall() if found.description else []

    def number(self) -> int:
        return int(self.run("SELECT number FROM schema_number")[0][0])

    def made_of(self) -> set[tuple[str, ...]]:
        """Columns, indexes, with them the keys, and triggers, without the schema's name."""
        columns = (
            "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns "
            f"WHERE table_schema = '{self.schema}'"
        )
        indexes = f"SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = '{self.schema}'"
        triggers = (
            f"SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = '{self.schema}.forecasts'::regclass"
        )
        found = [row for query in (columns, indexes, triggers) for row in self.run(query)]
        return {tuple(str(value).replace(f"{self.schema}.", "") for value in row) for row in found}


Old = OldSqlite | OldPostgres


@pytest.fixture(params=["sqlite", "postgresql"])
def make_old(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Old]:
    """Makes ledgers of schema 3 with rows in every table."""
    if request.param == "sqlite":
        return lambda name: OldSqlite(tmp_path / name)
    server = request.getfixturevalue("postgres")
    return lambda name: OldPostgres(tmp_path / name, server.url)


def rows_of(old: Old) -> Rows:
    """Every row of every table, as the database has it."""
    return {name: sorted(old.run(f"SELECT * FROM {name}"), key=repr) for name in metadata.tables}


def test_an_older_ledger_becomes_what_a_new_one_is_with_all_its_rows(
    make_old: Callable[[str], Old], caplog: pytest.LogCaptureFixture
) -> None:
    old = make_old("old")
    before = rows_of(old)
    assert all(before.values()), "a table without rows shows nothing"
    ledger = old.open()
    assert ledger.result("check", "k") == {"passed": True}
    assert list(ledger.runs()["loss"]) == [2.25]
    assert rows_of(old) == before
    ledger.close()
    assert old.number() == SCHEMA
    again = old.open()
    assert again.trials("s")
    again.close()
    told = [record.message for record in caplog.records if "migrated" in record.message]
    assert len(told) == 1, "none for a ledger that is of this schema"
    assert f"was migrated from schema 3 to {SCHEMA}" in told[0]
    fresh = make_new(old)
    assert old.made_of() == fresh.made_of()


def make_new(old: Old) -> Old:
    """A ledger that this version began, in the same kind of storage."""
    new = object.__new__(type(old))
    new.directory = old.directory.parent / "new"
    new.directory.mkdir()
    ledger = open_ledger(StorageSettings.model_validate({"ledger": old.kind}), new.directory, "s")
    assert ledger.trials("s") == []
    if isinstance(new, OldPostgres) and isinstance(old, OldPostgres):
        assert isinstance(ledger.storage, PostgresStorage)
        new.schema, new._url = ledger.storage.schema, old._url
    ledger.close()
    return new


def test_forecasts_stay_final_through_a_migration(make_old: Callable[[str], Old]) -> None:
    old = make_old("old")
    ledger = old.open()
    assert (ledger.forecast("p") or {})["loss"] == 2.0
    ledger.close()
    for statement in ("UPDATE forecasts SET loss = 1", "DELETE FROM forecasts"):
        with pytest.raises((sqlite3.IntegrityError, psycopg.errors.RaiseException), match="final"):
            old.run(statement)


def test_the_file_as_it_was_is_kept_beside_a_migrated_one(tmp_path: Path) -> None:
    old = OldSqlite(tmp_path / "old")
    before, made_of = rows_of(old), old.made_of()
    ledger = old.open()
    ledger.record_result("stage", "new", {})
    ledger.close()
    kept = old.directory / f"{LEDGER}.schema-3"
    assert sorted(path.name for path in old.directory.iterdir()) == [LEDGER, kept.name]
    shutil.move(kept, old.directory / LEDGER)
    assert (old.number(), rows_of(old), old.made_of()) == (3, before, made_of)


def test_those_who_open_an_older_ledger_at_once_migrate_it_once(
    make_old: Callable[[str], Old], caplog: pytest.LogCaptureFixture
) -> None:
    old = make_old("old")
    found: list[int] = []
    ready = threading.Barrier(8)

    def look() -> None:
        ledger = old.open()
        ready.wait(30)
        found.append(len(ledger.trials("s")))
        ledger.close()

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [2] * 8
    assert sum("was migrated" in record.message for record in caplog.records) == 1


def test_a_process_that_is_killed_before_the_commit_leaves_the_old_ledger_whole(make_old: Callable[[str], Old]) -> None:
    old = make_old("old")
    before, made_of = rows_of(old), old.made_of()
    died = subprocess.run([sys.executable, "-c", OPEN_AND_DIE, str(old.directory), old.kind], check=False)
    assert died.returncode == -signal.SIGKILL
    assert (old.number(), rows_of(old), old.made_of()) == (3, before, made_of)
    ledger = old.open()
    assert len(ledger.trials("s")) == 2
    ledger.close()
    assert old.number() == SCHEMA


def test_a_migration_that_fails_is_told_and_leaves_the_old_ledger_whole(make_old: Callable[[str], Old]) -> None:
    old = make_old("old")
    old.run("CREATE INDEX ix_results_created_at ON results (created_at)")  # somebody's own, of that name
    before, made_of = rows_of(old), old.made_of()
    with pytest.raises(StudyDirectoryError, match="can't be migrated from schema 3 to .*ix_results_created_at"):
        old.open().trials("s")
    assert (old.number(), rows_of(old), old.made_of()) == (3, before, made_of)


def test_a_merge_reads_an_older_ledger_and_leaves_it_as_it_is(make_old: Callable[[str], Old], tmp_path: Path) -> None:
    from muscale.store.merge import merge

    old = make_old("old")
    identity = json.loads(old.run("SELECT identity FROM studies")[0][0])
    ours = Ledger(tmp_path / LEDGER)
    ours.claim(identity, {})
    if isinstance(old, OldPostgres):
        with pytest.raises(StudyDirectoryError, match="has schema 3, and is only read here: open its own study"):
            merge(ours, old.directory)
        theirs = old.open()
        assert theirs.trials("s")
        theirs.close()
    added = merge(ours, old.directory).added
    assert (added["results"], added["forecasts"], added["trials"]) == (2, 1, 2)
    assert ours.result("check", "k") == {"passed": True}
    if isinstance(old, OldSqlite):
        assert old.number() == 3
        assert [path.name for path in old.directory.iterdir()] == [LEDGER]


@pytest.mark.cluster
def test_a_ledgers_actor_migrates_its_file(tmp_path: Path, ray_cluster: None) -> None:
    import ray

    from muscale.store.ledger_actor import ActorStorage

    old = OldSqlite(tmp_path / "old")
    place = {"ledger": "actor", "host": socket.gethostname(), "path": str(old.directory / LEDGER)}
    (old.directory / LEDGER_PLACE).write_text(json.dumps(place))
    ledger = open_ledger(StorageSettings(ledger="actor"), old.directory, "s")
    assert [row["number"] for row in ledger.trials("s")] == [0, 1]
    ledger.add_rung(sweep="s", trial=0, rung=1, tokens=1, segment="", loss=1.0, seconds=1.0)
    assert [row["sequence"] for row in ledger.rungs("s")] == [1, 2, 4]
    assert isinstance(ledger.storage, ActorStorage)
    ray.kill(ledger.storage.actor())
    ledger.close()
    assert old.number() == SCHEMA


def test_every_index_serves_what_it_is_for(make_old: Callable[[str], Old]) -> None:
    """Otherwise each result of a sweep, and each look at a stage, reads through all of them."""
    ledger = make_old("old").open()
    queries = {
        "ix_rungs_sequence": "SELECT max(sequence) FROM rungs WHERE sweep = 's'",
        "ix_decisions_sequence": "SELECT max(sequence) FROM decisions WHERE sweep = 's'",
        "ix_runs_key": "SELECT purpose FROM runs WHERE key = 'k'",
        "ix_results_created_at": "SELECT * FROM results WHERE stage = 'check' ORDER BY created_at DESC LIMIT 1",
        "ix_segments_created_at": "SELECT max(created_at) FROM segments",
        "ix_segments_state": "SELECT key, line FROM segments WHERE state IS NOT NULL",
        "ix_runs_created_at": "SELECT max(created_at) FROM runs",
    }
    for index, query in queries.items():
        assert index in ledger.read(_plan_of, query)
    ledger.close()


def _plan_of(connection: sa.Connection, query: str) -> str:
    """What the database would do, with a table of a few rows taken for a large one."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        return str(connection.exec_driver_sql(f"EXPLAIN {query}").all())
    return str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}").all())


def test_a_ledger_without_a_number_is_refused(tmp_path: Path) -> None:
    old = OldSqlite(tmp_path / "old")
    old.run("PRAGMA user_version = 0")
    with pytest.raises(StudyDirectoryError, match="schema 1, .* migrates from 3 on: open it with the older version"):
        old.open().trials("s")
    assert [path.name for path in old.directory.iterdir()] == [LEDGER]
