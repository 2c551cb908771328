"""The process of a training program: starts it in a separate process group, reads its rows, and ends all that it started."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from muscale.errors import TrainerError
from muscale.programs.protocol import ROWS, Description, TrainerJob, fill, rows_of
from proxy_models.files import write_text

DESCRIBE = "--describe"
OUTPUT = "output.log"
_LOOK_SECONDS = 0.02  # interval between checks for rows; a check that finds the file's size unchanged reads nothing
GRACE_SECONDS = 10.0  # time to save after SIGTERM (assumed)
_PROCESS = "process.json"  # process id and creation time of the program
_FOLDER = "MUSCALE_TRAINER_FOLDER"  # environment variable by which all processes that a program starts are found
_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):  # else it was killed before
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Sends SIGTERM by PR_SET_PDEATHSIG of prctl(2). `preexec_fn` would fork, which is not safe with the threads of a Ray worker."""


class TrainerStatus(StrEnum):
    """The end of a training."""

    FINISHED = "finished"
    DIVERGED = "diverged"
    FAILED = "failed"
    STALLED = "stalled"


@dataclass(frozen=True, kw_only=True)
class TrainerEnd:
    """The end of one training.

    Attributes:
        status: "diverged" (a loss that is not finite) is a result; "failed" and "stalled" are faults of the program.
        rows: Loss by tokens seen.
        reason: Why the training did not finish; else empty.
        was_killed: Whether a signal ended the program, as when memory runs out; the program's own faults give an exit code.
    """

    status: TrainerStatus
    rows: Mapping[int, float]
    reason: str = ""
    was_killed: bool = False

    @property
    def loss(self) -> float | None:
        """The last loss of a finished training."""
        return self.rows[max(self.rows)] if self.status is TrainerStatus.FINISHED else None


def describe(
    command: tuple[str, ...], job: TrainerJob, seconds: float = 300.0, *, cwd: Path | None = None
) -> Description:
    """Ask a program for the description of a job's shape.

    Args:
        command: The trainer's command, with {config} and {state}.
        seconds: Time limit; several times as long as importing torch takes on a busy machine (assumed).
        cwd: Working directory of the program; None: that of this process.

    Raises:
        TrainerError: If the program fails, takes longer, or its answer is no description.
    """
    with tempfile.TemporaryDirectory(prefix="muscale-describe-") as folder:
        config, log, errors = _write(job, Path(folder)), Path(folder) / "output", Path(folder) / "errors"
        words = [*fill(command, config, Path(folder) / "state"), DESCRIBE]
        with _started(words, log, cwd=cwd, errors=errors) as process:
            deadline = time.monotonic() + seconds
            while not _ended(process) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            if not _ended(process):
                raise TrainerError(f"{DESCRIBE}: must answer within {seconds:g} s")
        if process.returncode:
            raise TrainerError(f"{DESCRIBE}: must exit with 0, got {process.returncode}: {_last_line(errors, log)}")
        return Description.parse(log.read_text(errors="replace"))


def train(
    command: tuple[str, ...],
    job: TrainerJob,
    folder: Path,
    *,
    stall_seconds: float = math.inf,
    grace_seconds: float = GRACE_SECONDS,
    on_row: Callable[[int, float], None] = lambda _tokens, _loss: None,
    cwd: Path | None = None,
) -> TrainerEnd:
    """Train a job to its end; after any interruption the same call continues from the program's state.

    If the program of a killed earlier call still runs, this call ends it first.

    Args:
        command: The trainer's command, with {config} and {state}.
        folder: For `config.json`, `output.log` (standard output and errors) and the folder `state` with the program's state and rows.
        stall_seconds: Longest time between two rows, or before the first row; after that the program is killed.
        grace_seconds: Time to save between SIGTERM and SIGKILL when the program is ended.
        on_row: Gets tokens and loss of each row of this segment; if it raises, the program and all that it started are ended.
        cwd: Working directory of the program; None: that of this process.

    Raises:
        TrainerError: If the command can't be started.
        TrainingFailedError: If the rows break the protocol.
    """
    state, log = folder / "state", folder / OUTPUT
    state.mkdir(parents=True, exist_ok=True)
    _end_leftover(folder)
    words = fill(command, _write(job, folder), state)
    known = (state / ROWS).read_bytes().count(b"\n") if (state / ROWS).exists() else 0
    rows, size, moved = rows_of(state / ROWS, job, known), _size(state / ROWS), time.monotonic()
    seen = max(rows, default=job.start)
    with _started(words, log, grace_seconds, cwd=cwd) as process:
        with suppress(psutil.NoSuchProcess):  # the program ended already
            started = [process.pid, psutil.Process(process.pid).create_time()]
            (folder / _PROCESS).write_text(json.dumps(started))
        while True:
            ended = _ended(process)  # before the rows are read, so that none is missed
            if (now := _size(state / ROWS)) != size:
                rows, size, moved = rows_of(state / ROWS, job, known), now, time.monotonic()
                for tokens in sorted(at for at in rows if at > seen):
                    seen = tokens
                    on_row(tokens, rows[tokens])
            if ended:
                break
            if time.monotonic() - moved > stall_seconds:
                reason = f"no row for {stall_seconds:g} s after {seen:,} tokens, so it was stopped"
                return TrainerEnd(status=TrainerStatus.STALLED, rows=rows, reason=reason)
            time.sleep(_LOOK_SECONDS)
    return _judge(job, rows, process.returncode, log)


