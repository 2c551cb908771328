"""A folder that appears with all of its files, or not at all."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from proxy_models.atomic_write import named


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A folder beside `path` to write into; at the end of the block its files are on disk and it becomes `path`.

    After an error it is removed, after a kill it stays behind under a name that ends in `.unfinished`.

    Raises:
        FileExistsError: If there is something at `path`, other than an empty folder.
        OSError: With the folder's name, where the error itself names no file.
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
                _to_disk(file)
            _to_disk(unfinished)
            require_free(path)
            unfinished.rename(path)  # over an empty folder, if there is one; never over a file that came meanwhile
            _to_disk(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def require_free(path: Path) -> None:
    """Let a path pass at which there is nothing, or an empty folder.

    Raises:
        FileExistsError: If there is something else.
    """
    if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise FileExistsError(
            f"{path}: there is something already; name a folder that is not there, or remove this one"
        )


def _to_disk(path: Path) -> None:
    """Wait until a file or a folder's entries are written; where folders can't be opened there is nothing to wait for."""
    with suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
