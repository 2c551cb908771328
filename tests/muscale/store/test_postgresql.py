"""The ledger in PostgreSQL: what SQLite promises holds there too, through a restart, and its password is never shown."""

import logging
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from muscale import StudyDirectoryError
from muscale.errors import LeaseLostError, LedgerUnavailableError
from muscale.layout import LEDGER, LEDGER_PLACE
from muscale.settings.tables import StorageSettings
from muscale.store import lease as leases
from muscale.store import ledger_tables
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind, forecasts, retrained, rungs, trials
from muscale.store.open_ledger import open_ledger
from muscale.store.postgresql import PostgresStorage
from muscale.store.statements import check_token, insert_once

POSTGRESQL = StorageSettings(ledger="postgresql")

ADD_RUNGS = """
import sys
from pathlib import Path
from muscale.settings.tables import StorageSettings
from muscale.store.open_ledger import open_ledger
from muscale.store.ledger_tables import rungs
ledger = open_ledger(StorageSettings(ledger="postgresql"), Path(sys.argv[1]), "s")
for trial in range(int(sys.argv[2]), int(sys.argv[3])):
    for rung in range(10):
        ledger.insert(rungs, sweep="s", trial=trial, rung=rung, tokens=1, segment="", loss=1.0, seconds=1.0)
"""


@pytest.fixture
def ledger(postgres: Any, tmp_path: Path) -> Any:
    ledger = open_ledger(POSTGRESQL, tmp_path, "A study!")
    yield ledger
    ledger.close()


def test_a_study_has_a_schema_of_its_own_and_finds_it_again(ledger: Ledger, tmp_path: Path) -> None:
    ledger.claim({"model.d_model": 64}, {"sweep": float("nan")})
    (tmp_path / "other").mkdir()
    other = open_ledger(POSTGRESQL, tmp_path / "other", "A study!")
    assert other.identity() is None
    other.close()
    again = open_ledger(POSTGRESQL, tmp_path, "renamed")
    ledger.record_result(ResultKind.OWN_METHODS, "key", {})
    with pytest.raises(StudyDirectoryError, match="model.d_model is 32 here but 64 there"):
        again.claim({"model.d_model": 32}, {})
    again.close()


def test_rows_are_inserted_once_and_large_numbers_fit(ledger: Ledger) -> None:
    for until in (2, 1):
        ledger.insert(trials, sweep="s", number=0, config={"rate": 0.1}, until=until)
    assert [(row["config"], row["until"]) for row in ledger.trials("s")] == [({"rate": 0.1}, 2)]
    ledger.insert(retrained, key="k", tokens=15 * 10**12, seconds=0.1)
    assert [(row["tokens"], row["seconds"]) for row in ledger.retrained()] == [(15 * 10**12, 0.1)]


def test_a_registered_forecast_can_not_be_changed_or_deleted(ledger: Ledger, postgres: Any) -> None:
    ledger.insert(forecasts, plan="p", loss=2.0, low=1.9, high=2.1, level=0.9, payload={})
    assert isinstance(ledger.storage, PostgresStorage)
    table = f'"{ledger.storage.schema}".forecasts'
    for statement in (f"UPDATE {table} SET loss = 1", f"DELETE FROM {table}", f"TRUNCATE {table}"):
        with psycopg.connect(postgres.url) as connection, pytest.raises(psycopg.errors.RaiseException, match="final"):
            connection.execute(statement)


def test_sixteen_writers_at_once_share_one_sequence_without_gaps(ledger: Ledger) -> None:
    def write(first: int) -> None:
        own = open_ledger(POSTGRESQL, ledger.directory, "s")
        for trial in range(first, first + 2):
            for rung in range(10):
                own.insert(rungs, sweep="s", trial=trial, rung=rung, tokens=1, segment="", loss=1.0, seconds=1.0)
        own.close()

    elsewhere = [sys.executable, "-c", ADD_RUNGS, str(ledger.directory), "100", "104"]
    writers = [threading.Thread(target=write, args=(2 * n,)) for n in range(15)]
    process = subprocess.Popen(elsewhere)
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert process.wait(60) == 0
    rows = ledger.rungs("s")
    assert [row["sequence"] for row in rows] == list(range(1, 341))
    ledger.insert(rungs, sweep="s", trial=0, rung=0, tokens=1, segment="", loss=2.0, seconds=1.0)
    assert ledger.rungs("s") == rows, "a repeated write adds nothing"


@pytest.mark.parametrize("default", ["read committed", "repeatable read", "serializable"])
def test_a_stale_token_is_refused_also_after_a_wait_for_the_lock_whatever_the_server_s_default_isolation(
    ledger: Ledger, monkeypatch: Any, default: str
) -> None:
    monkeypatch.setenv("PGOPTIONS", f"-c default_transaction_isolation={default.replace(' ', chr(92) + ' ')}")
    ledger.close()  # connections of before have the server's default
    lease = {"name": "line", "owner": "elsewhere/1/0.00/aa", "beat": 0}
    ledger.write(insert_once, "leases", [{**lease, "token": 1}])
    locked, errors = threading.Event(), []

    def take(connection: sa.Connection) -> None:
        locked.set()
        waiting = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        while not connection.execute(waiting).scalar():
            time.sleep(0.01)
        connection.execute(sa.update(ledger_tables.leases).values(token=2))

    def record() -> None:
        locked.wait(60)
        try:
            ledger.under("line", 1).insert(retrained, key="k", tokens=1, seconds=0.1)
        except LeaseLostError as error:
            errors.append(error)

    stale = threading.Thread(target=record)
    stale.start()
    ledger.write(take)
    stale.join(60)
    assert len(errors) == 1
    assert ledger.retrained() == []


