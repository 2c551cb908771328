"""Retries of a run: after lost machines, not after the run's own errors; decided by type of error and recurrence at the same step."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from muscale import json_lines
from muscale.errors import DivergedError, MuscaleError, PreemptedError, StageError, of_storage
from muscale.full_runs.records.goodput import ATTEMPTS
from muscale.full_runs.records.preemption import OBEYED

Kind = Literal["preempted", "lost", "device", "diverged", "program", "unknown"]
T = TypeVar("T")

# By class name over the MRO, since neither Ray nor a CUDA build of torch may be installed.
_LOST = {
    *("RayActorError", "ActorDiedError", "ActorUnavailableError", "NodeDiedError", "WorkerCrashedError"),
    *("WorkerGroupStartupFailedError", "WorkerGroupStartupTimeoutError", "NCCLHangError"),
    *("DistNetworkError", "DistBackendError", "DistStoreError", "ConnectionError", "TimeoutError"),
}
_DEVICE = {"AcceleratorError", "OutOfMemoryError", "OSError"}
_PROGRAM = (
    *(MuscaleError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ImportError, NameError),
    *(NotImplementedError, ArithmeticError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
)
_LOST_WORDS = re.compile(
    r"closed by peer|reset by peer|broken pipe|gloo|\bnccl\b|timed out|socket timeout|connection refused|watchdog", re.I
)
_DEVICE_WORDS = re.compile(r"\bCUDA\b|cudnn|cublas|\bECC\b|\bHIP error|out of memory", re.I)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of an attempt on a rank; `error` holds type and message without numbers, which vary."""

    attempt: int
    step: int
    kind: Kind
    error: str


def kind_of(error: BaseException) -> Kind:
    """The kind of an error: a preemption, a lost worker (also its peers' errors), a device, a divergence, or the program."""
    names = {ancestor.__name__ for ancestor in type(error).__mro__}
    if isinstance(error, PreemptedError) or "PreemptionError" in names or getattr(error, "preempted", False):
        return "preempted"
    if names & _LOST:
        return "lost"
    if isinstance(error, DivergedError):
        return "diverged"
    if isinstance(error, _PROGRAM):
        return "program"
    if names & _DEVICE or (isinstance(error, RuntimeError) and _DEVICE_WORDS.search(str(error))):
        return "device"
    if isinstance(error, RuntimeError) and _LOST_WORDS.search(str(error)):
        return "lost"
    return "unknown"


def root_causes(error: BaseException) -> list[BaseException]:
    """The errors of single ranks behind the error of a worker group or a checkpoint; a single error is its own cause.

    Peers of a failed rank lose their connection to it; their errors count only if there are no others.
    """
    causes = list(_unwrapped(error))
    first = [cause for cause in causes if kind_of(cause) != "lost"]
    return first or causes


def _unwrapped(error: BaseException) -> Iterator[BaseException]:
    inner: list[Any] = []
    for name in ("worker_failures", "failures"):  # errors of Ray Train's worker group, and of a sharded checkpoint
        if isinstance(of_ranks := getattr(error, name, None), dict):
            inner += [one[0] if isinstance(one, tuple) else one for one in of_ranks.values()]
    for name in ("_base_exc", "cause", "controller_failure"):  # causes of an error from a Ray worker
        inner.append(getattr(error, name, None))
    inner = [one for one in inner if isinstance(one, BaseException)]
    if not inner:
        yield error
    for one in inner:
        yield from _unwrapped(one)


def is_retryable(error: BaseException, history: Sequence[Failure] = ()) -> bool:
    """Whether another attempt may succeed.

    Args:
        history: Ends of all attempts, including the last; an error that occurred twice at the same step will recur. The loss of a
            peer has no known cause and may recur at any step.
    """
    if any(kind_of(cause) in ("diverged", "program") for cause in root_causes(error)):
        return False
    last = max((failure.attempt for failure in history), default=0)
    specific = [failure for failure in history if failure.kind in ("device", "unknown")]
    now = {(failure.step, failure.error) for failure in specific if failure.attempt == last}
    return not any((failure.step, failure.error) in now for failure in specific if failure.attempt < last)


def describe(error: BaseException) -> dict[str, str]:
    """Kind and text of an error, for the record of an attempt."""
    cause = root_causes(error)[0]
    return {"kind": kind_of(cause), "error": f"{type(cause).__name__}: {cause}"[:2000]}


def failures(directory: Path) -> list[Failure]:
    """The ends of a run's attempts, as recorded by the ranks; a killed attempt records nothing."""
    attempt, found = 0, []
    for record in json_lines.read(directory / ATTEMPTS):
        attempt += record["event"] == "start"
        if record["event"] == "stop":
            text = re.sub(r"\d+", "#", record["error"])
            found.append(Failure(attempt=attempt, step=record["step"], kind=record["kind"], error=text))
    return found


def divergence(directory: Path) -> str:
    """Reason for which a run's last attempt diverged, as recorded; empty if it did not."""
    attempts = json_lines.read(directory / ATTEMPTS)
    diverged = bool(attempts) and attempts[-1].get("kind") == "diverged"
    return str(attempts[-1]["error"]).partition(": ")[2] if diverged else ""


def train_with_retries(attempt: Callable[[], T], directory: Path, *, max_failures: int, failed: type[Exception]) -> T:
    """Call `attempt` until it succeeds, as long as its errors are retryable.

    A preemption counts as a failure only if the attempt made no progress.

    Raises:
        StageError: If the error is not retryable, or the run failed more often than `max_failures`.
    """
    count, reached, known = 0, -1, len(failures(directory))
    while True:
        try:
            return attempt()
        except failed as error:
            reason = describe(error)
            history = failures(directory)[known:]  # earlier causes may have been fixed by the user
            stopped = max((failure.step for failure in history), default=0)
            if reason["kind"] != "preempted" or stopped <= reached:
                count += 1
            reached = max(reached, stopped)
            text = of_storage(root_causes(error)[0]) or reason["error"]
            cause = f"{text}; the run's records are in {directory}"
            if not is_retryable(error, history):
                raise StageError(f"promote: another attempt would fail in the same way: {cause}") from error
            # then the next attempt ends as one that was asked to
            if count > max_failures and not (directory / OBEYED).exists():
                raise StageError(
                    f"promote: failed {count} times, promote.max_failures = {max_failures}: {cause}"
                ) from error
            logging.getLogger(__name__).warning(
                "attempt ended (%s); the next attempt continues from the last checkpoint", reason["error"]
            )
            time.sleep(min(2.0**count, 30.0))
