"""Corpus of a study: one tokenized source, or a mixture of several, in one folder with one manifest.

    folder/manifest.json, train.bin, validation.bin        one source
    folder/manifest.json, sources/<name>/…                 a mixture
    folder/tokenizer.json, tokenizer.manifest.json         where the tokenizer is not bytes
    folder/manifest.json                                   without token files: data that a training program reads itself

A finished corpus is not written again but compared with the request, so that a folder never stands for another source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pandas as pd

from proxy_models.data.kept_tokenizer import (
    TrainingText,
    discard_tokenizer,
    kept_name,
    kept_tokenizer,
    make_tokenizer,
    tokenizer_name,
)
from proxy_models.data.mixture import MAX_EPOCHS, Mixture
from proxy_models.data.sources import CorpusError, Source
from proxy_models.data.token_files import (
    FORMAT,
    MANIFEST,
    STATED,
    OnProgress,
    PassProgress,
    TokenFiles,
    read_manifest,
    recorded_files,
    write_manifest,
    write_token_files,
)
from proxy_models.data.tokenizer import BYTES, Tokenizer, TokenizerSettings, Tokens
from proxy_models.files import folder_lock
from proxy_models.hashing import content_key

ONE_SOURCE = "corpus"  # the name of the source of a corpus that is no mixture
SOURCES = "sources"
OWN_DATA = "own_data"
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NAMED = "a source's name must be of letters, digits, - and _"  # as it names its folder


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A finished corpus in `folder`.

    Attributes:
        sources: The token files of each source, by name; one source is named "corpus". None: a program reads its own data.
        mixture: The proportions of the sources, or None with one source.
        held_out: The corpus whose held-out splits are evaluated in the place of its own; None: its own.
    """

    folder: Path
    manifest: dict[str, Any]
    sources: dict[str, TokenFiles]
    mixture: Mixture | None = None
    held_out: Corpus | None = None

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open what `write_corpus` or `write_mixture` finished.

        Raises:
            CorpusError: If a manifest is missing or broken, or the size of a token file differs from it.
        """
        manifest = read_manifest(folder)
        if OWN_DATA in manifest:
            if not (isinstance(manifest[OWN_DATA], str) and isinstance(manifest.get("key"), str)):
                raise CorpusError(f"{folder / MANIFEST}: {OWN_DATA} and key must be text, got {manifest}")
            return cls(folder=folder, manifest=manifest, sources={})
        if "mixture" not in manifest:
            files = TokenFiles.open(folder)
            return cls(folder=folder, manifest=files.manifest, sources={ONE_SOURCE: files})
        try:
            mixture = Mixture.from_dict(manifest["mixture"])
            keys = {name: str(manifest[SOURCES][name]) for name in mixture.names}
            _ = str(manifest["key"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{folder / MANIFEST}: not a mixture's manifest ({error})") from error
        if odd := [name for name in keys if not _NAME.fullmatch(name)]:
            raise CorpusError(f"{folder / MANIFEST}: {_NAMED}, got {odd[0]!r}")
        sources = {name: TokenFiles.open(folder / SOURCES / name) for name in keys}
        for name, files in sources.items():
            if files.key != keys[name]:
                raise CorpusError(f"{files.folder}: the mixture's manifest states key {keys[name]}, found {files.key}")
        return cls(folder=folder, manifest=manifest, sources=sources, mixture=mixture)

    @property
    def key(self) -> str:
        """Hash of the content: of all token files, how they were made, and the proportions; not of where they lie."""
        own = str(self.manifest["key"])
        return content_key([own, {"held_out": self.held_out.key}]) if self.held_out else own

    def evaluated_on(self, held_out: Corpus) -> Self:
        """Return the same training data, evaluated on the held-out splits of another corpus in the same tokens."""
        return replace(self, held_out=held_out)

    @property
    def vocab_size(self) -> int:
        """Token ids lie below it; 0 without token files."""
        return max((files.vocab_size for files in self.sources.values()), default=0)

    @property
    def is_own_data(self) -> bool:
        """True if a training program reads data of its own, of which only a name is known."""
        return OWN_DATA in self.manifest

    @property
    def n_tokens(self) -> int:
        """Tokens in the training splits of all sources."""
        return sum(files.n_tokens for files in self.sources.values())

    @property
    def n_validation_tokens(self) -> int:
        """Tokens in the validation splits of all sources."""
        return sum(files.n_validation_tokens for files in self.sources.values())

    @property
    def train(self) -> Tokens:
        """Training tokens of the one source, memory-mapped.

        Raises:
            CorpusError: If the corpus is a mixture; `batches.training_stream` reads both.
        """
        return self._only("training_stream").train

    @property
    def validation(self) -> Tokens:
        """Validation tokens of the one source, memory-mapped.

        Raises:
            CorpusError: If the corpus is a mixture; `batches.evaluation_sets` reads both.
        """
        return self._only("evaluation_sets").validation

    def _only(self, instead: str) -> TokenFiles:
        if self.mixture is not None:
            raise CorpusError(f"{self.folder}: a mixture of {', '.join(self.sources)}; read it with batches.{instead}")
        return self.sources[ONE_SOURCE]

    @property
    def stages_by_fraction(self) -> bool:
        """True if a stage of the mixture ends at a fraction of the run, so that the data of a run depend on its length."""
        return self.mixture is not None and not self.mixture.is_resolved

    @property
    def evaluation_weights(self) -> dict[str, float]:
        """Weight of each source's loss in the corpus's: its share in the last stage."""
        return self.mixture.stages[-1].shares if self.mixture else {ONE_SOURCE: 1.0}

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, closing tokens among them; None where a source was given as tokens.

        Sources are weighted as in the corpus's loss.
        """
        each = {name: files.bytes_per_token for name, files in self.sources.items()}
        known = {name: value for name, value in each.items() if value is not None}
        weights = self.evaluation_weights
        return sum(weights[name] * known[name] for name in each) if len(known) == len(each) else None

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the text.

        Raises:
            CorpusError: If the corpus was given as tokens.
        """
        if not self._has_tokenizer:
            raise CorpusError(f"{self.folder}: the corpus was given as tokens, their tokenizer is not known")
        return kept_tokenizer(self.folder)

    @property
    def end_of_document(self) -> int | None:
        """Id that closes documents; None where the corpus was given as tokens."""
        return self.tokenizer().end_of_document if self._has_tokenizer else None

    @property
    def _has_tokenizer(self) -> bool:
        return any(files.manifest["tokenizer"] != STATED for files in self.sources.values())

    def epochs(self, n_tokens: int) -> dict[str, float]:
        """Return how often a run of `n_tokens` sees each source."""
        planned = self.mixture.tokens(n_tokens) if self.mixture else {ONE_SOURCE: float(n_tokens)}
        return {name: planned[name] / files.n_tokens for name, files in self.sources.items()}

    def warnings(self, n_tokens: int) -> list[str]:
        """Return a line for each source that a run of `n_tokens` sees more than four times."""
        return [
            f"{name}: {epochs:.1f} epochs of its {self.sources[name].n_tokens:,} tokens in a run of {n_tokens:,}; beyond "
            f"{MAX_EPOCHS:g} repeated data is worth much less than new (Muennighoff et al., arXiv 2305.16264)"
            for name, epochs in self.epochs(n_tokens).items()
            if epochs > MAX_EPOCHS
        ]

    def table(self) -> pd.DataFrame:
        """One row per source: tokens, fertility (tokens per word), bytes per token, and its share at the end of a run."""
        rows = [
            (
                name,
                n.n_tokens,
                n.n_validation_tokens,
                n.fertility,
                n.bytes_per_token,
                f"{self.evaluation_weights[name]:.1%}",
            )
            for name, n in self.sources.items()
        ]
        columns = ["source", "training", "validation", "tokens/word", "bytes/token", "share"]
        return pd.DataFrame(rows, columns=columns).astype({"tokens/word": float, "bytes/token": float})

    def __str__(self) -> str:
        if self.is_own_data:
            return f"the trainer reads its own data, {self.manifest[OWN_DATA] or 'without a name'}"
        shown = self.table().to_string(
            index=False,
            na_rep="–",
            float_format="{:.2f}".format,
            formatters=dict.fromkeys(("training", "validation"), "{:,}".format),
        )
        return str(shown)


def write_corpus(
    folder: Path,
    source: str | Source,
    *,
    validation_fraction: float = 0.1,
    tokenizer: TokenizerSettings = BYTES,
    on_progress: OnProgress | None = None,
) -> Corpus:
    """Write the token files and the manifest of one source into `folder`, or open them if they are finished.

    An interrupted folder is written again; a finished one is compared with the source, by sizes and hashes.

    Args:
        source: The source to read; a string is the path of text.
        tokenizer: Not used for a source of tokens.
        on_progress: Called with the bytes done and all bytes; BPE reads the source twice, and both passes count.

    Raises:
        CorpusError: If the source can't be read, a split would be empty, or the folder holds another corpus. Nothing
            is written then.
    """
    source = source if isinstance(source, Source) else Source(path=source)
    return _Request(
        sources={ONE_SOURCE: source},
        mixture=None,
        tokenizer=tokenizer,
        validation_fraction=validation_fraction,
    ).fulfil(folder, on_progress)


def write_mixture(
    folder: Path,
    sources: Mapping[str, Source],
    mixture: Mixture,
    *,
    validation_fraction: float = 0.1,
    tokenizer: TokenizerSettings = BYTES,
    on_progress: OnProgress | None = None,
) -> Corpus:
    """Write several sources, tokenized alike, and their proportions into `folder`, or open them if they are finished.

    Sources that were finished before an interruption or an error are kept, and compared in the same way.

    Args:
        mixture: Weights of the same names.
        tokenizer: Not used for sources of tokens; BPE is trained on all others together.
        on_progress: Called as in `write_corpus`, over all sources.

    Raises:
        ValueError: If the names are not those of the mixture, or can't name folders.
        CorpusError: As in `write_corpus`, or if the sources' vocabularies differ in size.
    """
    if set(sources) != set(mixture.names):
        raise ValueError(
            f"the mixture must weigh the sources {', '.join(sorted(sources))}, got {', '.join(mixture.names)}"
        )
    for name in sources:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{_NAMED}, got {name!r}")
    return _Request(
        sources=dict(sources),
        mixture=mixture,
        tokenizer=tokenizer,
        validation_fraction=validation_fraction,
    ).fulfil(folder, on_progress)


def write_own_data(folder: Path, name: str) -> Corpus:
    """Write or open the corpus of a training program that reads its own data; the name is all that identifies them.

    Raises:
        CorpusError: If the folder holds another corpus.
    """
    if (folder / MANIFEST).exists():
        corpus = Corpus.open(folder)
        if corpus.manifest.get(OWN_DATA) != name:
            raise CorpusError(
                f"{folder}: holds another corpus than the trainer's own data {name!r}; choose another folder"
            )
        return corpus
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, {"format": FORMAT, "key": content_key({OWN_DATA: name}), OWN_DATA: name})
    return Corpus.open(folder)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Request for the content of a folder."""

    sources: dict[str, Source]
    mixture: Mixture | None
    tokenizer: TokenizerSettings
    validation_fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must lie between 0 and 1, got {self.validation_fraction}")
        if self.tokenizer.kind != "bytes" and all(source.kind == "tokens" for source in self.sources.values()):
            raise ValueError(f"sources of tokens take no tokenizer, got {self.tokenizer.kind!r}")

    def folder_of(self, folder: Path, name: str) -> Path:
        return folder / SOURCES / name if self.mixture else folder

    def fulfil(self, folder: Path, on_progress: OnProgress | None) -> Corpus:
        if (folder / MANIFEST).exists():
            return self._reopen(folder)
        with folder_lock(folder):
            if (folder / MANIFEST).exists():  # written while we waited
                return self._reopen(folder)
            return self._write(folder, on_progress)

    def _reopen(self, folder: Path) -> Corpus:
        corpus = Corpus.open(folder)
        if corpus.mixture != self.mixture:
            raise CorpusError(
                f"{folder}: holds {_described(corpus.mixture)}, not {_described(self.mixture)}; choose another folder, or "
                f"remove its {MANIFEST} to keep the tokenized sources"
            )
        made_by = tokenizer_name(self.tokenizer)
        if (there := kept_name(folder)) != made_by:
            raise CorpusError(f"{folder}: holds a corpus in tokens of {there}, not of {made_by}; choose another folder")
        for name, files in corpus.sources.items():
            self._compare(files, name)
        return corpus

    def _compare(self, files: TokenFiles, name: str) -> None:
        """Refuse token files of another source."""
        source, manifest = self.sources[name], files.manifest
        try:
            there, recorded = Source(**manifest["source"]), recorded_files(manifest)
        except (ValueError, TypeError) as error:
            raise CorpusError(f"{files.folder / MANIFEST}: source: not a valid source ({error})") from error
        found = {file.path: file.content for file in source.fingerprint(recorded)}
        before = {file.path: file.content for file in recorded}
        changed = sorted(path for path in {*found, *before} if found.get(path) != before.get(path))
        differences = [
            f"{key} is {source.to_dict().get(key)!r} here but {there.to_dict().get(key)!r} there"
            for key in ("kind", "field", "dtype", "vocab_size")
            if source.to_dict().get(key) != there.to_dict().get(key)
        ]
        if manifest["validation_fraction"] != self.validation_fraction:
            differences.append(
                f"validation_fraction is {self.validation_fraction} here but {manifest['validation_fraction']} there"
            )
        if changed:
            differences.append(f"{len(changed)} of {len({*found, *before})} files differ, the first is {changed[0]}")
        if differences:
            raise CorpusError(
                f"{files.folder}: holds the corpus of {there}, not of {source} as it is now: {'; '.join(differences)}; "
                "choose another folder or remove this one"
            )

    def _write(self, folder: Path, on_progress: OnProgress | None) -> Corpus:
        prints = {name: source.fingerprint() for name, source in self.sources.items()}
        progress = PassProgress(on_progress, prints, passes=2 if self.tokenizer.kind == "bpe" else 1)
        text = TrainingText(sources=self.sources, files=prints, validation_fraction=self.validation_fraction)
        try:
            tokenizer = make_tokenizer(folder, self.tokenizer, text, progress)
            progress.start_last_pass()
            sizes = {n: source.vocab_size or tokenizer.vocab_size for n, source in self.sources.items()}
            if len(set(sizes.values())) > 1:
                raise CorpusError(
                    "the sources of a mixture must have one vocabulary, got "
                    + ", ".join(f"{size} ids in {name}" for name, size in sizes.items())
                )
            for name, source in self.sources.items():
                place = self.folder_of(folder, name)
                if place != folder and (place / MANIFEST).exists():
                    self._compare(kept := TokenFiles.open(place), name)
                    if source.kind == "tokens" or kept.manifest["tokenizer"] == tokenizer.key:
                        continue
                    (place / MANIFEST).unlink()  # finished with a tokenizer that is gone
                place.mkdir(parents=True, exist_ok=True)
                write_token_files(
                    place,
                    source,
                    tokenizer,
                    prints[name],
                    validation_fraction=self.validation_fraction,
                    on_progress=progress.of(name),
                )
        except CorpusError:
            discard_tokenizer(folder)
            for name in self.sources:
                _remove_if_empty(self.folder_of(folder, name), below=folder)
            raise
        if self.mixture:
            keys = {name: TokenFiles.open(self.folder_of(folder, name)).key for name in self.sources}
            identity = {SOURCES: keys, "mixture": self.mixture.to_dict()}
            write_manifest(folder, {"format": FORMAT, "key": content_key(identity), **identity})
        return Corpus.open(folder)


def _described(mixture: Mixture | None) -> str:
    return f"the mixture {json.dumps(mixture.to_dict()['stages'])}" if mixture else "one source"


def _remove_if_empty(place: Path, *, below: Path) -> None:
    while place != below and place.is_dir() and not any(place.iterdir()):
        place.rmdir()
        place = place.parent
