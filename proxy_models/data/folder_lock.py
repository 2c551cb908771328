"""One writer of a folder at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

LOCK = ".writing"


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made if need be, against other processes; waits for the one that holds it.

    The kernel drops the lock of a process that dies. A folder that is empty at the end is removed.
    """
    lock = _hold(folder / LOCK)
    try:
        yield
    finally:
        (folder / LOCK).unlink()
        lock.close()
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def _hold(path: Path) -> IO[str]:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = path.open("w")
        except FileNotFoundError:  # the last holder removed the folder just now
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
                return lock
        lock.close()  # the last holder removed the file that we waited for