def _judge(job: TrainerJob, rows: Mapping[int, float], code: int, log: Path) -> TrainerEnd:
    if diverged := [tokens for tokens, loss in rows.items() if math.isinf(loss)]:
        reason = f"the loss is not finite after {diverged[0]:,} tokens"
        return TrainerEnd(status=TrainerStatus.DIVERGED, rows=rows, reason=reason)
    if code:
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = f"{how}: {_last_line(log)}"
        return TrainerEnd(status=TrainerStatus.FAILED, rows=rows, reason=reason, was_killed=code < 0)
    if job.end not in rows:
        reason = f"exit code 0 without a row at tokens.to = {job.end:,}; the last is at {max(rows, default=0):,}"
        return TrainerEnd(status=TrainerStatus.FAILED, rows=rows, reason=reason)
    return TrainerEnd(status=TrainerStatus.FINISHED, rows=rows)


def _write(job: TrainerJob, folder: Path) -> Path:
    write_text(folder / "config.json", json.dumps(job.to_dict(), indent=1))
    return folder / "config.json"


@contextmanager
def _started(
    words: list[str],
    log: Path,
    grace_seconds: float = GRACE_SECONDS,
    *,
    cwd: Path | None = None,
    errors: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the running process; on exit, end the process, its group and all that it started elsewhere.

    Workers of torchrun have separate sessions, so that a signal to the group does not reach them, and torchrun may end before
    them. On Linux the program gets SIGTERM when this process is killed.

    Args:
        errors: File for standard error; None: the log gets standard error too.
    """
    if not (shutil.which(words[0]) or os.access((cwd or Path()) / words[0], os.X_OK)):
        raise TrainerError(f"{words[0]}: can't be started: no such program")
    linux = sys.platform == "linux"
    with_parent = [sys.executable, "-S", "-E", "-c", _WITH_PARENT, str(os.getpid())] if linux else []
    try:
        with log.open("wb") as output, (errors or Path(os.devnull)).open("wb") as apart:
            process = subprocess.Popen(  # noqa: S603
                [*with_parent, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=apart if errors else subprocess.STDOUT,
                start_new_session=True,
                cwd=cwd,
                env=os.environ | {_FOLDER: str(log.parent.resolve())},
            )
    except OSError as error:
        raise TrainerError(f"{words[0]}: can't be started: {error.strerror or error}") from error
    try:
        yield process
    finally:
        elsewhere: list[psutil.Process] = []
        if not _ended(process):
            elsewhere = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_seconds
            while not _ended(process) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
        with suppress(ProcessLookupError, PermissionError):  # on macOS: the last process of the group is a zombie
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _kill([*elsewhere, *_started_for(log.parent)])


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended; it is not reaped, so that no other process gets the group's id before the group is ended."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_leftover(folder: Path) -> None:
    """End the program that a killed call left running, if the process still has the recorded id and creation time."""
    left = [*_started_for(folder)]
    with suppress(FileNotFoundError, ValueError, psutil.NoSuchProcess):  # the record is damaged, or the program ended
        pid, created = json.loads((folder / _PROCESS).read_text())
        process = psutil.Process(pid)
        if process.create_time() == created:
            left += [*process.children(recursive=True), process]
    _kill(left)


def _started_for(folder: Path) -> Iterator[psutil.Process]:
    """Processes of programs that were started for this folder, unless they overwrote their environment (setproctitle does)."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process ended, or belongs to another user
            if process.environ().get(_FOLDER) == str(folder.resolve()):
                yield process


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # also raised if another process has got its id
            process.kill()
    psutil.wait_procs(processes, timeout=GRACE_SECONDS)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _last_line(*logs: Path) -> str:
    """Return the last non-blank line of the first log that has one."""
    lines = (line for log in logs for line in reversed(log.read_text(errors="replace").splitlines()))
    return next((line.strip() for line in lines if line.strip()), "without a message")
