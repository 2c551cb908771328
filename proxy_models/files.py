"""Files and folders that appear complete or not at all, errors that name them, and one writer of a folder at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

LOCK = ".writing"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a name next to `path` to write to; at the end of the block the file becomes `path`.

    An error removes the unfinished file; a kill leaves it under a name that ends in `.unfinished`.

    Raises:
        OSError: With the file's name, which the error of a write to a full disk lacks.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    with named(path):
        try:
            yield unfinished
            unfinished.replace(path)
        except BaseException:
            with suppress(OSError):  # the storage may be gone or read-only; the first error is the important one
                unfinished.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write a text file by `atomic_write`."""
    with atomic_write(path) as unfinished:
        unfinished.write_text(text)


def read_at_most(path: Path, n_bytes: int) -> bytes:
    """Read a file that somebody else may have written; raise ValueError if it is longer."""
    with path.open("rb") as file:
        content = file.read(n_bytes + 1)
    if len(content) > n_bytes:
        raise ValueError(f"must have at most {n_bytes:,} bytes, but has more")
    return content


def is_utf8(path: str) -> bool:
    """Whether a path of the operating system can be written in UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the path to an operating system's error within the block that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a folder next to `path` to write into; at the end of the block its files are on disk and it becomes `path`.

    An error removes the unfinished folder; a kill leaves it under a name that ends in `.unfinished`.

    Raises:
        FileExistsError: If something other than an empty folder exists at `path`.
        OSError: With the folder's name, if the error itself names no file.
    """
    require_free(path)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with named(path):
            unfinished.mkdir(parents=True)
            yield unfinished
            readable = stat.S_IMODE(unfinished.stat().st_mode) & 0o666
            for file in unfinished.rglob("*"):
                if file.is_file():
                    file.chmod(readable)  # some libraries write files that only their owner can read
                to_disk(file)
            to_disk(unfinished)
            require_free(path)
            unfinished.rename(path)  # may replace an empty folder, but never a file that appeared meanwhile
            to_disk(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def require_free(path: Path) -> None:
    """Require that nothing or an empty folder exists at a path; raise FileExistsError if anything else exists there."""
    if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise FileExistsError(f"{path}: must not exist or be an empty folder; name another folder, or remove this one")


def to_disk(path: Path) -> None:
    """Wait until a file or a folder's entries are on disk; if the system can't open folders, there is nothing to wait for."""
    with suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Create `folder` if needed and lock it against other processes; wait for a process that holds the lock.

    The kernel releases the lock of a process that dies. A folder that is empty at the end is removed.
    """
    lock = _hold(folder / LOCK)
    try:
        yield
    finally:
        (folder / LOCK).unlink()
        lock.close()
        with suppress(OSError):  # the folder is not empty
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
        lock.close()  # the last holder removed the file while this process waited
