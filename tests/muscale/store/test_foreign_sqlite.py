"""An SQLite file of somebody else's: nothing that it defines is run, and a walk through its pages ends."""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing, suppress
from pathlib import Path

import pytest

from muscale.store.foreign_sqlite import connect, fault
from muscale.store.ledger import Ledger
from muscale.store.storage import read_only
from muscale.store.tables import REFUSALS
from tests.fuzz.database_targets import write_optuna_study
from tests.muscale.store.test_migrations import KEPT

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"


def fault_of(path: Path) -> str:
    with closing(connect(read_only(path))) as connection:
        return fault(connection, REFUSALS["sqlite"])


def written(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in ("PRAGMA page_size = 512", *statements):
            connection.execute(statement)
    return path


def test_files_as_they_are_written_here_and_by_optuna_may_be_read(tmp_path: Path) -> None:
    ledger, old, theirs = (tmp_path / name for name in ("ledger.sqlite", "old.sqlite", "theirs.db"))
    own = Ledger(ledger)
    own.claim({}, {})
    own.close()
    write_optuna_study(theirs)
    with closing(sqlite3.connect(old)) as connection:
        for name in ("sqlite", "rows"):
            connection.executescript((KEPT / f"{name}.sql").read_text())
    assert [fault_of(path) for path in (ledger, old, theirs)] == ["", "", ""]


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        (f"CREATE VIEW runs AS {ENDLESS}", "runs: must be a table, got a view"),
        (
            "CREATE VIRTUAL TABLE runs USING fts5(a)",
            "runs: must be a table with rows of its own, got 'CREATE VIRTUAL TABLE",
        ),
        (
            "CREATE TABLE runs (a, b AS (hex(zeroblob(1000000000))))",
            "runs.b: must be a column with values of its own, got one that is computed",
        ),
        (
            "CREATE TRIGGER t AFTER UPDATE ON plain BEGIN DELETE FROM plain; END",
            "t: must be a table, got a trigger",
        ),
    ],
)
def test_what_computes_is_refused_unread(tmp_path: Path, statement: str, told: str) -> None:
    path = written(tmp_path / "theirs.sqlite", "CREATE TABLE plain (a)", statement)
    assert fault_of(path).startswith(told)


def test_a_constraint_of_the_file_is_not_run(tmp_path: Path) -> None:
    path = written(
        tmp_path / "theirs.sqlite",
        "CREATE TABLE runs (a CHECK (abs(a) >= 0))",
        "PRAGMA ignore_check_constraints = ON",
        "INSERT INTO runs VALUES (-9223372036854775808)",  # whose absolute value is an error
    )
    with closing(sqlite3.connect(path)) as trusting, pytest.raises(sqlite3.Error, match="integer overflow"):
        trusting.execute("PRAGMA quick_check(1)").fetchall()
    assert fault_of(path) == ""


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
    assert fault_of(path).startswith("is damaged: ")
    for length in (100, 600, len(data) // 2):
        path.write_bytes(data[:length])
        with suppress(sqlite3.DatabaseError):
            assert fault_of(path)


def test_a_value_that_would_fill_the_memory_is_refused_by_sqlite(tmp_path: Path) -> None:
    path = written(tmp_path / "theirs.sqlite", "CREATE TABLE runs (a)")
    with closing(connect(read_only(path))) as connection, pytest.raises(sqlite3.Error, match="too big"):
        connection.execute("SELECT zeroblob(1000000000)")
