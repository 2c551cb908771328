"""Files and folders that appear whole or not at all, errors that name them, and one writer of a folder at a time."""

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
    """Yield a name beside `path` to write to; at the end of the block the file becomes `path`.

    After an error it is removed, after a kill it stays behind under a name that ends in `.unfinished`.

    Raises:
        OSError: With the file's name, which the error of a write to a full disk lacks.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    with named(path):
        try:
            yield unfinished
            unfinished.replace(path)
        except BaseException:
            with suppress(OSError):  # of storage that is gone or read-only; the first error is the one to raise
                unfinished.unlink(missing_ok=True)
            raise


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the path to an error of the operating system within the block that names none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` to write into; at the end of the block its files are on disk and it becomes `path`.

    After an error it is removed, after a kill it stays behind under a name that ends in `.unfinished`.

    Raises:
        FileExistsError: If there is something at `path`, other than an empty folder.
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
                    file.chmod(readable)  # some libraries write files that only their owner may read
                to_disk(file)
            to_disk(unfinished)
            require_free(path)
            unfinished.rename(path)  # over an empty folder, if there is one; never over a file that came meanwhile
            to_disk(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def require_free(path: Path) -> None:
    """Require a path at which there is nothing, or an empty folder.

    Raises:
        FileExistsError: If there is something else.
    """
    if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise FileExistsError(f"{path}: must not exist or be an empty folder; name another folder, or remove this one")


def to_disk(path: Path) -> None:
    """Wait until a file or a folder's entries are written; where folders can't be opened there is nothing to wait for."""
    with suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock `folder`, which is made if need be, against other processes; wait for the one that holds it.

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
