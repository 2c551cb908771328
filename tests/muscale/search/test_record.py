"""A record is read on one snapshot, also while the sweep's driver writes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from muscale.search.record import Record, RungResult
from muscale.settings.tables import StorageSettings
from muscale.store.ledger import Ledger
from muscale.store.open_ledger import open_ledger
from search_spaces import LogUniform, Space

SPACE = Space({"learning_rate": LogUniform(low=0.001, high=0.1)})


@pytest.fixture(params=["sqlite", "postgresql"])
def ledgers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Ledger]]:
    """The same ledger twice, as two processes have it."""
    settings = StorageSettings(ledger=request.param)
    if request.param == "postgresql":
        request.getfixturevalue("postgres")
    opened = [open_ledger(settings, tmp_path, "study") for _ in range(2)]
    yield opened
    for ledger in opened:
        ledger.close()


def test_a_record_is_as_it_was_at_one_moment_although_the_driver_writes_between_two_queries(
    ledgers: list[Ledger],
) -> None:
    read, written = ledgers
    driver = Record(written, "s")
    driver.begin_round("random", SPACE)

    def search() -> None:
        """Start a trial, bring it to its first rung and send it on."""
        trial = driver.start({"learning_rate": 0.01}, 0)
        driver.add_result(RungResult(trial=trial, rung=0, loss=2.0, segment="", tokens=1, seconds=1.0))
        driver.go_on(trial, 1)

    search()
    engine: sa.Engine = read.storage._engine  # type: ignore[attr-defined]
    asked: list[Any] = []

    @sa.event.listens_for(engine, "after_cursor_execute")
    def _write(*arguments: Any) -> None:
        asked.append(arguments[2])
        search()

    record = Record(read, "s")
    sa.event.remove(engine, "after_cursor_execute", _write)
    assert len(asked) > 3
    assert len(record.rounds) == 1
    trials = {*record.configs}
    assert {trial for trial, _ in record.results} == trials == {trial for trial, _ in record.advanced} == {*record.open}
    assert {*Record(read, "s").configs} > trials
