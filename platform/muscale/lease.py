"""A lease keeps two workers from training the same line at once, and a dead one's lease does not outlive it for long.

The owner raises a counter; whoever waits judges by its own monotonic clock, so no two machines' clocks are compared. Each
new owner gets a larger fencing token, and a result is accepted only with the current one. While the ledger does not answer,
nobody is judged: the owner could not beat either.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from muscale.errors import MuscaleError
from muscale.ledger import Ledger, check_token, find, insert_once, stamped
from muscale.tables import leases, segments

BEAT_SECONDS = 2.0
EXPIRES_SECONDS = 20.0  # without a beat; a dead process of this machine is noticed at once
_POLL_SECONDS = 0.2
_ANSWERS_SECONDS = 1.0  # a poll that takes longer has waited for the ledger
_TELLS_SECONDS = 3.0  # of waiting, before a person is told for whom

_log = logging.getLogger(__name__)


@contextmanager
def lease(ledger: Ledger, name: str) -> Iterator[int]:
    """Hold the lease called `name`, waiting for it as long as its owner lives; yields the fencing token."""
    token = _acquire(ledger, name)
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_SECONDS):
            try:
                ledger.write(_beat, name, token)
            except MuscaleError as error:  # the owner is told when it records; until then it trains on
                _log.warning("lease %s: no heartbeat: %s", name, error)

    heart = threading.Thread(target=beat, name=f"lease {name}", daemon=True)
    heart.start()
    try:
        yield token
    finally:
        done.set()
        heart.join()
        ledger.write(_release, name, token)


def record_segment(ledger: Ledger, name: str, token: int, row: Mapping[str, Any]) -> None:
    """Record what was trained under a lease.

    Raises:
        LeaseLostError: If another owner has taken the lease since; nothing is recorded then.
    """
    ledger.write(_record, name, token, stamped(segments, row))


def all_leases(connection: sa.Connection) -> list[dict[str, Any]]:
    """Every lease, for a ledger's `read`; free ones have no owner."""
    return find(connection, "leases")


def _acquire(ledger: Ledger, name: str) -> int:
    me = f"{_me()}/{secrets.token_hex(4)}"  # of this attempt, so that one whose answer was lost is recognized as ours
    judged: tuple[int, int] | None = None
    seen, seen_at = None, time.monotonic()
    tells_at = seen_at + _TELLS_SECONDS
    while True:
        asked_at = time.monotonic()
        held = ledger.write(_take, name, me, judged)
        if held["owner"] == me:
            return int(held["token"])
        now = time.monotonic()
        standing = (int(held["token"]), int(held["beat"]))
        if standing != seen or now - asked_at > _ANSWERS_SECONDS:
            seen, seen_at = standing, now
        judged = standing if now - seen_at > EXPIRES_SECONDS or is_dead(held["owner"]) else None
        if judged is None:
            if now > tells_at:
                host = held["owner"].rsplit("/", 3)[0].split(":")[0]
                who = f"process {process_of(held['owner'])} on {host}"
                _log.warning("%s: %s is at work on it; waiting until it ends", name, who)
                tells_at = math.inf
            time.sleep(_POLL_SECONDS)


def _take(connection: sa.Connection, name: str, me: str, judged: tuple[int, int] | None) -> dict[str, Any]:
    """Take the lease if it is free, or stands where its owner was judged to be gone; returns it as it is then."""
    row = connection.execute(sa.select(leases).where(leases.c.name == name)).mappings().first()
    if row is None:
        first = {"name": name, "token": 1, "owner": me, "beat": 0}
        insert_once(connection, "leases", [first])
        return first
    if row["owner"] is not None and (row["token"], row["beat"]) != judged:
        return dict(row)
    taken = {"token": row["token"] + 1, "owner": me, "beat": row["beat"] + 1}
    connection.execute(sa.update(leases).where(leases.c.name == name).values(**taken))
    return {**row, **taken}


def _beat(connection: sa.Connection, name: str, token: int) -> None:
    mine = (leases.c.name == name) & (leases.c.token == token)
    connection.execute(sa.update(leases).where(mine).values(beat=leases.c.beat + 1))


def _release(connection: sa.Connection, name: str, token: int) -> None:
    mine = (leases.c.name == name) & (leases.c.token == token)
    connection.execute(sa.update(leases).where(mine).values(owner=None))


def _record(connection: sa.Connection, name: str, token: int, row: Mapping[str, Any]) -> None:
    check_token(connection, name, token)
    insert_once(connection, "segments", [row])


@cache
def _machine() -> str:
    """This machine, as far as process ids mean the same on it: containers of one host are told apart."""
    boot, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [boot.read_text()[:8]] if boot.exists() else []
    parts += [str(processes.stat().st_ino)] if processes.exists() else []
    return ":".join([socket.gethostname(), *parts])


def _me() -> str:
    return f"{_machine()}/{os.getpid()}/{psutil.Process().create_time():.2f}"


def process_of(owner: str) -> int:
    """The owner's process id, on whatever machine."""
    return int(owner.rsplit("/", 3)[1])


def is_dead(owner: str) -> bool:
    """Whether the owner is a process of this machine that has ended."""
    machine, pid, created, _ = owner.rsplit("/", 3)
    if machine != _machine():
        return False
    try:
        process = psutil.Process(int(pid))
        return f"{process.create_time():.2f}" != created or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def held_leases(ledger: Ledger) -> list[str]:
    """Names of the leases that somebody holds who is not known to be dead."""
    return [row["name"] for row in ledger.read(all_leases) if row["owner"] is not None and not is_dead(row["owner"])]
