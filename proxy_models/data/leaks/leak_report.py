"""Held-out text that was found in the training text: counts by source, and places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Passage of a training document that is also held-out text.

    Attributes:
        line: Line of the passage in the training file; row of a table; or number of a token.
        n_units: Words, bytes or tokens that agree.
        share: Share of the held-out document that they are.
        text: Beginning of the passage, normalized.
    """

    source: str
    file: str
    line: int
    held_out_source: str
    held_out_file: str
    held_out_line: int
    n_units: int
    unit: str
    share: float
    text: str

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line} holds {self.n_units:,} {self.unit} ({self.share:.0%}) of "
            f"{self.held_out_file}:{self.held_out_line}"
        )


@dataclass(frozen=True, kw_only=True)
class SourceLeaks:
    """Leaks of one held-out source. Each section of a long document counts as a document.

    Attributes:
        documents: Held-out documents that were looked up.
        leaked_documents: Those that the training text holds almost as a whole.
        n_units: Words (or bytes, or tokens) of all documents.
        leaked_units: Words of the leaked documents.
        repeated_units: Words of all passages that the training text holds.
        by_source: These words, by training source.
        skipped: Documents that are too short to look up.
    """

    documents: int
    leaked_documents: int
    n_units: int
    leaked_units: int
    repeated_units: int
    by_source: Mapping[str, int]
    skipped: int


@dataclass(frozen=True, kw_only=True)
class LeakReport:
    """Held-out text that the training text holds.

    Attributes:
        held_out: Counts by held-out source.
        leaks: Some of the passages: first those that are most of a document, then the longest.
        n_leaks: Number of all passages.
        indexed: Share of the held-out text that was looked up.
    """

    held_out: Mapping[str, SourceLeaks]
    leaks: tuple[Leak, ...]
    n_leaks: int
    indexed: float

    @property
    def share(self) -> float:
        """Share of the held-out words that are in leaked documents."""
        return self._share("leaked_units")

    @property
    def repeated_share(self) -> float:
        """Share of the held-out words that are in any passage of the training text."""
        return self._share("repeated_units")

    def _share(self, name: str) -> float:
        n_units = sum(source.n_units for source in self.held_out.values())
        return sum(getattr(source, name) for source in self.held_out.values()) / n_units if n_units else 0.0
