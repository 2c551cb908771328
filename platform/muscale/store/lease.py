"""Leases: they prevent two workers from training the same line at once, and expire soon after their owner dies.

The owner raises a counter, and waiting processes judge it by their own monotonic clocks, so that clocks of different machines
need not be compared. Each new owner gets a larger fencing token, and a result is accepted only with the current token. Time in
which the ledger does not answer does not count, since the owner can't send heartbeats then either.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import sqlalchemy as sa

from muscale.background import in_background
from muscale.errors import LeaseHeldError, MuscaleError
from muscale.store.ledger import Ledger, stamped
from muscale.store.ledger_tables import leases, segments
from muscale.store.statements import check_token, find, insert_once
from muscale.store.storage import P, T

BEAT_SECONDS = 2.0
EXPIRES_SECONDS = 20.0  # without a heartbeat; a dead process of this machine is noticed at once
_POLL_SECONDS = 0.2
_REPORT_AFTER_SECONDS = 3.0  # of waiting, after which a message names the owner
_ANSWER_SECONDS = 1.0  # longer calls are counted as waiting for the ledger
_TRIES_WRITING = 0.8  # share of EXPIRES_SECONDS without a heartbeat after which a write is tried

_log = logging.getLogger(__name__)

Standing: TypeAlias = tuple[str, int, int]
"""Name, token and beat of a lease; if they stay unchanged, the owner sent no heartbeat."""


def full_run_lease(key: str) -> str:
    """Name of the lease that every writer of a full run's folder takes: promote, smoke test, train, continue, bundle."""
    return f"full run {key}"


@contextmanager
def lease(ledger: Ledger, name: str, *, wait: bool = True) -> Iterator[int]:
    """Hold the lease `name`, and yield its fencing token; without `wait`, raise LeaseHeldError if another owner lives."""
    token = _acquire(ledger, name, wait=wait)

    def beat(done: threading.Event) -> None:
        reported = ""
        while not done.wait(BEAT_SECONDS):
            try:
                ledger.write(_beat, name, token)
                reported = ""
            except MuscaleError as error:  # recording fails later; until then the training continues
                if str(error) != reported:  # a full disk stays full for many heartbeats
                    _log.warning("lease %s: no heartbeat: %s", name, error)
                reported = str(error)

    try:
        with in_background(beat, f"lease {name}"):
            yield token
    finally:
        ledger.write(_release, name, token)


def sweep_lease(sweep: str) -> str:
    """The name of the lease that the driver of a sweep holds."""
    return f"sweep {sweep}"


def record_segment(ledger: Ledger, name: str, token: int, row: Mapping[str, Any]) -> None:
    """Record a segment trained under a lease; raise LeaseLostError, and record nothing, if another owner has taken it since."""
    ledger.write(_record, name, token, stamped(segments, row))


def taken_leases(connection: sa.Connection) -> list[dict[str, Any]]:
    """All leases that have an owner, dead or alive, for a ledger's `read`; most leases ever taken are free."""
    return [dict(row) for row in connection.execute(sa.select(leases).where(leases.c.owner.is_not(None))).mappings()]


def expired_leases(ledger: Ledger) -> frozenset[Standing]:
    """Leases of other processes that have not changed for `EXPIRES_SECONDS`: their owners died on another machine, or hang.

    The call takes that long if there are such leases; otherwise it returns once every owner has sent a heartbeat.
    """
    clock, mine = _LedgerClock(), f"{_me()}/"
    still: frozenset[Standing] | None = None
    since = clock.now()
    while True:
        held = [row for row in clock.timed(ledger.read, taken_leases) if not is_dead(row["owner"])]
        seen = frozenset(standing_of(row) for row in held if not row["owner"].startswith(mine))
        if still is None:
            still, since = seen, clock.now()
        still &= seen
        if not still or clock.now() - since > EXPIRES_SECONDS:
            return still
        time.sleep(_POLL_SECONDS)


def standing_of(row: Mapping[str, Any]) -> Standing:
    """The name, token and beat of a lease."""
    return row["name"], int(row["token"]), int(row["beat"])


