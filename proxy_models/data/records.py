"""Records of a source's files, one after another in bounded memory: JSON Lines, JSON, CSV, Parquet, Arrow and cleaned text."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from proxy_models.data.file_contents import UTF8, Content, open_content
from proxy_models.data.prompts import completed, of_chat
from proxy_models.data.sources import ROWS, CorpusError, Source, Split, plain_suffix

_ROWS = 256  # rows of a table that are held at once
_BLOCK = 1 << 20  # bytes of JSON that are read at once, or more if a value is longer
_LONGEST_WORD = 16  # characters; an error of JSON so close to the end of a block may come from the cut
LONGEST_FIELD = 1 << 28  # characters of a field of CSV (assumed); a longer field lacks its closing quote
_DELIMITERS = ",\t;|"
_SPACE = re.compile(r"[ \t\r\n]*")
_Object = dict[str, Any]


class NoFieldError(CorpusError):
    """A record or table lacks a field that the source names."""


class TextRecord(NamedTuple):
    """A document of a file.

    Attributes:
        line: Line at which the record begins, from 1; of Parquet and Arrow, the row, from 0.
        text: UTF-8; None for a blank line or a null.
        done_bytes: Bytes of the file that have been read.
        file: File that the document came from; only cleaned text states it, and its line in that file.
        split: Side that the document is on; only cleaned text states it.
        parts: The text in parts, each with whether it counts in the loss; empty if all of it does.
    """

    line: int
    text: bytes | None
    done_bytes: int
    file: str = ""
    split: Split | None = None
    parts: tuple[tuple[bytes, bool], ...] = ()


Row = tuple[int, Sequence[Any] | None, int]
"""Line, values of the source's fields or None for a blank line, and bytes of the file that have been read."""


def records(path: Path, source: Source, encoding: str = UTF8) -> Iterator[TextRecord]:
    """Yield the documents of one file.

    Args:
        encoding: Encoding of CSV; all other kinds are UTF-8 or state theirs.

    Raises:
        CorpusError: If the file is broken, or has no text where the source says.
    """
    if source.kind == "parquet":
        yield from _records(path, source, _parquet_rows(path, source))
    elif source.kind == "huggingface":
        yield from _records(path, source, _arrow_rows(path, source))
    elif source.kind == "csv":
        yield from _records(path, source, _csv_rows(path, source.fields, encoding))
    elif source.kind == "jsonl":
        yield from _records(path, source, _json_rows(path, source.fields))
    else:
        for line, value, done_bytes in _json(path):
            if value is None:
                yield TextRecord(line, None, done_bytes)
                continue
            where = f"{path}: line {line}"
            text = _encoded(_field(value, source.field, where), where, f"field {source.field!r}")
            yield _with_origin(TextRecord(line, text, done_bytes), value, path)


def _records(path: Path, source: Source, rows: Iterator[Row]) -> Iterator[TextRecord]:
    unit, noun = "row" if source.kind in ROWS else "line", "field" if source.kind == "jsonl" else "column"
    names = tuple(f"{noun} {field!r}" for field in source.fields)
    for line, values, done_bytes in rows:
        where = f"{path}: {unit} {line}"
        if values is None:
            yield TextRecord(line, None, done_bytes)
        elif source.has_prompts:
            found = of_chat(values, where, *names) if source.messages_field else completed(values, where, names)
            encoded = ((_encoded(text, where, " and ".join(names)), counts) for text, counts in found)
            parts = tuple((text, counts) for text, counts in encoded if text)
            yield TextRecord(line, b"".join(text for text, _ in parts), done_bytes, parts=parts)
        else:
            yield TextRecord(line, _encoded(values[0], where, names[0]), done_bytes)


def _json(path: Path) -> Iterator[tuple[int, _Object | None, int]]:
    read = _json_values if plain_suffix(path) == ".json" else _json_lines
    with open_content(path) as content:
        yield from read(content, path)


