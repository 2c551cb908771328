"""One owner at a time; a dead owner's lease is taken over at once, a silent one's after its time."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from muscale.errors import LeaseHeldError, LeaseLostError, LedgerUnavailableError
from muscale.layout import LEDGER
from muscale.search.record import Record, RungResult
from muscale.store import lease as leases
from muscale.store import ledger_tables
from muscale.store.ledger import Ledger
from muscale.store.statements import check_token, insert_once
from muscale.store.storage import SqliteStorage


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells when a process began")
def test_a_clock_that_is_set_ends_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, boot = f"{leases._me()}/aa", psutil.boot_time()
    # what moves in /proc/stat as the clock is set
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 3600.0)
    assert not leases.is_dead(owner)
    assert leases.is_dead(f"{owner.rsplit('/', 2)[0]}/0.00/aa"), "another process that had its id"


def test_a_second_owner_waits_for_the_first_logs_it_and_has_a_larger_token(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "_REPORT_AFTER_SECONDS", 0.1)
    order: list[str] = []

    def second() -> None:
        with leases.lease(ledger, "line") as token:
            order.append(f"second with {token}")

    with leases.lease(ledger, "line") as token:
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.5)
        order.append(f"first with {token}")
    waiting.join(10)
    assert order == ["first with 1", "second with 2"]
    me = f"process {os.getpid()} on {socket.gethostname()}"
    assert caplog.messages == [f"line: {me} is running it; waiting until it ends"], "once"


def test_heartbeats_that_fail_in_the_same_way_are_logged_once_until_one_succeeds(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.01)
    left, all_came = ["full", "full", "", "full", "full", "gone", "gone"], threading.Event()
    beat = leases._beat

    def failing(connection: sa.Connection, name: str, token: int) -> None:
        if not left:
            all_came.set()
        elif fault := left.pop(0):
            raise LedgerUnavailableError(fault)
        beat(connection, name, token)

    monkeypatch.setattr(leases, "_beat", failing)
    with leases.lease(ledger, "line"):
        assert all_came.wait(10)
    assert [message.rsplit(": ", 1)[1] for message in caplog.messages] == ["full", "full", "gone"]


def test_who_does_not_wait_is_refused_while_an_owner_lives_and_not_after_it(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    with leases.lease(ledger, "line"), pytest.raises(LeaseHeldError), leases.lease(ledger, "line", wait=False):
        raise AssertionError("two owners")
    with leases.lease(ledger, "line", wait=False) as token:
        assert token == 2
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.5)
    hold_elsewhere(ledger, "silent")
    with leases.lease(ledger, "silent", wait=False) as token:
        assert token == 2


def test_the_lease_of_a_killed_process_is_taken_over_at_once(ledger: Ledger) -> None:
    code = (
        "import sys, time, pathlib; from muscale.store.ledger import Ledger; from muscale.store.lease import lease\n"
        "with lease(Ledger(pathlib.Path(sys.argv[1])), 'line'): print('held', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(ledger.directory / LEDGER)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    with leases.lease(ledger, "line") as token:
        assert token == 2


def test_a_silent_owner_elsewhere_expires_and_its_token_is_refused(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.5)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 60.0)
    monkeypatch.setattr(leases, "_me", lambda: "another-machine/1/0.00")
    with leases.lease(ledger, "line") as old, leases.lease(ledger, "line") as new:
        ledger.write(check_token, "line", new)
        with pytest.raises(LeaseLostError, match="1.*2"):
            ledger.write(check_token, "line", old)


def test_an_owner_that_beats_is_not_expired(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.6)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(leases, "is_dead", lambda owner: False)
    got: list[int] = []

    def second() -> None:
        with leases.lease(ledger, "line") as token:
            got.append(token)

    with leases.lease(ledger, "line"):
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(1.5)
        assert got == []
    waiting.join(10)
    assert got == [2]


class Slow(SqliteStorage):
    """A ledger that takes its time over every call, and counts them."""

    reads = writes = 0

    def read(self, *args: Any, **kwargs: Any) -> Any:
        self.reads += 1
        time.sleep(0.3)
        return super().read(*args, **kwargs)

    def write(self, *args: Any, **kwargs: Any) -> Any:
        self.writes += 1
        time.sleep(0.3)
        return super().write(*args, **kwargs)


def hold_elsewhere(ledger: Ledger, name: str) -> None:
    """A lease whose owner died on another machine."""
    ledger.write(insert_once, "leases", [{"name": name, "token": 1, "owner": "elsewhere/1/0.00/aa", "beat": 3}])


def test_on_a_ledger_that_is_always_slow_a_dead_owner_is_judged_and_waiting_only_reads(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 1.0)
    monkeypatch.setattr(leases, "_ANSWER_SECONDS", 0.1)
    hold_elsewhere(ledger, "line")
    storage = Slow(ledger.directory / LEDGER)
    slow, got = Ledger(storage, ledger.directory), list[int]()
    waiting = threading.Thread(target=lambda: got.append(leases._acquire(slow, "line")), daemon=True)
    waiting.start()
    waiting.join(20)
    assert got == [2]
    assert storage.reads >= 4
    assert storage.writes == 2, "one to see that a write goes through, one to take it"


def test_an_owner_whose_beats_wait_for_another_writer_is_not_expired(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 1.5)
    monkeypatch.setattr(leases, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(leases, "is_dead", lambda owner: False)
    got: list[int] = []

    def second() -> None:
        with leases.lease(ledger, "line") as token:
            got.append(token)

    with leases.lease(ledger, "line") as token:
        waiting = threading.Thread(target=second)
        waiting.start()
        ledger.write(lambda connection: time.sleep(2.0))
        time.sleep(0.5)
        ledger.write(check_token, "line", token)
        assert got == []
    waiting.join(10)
    assert got == [2]


def test_a_dead_owner_elsewhere_holds_nothing_after_its_time_and_a_living_one_does(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 1.0)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    hold_elsewhere(ledger, "dead")
    with ExitStack() as held:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(leases, "_me", lambda: "another-machine/1/0.00")
            held.enter_context(leases.lease(ledger, "living"))
        held.enter_context(leases.lease(ledger, "mine"))
        assert set(leases.held_leases(ledger, ())) == {"dead", "living", "mine"}
        expired = leases.expired_leases(ledger)
        assert expired == {("dead", 1, 3)}
        assert set(leases.held_leases(ledger, expired)) == {"living", "mine"}


def test_a_driver_that_lost_its_sweep_writes_no_more_of_its_record(ledger: Ledger) -> None:
    with leases.lease(ledger, "sweep s") as old:
        record = Record(ledger.under("sweep s", old), "s")
        record.start({"learning_rate": 0.1}, until=0)
        ledger.write(_take_over, "sweep s")
        with pytest.raises(LeaseLostError, match=f"{old}.*{old + 1}"):
            record.start({"learning_rate": 0.2}, until=0)
        result = RungResult(trial=0, rung=0, loss=1.0, segment="k", tokens=1, seconds=1.0)
        with pytest.raises(LeaseLostError):
            record.add_result(result)
    assert [row["config"] for row in ledger.trials("s")] == [{"learning_rate": 0.1}]
    assert ledger.rungs("s") == []


def _take_over(connection: sa.Connection, name: str) -> None:
    connection.execute(
        sa.update(ledger_tables.leases)
        .where(ledger_tables.leases.c.name == name)
        .values(token=ledger_tables.leases.c.token + 1)
    )
