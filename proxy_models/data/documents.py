"""The text of a source as a stream of pieces, checked while it is read, in bounded memory.

A document is a text file, a line of JSONL or a row of a table. A hash assigns each whole document to training or to
validation, independently of other documents: the hash of a file's path, or of a line's or row's text, so that exact duplicates
are on one side. A source that is a single text file is cut by position instead.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from proxy_models.data.sources import CorpusError, Source, decompressor

Split = Literal["train", "validation"]
PIECE_BYTES = 1 << 20  # assumed: large compared with most documents, small compared with memory
_log = logging.getLogger(__name__)
_ROWS = 256  # rows of a table that are held at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Piece of the text of one document.

    Attributes:
        file: File of the document, relative to the source's root.
        split: Side that the document is on.
        content: Valid UTF-8 without byte 0.
        line: Line at which the piece begins, from 1; of a table, the row, from 0.
        closes: True if the document ends here.
        done_bytes: Bytes of the file that have been read.
    """

    file: str
    split: Split
    content: bytes
    line: int
    closes: bool
    done_bytes: int


def in_validation(document: str | bytes, fraction: float) -> bool:
    """Return True if the document with this name or text is held out."""
    name = document.encode() if isinstance(document, str) else document
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "little") < fraction * 2**64


def pieces(source: Source, validation_fraction: float) -> Iterator[Piece]:
    """Yield every document that is not empty, piece by piece, in the order of `source.files()`.

    A document longer than `PIECE_BYTES` is cut after the end of a line if there is one, else between characters.

    Raises:
        CorpusError: If a file can't be read or is broken, or a text is not UTF-8 or holds byte 0. Lines are counted
            from 1, rows and bytes from 0.
    """
    root, files = source.files()
    for path in files:
        name = path.relative_to(root).as_posix()
        try:
            if source.kind in ("text", "jsonl") and (tool := decompressor(path)):
                raise CorpusError(f"{path}: is compressed; decompress it, as with `{tool}`")
            if source.kind == "text":
                yield from _of_text(path, name, validation_fraction, alone=len(files) == 1)
            else:
                yield from _of_records(path, name, source, validation_fraction)
        except OSError as error:
            raise CorpusError(f"{path}: can't be read ({error.strerror or error})") from error


def _of_text(path: Path, name: str, fraction: float, *, alone: bool) -> Iterator[Piece]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        if not alone:
            split: Split = "validation" if in_validation(name, fraction) else "train"
            parts = {split: size} if size else {}
        else:
            held_out = _character_start(stream, size - int(size * fraction))
            parts = {"train": held_out, "validation": size - held_out} if size else {}
        line = 1
        for split, n_bytes in parts.items():
            for content, closes in _cut(stream, n_bytes, str(path)):
                done = stream.tell()
                yield Piece(file=name, split=split, content=content, line=line, closes=closes, done_bytes=done)
                line += content.count(b"\n")


def _of_records(path: Path, name: str, source: Source, fraction: float) -> Iterator[Piece]:
    read = {"jsonl": _lines, "parquet": _parquet_rows, "huggingface": _arrow_rows}[source.kind]
    place = "line" if source.kind == "jsonl" else "row"
    is_empty, n_blank = True, 0
    for line, text, done_bytes in read(path, source.field):
        if text is None:
            n_blank += 1
            continue
        is_empty = False
        if not text:
            continue
        split: Split = "validation" if in_validation(text, fraction) else "train"
        for content, closes in _cut(io.BytesIO(text), len(text), f"{path}: {place} {line}"):
            yield Piece(file=name, split=split, content=content, line=line, closes=closes, done_bytes=done_bytes)
    if is_empty:
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
            f"{where}: byte {content[at]:#04x} at {offset + at} ({error.reason}); text must be UTF-8"
        ) from error
    if (zero := content.find(b"\0")) >= 0:
        raise CorpusError(f"{where}: byte 0 at {offset + zero}; it closes documents, so this is no text file")


# Records: (line or row, text or None for a blank line or a null, bytes of the file that have been read)


def _lines(path: Path, field: str) -> Iterator[tuple[int, bytes | None, int]]:
    done_bytes = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"line {number}"
            done_bytes += len(line)
            _check_text(line, f"{path}: {place}", 0)
            if not line.strip():
                yield number, None, done_bytes
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise CorpusError(f"{path}: {place}: not JSON ({error})") from error
            if not isinstance(record, dict):
                raise CorpusError(f"{path}: {place}: each line must be an object, got {_short(record)}")
            if field not in record:
                raise CorpusError(f"{path}: {place}: no field {field!r}, only {', '.join(map(repr, record)) or 'none'}")
            yield number, _encoded(record[field], f"{path}: {place}: field {field!r}"), done_bytes


def _parquet_rows(path: Path, field: str) -> Iterator[tuple[int, bytes | None, int]]:
    import pyarrow as pa
    from pyarrow import parquet

    size = path.stat().st_size
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(file.schema_arrow, field, path)
            batches = file.iter_batches(batch_size=_ROWS, columns=[field])
            row, total = 0, max(1, file.metadata.num_rows)
            for batch in batches:
                for text in _texts(batch.column(0), row, f"{path}", field):
                    yield row, text, size * (row + 1) // total
                    row += 1
    except pa.ArrowException as error:
        raise CorpusError(f"{path}: can't be read as Parquet ({error})") from error


def _arrow_rows(path: Path, field: str) -> Iterator[tuple[int, bytes | None, int]]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as reader:
            _check_column(reader.schema, field, path)
            row = 0
            for batch in reader:
                for start in range(0, len(batch), _ROWS):
                    for text in _texts(batch.column(field).slice(start, _ROWS), row, f"{path}", field):
                        yield row, text, mapped.tell()
                        row += 1
    except pa.ArrowException as error:
        raise CorpusError(f"{path}: can't be read as an Arrow stream ({error})") from error


def _check_column(schema: Any, field: str, path: Path) -> None:
    from pyarrow import types

    if field not in schema.names:
        raise CorpusError(f"{path}: no column {field!r}, only {', '.join(map(repr, schema.names)) or 'none'}")
    kind = schema.field(field).type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise CorpusError(f"{path}: column {field!r} must hold strings, got {kind}")


def _texts(column: Any, first_row: int, where: str, field: str) -> Iterator[bytes | None]:
    for row, scalar in enumerate(column, start=first_row):
        place = f"row {row}"
        try:
            value = scalar.as_py()
        except UnicodeDecodeError as error:
            raise CorpusError(f"{where}: {place}: column {field!r} must be UTF-8 ({error})") from error
        yield _encoded(value, f"{where}: {place}: column {field!r}")


def _encoded(value: Any, where: str) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise CorpusError(f"{where} must be a string, got {_short(value)}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"{where}: character {error.start} is half of a pair; text must be UTF-8") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