def _json_rows(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    for line, value, done_bytes in _json(path):
        where = f"{path}: line {line}"
        yield line, None if value is None else [_field(value, field, where) for field in fields], done_bytes


def _with_origin(record: TextRecord, value: _Object, path: Path) -> TextRecord:
    file, line, split = value.get("file"), value.get("line"), value.get("split")
    if not isinstance(file, str) or type(line) is not int or split not in get_args(Split):
        raise CorpusError(
            f"{path}: line {record.line}: cleaned text states its file, its line, and a split of "
            f"{', '.join(get_args(Split))}; got {_short({'file': file, 'line': line, 'split': split})}"
        )
    return record._replace(line=line, file=file, split=split)


def _field(record: _Object, field: str, where: str) -> Any:
    """Return the value of a field; `content.text` is the field `text` of `content` unless a field has the whole name.

    A null on the way to a nested field is a null text.
    """
    value: Any = record
    for part in (field,) if field in record else field.split("."):
        if value is None:
            return None
        if not isinstance(value, dict) or part not in value:
            raise NoFieldError(f"{where}: no field {field!r}, only {', '.join(map(repr, record)) or 'none'}")
        value = value[part]
    return value


# JSON: (line, object or None for a blank line, bytes of the file that have been read)


def _json_lines(content: Content, path: Path) -> Iterator[tuple[int, _Object | None, int]]:
    done_bytes, is_converted = 0, content.is_converted
    for number, line in enumerate(content, start=1):
        done_bytes = content.done_bytes() if is_converted else done_bytes + len(line)
        if not line.strip():
            yield number, None, done_bytes
            continue
        where = f"{path}: line {number}"
        try:
            value = json.loads(line.decode(UTF8 if number > 1 else "utf-8-sig"))
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{where}: byte {line[error.start]:#04x} at {error.start} ({error.reason}); text must be UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise CorpusError(f"{where}: each line must be an object, got {_short(value)}")
        yield number, value, done_bytes


def _json_values(content: Content, path: Path) -> Iterator[tuple[int, _Object, int]]:
    """Yield the objects of an array, or the objects that follow one another in a file without an array."""
    reader = _JsonReader(content, path)
    if in_array := reader.peek() == "[":
        reader.take()
    while (following := reader.peek()) not in ("", "]"):
        line, value = reader.value()
        if not isinstance(value, dict):
            raise CorpusError(f"{path}: line {line}: each record must be an object, got {_short(value)}")
        yield line, value, content.done_bytes()
        if not in_array:
            continue
        if (following := reader.peek()) == ",":
            reader.take()
        if (following == ",") == (reader.peek() in ("", "]")):
            raise reader.error("the array needs a comma between values and ] at its end")
    if in_array and following:
        reader.take()
        in_array, following = False, reader.peek()
    if in_array or following:
        raise reader.error("an array must be closed, and nothing may follow it")


class _JsonReader:
    """Values of JSON in a file, of which no more is held than the value that is read and a block."""

    def __init__(self, content: Content, path: Path) -> None:
        self._content, self._path = content, path
        self._characters = codecs.getincrementaldecoder("utf-8-sig")()
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._at = "", 0
        self._line, self._counted = 1, 0  # the line of a position, up to which lines have been counted

    def peek(self) -> str:
        """Return the next character that is not white space; empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # matches nothing, too
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def take(self) -> None:
        self._at += 1

    def value(self) -> tuple[int, Any]:
        """Return the line of the next value, and the value."""
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos + _LONGEST_WORD >= len(self._text)
                if not (is_cut and self._more()):
                    raise self.error(error.msg, error.pos) from error
            except RecursionError as error:
                raise self.error(str(error)) from error
            else:
                line, self._at = self._line_of(self._at), end
                return line, value

    def error(self, rule: str, position: int | None = None) -> CorpusError:
        line = self._line_of(self._at if position is None else position)
        return CorpusError(f"{self._path}: line {line}: not JSON ({rule})")

    def _line_of(self, position: int) -> int:
        self._line += self._text.count("\n", self._counted, position)
        self._counted = position
        return self._line

    def _more(self) -> bool:
        """Read a block and drop what has been used; the block doubles with a long value, whose parsing begins again."""
        self._line_of(self._at)
        rest = self._text[self._at :]
        try:
            block = self._content.read(max(_BLOCK, len(rest)))
            self._text = rest + self._characters.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise CorpusError(f"{self._path}: after line {self._line}: {error}; text must be UTF-8") from error
        self._at, self._counted = 0, 0
        return bool(block)


# Tables


def _csv_rows(path: Path, fields: Sequence[str], encoding: str) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_FIELD)  # a limit of the whole process; the default is 128 KiB
    with open_content(path, encoding) as content:
        line = 1
        try:
            header = content.readline().decode("utf-8-sig")
            delimiter = next((d for d in _DELIMITERS if fields[0] in next(csv.reader([header], delimiter=d), [])), ",")
            names = next(csv.reader([header], delimiter=delimiter), [])
            if not names:
                return
            _require_columns(names, fields, path)
            columns = [names.index(field) for field in fields]
            rows = csv.reader((text.decode() for text in content), delimiter=delimiter, strict=True)
            line = 2
            for row in rows:
                if row and len(row) != len(names):
                    raise CorpusError(
                        f"{path}: line {line}: must have the {len(names)} columns of the header, got {len(row)}"
                    )
                yield line, [row[column] for column in columns] if row else None, content.done_bytes()
                line = rows.line_num + 2
        except csv.Error as error:
            raise CorpusError(f"{path}: line {line}: not CSV ({error})") from error
        except UnicodeDecodeError as error:
            raise CorpusError(f"{path}: after line {line}: {error}; state the source's `encoding`") from error


def _parquet_rows(path: Path, source: Source) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    size = path.stat().st_size
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow, source, path)
            batches = file.iter_batches(batch_size=_ROWS, columns=list(source.fields))
            row, total = 0, max(1, file.metadata.num_rows)
            for batch in batches:
                for values in _values(batch, row, source, path):
                    yield row, values, size * (row + 1) // total
                    row += 1
    except pa.ArrowException as error:
        raise CorpusError(f"{path}: can't be read as Parquet ({error})") from error


def _arrow_rows(path: Path, source: Source) -> Iterator[Row]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as reader:
            _check_columns(reader.schema, source, path)
            row = 0
            for batch in reader:
                for start in range(0, len(batch), _ROWS):
                    for values in _values(batch.slice(start, _ROWS), row, source, path):
                        yield row, values, mapped.tell()
                        row += 1
    except pa.ArrowException as error:
        raise CorpusError(f"{path}: can't be read as an Arrow stream ({error})") from error


def _require_columns(names: Sequence[str], fields: Sequence[str], path: Path) -> None:
    for field in fields:
        if field not in names:
            raise NoFieldError(f"{path}: no column {field!r}, only {', '.join(map(repr, names)) or 'none'}")


def _check_columns(schema: Any, source: Source, path: Path) -> None:
    from pyarrow import types

    _require_columns(schema.names, source.fields, path)
    for field in source.fields:
        kind = schema.field(field).type
        if source.messages_field:
            if not (types.is_list(kind) or types.is_large_list(kind)):
                raise CorpusError(f"{path}: column {field!r} must hold lists of messages, got {kind}")
        elif not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise CorpusError(f"{path}: column {field!r} must hold strings, got {kind}")


def _values(batch: Any, first_row: int, source: Source, path: Path) -> Iterator[list[Any]]:
    """Yield the values of the source's fields for each row of a batch."""
    columns = {field: batch.column(field) for field in source.fields}
    for row in range(len(batch)):
        values = []
        for field, column in columns.items():
            try:
                values.append(column[row].as_py())
            except UnicodeDecodeError as error:
                where = f"{path}: row {first_row + row}"
                raise CorpusError(f"{where}: column {field!r} must be UTF-8 ({error})") from error
        yield values


def _encoded(value: Any, where: str, field: str) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise CorpusError(f"{where}: {field} must be a string, got {_short(value)}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"{where}: {field}: character {error.start} is half of a pair; text must be UTF-8") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
