"""Exceptions that a user of muscale may meet (any other is a bug), and excerpts of library errors."""

from __future__ import annotations

import errno
import os

_OF_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}  # full, read-only, broken or gone

EXIT_PREEMPTED = 75
"""Exit code of a process that was preempted and has saved: EX_TEMPFAIL of sysexits.h, which invites a retry."""
EXIT_FAULT = 70
"""Exit code of a command that met a bug: EX_SOFTWARE of sysexits.h, distinct from a failed check."""
EXIT_BROKEN_PIPE = 141
"""Exit code of a command whose output pipe was closed: 128 + SIGPIPE, as for other programs."""


class MuscaleError(Exception):
    """Root of muscale's own exceptions; the command line prints its message without a stack trace and exits with 2."""


class StudyFileError(MuscaleError):
    """A study file that can't be used: the message names the file, the key, the rule and the value."""


class StudyDirectoryError(MuscaleError):
    """A directory that can't hold this study: another one's or version's, or on storage that SQLite can't use."""


class StageError(MuscaleError):
    """A stage that can't give its result: an input is missing, or what it found can't be used."""


class LedgerUnavailableError(MuscaleError):
    """A ledger that does not answer: its server or actor is gone, or was not reached at all."""


class PackageMismatchError(MuscaleError):
    """A worker that runs another muscale than the driver: the same key could mean another training there."""


class WorkerLostError(MuscaleError):
    """A worker that died with its process, its node or by its own hand as it hung; another can train what it had at work."""


class TrainerError(MuscaleError):
    """A training program that breaks the protocol: the message names the rule, what came and what to do."""


class TrainingFailedError(TrainerError):
    """A training that its program ended with a fault: an exit code, a row that breaks the protocol, no row for too long.

    The same training may fail again, others need not.
    """


class LeaseLostError(MuscaleError):
    """The lease was taken over; what was worked under it is not recorded."""


class LeaseHeldError(MuscaleError):
    """Another process does this work, and the command does not wait for it."""


class BundleError(MuscaleError):
    """A bundle that can't be used: not one, of another version, damaged, or without what is asked of it."""


class RunSelectionError(MuscaleError):
    """A choice of runs that can't be made: a column, a value or a key that there is not, or a file of another kind."""


class PreemptedError(MuscaleError):
    """A run was preempted and has saved; the same command continues it (exit code 75)."""


def of_storage(error: BaseException | None) -> str:
    """The message for an error of a disk; "" for other errors."""
    if not isinstance(error, OSError) or error.errno not in _OF_STORAGE:
        return ""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{os.strerror(error.errno).lower()}; see to the disk and run the same command again to resume"


def first_line(error: Exception) -> str:
    """The first line of an error, without the statement and the stack that libraries append."""
    return next(iter(str(getattr(error, "orig", None) or error).splitlines()), type(error).__name__)


def last_line(error: Exception) -> str:
    """The last line of an error of Ray's, which states the reason after the ids."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
