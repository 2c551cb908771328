"""The text of a source as a stream of pieces, checked while it is read, in bounded memory.

A document is a text file, an object of JSON or a row of a table. A hash assigns each whole document to training or to
validation, independently of other documents: the hash of a file's path, or of a record's text, so that exact duplicates
are on one side. A source that is a single text file is cut by position instead. Cleaned text keeps the side that it was on.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from proxy_models.data.file_contents import UTF8, encoding_of, open_content
from proxy_models.data.records import TextRecord, records
from proxy_models.data.sources import ROWS, CorpusError, Source, Split
from proxy_models.files import is_utf8

Part = TypeVar("Part")
PIECE_BYTES = 1 << 20  # assumed: large compared with most documents, small compared with memory
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Piece of the text of one document.

    Attributes:
        file: File of the document, relative to the source's root; of cleaned text, the file before cleaning.
        split: Side that the document is on.
        content: Valid UTF-8 without byte 0.
        line: Line at which the piece begins, from 1; of Parquet and Arrow, the row, from 0.
        closes: True if the document ends here.
        done_bytes: Bytes of `read_from` that have been read.
        read_from: File that was read; it differs from `file` for cleaned text only.
        counts: Whether the piece counts in the loss; prompts do not.
    """

    file: str
    split: Split
    content: bytes
    line: int
    closes: bool
    done_bytes: int
    read_from: str
    counts: bool = True


@dataclass(kw_only=True)
class ReadReport:
    """Findings about a source's files, by their paths relative to the root.

    Attributes:
        skipped: Reason for each file that can't be read and was skipped.
        encodings: Encoding of each file that is not UTF-8.
        sampled: Characters of a sample of the text, without white space.
        lost: Those of them that the tokenizer can't represent.
    """

    skipped: dict[str, str] = field(default_factory=dict)
    encodings: dict[str, str] = field(default_factory=dict)
    sampled: int = 0
    lost: int = 0


class HasContent(Protocol):
    """Interface of what `batches` collects."""

    @property
    def content(self) -> bytes: ...


Item = TypeVar("Item", bound=HasContent)


