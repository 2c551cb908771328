"""The ledger keeps facts: inserted once, never changed, and a forecast not even by hand."""

import multiprocessing
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa

from muscale import StudyDirectoryError
from muscale.errors import LedgerUnavailableError
from muscale.layout import LEDGER
from muscale.store import lease as leases
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import SCHEMA, ResultKind, forecasts, rungs, trials
from muscale.store.statements import insert_once
from muscale.store.storage import file_system


def test_another_identity_is_refused_with_what_differs(ledger: Ledger) -> None:
    ledger.claim({"model.d_model": 64, "tokenizer": "bytes"}, {"sweep": 1})
    ledger.claim({"model.d_model": 64, "tokenizer": "bytes"}, {"sweep": 2})
    ledger.record_result(ResultKind.OWN_METHODS, "key", {})
    with pytest.raises(StudyDirectoryError, match="model.d_model is 32 here but 64 there"):
        ledger.claim({"model.d_model": 32, "tokenizer": "bytes"}, {"sweep": 1})


def test_the_identity_may_change_until_something_was_trained(ledger: Ledger) -> None:
    ledger.claim({"model.d_model": 64}, {"sweep": 1})
    ledger.record_result(ResultKind.CHECK, "key", {"passed": False})
    ledger.claim({"model.d_model": 32}, {"sweep": 1})
    assert ledger.identity() == {"model.d_model": 32}
    with leases.lease(ledger, "line"), pytest.raises(StudyDirectoryError, match="model.d_model"):
        ledger.claim({"model.d_model": 64}, {})
    ledger.record_result(ResultKind.OWN_METHODS, "key", {})
    with pytest.raises(StudyDirectoryError, match="model.d_model"):
        ledger.claim({"model.d_model": 64}, {})


@pytest.mark.parametrize("number", [0, SCHEMA - 1, SCHEMA + 1])
def test_a_ledger_of_another_schema_is_refused_with_what_to_do(ledger: Ledger, number: int) -> None:
    ledger.claim({}, {})
    ledger.close()
    with sqlite3.connect(ledger.directory / LEDGER) as connection:
        connection.execute("ALTER TABLE segments DROP COLUMN source_losses")
        connection.execute(f"PRAGMA user_version = {number}")
    connection.close()
    with pytest.raises(StudyDirectoryError, match=rf"ledger\.sqlite: .* schema {number}, .* schema {SCHEMA}"):
        ledger.runs()


def test_a_result_is_kept_as_it_was_first_recorded(ledger: Ledger) -> None:
    assert ledger.result(ResultKind.CHECK, "k") is None
    ledger.record_result(ResultKind.CHECK, "k", {"passed": True})
    ledger.record_result(ResultKind.CHECK, "k", {"passed": False})
    assert ledger.result(ResultKind.CHECK, "k") == {"passed": True}


def test_a_registered_forecast_can_not_be_changed_or_deleted(ledger: Ledger) -> None:
    values = {"loss": 2.0, "low": 1.9, "high": 2.1, "level": 0.9, "payload": {}}
    ledger.insert(forecasts, plan="p", **values)
    ledger.insert(forecasts, plan="p", **{**values, "loss": 1.0})
    forecast = ledger.forecast("p")
    assert forecast is not None
    assert forecast["loss"] == 2.0
    for statement in ("UPDATE forecasts SET loss = 1", "DELETE FROM forecasts"):
        with (
            pytest.raises(sqlite3.IntegrityError, match="final"),
            sqlite3.connect(ledger.directory / LEDGER) as connection,
        ):
            connection.execute(statement)


def test_a_failed_transaction_leaves_nothing(ledger: Ledger) -> None:
    def fail_midway(connection: sa.Connection) -> None:
        row = {"sweep": "s", "number": 0, "config": {}, "until": 0, "created_at": "", "sequence": 0}
        insert_once(connection, trials.name, [row])
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        ledger.write(fail_midway)
    assert ledger.trials("s") == []


def _add_rungs(path: Path, trial: int) -> None:
    ledger = Ledger(path)
    for rung in range(20):
        ledger.insert(rungs, sweep="s", trial=trial, rung=rung, tokens=1, segment="", loss=1.0, seconds=1.0)


def test_processes_that_write_at_once_lose_nothing_and_share_one_sequence(ledger: Ledger) -> None:
    ledger.rungs("s")
    writers = [
        multiprocessing.get_context("spawn").Process(target=_add_rungs, args=(ledger.directory / LEDGER, n))
        for n in range(2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [row["sequence"] for row in ledger.rungs("s")] == list(range(1, 41))


def test_a_ledger_that_stays_busy_is_reported_as_busy(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muscale.store.storage._BUSY_SECONDS", 0.2)
    ledger.trials("s")
    with sqlite3.connect(ledger.directory / LEDGER) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerUnavailableError, match="ledger.sqlite:"):
            ledger.record_result(ResultKind.CHECK, "k", {})
        holder.rollback()
    holder.close()
    ledger.record_result(ResultKind.CHECK, "k", {})
    assert ledger.result(ResultKind.CHECK, "k") == {}


def test_a_ledger_that_can_t_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muscale.store.storage._BUSY_SECONDS", 0.2)
    begun = Ledger(tmp_path / LEDGER)
    begun.trials("s")
    begun.close()
    with sqlite3.connect(tmp_path / LEDGER) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerUnavailableError, match="ledger.sqlite: .*database is locked"):
            Ledger(tmp_path / LEDGER).trials("s")
        holder.rollback()
    holder.close()
    (tmp_path / "notes.txt").write_text("no database, and longer than the head of one. " * 20)
    with pytest.raises(StudyDirectoryError, match="notes.txt: .*file is not a database"):
        Ledger(tmp_path / "notes.txt").trials("s")


def test_a_file_system_is_found_through_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc")
    assert file_system(tmp_path / "link" / "self") == "proc"
