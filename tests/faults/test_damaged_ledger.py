"""A damaged page of an SQLite ledger: reported with what to do, and nothing is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muscale import StudyDirectoryError
from muscale.layout import LEDGER
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import segments
from tests.faults.lean import chains, rows

ROW: dict[str, Any] = {
    **dict.fromkeys(("key", "line"), "k"),
    **{name: {} for name in ("numerics", "segment", "environment", "source_losses")},
    "tokens": 1,
    "trained_from": 0,
    "seconds": 1.0,
}


def damaged(path: Path, table: str) -> bytes:
    """Spoil the root page of a table; what the file holds then."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    content = bytearray(path.read_bytes())
    for at in range((root - 1) * size, root * size):
        content[at] ^= 0x5A
    path.write_bytes(content)
    return bytes(content)


def test_a_damaged_page_is_reported_with_what_to_do_and_nothing_is_written(study: Path) -> None:
    path, key = study / LEDGER, chains(study)[0].key
    before = damaged(path, "segments")
    ledger = Ledger(path)
    uses: tuple[Callable[[], object], ...] = (lambda: ledger.segment(key), lambda: ledger.insert(segments, **ROW))
    for use in uses:
        with pytest.raises(
            StudyDirectoryError,
            match=r"ledger.sqlite: ",
        ):
            use()
    ledger.close()
    assert path.read_bytes()[100:] == before[100:], "but SQLite's header, which says that there is a log"


def test_tables_on_other_pages_can_still_be_read(study: Path) -> None:
    kept = rows(study / LEDGER)
    damaged(study / LEDGER, "segments")
    found = rows(study / LEDGER, leave_out=("leases", "segments"))
    assert found == {name: known for name, known in kept.items() if name != "segments"}
