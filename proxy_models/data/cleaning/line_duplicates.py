"""Lines that occur in many documents, such as menus and notices: they are removed from every document."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from proxy_models.data.cleaning.cleaning_step import Over, TextVerdict, gathered, save
from proxy_models.data.cleaning.text_shards import Document, Shard

_PARTS = 16  # in which lines are counted one after another, by the first bits of their hashes, to bound memory


@dataclass(frozen=True, kw_only=True)
class LineDuplicates:
    """Remove lines that occur in more than `max_documents` documents of all sources; spaces around them don't count.

    Attributes:
        min_characters: Shorter lines stay.
        max_documents: Lines that occur in more documents are removed.
    """

    min_characters: int = 30
    max_documents: int = 10
    name: ClassVar[str] = "line_duplicates"
    passes: ClassVar[int] = 2

    def identity(self) -> dict[str, Any]:
        """Return the settings."""
        return asdict(self)

    def learn(self, shards: Sequence[Shard], over: Over) -> tuple[JudgeByLines, dict[str, Any]]:
        """Count the documents of every line."""
        files = over(self._count)
        frequent: dict[int, int] = {}
        for part in range(_PARTS):
            hashes, counts = gathered(files, f"hashes {part}"), gathered(files, f"counts {part}")
            lines, where = np.unique(hashes, return_inverse=True)
            totals = np.bincount(where, counts, len(lines)).astype(int)
            often = totals > self.max_documents
            frequent |= dict(zip(lines[often].tolist(), totals[often].tolist(), strict=True))
        return JudgeByLines(frequent, self.min_characters), {"lines_removed": len(frequent)}

    def _count(self, shard: Shard, target: Path) -> None:
        """Save the hashes of the lines of a shard, and in how many documents each occurs."""
        found: Counter[int] = Counter()
        for document in shard.documents():
            found.update({_hash(line) for line in _long_lines(document.text, self.min_characters)})
        hashes = np.fromiter(found.keys(), dtype=np.uint64, count=len(found))
        counts = np.fromiter(found.values(), dtype=np.int64, count=len(found))
        part = hashes % np.uint64(_PARTS)
        columns = {f"hashes {number}": hashes[part == number] for number in range(_PARTS)}
        save(columns | {f"counts {number}": counts[part == number] for number in range(_PARTS)}, target)


@dataclass(frozen=True)
class JudgeByLines:
    """Judge that removes lines.

    Attributes:
        frequent: Hash of each line to remove, and the number of documents that have it.
    """

    frequent: dict[int, int]
    min_characters: int

    def __call__(self, shard: Shard) -> Iterator[tuple[Document, TextVerdict]]:
        """Yield every document with its verdict."""
        for document in shard.documents():
            yield document, self._verdict(document.text)

    def _verdict(self, text: str) -> TextVerdict:
        kept, first, n_documents = [], "", 0
        for line in text.splitlines(keepends=True):
            stripped = line.strip()
            count = self.frequent.get(_hash(stripped), 0) if len(stripped) >= self.min_characters else 0
            if not count:
                kept.append(line)
            elif not first:
                first, n_documents = stripped, count
        if not first:
            return TextVerdict(text)
        left = "".join(kept)
        return TextVerdict(left if left.strip() else "", f"a line that occurs in {n_documents:,} documents", first)


def _long_lines(text: str, min_characters: int) -> Iterator[str]:
    return (line for line in map(str.strip, text.splitlines()) if len(line) >= min_characters)


def _hash(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest())
