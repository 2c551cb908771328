"""End a training that hangs from within its process: the driver notices a dead worker, but not one that hangs.

The criterion is progress, not time alone: a run may take any time as long as it takes steps.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from muscale.background import in_background
from muscale.layout import STALLS

_TICKS = 20  # looks in the time allowed
_LONGEST_TICK = 5.0  # seconds
_AT_MOST = 2.0  # most ticks that one look counts, since a stopped process or a sleeping machine could make no steps


@contextmanager
def ended_where_stalled(path: Path, seconds: float, what: str) -> Iterator[Callable[[], None]]:
    """Kill this process after `seconds` of its running time without progress; yield the function that reports progress.

    Args:
        path: File for the stack of each thread at that time.
        seconds: Time allowed between two signs of progress; infinite: the process is never killed.
    """
    moved = threading.Event()
    tick = min(seconds / _TICKS, _LONGEST_TICK)

    def watch(done: threading.Event) -> None:
        idle, before = 0.0, time.monotonic()
        while not done.wait(tick):
            now = time.monotonic()
            idle = 0.0 if moved.is_set() else idle + min(now - before, _AT_MOST * tick)
            moved.clear()
            before = now
            if idle > seconds and not done.is_set():
                try:
                    _tell(
                        path, f"{what} took no step for {seconds:g} s, and its process {os.getpid()} was ended at:\n\n"
                    )
                finally:  # a disk may be full, and be why it hangs
                    os.kill(os.getpid(), signal.SIGKILL)

    if math.isinf(seconds):
        yield moved.set
        return
    with in_background(watch, "stalls"):
        yield moved.set


def hint(directory: Path, since: float) -> str:
    """A hint for the message of a worker's death: the file of the newest stall since `since` (seconds of the system's clock)."""
    paths = sorted(directory.joinpath(STALLS).glob("*.txt"), key=lambda path: path.stat().st_mtime)
    return (
        f"; it was ended because it took no step; {paths[-1]} shows where"
        if paths and paths[-1].stat().st_mtime >= since
        else ""
    )


def _tell(path: Path, first: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(first)
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
