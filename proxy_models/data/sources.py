"""Sources of a corpus: the files that a source names, and the hashes that identify them.

A source is named by a path and the kind of its files. `documents` reads its text, `token_ids` its tokens.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from proxy_models.hashing import file_sha256

EMBEDDED = "python-stdlib"
CLEANING = "cleaning.json"  # manifest of cleaned text, in the folder that holds a folder for each source
Kind = Literal["text", "jsonl", "csv", "parquet", "huggingface", "tokens", "cleaned"]
Split = Literal["train", "validation"]
OnError = Literal["stop", "skip"]
TokenDtype = Literal["uint8", "uint16", "uint32"]

_NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
ROWS = ("parquet", "huggingface")  # kinds whose documents are numbered by row, from 0
COMPRESSED = (".gz", ".zst")
# Suffixes of a folder's files; the second group is read only if the folder has no file of the first: a .json next to .jsonl files
# describes them.
_SUFFIXES: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "jsonl": ((".jsonl",), (".json",)),
    "csv": ((".csv", ".tsv"),),
    "parquet": ((".parquet",),),
    "tokens": ((".bin",), (".npy",)),
    "cleaned": ((".jsonl",),),
}
# fields that a record of the source names only where they are not the default
OPTIONAL = (
    "prompt_field",
    "messages_field",
    "encoding",
    "on_error",
    "language",
)
READ_BY = ("kind", "field", "prompt_field", "messages_field", "dtype", "vocab_size", "encoding", "on_error")
"""Fields that determine what is read of the files."""
WITH_PROMPTS = ("jsonl", "csv", *ROWS)  # kinds whose records may have prompts
_COMPRESSIBLE = ("jsonl", "csv", "cleaned")
_DECOMPRESSORS = {
    b"\x1f\x8b": "gunzip",
    b"\x28\xb5\x2f\xfd": "zstd -d",
    b"BZh91AY": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"PK\3\4": "unzip",
}


class CorpusError(ValueError):
    """Error for data that cannot be read or written; names the file, the location, the rule and the value."""


def at_home(path: str) -> Path:
    """Expand ~ to the user's folder; the path of an unknown user stays unchanged."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def decompressor(path: Path) -> str:
    """Return the tool that decompresses a file, by the file's first bytes; empty if it is not compressed."""
    with path.open("rb") as content:
        head = content.read(8)
    return next((tool for start, tool in _DECOMPRESSORS.items() if head.startswith(start)), "")


def plain_suffix(path: Path) -> str:
    """Return the last suffix of a file's name without that of a compression."""
    return path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix


def is_hidden(path: Path, root: Path) -> bool:
    """Return True if the name of the file, or of a folder between it and the root, begins with a dot."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source at the time of its hash.

    Attributes:
        path: Path relative to the source's root, with forward slashes.
        modified_ns: Time of modification; the file is not hashed again while its time and size stay the same.
    """

    path: str
    bytes: int
    modified_ns: int
    sha256: str

    @property
    def content(self) -> tuple[str, int, str]:
        """Path, size and hash, which do not depend on where and when the file was written."""
        return self.path, self.bytes, self.sha256


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of text or tokens.

    Attributes:
        path: `python-stdlib`, a file, or a folder; names in the folder that begin with a dot are left out and counted.
        kind: "text": each file is a document. "jsonl": each line of the `*.jsonl` files is an object, or the `*.json` files hold
            an array of objects, or objects one after another. "csv": each row of the `*.csv` and `*.tsv` files, which have a
            header, is a document. These three may be compressed, as `.gz` or `.zst`. "parquet": each row of the `*.parquet` files
            is a document. "huggingface": a folder that the datasets library's `save_to_disk` wrote. "tokens": ids in `*.bin`
            or `*.npy` files; see `token_ids`. "cleaned": a folder of JSON Lines that cleaning wrote, each with text, file, line
            and split.
        field: Field or column that holds the text; `content.text` is the field `text` within `content` in JSON.
        prompt_field: Field or column whose text comes before that of `field`; only the text of `field` counts in the loss.
        messages_field: Field or column with the messages of a chat, of which the assistant's count in the loss, instead of `field`.
        dtype: Type of the little-endian ids, for tokens; None if each file states it (a `.npy` header, or an index of Megatron).
        vocab_size: Upper limit of ids, exclusive; required for tokens.
        encoding: Encoding of text and CSV, as Python names it; None: UTF-8, or detected.
        on_error: "stop": a file that can't be read is an error. "skip": it is left out as a whole, and counted; to know that, every
            file is read twice.
        language: Language of the text; it is recorded in the manifest and shown next to the fertility.
    """

    path: str
    kind: Kind = "text"
    field: str = "text"
    prompt_field: str | None = None
    messages_field: str | None = None
    dtype: TokenDtype | None = None
    vocab_size: int | None = None
    encoding: str | None = None
    on_error: OnError = "stop"
    language: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error must be one of {', '.join(get_args(OnError))}, got {self.on_error!r}")
        if self.path == EMBEDDED and self.kind != "text":
            raise ValueError(f'the source {EMBEDDED} is of kind "text", got {self.kind!r}')
        if not self.field:
            raise ValueError("field must be a name, got ''")
        self._check_prompts()
        if self.kind == "tokens":
            if self.dtype not in (None, *get_args(TokenDtype)):
                raise ValueError(f"dtype must be one of {', '.join(get_args(TokenDtype))}, got {self.dtype!r}")
            if self.vocab_size is None or self.vocab_size < 1:
                raise ValueError(f"a source of tokens needs a vocab_size of at least 1, got {self.vocab_size}")
        elif self.dtype is not None or self.vocab_size is not None:
            raise ValueError(f'dtype and vocab_size are for kind "tokens", got them for {self.kind!r}')
        if self.encoding is not None:
            if self.kind not in ("text", "csv"):
                raise ValueError(f'encoding is for kinds "text" and "csv", got {self.encoding!r} for {self.kind!r}')
            try:
                "".encode(self.encoding)
            except LookupError as error:
                raise ValueError(f"encoding must be an encoding that Python knows, got {self.encoding!r}") from error

    def _check_prompts(self) -> None:
        for name in ("prompt_field", "messages_field"):
            value = getattr(self, name)
            if value is not None and self.kind not in WITH_PROMPTS:
                raise ValueError(f"{name} is for kinds {', '.join(WITH_PROMPTS)}, got {value!r} for {self.kind!r}")
            if value == "":
                raise ValueError(f"{name} must be a name, got ''")
        if self.messages_field is not None:
            if self.kind == "csv":
                raise ValueError(
                    f'messages_field must name a list, which "csv" can\'t hold, got {self.messages_field!r}'
                )
            if self.prompt_field is not None or self.field != Source.field:
                raise ValueError(
                    f"messages_field = {self.messages_field!r} can't be combined with field = {self.field!r} and prompt_field = "
                    f"{self.prompt_field!r}"
                )
        elif self.prompt_field == self.field:
            raise ValueError(f"prompt_field and field must differ, got {self.field!r} for both")

    @property
    def has_prompts(self) -> bool:
        """True if some of the text does not count in the loss."""
        return self.prompt_field is not None or self.messages_field is not None

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields or columns that are read of a record."""
        if self.messages_field is not None:
            return (self.messages_field,)
        return (self.field,) if self.prompt_field is None else (self.prompt_field, self.field)

    def __str__(self) -> str:
        named = " and ".join(self.fields)
        settings = dict.fromkeys(("jsonl", "cleaned"), f", field {named}")
        settings |= dict.fromkeys(("csv", *ROWS), f", column {named}")
        settings["tokens"] = f" of {self.dtype}" if self.dtype else ""
        return self.path if self.kind == "text" else f"{self.path} ({self.kind}{settings[self.kind]})"

    def files(self) -> tuple[Path, list[Path]]:
        """Return the root and the files, sorted by path; files of a saved data set are in its stated order.

        Raises:
            CorpusError: If there is no such source or it holds no file of its kind.
        """
        if self.path == EMBEDDED:
            root = Path(sysconfig.get_path("stdlib"))
            found = _library_files(root)
        else:
            root = at_home(self.path)
            if self.kind == "huggingface":
                found = _saved_files(root)
            elif root.is_file():
                root, found = root.parent, [root]
            elif root.is_dir():
                found = self._of_kind([path for path in _all_files(root) if not is_hidden(path, root)])
            else:
                raise CorpusError(f"{root}: no such file or folder")
        if not found:
            wanted = ", ".join(f"*{suffix}" for group in _SUFFIXES.get(self.kind, ()) for suffix in group)
            raise CorpusError(f"{root}: the corpus is empty, no file {wanted}{' ' * bool(wanted)}lies there")
        return root, found

    def _of_kind(self, files: list[Path]) -> list[Path]:
        suffix_of = plain_suffix if self.kind in _COMPRESSIBLE else lambda path: path.suffix
        for suffixes in _SUFFIXES.get(self.kind, ()):
            if found := [path for path in files if suffix_of(path) in suffixes]:
                return found
        return [] if self.kind in _SUFFIXES else files

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file by its path below the root."""
        root, files = self.files()
        return {path.relative_to(root).as_posix(): status(path).st_size for path in files}

    def n_hidden(self) -> int:
        """Return the number of files that are left out since their name, or a folder's, begins with a dot."""
        root = at_home(self.path)
        if self.path == EMBEDDED or self.kind == "huggingface" or not root.is_dir():
            return 0
        return sum(is_hidden(path, root) for path in _all_files(root))

    def fingerprint(self, known: Iterable[SourceFile] = ()) -> list[SourceFile]:
        """Return every file with its size and hash, including the index of a file of tokens that is read by its index.

        Args:
            known: Earlier fingerprints; a file of the same size and time of modification is not read again.

        Raises:
            CorpusError: If a file can't be read and such files are not skipped.
        """
        root, files = self.files()
        before = {file.path: file for file in known}
        if self.kind == "tokens" and self.dtype is None:
            files = [*files, *(index for path in files if (index := path.with_suffix(".idx")).is_file())]
        fingerprints = []
        for path in files:
            name = path.relative_to(root).as_posix()
            try:
                found, old = status(path), before.get(name)
                if old and (old.bytes, old.modified_ns) == (found.st_size, found.st_mtime_ns):
                    digest = old.sha256
                else:
                    digest = self._sha256(path)
            except OSError as error:
                raise CorpusError(f"{path}: can't be read ({error.strerror})") from error
            fingerprints.append(
                SourceFile(path=name, bytes=found.st_size, modified_ns=found.st_mtime_ns, sha256=digest)
            )
        return fingerprints

    def _sha256(self, path: Path) -> str:
        try:
            return file_sha256(path)
        except OSError:
            if self.on_error == "stop":
                raise
            return ""  # reading will skip and report the file

    def cleaning(self) -> list[dict[str, Any]] | None:
        """Return what each step of cleaning removed from this source; None if it is not cleaned text, or not by `cleaning`.

        Raises:
            CorpusError: If the manifest of the cleaning can't be read.
        """
        if self.kind != "cleaned":
            return None
        folder = at_home(self.path)
        if not (folder.parent / CLEANING).exists():
            return None
        try:
            steps: list[dict[str, Any]] = json.loads((folder.parent / CLEANING).read_bytes())["removed"][folder.name]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{folder.parent / CLEANING}: not the manifest of cleaned text ({error})") from error
        return steps

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that matter for its kind, as plain values."""
        relevant = {"text": (), "tokens": ("dtype", "vocab_size")}.get(self.kind, ("field",))
        stated = [name for name in OPTIONAL if getattr(self, name) != getattr(Source, name)]
        return {name: value for name, value in asdict(self).items() if name in ("path", "kind", *relevant, *stated)}


def _all_files(root: Path) -> list[Path]:
    """Return the files of a folder and of the folders that it links to, each folder once: a copy could be trained and held out.

    A link that leads nowhere counts as a file, which can't be read.
    """
    found: list[Path] = []
    own, read = Path(os.path.realpath(root)), set[str]()
    for folder, folders, names in os.walk(root, followlinks=True):
        here = Path(os.path.realpath(folder))
        for name in sorted(folders):  # in order, so that of two links the first is read
            to = Path(os.path.realpath(Path(folder, name)))
            known = to.is_relative_to(own) or own.is_relative_to(to) or here.is_relative_to(to)
            if str(to) in read or (known and Path(folder, name).is_symlink()):
                folders.remove(name)
            else:
                read.add(str(to))
        found += (path for path in map(Path(folder).joinpath, names) if path.is_file() or not path.exists())
    return sorted(found)


def status(path: Path) -> os.stat_result:
    """Return the status of a file, or of a link that leads nowhere; reading such a link fails with its name."""
    return path.stat() if path.exists() else path.lstat()


def _library_files(root: Path) -> list[Path]:
    """Return the library's modules, without its tests and installed packages, which may have thousands of folders."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _NOT_THE_LIBRARY
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found)


def _saved_files(root: Path) -> list[Path]:
    """Return the Arrow files of one data set that `save_to_disk` wrote, in the data set's order."""
    if (splits := root / "dataset_dict.json").is_file():
        try:
            names = ", ".join(json.loads(splits.read_text())["splits"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{splits}: not the list of splits of a saved data set ({error})") from error
        raise CorpusError(f"{root}: holds several data sets ({names}); name the folder of one of them")
    state = root / "state.json"
    try:
        listed = [entry["filename"] for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
        if odd := [name for name in listed if Path(name).name != name]:
            raise CorpusError(f"{state}: a data file must be named by its name alone, as it lies here, got {odd[0]!r}")
        return [root / name for name in listed]
    except OSError as error:
        raise CorpusError(f"{state}: can't be read ({error.strerror}); save_to_disk writes one") from error
    except CorpusError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{state}: not the state of a saved data set ({error})") from error
