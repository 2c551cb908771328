"""A reader of files that people give: it takes any bytes and ends in a value, or in an error of the kinds that it documents.

A target writes the bytes under a folder of its own. Whatever else it raises, how long it takes, an empty message, and a file
that it leaves behind are findings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar


class Target(ABC):
    """A reader of files."""

    suffix: ClassVar[str]
    few: ClassVar[int] = 40
    """Readings of the tests that run every time: fewer where one takes a tenth of a second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seeds: list[bytes] = []

    @property
    @abstractmethod
    def refusals(self) -> tuple[type[Exception], ...]:
        """What it documents."""

    @abstractmethod
    def read(self, path: Path) -> object:
        """Read a file, and use what was read as the command would."""

    def place(self, data: bytes) -> Path:
        """Where the bytes lie."""
        path = self.folder / f"given{self.suffix}"
        path.write_bytes(data)
        return path

    def __call__(self, data: bytes) -> str:
        """Read the bytes; returns the refusal, or nothing."""
        path = self.place(data)
        before = self._standing()
        try:
            self.read(path)
        except self.refusals as error:
            told = str(error)
            if not told.strip():
                raise AssertionError(f"a refusal that says nothing: {error!r}") from error
            if len(told) > 50_000:
                raise AssertionError(f"a refusal of {len(told):,} characters") from error
            if self._standing() != before:
                raise AssertionError(f"left behind: {self._standing() ^ before}") from error
            return told
        return ""

    def _standing(self) -> set[str]:
        return {str(path) for path in self.folder.rglob("*")}


def passes(call: object, refusals: tuple[type[Exception], ...]) -> bool:
    try:
        call()  # type: ignore[operator]
    except refusals:
        return False
    return True