def test_work_and_heartbeat_outlast_a_restart_of_the_server(ledger: Ledger, postgres: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 2.0)
    monkeypatch.setattr(leases, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(leases, "is_dead", lambda owner: False)
    order: list[str] = []
    waiting_ledger = open_ledger(POSTGRESQL, ledger.directory, "s")
    waiting_ledger.trials("s")  # a server that never answered is not waited for

    def wait() -> None:
        with leases.lease(waiting_ledger, "line") as token:
            order.append(f"second with {token}")

    with leases.lease(ledger, "line") as token:
        waiter = threading.Thread(target=wait)
        waiter.start()
        postgres.stop()
        restart = threading.Timer(2.5, postgres.start)
        restart.start()
        ledger.record_result(ResultKind.CHECK, "k", {"kept": True})
        restart.join()
        ledger.write(check_token, "line", token)
        order.append("first")
    waiter.join(30)
    waiting_ledger.close()
    assert order == ["first", "second with 2"], "an owner that could not beat is not taken for dead"
    assert ledger.result(ResultKind.CHECK, "k") == {"kept": True}


def test_a_server_that_stays_away_ends_in_a_clear_error(ledger: Ledger, postgres: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("muscale.store.storage.PATIENCE_SECONDS", 0.3)
    ledger.trials("s")
    postgres.stop()
    try:
        with pytest.raises(
            LedgerUnavailableError, match="has not answered for .* run the same command again"
        ) as failure:
            ledger.trials("s")
    finally:
        postgres.start()
    assert postgres.password not in str(failure.value)


def test_no_message_and_no_file_contains_the_password(
    ledger: Ledger, postgres: Any, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = postgres.password
    shown = [repr(ledger), str(ledger.storage), repr(ledger.storage), (ledger.directory / LEDGER_PLACE).read_text()]
    assert all(secret not in text for text in shown)
    assert secret.encode() not in pickle.dumps(ledger)
    assert secret.encode() in pickle.dumps(ledger.for_worker())
    (ledger.directory / "new").mkdir()
    for value in (postgres.url.replace(secret, f"{secret}x"), f"mysql://me:{secret}@host/db", f"//{secret}"):
        monkeypatch.setenv("MUSCALE_LEDGER_URL", value)
        with pytest.raises((LedgerUnavailableError, StudyDirectoryError)) as failure:
            open_ledger(POSTGRESQL, ledger.directory / "new", "s")
        assert secret not in str(failure.value)
    assert secret not in caplog.text
    monkeypatch.delenv("MUSCALE_LEDGER_URL")
    with pytest.raises(StudyDirectoryError, match="MUSCALE_LEDGER_URL"):
        open_ledger(POSTGRESQL, ledger.directory / "new", "s")


def test_a_missing_driver_is_reported_with_how_to_install_it(postgres: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StudyDirectoryError, match=r"muscale\[postgresql\]"):
        open_ledger(POSTGRESQL, tmp_path, "s")
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_begun_elsewhere_is_never_silently_a_new_one(ledger: Ledger, tmp_path: Path, postgres: Any) -> None:
    with pytest.raises(StudyDirectoryError, match='storage.ledger = "postgresql", got "sqlite"'):
        open_ledger(StorageSettings(), tmp_path, "s")
    assert not (tmp_path / LEDGER).exists()
    assert isinstance(ledger.storage, PostgresStorage)
    with psycopg.connect(postgres.url) as connection:
        connection.execute(f'DROP SCHEMA "{ledger.storage.schema}" CASCADE')
    with pytest.raises(StudyDirectoryError, match="not in this database"):
        open_ledger(POSTGRESQL, tmp_path, "s").trials("s")


def test_the_password_may_lie_in_a_file_that_the_url_names(
    postgres: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "pgpass"
    secret.write_text(f"127.0.0.1:{postgres.port}:*:muscale:{postgres.password}\n")
    secret.chmod(0o600)  # libpq passes over a file that others may read
    monkeypatch.setenv(
        "MUSCALE_LEDGER_URL", f"postgresql://muscale@127.0.0.1:{postgres.port}/postgres?passfile={secret}"
    )
    (tmp_path / "study").mkdir()
    ledger = open_ledger(POSTGRESQL, tmp_path / "study", "s")
    assert ledger.trials("s") == []
    ledger.close()
    secret.chmod(0o644)
    with pytest.raises(LedgerUnavailableError, match="no password supplied"):
        open_ledger(POSTGRESQL, tmp_path / "study", "s").trials("s")
