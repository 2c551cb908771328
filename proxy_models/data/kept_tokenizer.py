"""The tokenizer that a corpus keeps in its folder, trained or copied once, with a manifest that records how.

The manifest is written last. If it is missing or records another request, the tokenizer is made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy_models.data.documents import in_sample, pieces
from proxy_models.data.sources import CorpusError, Source, SourceFile
from proxy_models.data.token_files import PassProgress, replace
from proxy_models.data.tokenizer import (
    BytesTokenizer,
    FileTokenizer,
    Tokenizer,
    TokenizerSettings,
    train_bpe,
    train_unigram,
)
from proxy_models.hashing import content_key

TOKENIZER = "tokenizer.json"
TOKENIZER_MANIFEST = "tokenizer.manifest.json"
SAMPLE_BYTES = 512 << 20  # largest amount of text that a tokenizer is trained on, evenly over the sources; assumed
_SAMPLE = 2  # version of the choice of a sample


@dataclass(frozen=True, kw_only=True)
class TrainingText:
    """Training text of a tokenizer: the training side of every source of text.

    Attributes:
        validation_fraction: Share of the text that is left out.
    """

    sources: Mapping[str, Source]
    files: Mapping[str, Sequence[SourceFile]]
    validation_fraction: float

    @property
    def key(self) -> str:
        """Hash of the files' contents and the fields that are read, independent of the files' location."""
        contents = {
            name: {**self.sources[name].to_dict(), "path": None, "files": [file.content for file in files]}
            for name, files in self.files.items()
        }
        sample = {"sample": _SAMPLE} if self._share < 1 else {}
        return content_key({"sources": contents, "validation_fraction": self.validation_fraction, **sample})

    @property
    def _share(self) -> float:
        """Share of the text that is read."""
        of_text = (name for name, source in self.sources.items() if source.kind != "tokens")
        return min(1.0, SAMPLE_BYTES / max(1, sum(file.bytes for name in of_text for file in self.files[name])))

    def read(self, progress: PassProgress) -> Iterator[bytes]:
        """Yield the pieces of the text, thinned evenly if the text is longer than `SAMPLE_BYTES`."""
        texts = {name: source for name, source in self.sources.items() if source.kind != "tokens"}
        share = self._share
        for name, source in texts.items():
            on_progress, done, at = progress.of(name), 0, ""
            sizes = {file.path: file.bytes for file in self.files[name]}
            for piece in pieces(source, self.validation_fraction):
                if piece.read_from != at:
                    done, at = done + sizes.get(at, 0), piece.read_from
                if on_progress:
                    on_progress(done + piece.done_bytes, 0)
                if piece.split == "train" and (share >= 1 or in_sample(piece.content, share)):
                    yield piece.content


def tokenizer_name(settings: TokenizerSettings) -> str:
    """Return the name of the tokenizer for these settings; tokenizers with equal names encode a corpus equally.

    Raises:
        CorpusError: If the file of a tokenizer can't be used.
    """
    if settings.kind == "file":
        return _given(settings).name
    return "bytes" if settings.kind == "bytes" else f"{settings.kind} of {settings.vocab_size} ids"


def make_tokenizer(folder: Path, settings: TokenizerSettings, text: TrainingText, progress: PassProgress) -> Tokenizer:
    """Load or train a tokenizer, and keep it in the folder unless it is bytes.

    Raises:
        CorpusError: If the tokenizer's file or the text can't be used.
    """
    if settings.kind == "bytes":
        return BytesTokenizer()
    given = _given(settings) if settings.kind == "file" else None
    wanted = {
        "name": given.name if given else tokenizer_name(settings),
        "trained_on": None if given else text.key,
        "end_of_document": given.end_name if given else None,
    }
    path = folder / TOKENIZER_MANIFEST
    if not path.exists() or json.loads(path.read_text()) != wanted:
        path.unlink(missing_ok=True)
        if given:
            content = given.content
        else:
            train = train_bpe if settings.kind == "bpe" else train_unigram
            content = train(text.read(progress), settings.vocab_size or 0).encode()
        replace(folder / TOKENIZER, content)
        replace(path, json.dumps(wanted, indent=1).encode())
    return FileTokenizer(folder / TOKENIZER, wanted["end_of_document"])


def kept_name(folder: Path) -> str:
    """Return the name of the tokenizer that a folder keeps."""
    path = folder / TOKENIZER_MANIFEST
    return str(_manifest(path)["name"]) if path.exists() else "bytes"


def kept_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer that a folder keeps."""
    path = folder / TOKENIZER_MANIFEST
    if not path.exists():
        return BytesTokenizer()
    return FileTokenizer(folder / TOKENIZER, _manifest(path)["end_of_document"])


def _manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a kept tokenizer.

    Raises:
        CorpusError: If the manifest can't be read, or a key is missing.
    """
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: can't be read ({error})") from error
    known = isinstance(values, dict) and isinstance(values.get("name"), str) and "end_of_document" in values
    if not known or not isinstance(values["end_of_document"], str | None):
        raise CorpusError(f"{path}: must be a table with name and end_of_document, got {repr(values)[:100]}")
    return dict(values)


def discard_tokenizer(folder: Path) -> None:
    for name in (TOKENIZER_MANIFEST, TOKENIZER):
        (folder / name).unlink(missing_ok=True)


def _given(settings: TokenizerSettings) -> FileTokenizer:
    return FileTokenizer(Path(str(settings.path)).expanduser(), settings.end_of_document)
