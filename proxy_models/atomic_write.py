"""A file that appears with all of its content, or not at all; what keeps it from being written names it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; at the end of the block the file becomes `path`.

    After an error it is removed, after a kill it stays behind under a name that ends in `.unfinished`.

    Raises:
        OSError: With the file's name, as that of a full disk has none where it is told by a write.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    with named(path):
        try:
            yield unfinished
            unfinished.replace(path)
        except BaseException:
            with suppress(OSError):  # of storage that is gone or read-only; the first error is the one to tell
                unfinished.unlink(missing_ok=True)
            raise


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Let an error of the operating system within the block name the path, if it names none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
