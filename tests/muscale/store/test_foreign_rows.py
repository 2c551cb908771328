"""Rows of somebody else's ledger: each value is one that a ledger has, or is named with its place and the rule."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from muscale import StudyDirectoryError
from muscale.store.foreign_rows import MOST_DEPTH
from muscale.store.ledger import Ledger
from muscale.store.merge import merge
from tests.fuzz.database_targets import write_ledgers


@pytest.fixture
def ledgers(tmp_path: Path) -> Iterator[tuple[Ledger, Path]]:
    theirs = tmp_path / "theirs.sqlite"
    (tmp_path / "ours").mkdir()
    write_ledgers(theirs, tmp_path / "ours" / "ledger.sqlite")
    ours = Ledger(tmp_path / "ours" / "ledger.sqlite")
    yield ours, theirs
    ours.close()


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("segments.loss", "low", "segments, row 1, loss: must be a number, got 'low'"),
        ("segments.tokens", 1.5, "segments, row 1, tokens: must be a whole number, got 1.5"),
        ("segments.seconds", float("inf"), "segments, row 1, seconds: must be finite, got inf"),
        ("segments.key", b"\x00", r"segments, row 1, key: must be text, got b'\x00'"),
        ("segments.numerics", "[1]", "segments, row 1, numerics: must be a table of JSON, got [1]"),
        ("segments.numerics", "{", "JSONDecodeError"),
        ("segments.numerics", 3, "segments, row 1, numerics: must be a table of JSON, got 3"),
        ("decisions.path", "{}", "decisions, row 1, path: must be a list of JSON, got {}"),
        ("results.payload", deep(MOST_DEPTH), f"results, row 1, payload: must be JSON of at most {MOST_DEPTH} tables"),
        ("results.payload", deep(100_000), "RecursionError"),
        ("results.payload", r'{"a": "\ud800"}', "results, row 1, payload: must be JSON of whole characters"),
        ("results.payload", f'{{"a": {2**63}}}', "payload: must be JSON whose whole numbers fit into 64 bits"),
        ("results.payload", f'{{"a": {"9" * 5000}}}', "Exceeds the limit"),
        ("results.created_at", "zz", "results, row 1, created_at: must be a time as ISO 8601 has it, UTC, got 'zz'"),
        ("forecasts.registered_at", "9999-12-31T23:59:59+00:00", "registered_at: must be a time"),
        ("trials.config", "null", "trials, row 1, config: must be there, got None"),
        ("studies.identity", "7", "studies, row 1, identity: must be a table of JSON, got 7"),
    ],
)
def test_a_value_that_no_ledger_has_is_named_and_nothing_is_merged(
    ledgers: tuple[Ledger, Path], place: str, value: Any, told: str
) -> None:
    ours, theirs = ledgers
    table, column = place.split(".")
    with closing(sqlite3.connect(theirs)) as connection:
        for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {sql.split()[2]}")
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM {table})", (value,))
        connection.commit()
    before = list(dump(ours))
    with pytest.raises(StudyDirectoryError) as refusal:
        merge(ours, theirs)
    assert str(refusal.value).startswith(f"{theirs}: ")
    assert told in str(refusal.value)
    assert len(str(refusal.value)) < 1000
    assert list(dump(ours)) == before


def dump(ledger: Ledger) -> Iterator[str]:
    with closing(sqlite3.connect(ledger.storage.name)) as connection:
        yield from connection.iterdump()


def test_a_ledger_without_one_of_the_tables_or_columns_is_refused(ledgers: tuple[Ledger, Path]) -> None:
    ours, theirs = ledgers
    for statement, told in (
        ("ALTER TABLE rungs DROP COLUMN seconds", "no such column: rungs.seconds"),
        ("DROP TABLE rungs", "no such table: rungs"),
    ):
        with closing(sqlite3.connect(theirs)) as connection:
            connection.execute(statement)
        with pytest.raises(StudyDirectoryError, match=f"can't be read as a ledger: {told}"):
            merge(ours, theirs)


def test_infinite_values_within_results_are_json_here_and_stay(ledgers: tuple[Ledger, Path]) -> None:
    ours, theirs = ledgers
    other = Ledger(theirs)
    other.record_result("check", "k", {"nothing": float("nan"), "most": float("inf")})
    other.close()
    merge(ours, theirs)
    assert json.dumps(ours.result("check", "k")) == '{"nothing": NaN, "most": Infinity}'
