"""A lease keeps two workers from training the same line at once, and a dead one's lease does not outlive it for long.

The owner raises a counter; whoever waits judges by its own monotonic clock, so no two machines' clocks are compared. Each
new owner gets a larger fencing token, and a result is accepted only with the current one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import sqlalchemy as sa

from muscale.errors import MuscaleError
from muscale.ledger import Ledger
from muscale.tables import leases

BEAT_SECONDS = 2.0
EXPIRES_SECONDS = 20.0  # without a beat; a dead process of this machine is noticed at once
_POLL_SECONDS = 0.2


class LeaseLostError(MuscaleError):
    """The lease was taken over; what was worked under it is not recorded."""


@contextmanager
def lease(ledger: Ledger, name: str) -> Iterator[int]:
    """Hold the lease called `name`, waiting for it as long as its owner lives; yields the fencing token."""
    token = _acquire(ledger, name)
    done = threading.Event()
    mine = (leases.c.name == name) & (leases.c.token == token)

    def beat() -> None:
        while not done.wait(BEAT_SECONDS):
            with ledger.write() as connection:
                connection.execute(sa.update(leases).where(mine).values(beat=leases.c.beat + 1))

    heart = threading.Thread(target=beat, name=f"lease {name}", daemon=True)
    heart.start()
    try:
        yield token
    finally:
        done.set()
        heart.join()
        with ledger.write() as connection:
            connection.execute(sa.update(leases).where(mine).values(owner=None))


def check_token(connection: sa.Connection, name: str, token: int) -> None:
    """Refuse, inside a writing transaction, a token that is no longer the lease's.

    Raises:
        LeaseLostError: If another owner has taken the lease since.
    """
    current = connection.execute(sa.select(leases.c.token).where(leases.c.name == name)).scalar()
    if current != token:
        raise LeaseLostError(f"lease {name}: held with token {token}, but the current one is {current}")


def _acquire(ledger: Ledger, name: str) -> int:
    seen, seen_at = None, time.monotonic()
    while True:
        with ledger.write() as connection:
            row = connection.execute(sa.select(leases).where(leases.c.name == name)).mappings().first()
            if row is None:
                connection.execute(sa.insert(leases).values(name=name, token=1, owner=_me(), beat=0))
                return 1
            if row["beat"] != seen:
                seen, seen_at = row["beat"], time.monotonic()
            expired = time.monotonic() - seen_at > EXPIRES_SECONDS
            if row["owner"] is None or expired or _is_dead(row["owner"]):
                token = int(row["token"]) + 1
                taken = sa.update(leases).where(leases.c.name == name)
                connection.execute(taken.values(token=token, owner=_me(), beat=row["beat"] + 1))
                return token
        time.sleep(_POLL_SECONDS)


def _me() -> str:
    return f"{socket.gethostname()}/{os.getpid()}/{psutil.Process().create_time():.2f}"


def _is_dead(owner: str) -> bool:
    """Whether the owner is a process of this machine that has ended."""
    host, pid, created = owner.rsplit("/", 2)
    if host != socket.gethostname():
        return False
    try:
        process = psutil.Process(int(pid))
        return f"{process.create_time():.2f}" != created or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
