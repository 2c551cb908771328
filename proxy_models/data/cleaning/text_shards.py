"""Documents of a source in files of bounded size, so that every step can resume, and can run in parallel, file by file.

A file of documents is JSON Lines with the fields text, file, line and split.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from proxy_models.data.documents import pieces
from proxy_models.data.sources import Source, Split
from proxy_models.files import atomic_write

SHARD_BYTES = 16 << 20  # text of a file: assumed, some seconds of work for the slowest step
LONGEST = 4 << 20  # text of a document; a longer one counts as several, so that a step's arrays stay below 200 MB


@dataclass(frozen=True, slots=True)
class Document:
    """A document, with the file and the line or row from which it was read."""

    text: str
    file: str
    line: int
    split: Split

    @property
    def n_bytes(self) -> int:
        """Bytes of the text in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of documents.

    Attributes:
        source: Name of the source.
        first: Number of the first document, counted over all sources.
        n_bytes: Bytes of text.
    """

    path: Path
    source: str
    first: int
    n_documents: int
    n_bytes: int

    def documents(self) -> Iterator[Document]:
        """Yield the documents in order."""
        with self.path.open("rb") as lines:
            yield from map(parse, lines)

    def document(self, number: int) -> Document:
        """Return the document with this number, counted over all sources."""
        return next(document for place, document in enumerate(self.documents(), self.first) if place == number)


def parse(line: bytes) -> Document:
    """Return the document of a line."""
    return Document(**json.loads(line))


def write(document: Document, stream: BinaryIO) -> None:
    """Write a document as a line."""
    fields = {"text": document.text, "file": document.file, "line": document.line, "split": document.split}
    stream.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")


def write_all(found: Iterable[Document], path: Path) -> None:
    """Write documents as a file, which is there once it is complete."""
    with atomic_write(path) as unfinished, unfinished.open("wb") as output:
        for document in found:
            write(document, output)


def documents(source: Source, validation_fraction: float) -> Iterator[tuple[Document, tuple[str, int]]]:
    """Yield every document, the file from which it is read, and the bytes of that file that have been read.

    Documents longer than `LONGEST` come in parts. A single text file is one document; its pieces count as documents.
    """
    whole = source.kind != "text" or len(source.files()[1]) > 1
    content, line = b"", 0
    for piece in pieces(source, validation_fraction):
        line = line if content else piece.line
        content += piece.content
        if piece.closes or not whole or len(content) + len(piece.content) > LONGEST:
            if content:
                document = Document(content.decode(), piece.file, line, piece.split)
                yield document, (piece.read_from, piece.done_bytes)
            content = b""


def shards_of(
    stream: Iterable[tuple[Document, tuple[str, int]]],
) -> Iterator[list[tuple[Document, tuple[str, int]]]]:
    """Group documents into shards."""
    shard: list[tuple[Document, tuple[str, int]]] = []
    size = 0
    for document, done in stream:
        shard.append((document, done))
        size += document.n_bytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard
