"""One tokenized source on disk: training and validation tokens, memory-mapped, and the manifest that identifies them.

Token files and manifest get their names only when they are complete, and the manifest comes last: a folder without a
manifest is unfinished and is written again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np

from proxy_models.data.documents import ReadReport
from proxy_models.data.record_packing import Packing
from proxy_models.data.sources import CorpusError, Source, SourceFile, Split, TokenDtype
from proxy_models.data.tokenization import TokenBlock, blocks
from proxy_models.data.tokenizer import Tokenizer, Tokens, smallest_dtype, stored_dtype
from proxy_models.data.uncounted import SIGNED, signed
from proxy_models.files import atomic_write, named
from proxy_models.hashing import content_key

FORMAT = 2
MANIFEST = "manifest.json"
SPLITS: tuple[Split, ...] = ("train", "validation")
COUNTED = "counted"  # key of the numbers of tokens and bytes that count in the loss, for a source with prompts only
STATED = "stated"  # name of the tokenizer of a source of tokens
UNFINISHED = ".unfinished"
_MOST_LOST = 0.01
"""Share of characters that a tokenizer may be unable to represent before a warning (assumed)."""
_log = logging.getLogger(__name__)
OnProgress = Callable[[int, int], None]
"""Called with the bytes done and all bytes."""


@dataclass(frozen=True, kw_only=True)
class TokenFiles:
    """A finished source in `folder`."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a folder that `write_token_files` finished.

        Raises:
            CorpusError: If the manifest is missing or broken, or the size of a token file differs from the manifest.
        """
        manifest = read_manifest(folder)
        _require_fields(manifest, folder / MANIFEST)
        width = np.dtype(manifest["dtype"]).itemsize
        sizes: dict[Split, int] = {split: manifest["tokens"][split] for split in SPLITS}
        for split, tokens in sizes.items():
            file = folder / f"{split}.bin"
            found = file.stat().st_size if file.is_file() else "no file"
            if found != tokens * width:
                raise CorpusError(f"{file}: the manifest states {tokens * width} bytes, found {found}")
        return cls(folder=folder, manifest=manifest)

    @property
    def key(self) -> str:
        """Hash of the content: of both token files and how they were made; independent of their location."""
        return str(self.manifest["key"])

    @property
    def vocab_size(self) -> int:
        """Upper limit of token ids, exclusive."""
        return int(self.manifest["vocab_size"])

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the training split."""
        return int(self.manifest["tokens"]["train"])

    @property
    def n_validation_tokens(self) -> int:
        return int(self.manifest["tokens"]["validation"])

    @property
    def all_count(self) -> bool:
        """True if every token counts in the loss; False if the source has prompts, whose tokens are stored as in `uncounted`."""
        return self.manifest["dtype"] not in SIGNED

    @property
    def counted_text(self) -> dict[str, int] | None:
        """Numbers of bytes, and of held-out bytes, of the text that counts; None without text."""
        found: dict[str, int] | None = self.manifest["text" if self.all_count else COUNTED]
        return found

    @property
    def n_validation_counted(self) -> int:
        """Number of tokens in the validation split that count."""
        return self.n_validation_tokens if self.all_count else int(self.manifest[COUNTED]["validation"])

    @property
    def counted_share(self) -> float:
        """Share of the tokens of both splits that count."""
        return self._n_counted / self._n_in_both

    @property
    def _n_counted(self) -> int:
        return self._n_in_both if self.all_count else sum(self.manifest[COUNTED][split] for split in SPLITS)

    @property
    def fertility(self) -> float | None:
        """Tokens per word without the closing tokens; words are separated by ASCII white space. None without text."""
        text = self.manifest["text"]
        return (self._n_in_both - text["documents"]) / text["words"] if text and text["words"] else None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, including closing tokens, over which a loss is a mean too. None without text.

        With prompts, bytes and tokens that count.
        """
        text = self.counted_text
        return text["bytes"] / self._n_counted if text else None

    @property
    def n_left_out(self) -> int:
        """Number of files that were not read: hidden, or skipped since they can't be read."""
        return int(self.manifest.get("hidden_files", 0)) + len(self.manifest.get("skipped_files", ()))

    @property
    def _n_in_both(self) -> int:
        return self.n_tokens + self.n_validation_tokens

    @cached_property
    def train(self) -> Tokens:
        """Training tokens, memory-mapped."""
        return self._map("train")

    @cached_property
    def validation(self) -> Tokens:
        """Validation tokens, memory-mapped."""
        return self._map("validation")

    @cached_property
    def packings(self) -> dict[tuple[Split, int], Packing]:
        """Sequences of whole records that `Corpus.packing` has found, by split and context length."""
        return {}

    def _map(self, split: str) -> Tokens:
        return np.memmap(self.folder / f"{split}.bin", dtype=stored_dtype(self.manifest["dtype"]), mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the maps, since each worker opens the files itself."""
        return {"folder": self.folder, "manifest": self.manifest}


def write_token_files(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    files: Sequence[SourceFile],
    *,
    validation_fraction: float,
    on_progress: OnProgress | None = None,
) -> TokenFiles:
    """Tokenize `source` into `folder`; only one process may do so at a time.

    A single text file and every file of tokens are split by position, with their last part held out; other documents are
    not split.

    Args:
        folder: Existing folder to write into.
        tokenizer: Ignored for a source of tokens.
        validation_fraction: Share of the documents or of a file that is held out.

    Raises:
        CorpusError: If the source can't be read or changes meanwhile, or a split would be empty; no files are left then.
    """
    vocab_size = source.vocab_size or tokenizer.vocab_size
    dtype: str = smallest_dtype(vocab_size)
    if source.has_prompts:
        dtype = signed(dtype)
    unfinished = {split: folder / f"{split}.bin{UNFINISHED}" for split in SPLITS}
    try:
        tally, report = _Tally(files), ReadReport()
        with named(folder), ExitStack() as stack:
            outputs = {split: stack.enter_context(path.open("wb")) for split, path in unfinished.items()}
            for block in blocks(source, tokenizer, validation_fraction, report):
                outputs[block.split].write(tally.count(block, dtype))
                if on_progress:
                    on_progress(tally.done_bytes, tally.total_bytes)
        if source.fingerprint(files) != list(files):
            raise CorpusError(f"{source}: changed while it was read; write the corpus again")
        for split in SPLITS:
            if tally.tokens[split] < 2:
                raise CorpusError(
                    f"{source}: the corpus is empty in its {split} split "
                    f"({len(tally.of_file)} files with text, {len(report.skipped)} skipped, validation_fraction = "
                    f"{validation_fraction}); a document goes whole to "
                    "one side: add documents, or put plain texts into one file, whose end is held out"
                )
    except CorpusError:
        for path in unfinished.values():
            path.unlink(missing_ok=True)
        raise
    if report.lost > _MOST_LOST * report.sampled:
        _log.warning(
            "%s: the tokenizer can't represent %.1f%% of the characters (in a sample): they become its unknown token or no token, so "
            "losses do not cover them, and bits per byte are too low",
            source,
            100 * report.lost / report.sampled,
        )
    for split, path in unfinished.items():
        path.replace(folder / f"{split}.bin")
    made_by = STATED if source.kind == "tokens" else tokenizer.key
    content_hashes: dict[str, str] = {split: digest.hexdigest() for split, digest in tally.hashes.items()}
    identity = {"tokenizer": made_by, **content_hashes}
    for name, encoding in report.encodings.items():
        tally.of_file.get(name, {})["encoding"] = encoding
    manifest = {
        "format": FORMAT,
        "source": source.to_dict(),
        "validation_fraction": validation_fraction,
        "tokenizer": made_by,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "tokens": {split: tally.tokens[split] for split in SPLITS},
        "text": None
        if source.kind == "tokens"
        else {name: tally.text[name] for name in ("documents", "bytes", "words", "held_out_bytes")},
        "sha256": content_hashes,
        "key": content_key(identity),
        "files": [{**asdict(file), **tally.of_file[file.path]} for file in files if file.path in tally.of_file],
        "empty_files": [asdict(file) for file in files if file.path not in {*tally.of_file, *report.skipped}],
        "skipped_files": [
            {**asdict(file), "reason": report.skipped[file.path]} for file in files if file.path in report.skipped
        ],
        "hidden_files": source.n_hidden(),
    }
    if source.has_prompts:
        manifest[COUNTED] = {name: tally.counted[name] for name in (*SPLITS, "bytes", "held_out_bytes")}
    if (removed := source.cleaning()) is not None:
        manifest["cleaned"] = removed
    write_manifest(folder, manifest)
    return TokenFiles.open(folder)


def recorded_files(manifest: dict[str, Any]) -> list[SourceFile]:
    """Return the fingerprint of the source that a manifest records."""
    names = SourceFile.__dataclass_fields__
    listed = manifest["files"] + manifest["empty_files"] + manifest.get("skipped_files", [])
    return [SourceFile(**{name: entry[name] for name in names}) for entry in listed]


def with_times(manifest: dict[str, Any], now: Mapping[str, SourceFile]) -> dict[str, Any]:
    """Return a manifest with the present times of its files, whose contents are unchanged."""
    lists = [name for name in ("files", "empty_files", "skipped_files") if name in manifest]
    return manifest | {
        name: [{**entry, "modified_ns": now[entry["path"]].modified_ns} for entry in manifest[name]] for name in lists
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a finished folder.

    Raises:
        CorpusError: If the manifest is missing or broken.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CorpusError(f"{path}: no such file; this folder holds no finished corpus") from error
    except OSError as error:
        raise CorpusError(f"{path}: can't be read ({error.strerror})") from error
    except ValueError as error:
        raise CorpusError(f"{path}: not a corpus manifest ({error})") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CorpusError(f"{path}: not a corpus manifest: a table with a format is needed")
    if (found := manifest["format"]) != FORMAT:
        raise CorpusError(f"{path}: format must be {FORMAT}, got {found!r}; remove the folder to have it written again")
    return manifest


def _require_fields(manifest: dict[str, Any], path: Path) -> None:
    """Require the keys of a token files' manifest that are read later.

    Raises:
        CorpusError: Naming the file, the key, the rule and the value.
    """
    rules: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "dtype": ("a type of token files", lambda v: isinstance(v, str) and v in (*get_args(TokenDtype), *SIGNED)),
        "tokens": ("counts of train and validation", lambda v: _are_counts(v, SPLITS)),
        "vocab_size": ("a whole number of at least 1", lambda v: type(v) is int and v >= 1),
        "key": ("a hash", lambda v: isinstance(v, str) and bool(v)),
        "tokenizer": ("a name", lambda v: isinstance(v, str)),
        "text": ("null or counts", lambda v: v is None or _are_counts(v, ("documents", "bytes", "words"))),
        "source": ("a table", lambda v: isinstance(v, dict)),
        "validation_fraction": ("a number", lambda v: isinstance(v, float)),
        "files": ("a list of files", _are_files),
        "empty_files": ("a list of files", _are_files),
        "skipped_files": ("a list of files", _are_files),
        "hidden_files": ("a count", lambda v: type(v) is int and v >= 0),
    }
    if manifest.get("dtype") in SIGNED:
        counts = (*SPLITS, "bytes", "held_out_bytes")
        rules[COUNTED] = ("counts of at least 1", lambda v: _are_counts(v, counts) and all(v[name] for name in counts))
    manifest = {"skipped_files": [], "hidden_files": 0, **manifest}  # corpora written before such files were counted
    for key, (rule, holds) in rules.items():
        if key not in manifest:
            raise CorpusError(f"{path}: {key}: missing, must be {rule}")
        if not holds(value := manifest[key]):
            raise CorpusError(f"{path}: {key}: must be {rule}, got {repr(value)[:100]}")


def _are_counts(value: Any, names: Sequence[str]) -> bool:
    return isinstance(value, dict) and all(type(value.get(name)) is int and value[name] >= 0 for name in names)


def _are_files(value: Any) -> bool:
    names = SourceFile.__dataclass_fields__
    return isinstance(value, list) and all(isinstance(entry, dict) and entry.keys() >= names.keys() for entry in value)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a folder atomically."""
    replace(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def replace(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with atomic_write(path) as unfinished:
        unfinished.write_bytes(content)


class PassProgress:
    """Progress of a task that reads several sources, perhaps several times, in bytes over all passes."""

    def __init__(
        self, on_progress: OnProgress | None, prints: Mapping[str, Sequence[SourceFile]], *, passes: int
    ) -> None:
        self._on_progress = on_progress
        self._sizes = {name: sum(file.bytes for file in files) for name, files in prints.items()}
        self._passes, self._ended = passes, 0

    def of(self, name: str) -> OnProgress | None:
        """Return the callback for a pass over this source."""
        if self._on_progress is None:
            return None
        report, total = self._on_progress, sum(self._sizes.values())
        names = list(self._sizes)
        before = sum(self._sizes[other] for other in names[: names.index(name)]) + self._ended * total
        return lambda done, _total: report(before + done, total * self._passes)

    def start_last_pass(self) -> None:
        """Count all passes except the last as done."""
        self._ended = self._passes - 1


class _Tally:
    """Counts and hashes of the written tokens."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        sizes = [file.bytes for file in files]
        self._before = {file.path: before for file, before in zip(files, accumulate(sizes, initial=0), strict=False)}
        self.total_bytes, self.done_bytes = sum(sizes), 0
        self.hashes = {split: hashlib.sha256() for split in SPLITS}
        self.tokens: Counter[str] = Counter()
        self.text: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()
        self.of_file: dict[str, dict[str, Any]] = {}

    def count(self, block: TokenBlock, dtype: str) -> bytes:
        """Count a block and return its bytes for the file."""
        tokens = block.tokens.astype(stored_dtype(dtype), copy=False)
        stored = (tokens if block.counts else ~tokens).tobytes()
        self.hashes[block.split].update(stored)
        self.tokens[block.split] += len(block.tokens)
        held_out_bytes = block.n_bytes if block.split == "validation" else 0
        self.text.update(
            documents=block.n_documents, bytes=block.n_bytes, words=block.n_words, held_out_bytes=held_out_bytes
        )
        if block.counts:
            self.counted.update({block.split: len(tokens), "bytes": block.n_bytes, "held_out_bytes": held_out_bytes})
        counts = self.of_file.setdefault(block.file, {"tokens": 0, "training_tokens": 0, "split": block.split})
        counts["tokens"] += len(block.tokens)
        counts["training_tokens"] += len(block.tokens) if block.split == "train" else 0
        if counts["split"] != block.split:
            counts["split"] = "both"
        self.done_bytes = self._before.get(block.file, 0) + block.done_bytes
        return stored
