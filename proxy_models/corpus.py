"""A corpus on disk: two memory-mapped token files, training and validation, and the manifest that identifies them.

The tokenizer is bytes: token = byte, 256 ids, and byte 0 closes every document. Files are split by the hash of their
path, so adding a file moves no other. The manifest is written last and moved into place whole: a folder without it is
an unfinished corpus and is written again.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

EMBEDDED = "python-stdlib"
VOCAB_SIZE = 256
END_OF_DOCUMENT = b"\0"
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")


class CorpusError(ValueError):
    """A corpus that can't be read or written; the message names the file and the rule."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A finished corpus in `folder`."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open what `write_corpus` finished.

        Raises:
            CorpusError: If the manifest is missing or broken, or a token file has not the size that it states.
        """
        path = folder / MANIFEST
        try:
            manifest = json.loads(path.read_text())
            sizes = {split: int(manifest["tokens"][split]) for split in SPLITS}
        except FileNotFoundError as error:
            raise CorpusError(f"{path}: no such file; this folder holds no finished corpus") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{path}: not a corpus manifest ({error})") from error
        for split, tokens in sizes.items():
            file = folder / f"{split}.bin"
            if not file.is_file() or file.stat().st_size != tokens:
                found = file.stat().st_size if file.is_file() else "no file"
                raise CorpusError(f"{file}: the manifest states {tokens} bytes, found {found}")
        return cls(folder=folder, manifest=manifest)

    @property
    def key(self) -> str:
        """Hash of the content: of both token files and how they were made, not of where they lie."""
        return str(self.manifest["key"])

    @property
    def n_tokens(self) -> int:
        """Tokens in the training split."""
        return int(self.manifest["tokens"]["train"])

    @property
    def n_validation_tokens(self) -> int:
        """Tokens in the validation split."""
        return int(self.manifest["tokens"]["validation"])

    @cached_property
    def train(self) -> NDArray[np.uint8]:
        """Training tokens, memory-mapped."""
        return self._map("train")

    @cached_property
    def validation(self) -> NDArray[np.uint8]:
        """Validation tokens, memory-mapped."""
        return self._map("validation")

    def _map(self, split: str) -> NDArray[np.uint8]:
        return np.memmap(self.folder / f"{split}.bin", dtype=np.uint8, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the maps: a worker opens its own."""
        return {"folder": self.folder, "manifest": self.manifest}


def source_files(source: str) -> tuple[Path, list[Path]]:
    """The root and the sorted text files of a source: the standard library's own modules, a folder, or one file.

    Raises:
        CorpusError: If there is no such source or it holds no file.
    """
    if source == EMBEDDED:
        root = Path(sysconfig.get_path("stdlib"))
        left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
        files = [path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts)]
    else:
        root = Path(source).expanduser()
        if root.is_file():
            root, files = root.parent, [root]
        elif root.is_dir():
            files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        else:
            raise CorpusError(f"{root}: no such file or folder")
    if not files:
        raise CorpusError(f"{root}: the corpus is empty, no file lies there")
    return root, files


def documents(root: Path, files: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Relative path and content of each file that is not empty.

    Raises:
        CorpusError: If a file can't be read, is no text, or holds the byte that closes documents.
    """
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CorpusError(f"{path}: can't be read ({error.strerror})") from error
        if END_OF_DOCUMENT in content:
            raise CorpusError(
                f"{path}: byte 0 at {content.index(END_OF_DOCUMENT)}; it closes documents, so this is no text file"
            )
        if content:
            yield path.relative_to(root).as_posix(), content


def in_validation(path: str, fraction: float) -> bool:
    """Whether the document at this relative path is held out."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "little") < fraction * 2**64


def write_corpus(folder: Path, source: str, *, validation_fraction: float = 0.1) -> Corpus:
    """Write the token files and the manifest of `source` into `folder`, or open them if they are finished.

    A single file is split by position, its last part held out; several files are split by file.

    Raises:
        CorpusError: If the source can't be read, or one of the splits would be empty.
    """
    if (folder / MANIFEST).exists():
        return Corpus.open(folder)
    root, files = source_files(source)
    folder.mkdir(parents=True, exist_ok=True)
    hashes = {split: hashlib.sha256() for split in SPLITS}
    tokens = dict.fromkeys(SPLITS, 0)
    listed: list[dict[str, Any]] = []
    with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as validation:
        outputs = {"train": train, "validation": validation}

        def append(split: str, content: bytes) -> None:
            outputs[split].write(content)
            hashes[split].update(content)
            tokens[split] += len(content)

        for path, content in documents(root, files):
            if len(files) == 1:
                held_out = len(content) - int(len(content) * validation_fraction)
                append("train", content[:held_out] + END_OF_DOCUMENT)
                append("validation", content[held_out:] + END_OF_DOCUMENT)
                split = "both"
            else:
                split = "validation" if in_validation(path, validation_fraction) else "train"
                append(split, content + END_OF_DOCUMENT)
            listed.append(
                {
                    "path": path,
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "tokens": len(content) + 1,
                    "split": split,
                }
            )
    for split in SPLITS:
        if tokens[split] < 2:
            raise CorpusError(
                f"{root}: the corpus is empty in its {split} split "
                f"({len(listed)} files with text, validation_fraction = {validation_fraction})"
            )
    content_hashes = {split: digest.hexdigest() for split, digest in hashes.items()}
    identity = json.dumps({"tokenizer": "bytes", **content_hashes}, sort_keys=True)
    manifest = {
        "format": 1,
        "source": source,
        "tokenizer": "bytes",
        "vocab_size": VOCAB_SIZE,
        "dtype": "uint8",
        "tokens": tokens,
        "sha256": content_hashes,
        "key": hashlib.sha256(identity.encode()).hexdigest()[:16],
        "files": listed,
    }
    unfinished = folder / (MANIFEST + ".unfinished")
    unfinished.write_text(json.dumps(manifest, indent=1))
    unfinished.replace(folder / MANIFEST)
    return Corpus.open(folder)
