"""Preemption notices: the run saves and ends with an exit code that asks for a restart.

A notice is SIGTERM (torchrun, batch systems, containers), SIGUSR1 under Slurm (`--signal=USR1@120`), or a file in the run's
directory, for launchers whose workers receive no signals: Ray trains in a thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

NOTICE = "preempt"  # file in a run's directory
_LOOK_SECONDS = 1.0


class PreemptionNotice:
    """Whether this process has received a notice."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / NOTICE
        self._heard = False
        self._file_is_there = _looking_for(self.file)

    def listen(self) -> None:
        """Install signal handlers in the main thread; Lightning's own would start a collective in mid-step."""
        if threading.current_thread() is not threading.main_thread():
            return
        for which in (signal.SIGTERM, *((signal.SIGUSR1,) if "SLURM_JOB_ID" in os.environ else ())):
            signal.signal(which, self._hear)

    def __call__(self) -> bool:
        """Whether a notice has arrived."""
        return self._heard or self._file_is_there()

    def _hear(self, _signal: int, _frame: object) -> None:
        self._heard = True


def _looking_for(file: Path) -> Callable[[], bool]:
    """A function that checks whether a file exists, at most every `_LOOK_SECONDS`, as shared disks are slow."""
    looked, found = float("-inf"), False

    def look() -> bool:
        nonlocal looked, found
        if not found and time.monotonic() - looked >= _LOOK_SECONDS:
            looked, found = time.monotonic(), file.exists()
        return found

    return look