def is_held(row: Mapping[str, Any], expired: Collection[Standing]) -> bool:
    """Whether a lease has an owner who is not known to be dead, given the expired leases."""
    return row["owner"] is not None and not is_dead(row["owner"]) and standing_of(row) not in expired


def held_leases(ledger: Ledger, expired: Collection[Standing]) -> list[str]:
    """Names of the leases that somebody holds, given the expired leases (`expired_leases`)."""
    return [row["name"] for row in ledger.read(taken_leases) if is_held(row, expired)]


class _LedgerClock:
    """Seconds in which the ledger answered, by this process's monotonic clock.

    Each call counts for at most `_ANSWER_SECONDS`. An owner who can't send heartbeats while the ledger is away is therefore not
    judged dead, but an owner who died is, even if the ledger is always slow.
    """

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        return time.monotonic() - self._waited

    def timed(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        begun = time.monotonic()
        found = call(*args, **kwargs)
        self._waited += max(0.0, time.monotonic() - begun - _ANSWER_SECONDS)
        return found


def _acquire(ledger: Ledger, name: str, *, wait: bool = True) -> int:
    me = f"{_me()}/{secrets.token_hex(4)}"  # unique per attempt, so that a lease whose answer was lost is recognized
    clock = _LedgerClock()
    seen: Standing | None = None
    since, tried = clock.now(), False
    tells_at = since + _REPORT_AFTER_SECONDS
    while True:
        row = next(iter(clock.timed(ledger.read, find, "leases", {"name": name})), None)
        standing = standing_of(row) if row else None
        free = row is None or row["owner"] is None or is_dead(row["owner"])
        if standing != seen:
            if row and not free and seen and not wait:  # a heartbeat, or a new owner
                raise LeaseHeldError(f"{name}: {_who(row['owner'])} is running it; wait until it ends")
            seen, since, tried = standing, clock.now(), False
        silent = clock.now() - since
        free = free or silent > EXPIRES_SECONDS
        # If reads are answered while writes wait, the owner can't send heartbeats: one of our writes must succeed before we judge.
        if free or (silent > _TRIES_WRITING * EXPIRES_SECONDS and not tried):
            held = clock.timed(ledger.write, _take, name, me, standing if free else None)
            if held["owner"] == me:
                return int(held["token"])
            tried = True
        elif row and clock.now() > tells_at:
            _log.warning("%s: %s is running it; waiting until it ends", name, _who(row["owner"]))
            tells_at = math.inf
        time.sleep(_POLL_SECONDS)


def _take(connection: sa.Connection, name: str, me: str, judged: Standing | None) -> dict[str, Any]:
    """Take the lease if it is free or unchanged since its owner was judged dead; return the lease's row afterwards."""
    row = next(iter(find(connection, "leases", {"name": name})), None)
    if row is None:
        first = {"name": name, "token": 1, "owner": me, "beat": 0}
        insert_once(connection, "leases", [first])
        return first
    if row["owner"] is not None and standing_of(row) != judged:
        return row
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
    """This machine, or the part of it in which process ids are unique: containers of one host differ."""
    boot, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [boot.read_text()[:8]] if boot.exists() else []
    parts += [str(processes.stat().st_ino)] if processes.exists() else []
    return ":".join([socket.gethostname(), *parts])


def _me() -> str:
    return f"{_machine()}/{os.getpid()}/{_began(psutil.Process())}"


def _began(process: psutil.Process) -> str:
    """Start of a process in seconds after the machine's start, so that setting the system's clock has no effect."""
    return f"{process.create_time() - psutil.boot_time():.2f}"


def process_of(owner: str) -> int:
    """The owner's process id on the owner's machine."""
    return int(owner.rsplit("/", 3)[1])


def host_of(owner: str) -> str:
    """The name of the owner's machine."""
    return owner.rsplit("/", 3)[0].split(":")[0]


def _who(owner: str) -> str:
    return f"process {process_of(owner)} on {host_of(owner)}"


def is_dead(owner: str) -> bool:
    """Whether the owner is a process of this machine that has ended."""
    machine, pid, created, _ = owner.rsplit("/", 3)
    if machine != _machine():
        return False
    try:
        process = psutil.Process(int(pid))
        return _began(process) != created or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
