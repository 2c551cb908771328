"""Valid files made wrong are read or refused with a message: no other error, no hang, nothing left behind."""

from __future__ import annotations

import random
import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS

LIMIT = 10.0
"""Seconds of the processor for one reading; the slowest valid one takes a tenth of a second."""
MEMORY = 4 << 30
"""Bytes; a pickle may ask for a memo of any size, which its reader refuses as a MemoryError."""


class TookTooLongError(BaseException):
    """Not an Exception, so that no reader catches it."""


@contextmanager
def limited() -> Iterator[None]:
    """Bound the time on the processor, which a busy machine does not change, and the memory."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise TookTooLongError(f"more than {LIMIT:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def read_many(name: str, folder: Path, *, readings: int | None, seed: int) -> None:
    (folder / "given").mkdir()
    target, generator = TARGETS[name](folder / "given"), random.Random(seed)
    for valid in target.seeds:
        assert target(valid), "a valid file is read"
    for _ in range(readings or target.readings):
        data = mutated(generator.choice(target.seeds), generator)
        try:
            with limited(), warnings.catch_warnings():
                warnings.simplefilter("error")
                target(data)
        except (Exception, TookTooLongError) as error:
            raise AssertionError(f"{name}: {data[:2000]!r}") from error


@pytest.mark.parametrize("name", TARGETS)
def test_a_file_made_wrong_is_read_or_refused(name: str, tmp_path: Path) -> None:
    read_many(name, tmp_path, readings=None, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_thousands_of_files_made_wrong_are_read_or_refused(name: str, tmp_path: Path) -> None:
    read_many(name, tmp_path, readings=5_000, seed=2)
