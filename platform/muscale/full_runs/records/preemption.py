"""Preemption notices: the run saves and ends with an exit code that asks for a restart.

A notice is SIGINT (Ctrl-C; a second one, unless it is an echo, interrupts at once), SIGTERM (torchrun, batch systems, containers),
SIGUSR1 under Slurm (`--signal=USR1@120`), or a file in the run's directory, for launchers whose workers receive no signals: Ray
trains in a thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from muscale.interrupts import ECHO_SECONDS

NOTICE = "preempt"  # file in a run's directory
OBEYED = "preempt.obeyed"  # its name once the run has saved and ended because of it
_LOOK_SECONDS = 1.0


class PreemptionNotice:
    """Whether this process has received a notice."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / NOTICE
        self._heard = False
        self._interrupted_at = float("inf")
        self._looked = float("-inf")

    def listen(self) -> None:
        """Install signal handlers in the main thread; Lightning's handlers would start a collective in the middle of a step."""
        if threading.current_thread() is not threading.main_thread():
            return
        for which in (signal.SIGINT, signal.SIGTERM, *((signal.SIGUSR1,) if "SLURM_JOB_ID" in os.environ else ())):
            signal.signal(which, self._hear)

    def __call__(self) -> bool:
        """Whether a notice has arrived; the file is checked at most every `_LOOK_SECONDS`, since shared disks are slow."""
        if not self._heard and time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            if self.file.exists():  # never reset to False: a signal may have arrived meanwhile
                self._heard = True
        return self._heard

    def obeyed(self) -> None:
        """Rename the file: it ends no other attempt, and tells the driver that none may follow."""
        with suppress(FileNotFoundError):  # the notice was a signal
            self.file.replace(self.file.with_name(OBEYED))

    def _hear(self, which: int, _frame: object) -> None:
        if which == signal.SIGINT:
            if time.monotonic() > self._interrupted_at + ECHO_SECONDS:
                raise KeyboardInterrupt
            self._interrupted_at = min(self._interrupted_at, time.monotonic())
        self._heard = True
