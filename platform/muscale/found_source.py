"""Recognition of a user's data: the kind of its files, the field of its text, and the file that does not belong, if there is one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from muscale.errors import StageError, refusing

if TYPE_CHECKING:
    from proxy_models.data.sources import Kind, Source

_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".npy": "tokens",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".bin": "tokens",
}
_ALSO_IN_TEXT = (".json", ".csv", ".tsv", ".bin")
"""Suffixes that folders of text also have; they are data if they make up most of the bytes."""
_DOCUMENTATION = re.compile(r"(readme|licen[cs]e|copying|notice|citation|changelog|dataset_infos?)\b.*", re.IGNORECASE)
_SAVED = ("state.json", "dataset_dict.json")  # of `save_to_disk`
_FIELDS = ("text", "content", "raw_content", "body", "document")  # usual names of the text, the most usual first
_WITH_PROMPTS: tuple[dict[str, str], ...] = (  # names in records with prompts
    {"prompt_field": "prompt", "field": "completion"},
    {"prompt_field": "prompt", "field": "response"},
    {"messages_field": "messages"},
)
_SAMPLE_BYTES = 65536
_SHOWN_FILES = 10


def found_source(path: Path) -> tuple[Source, list[Path]]:
    """Return the source that a file or folder is, and its files; the first record of data is read.

    Raises:
        StageError: If the path is missing or empty, files do not belong together, or a file can't be read; the error names them.
    """
    from proxy_models.data.sources import CorpusError, Source

    kind = _kind(path)
    with refusing("--source", CorpusError):
        if kind != "tokens":
            source = Source(path=str(path), kind=kind)
            files = source.files()[1]
        else:
            files = Source(path=str(path), kind=kind, vocab_size=1).files()[1]
            source = Source(path=str(path), kind=kind, vocab_size=_n_ids(path, files))
    if not any(source.sizes().values()):
        raise StageError(f"--source: {path}: the corpus is empty, no file in it holds a byte")
    if odd := [file for file in _described(path) if file not in files and not _is_index(file)]:
        raise StageError(
            f"--source: {odd[0]}: lies next to {files[0].name}; a folder's files must be of one kind: move {len(odd)} elsewhere"
        )
    if kind == "text":
        _require_text(files)
        _require_no_records(files)
    elif kind != "tokens":
        source = _with_field(source, files[0])
    return source, files


def _kind(path: Path) -> Kind:
    """Return the kind by the files' names, without documentation."""
    from proxy_models.data.sources import plain_suffix

    if path.is_file():
        return _SUFFIXES.get(plain_suffix(path), "text")
    if any((path / name).is_file() for name in _SAVED):
        return "huggingface"
    files = _described(path)
    sizes = {file: file.stat().st_size for file in files}
    also = [file for file in files if plain_suffix(file) in _ALSO_IN_TEXT]
    data = [file for file in files if plain_suffix(file) in _SUFFIXES.keys() - {*_ALSO_IN_TEXT}]
    if not data and 2 * sum(sizes[file] for file in also) > sum(sizes.values()):
        data = also
    return _SUFFIXES[plain_suffix(data[0])] if data else "text"


def _described(path: Path) -> list[Path]:
    """Return the files of a folder without documentation, hidden files and the description of a saved data set."""
    from proxy_models.data.sources import is_hidden

    if not path.is_dir() or any((path / name).is_file() for name in _SAVED):
        return []
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not is_hidden(file, path)]
    return [file for file in files if not _DOCUMENTATION.fullmatch(file.name)]


def _is_index(file: Path) -> bool:
    return file.suffix == ".idx" and file.with_suffix(".bin").is_file()


def _n_ids(path: Path, files: Sequence[Path]) -> int:
    """Return the largest id of the files plus one."""
    from proxy_models.data.sources import Source
    from proxy_models.data.token_ids import open_ids

    source = Source(path=str(path), kind="tokens", vocab_size=1)
    return 1 + max(int(open_ids(file, source)[0].max()) for file in files)


def _with_field(source: Source, first: Path) -> Source:
    """Return the source with the first usual field, or fields of prompts, that holds text in its first record."""
    from dataclasses import replace

    from proxy_models.data.file_contents import encoding_of
    from proxy_models.data.records import NoFieldError, records
    from proxy_models.data.sources import CorpusError

    errors = []
    for names in (*({"field": field} for field in _FIELDS), *_WITH_PROMPTS):
        if source.kind == "csv" and "messages_field" in names:
            continue
        named = replace(source, **names)  # type: ignore[arg-type]
        try:
            encoding = encoding_of(first, None) if source.kind == "csv" else "utf-8"
            next(records(first, named, encoding), None)
        except CorpusError as error:
            errors.append(error)
        else:
            return named
    tried = ", ".join([*_FIELDS[1:], *(" with ".join(names.values()) for names in _WITH_PROMPTS)])
    broken = next((error for error in errors if not isinstance(error, NoFieldError)), None)
    if broken is not None:  # the fields are there
        raise StageError(f"--source: {broken}") from broken
    raise StageError(f"--source: {errors[0]} (also tried: {tried})") from errors[0]


def _require_no_records(files: Sequence[Path]) -> None:
    """Refuse JSON lines under other names, if they make up most of the bytes."""
    data = [file for file in files if _begins_as_json(file)]
    if 2 * sum(file.stat().st_size for file in data) > sum(file.stat().st_size for file in files):
        raise StageError(
            f"--source: {data[0]}: holds records, not text ({len(data)} of {len(files)} files do); give JSON lines the suffix .jsonl"
        )


def _begins_as_json(file: Path) -> bool:
    """Whether the file begins with an object, or a list of objects, whose first key is on the first line."""
    from proxy_models.data.file_contents import open_content

    with open_content(file) as content:
        return re.match(rb'(\xef\xbb\xbf)?\s*(\[\s*)?\{[ \t]*"[^"\n]*"[ \t]*:', content.read(_SAMPLE_BYTES)) is not None


def _require_text(files: Sequence[Path]) -> None:
    """Refuse files whose encoding can't be detected, before a study fails on them; the error lists all of them."""
    from proxy_models.data.file_contents import encoding_of
    from proxy_models.data.sources import CorpusError

    faulty: list[str] = []
    for file in files:
        try:
            encoding_of(file, None)
        except CorpusError as error:
            faulty.append(f"--source: {error}")
    if faulty:
        shown = [*faulty[:_SHOWN_FILES], *([f"and {n} files more"] if (n := len(faulty) - _SHOWN_FILES) > 0 else [])]
        raise StageError(
            "\n".join(shown)
            + "\nconvert texts, as with `iconv -f LATIN1 -t UTF-8 FILE`, and move other files elsewhere; "
            ".jsonl and .parquet files are read where the folder has no others"
        )
