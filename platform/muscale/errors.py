"""Exceptions that a user of muscale may see (any other is a bug), and excerpts of library errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

_OF_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}  # full, read-only, broken or lost

EXIT_PREEMPTED = 75
"""Exit code of a preempted process that has saved: EX_TEMPFAIL of sysexits.h, which invites a retry."""
EXIT_FAULT = 70
"""Exit code of a command that hit a bug: EX_SOFTWARE of sysexits.h, distinct from a failed check."""
EXIT_BROKEN_PIPE = 141
"""Exit code of a command whose output pipe was closed: 128 + SIGPIPE, as in other programs."""


class MuscaleError(Exception):
    """Root of muscale's own exceptions; the command line prints its message without a stack trace and exits with 2."""


class StudyFileError(MuscaleError):
    """A study file that can't be used: the message names the file, the key, the rule and the value."""


class StudyDirectoryError(MuscaleError):
    """A directory that can't hold this study: it belongs to another study or version, or SQLite can't use its storage."""


class StageError(MuscaleError):
    """A stage that can't give a result: an input is missing, or its outcome can't be used."""


class DivergedError(StageError):
    """A run that diverged, which it would do again."""


class LedgerUnavailableError(MuscaleError):
    """A ledger that does not answer: its server or actor is gone, or could not be reached at all."""


class PackageMismatchError(MuscaleError):
    """A worker whose muscale differs from the driver's: the same key could mean different training there."""


class WorkerLostError(MuscaleError):
    """A worker that died with its process or node, or ended itself because it hung; another worker can take over its run."""


class TrainerError(MuscaleError):
    """A training program that breaks the protocol: the message names the rule, the value and the remedy."""


class TrainingFailedError(TrainerError):
    """A run that its program failed: by an exit code, a row that breaks the protocol, or no row for too long.

    The same run may fail again; other runs need not.
    """


class LeaseLostError(MuscaleError):
    """A lease that another process took over; work done under it is not recorded."""


class LeaseHeldError(MuscaleError):
    """A lease that another process holds, for which the command does not wait."""


class BundleError(MuscaleError):
    """A bundle that can't be used: not a bundle, of another version, damaged, or without the requested part."""


class RunSelectionError(MuscaleError):
    """A choice of runs that can't be made: a column, value or key that does not exist, or a file of another kind."""


class PreemptedError(MuscaleError):
    """A run that was preempted and has saved; the same command continues it (exit code 75)."""


def of_storage(error: BaseException | None) -> str:
    """Return the message for an error of the disk; "" for other errors."""
    if not isinstance(error, OSError) or error.errno not in _OF_STORAGE:
        return ""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{os.strerror(error.errno).lower()}; check the disk and run the same command again to resume"


@contextmanager
def refusing(place: object, *kinds: type[Exception], raising: type[Exception] = StageError) -> Iterator[None]:
    """Turn errors of these kinds within the block, by default ValueError, into an error that names the place."""
    caught = kinds or (ValueError,)
    try:
        yield
    except caught as error:
        raise raising(f"{place}: {error}") from error


def first_line(error: Exception) -> str:
    """Return the first line of an error, without the statement and the stack that libraries append."""
    return next(iter(str(getattr(error, "orig", None) or error).splitlines()), type(error).__name__)


def one_line(error: object) -> str:
    """Return a library's message in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


def last_line(error: Exception) -> str:
    """Return the last line of a Ray error, which states the reason after the ids."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
