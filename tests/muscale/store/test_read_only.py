"""An SQLite file of somebody else's: nothing that it defines is run, and a walk through its pages ends."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from muscale import StudyDirectoryError
from muscale.layout import LEDGER, LEDGER_PLACE
from muscale.search.prior_runs import runs_of
from muscale.settings.tables import StorageSettings
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import REFUSALS, SCHEMA, ResultKind
from muscale.store.open_ledger import open_ledger
from muscale.store.read_only import connect, fault_of, open_read_only, read_only_uri
from muscale.store.statements import find
from tests.fuzz.targets import write_optuna_study
from tests.muscale.planted_ledger import IDENTITY, add_run

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"


def fault_in(path: Path) -> str:
    with closing(connect(read_only_uri(path))) as connection:
        return fault_of(connection, REFUSALS["sqlite"])


def written(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in ("PRAGMA page_size = 512", *statements):
            connection.execute(statement)
    return path


def test_files_as_they_are_written_here_and_by_optuna_may_be_read(tmp_path: Path) -> None:
    ledger, theirs = tmp_path / "ledger.sqlite", tmp_path / "theirs.db"
    own = Ledger(ledger)
    own.claim({}, {})
    own.close()
    write_optuna_study(theirs)
    assert [fault_in(path) for path in (ledger, theirs)] == ["", ""]


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        (f"CREATE VIEW runs AS {ENDLESS}", "runs: "),
        ("CREATE VIRTUAL TABLE runs USING fts5(a)", "runs: "),
        ("CREATE TABLE runs (a, b AS (hex(zeroblob(1000000000))))", "runs.b: "),
        ("CREATE TRIGGER t AFTER UPDATE ON plain BEGIN DELETE FROM plain; END", "t: "),
    ],
)
def test_what_computes_is_refused_unread(tmp_path: Path, statement: str, fault: str) -> None:
    path = written(tmp_path / "theirs.sqlite", "CREATE TABLE plain (a)", statement)
    assert fault_in(path).startswith(fault)


def test_a_constraint_of_the_file_is_not_run(tmp_path: Path) -> None:
    path = written(
        tmp_path / "theirs.sqlite",
        "CREATE TABLE runs (a CHECK (abs(a) >= 0))",
        "PRAGMA ignore_check_constraints = ON",
        "INSERT INTO runs VALUES (-9223372036854775808)",  # whose absolute value is an error
    )
    with closing(sqlite3.connect(path)) as trusting, pytest.raises(sqlite3.Error, match="integer overflow"):
        trusting.execute("PRAGMA quick_check(1)").fetchall()
    assert fault_in(path) == ""


def test_pages_that_point_at_each_other_are_found(tmp_path: Path) -> None:
    rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 500) SELECT hex(zeroblob(40)) FROM n"
    path = written(tmp_path / "theirs.sqlite", "CREATE TABLE runs (a)", f"INSERT INTO runs {rows}")
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'runs'").fetchone()
    data = bytearray(path.read_bytes())
    page = 512 * (root - 1)
    assert data[page] == 5, "a page that points at others"
    (cell,) = struct.unpack_from(">H", data, page + 12)
    data[page + 8 : page + 12] = data[page + cell : page + cell + 4]  # its last pointer as its first
    path.write_bytes(data)
    assert fault_in(path).startswith("is damaged: ")
    for length in (100, 600, len(data) // 2):
        path.write_bytes(data[:length])
        with suppress(sqlite3.DatabaseError):
            assert fault_in(path)


def test_a_value_that_would_fill_the_memory_is_refused_by_sqlite(tmp_path: Path) -> None:
    path = written(tmp_path / "theirs.sqlite", "CREATE TABLE runs (a)")
    with closing(connect(read_only_uri(path))) as connection, pytest.raises(sqlite3.Error, match="too big"):
        connection.execute("SELECT zeroblob(1000000000)")


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Ledger]:
    (tmp_path / "theirs").mkdir()
    ledger = Ledger(tmp_path / "theirs" / LEDGER)
    ledger.claim(IDENTITY, {})
    add_run(ledger, 0, 2.0)
    yield ledger
    ledger.close()


def test_a_ledger_that_is_being_written_is_read_in_one_snapshot(theirs: Ledger) -> None:
    with open_read_only(theirs.directory) as (name, read):
        assert name == str(theirs.directory / LEDGER)
        assert len(read(find, "runs")) == 1
        add_run(theirs, 1, 3.0)
        assert len(read(find, "runs")) == 1, "rows written meanwhile are not seen"
    with open_read_only(theirs.directory / LEDGER) as (_, read):
        assert len(read(find, "runs")) == 2


def test_another_schema_another_host_and_no_ledger_are_refused(theirs: Ledger, tmp_path: Path) -> None:
    theirs.close()
    with closing(sqlite3.connect(theirs.directory / LEDGER)) as connection:
        connection.execute("PRAGMA user_version = 5")
    text = tmp_path / "text.sqlite"
    text.write_text("no database at all")
    away = tmp_path / "away"
    away.mkdir()
    (away / LEDGER_PLACE).write_text('{"ledger": "actor", "host": "node-7", "path": "/l.sqlite"}')
    for source, rule in (
        (theirs.directory, f"schema 5, .* schema {SCHEMA}"),
        (text, "text"),
        (away, "node-7"),
        (tmp_path, "no such"),
    ):
        with pytest.raises(StudyDirectoryError, match=rule), open_read_only(source):
            pass


def test_a_row_that_is_no_run_names_table_row_and_column(theirs: Ledger) -> None:
    theirs.close()
    with closing(sqlite3.connect(theirs.directory / LEDGER)) as connection, connection:
        connection.execute("UPDATE runs SET hyperparameters = '[]'")
    with pytest.raises(StudyDirectoryError, match="runs, row 1, hyperparameters"):
        runs_of(theirs.directory)
    with closing(sqlite3.connect(theirs.directory / LEDGER)) as connection, connection:
        connection.execute("UPDATE runs SET n_params = 'many'")
    with pytest.raises(StudyDirectoryError, match="n_params.*many"):
        runs_of(theirs.directory)


def test_a_postgresql_ledger_is_read_in_one_snapshot(postgres: Any, tmp_path: Path) -> None:
    database = open_ledger(StorageSettings(ledger="postgresql"), tmp_path, "s")
    database.claim(IDENTITY, {})
    with open_read_only(tmp_path) as (_, read):
        assert read(find, "results") == []
        database.record_result(ResultKind.CHECK, "k", {})
        assert read(find, "results") == [], "rows written meanwhile are not seen"
    database.close()