def batches(items: Iterable[Item], n_bytes: int) -> Iterator[list[Item]]:
    """Yield the items in lists of about `n_bytes` of content."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.content)
        if size >= n_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def in_validation(document: str | bytes, fraction: float) -> bool:
    """Return True if the document with this name or text is held out."""
    name = document.encode() if isinstance(document, str) else document
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "little") < fraction * 2**64


def in_sample(content: bytes, share: float) -> bool:
    """Return True for about such a share of all texts, of the held-out ones as of the others."""
    return in_validation(b"sample\0" + content, share)


def pieces(source: Source, validation_fraction: float, report: ReadReport | None = None) -> Iterator[Piece]:
    """Yield every document that is not empty, piece by piece, in the order of `source.files()`.

    A document longer than `PIECE_BYTES` is cut after the end of a line if there is one, else between characters.

    Args:
        report: Receives the files that were skipped and the encodings that were found.

    Raises:
        CorpusError: If a file can't be read or is broken, or a text is not UTF-8 or holds byte 0. Lines are counted
            from 1, rows and bytes from 0.
    """
    alone = len(source.files()[1]) == 1
    report = report or ReadReport()

    def read(path: Path, name: str) -> Iterator[Piece]:
        encoding = encoding_of(path, source.encoding) if source.kind in ("text", "csv") else UTF8
        if encoding != UTF8:
            report.encodings[name] = encoding
        if source.kind == "text":
            return _of_text(path, name, encoding, validation_fraction, alone=alone)
        unit = "row" if source.kind in ROWS else "line"
        return _of_records(path, name, records(path, source, encoding), validation_fraction, unit, alone=alone)

    yield from read_files(source, read, report)


def read_files(source: Source, read: Callable[[Path, str], Iterator[Part]], report: ReadReport) -> Iterator[Part]:
    """Yield the parts of every file; with `on_error = "skip"`, a file is read to its end before any part of it counts.

    Raises:
        CorpusError: If a file can't be read and the source does not skip such files.
    """
    root, files = source.files()

    def parts(path: Path) -> Iterator[Part]:
        name = path.relative_to(root).as_posix()
        if not is_utf8(name):
            raise CorpusError(f"{str(path)!a}: the name of a file must be UTF-8; rename it")
        try:
            yield from read(path, name)
        except OSError as error:
            raise CorpusError(f"{path}: can't be read ({error.strerror or error})") from error

    for path in files:
        if source.on_error == "skip":
            try:
                for _ in parts(path):
                    pass
            except CorpusError as error:
                _log.warning("skipped %s", error)
                report.skipped[path.relative_to(root).as_posix()] = str(error)
                continue
        yield from parts(path)


def _of_text(path: Path, name: str, encoding: str, fraction: float, *, alone: bool) -> Iterator[Piece]:
    with open_content(path, encoding) as stream:
        size = stream.size()
        if not alone:
            split: Split = "validation" if in_validation(name, fraction) else "train"
            parts = {split: size} if size else {}
        else:
            held_out = _character_start(stream, size - int(size * fraction))
            parts = {"train": held_out, "validation": size - held_out} if size else {}
        line = 1
        for split, n_bytes in parts.items():
            for content, closes in _cut(stream, n_bytes, str(path)):
                yield Piece(
                    file=name,
                    split=split,
                    content=content,
                    line=line,
                    closes=closes,
                    done_bytes=stream.done_bytes(),
                    read_from=name,
                )
                line += content.count(b"\n")


def _of_records(
    path: Path, name: str, found: Iterator[TextRecord], fraction: float, unit: str, *, alone: bool
) -> Iterator[Piece]:
    is_empty, n_blank = True, 0
    for record in found:
        if (text := record.text) is None:
            n_blank += 1
            continue
        is_empty = False
        if not text:
            continue
        split = record.split or ("validation" if in_validation(text, fraction) else "train")
        where = f"{path}: {unit} {record.line}"
        _check_no_zero(text, where, 0)
        parts = record.parts or ((text, True),)
        for number, (part, counts) in enumerate(parts, start=1):
            is_short = len(part) <= PIECE_BYTES
            for content, ends in [(part, True)] if is_short else _cut(io.BytesIO(part), len(part), where):
                yield Piece(
                    file=record.file or name,
                    split=split,
                    content=content,
                    line=record.line,
                    closes=ends and number == len(parts),
                    done_bytes=record.done_bytes,
                    read_from=name,
                    counts=counts,
                )
    if is_empty and alone:
        raise CorpusError(f"{path}: the file is empty; it must hold at least one document")
    if n_blank:
        _log.warning("%s: skipped %d blank lines and null texts", path, n_blank)


# Pieces


def _cut(stream: BinaryIO, n_bytes: int, where: str) -> Iterator[tuple[bytes, bool]]:
    """Yield the next `n_bytes` of UTF-8 in pieces that end between characters, each with True if it is the last."""
    rest, offset, left = b"", stream.tell(), n_bytes
    while True:
        block = stream.read(min(PIECE_BYTES, left))
        if left and not block:
            raise CorpusError(
                f"{where}: ends at byte {offset + len(rest)}, {left} bytes early; it changed while it was read"
            )
        left -= len(block)
        content = rest + block
        end = _last_cut(content) if left else len(content)
        content, rest = content[:end], content[end:]
        _check_text(content, where, offset)
        yield content, not left
        if not left:
            return
        offset += end


def _last_cut(content: bytes) -> int:
    """Return the position after the end of the last complete line, or before the last character."""
    if line_end := content.rfind(b"\n") + 1:
        return line_end
    end = len(content) - 1
    while end > len(content) - 4 and content[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _character_start(stream: BinaryIO, position: int) -> int:
    """Return the start of the character at `position`, and rewind the stream."""
    start = max(0, position - 3)
    stream.seek(start)
    around = stream.read(position - start + 1)
    while len(around) > 1 and position > start and around[position - start] & 0xC0 == 0x80:
        position -= 1
    stream.seek(0)
    return position


def _check_text(content: bytes, where: str, offset: int) -> None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        at = error.start
        raise CorpusError(
            f"{where}: byte {content[at]:#04x} at {offset + at} ({error.reason}); text must be UTF-8, or state the source's `encoding`"
        ) from error
    _check_no_zero(content, where, offset)


def _check_no_zero(content: bytes, where: str, offset: int) -> None:
    if (zero := content.find(b"\0")) >= 0:
        raise CorpusError(f"{where}: byte 0 at {offset + zero}; it closes documents, so this is no text file")
