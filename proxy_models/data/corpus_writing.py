"""Writing of a corpus: one source, a mixture of several, or the name of data that a training program reads itself.

A finished corpus is compared with the request instead of written again, so that a folder never holds another source than requested.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from proxy_models.data.corpus import NAME, NAMED, ONE_SOURCE, OWN_DATA, SOURCES, Corpus
from proxy_models.data.kept_tokenizer import (
    TOKENIZER,
    TOKENIZER_MANIFEST,
    TrainingText,
    discard_tokenizer,
    kept_name,
    make_tokenizer,
    tokenizer_name,
)
from proxy_models.data.mixture import Mixture
from proxy_models.data.sources import READ_BY, CorpusError, Source
from proxy_models.data.token_files import (
    FORMAT,
    MANIFEST,
    OnProgress,
    PassProgress,
    TokenFiles,
    recorded_files,
    with_times,
    write_manifest,
    write_token_files,
)
from proxy_models.data.tokenizer import BYTES, TokenizerSettings
from proxy_models.files import folder_lock
from proxy_models.hashing import content_key


class OtherCorpusError(CorpusError):
    """Error for a folder that holds another corpus than the requested one."""


def write_corpus(
    folder: Path,
    source: str | Source,
    *,
    validation_fraction: float = 0.1,
    tokenizer: TokenizerSettings = BYTES,
    on_progress: OnProgress | None = None,
) -> Corpus:
    """Write the token files and the manifest of one source into `folder`, or open them if they are finished.

    An interrupted folder is written again; a finished folder is compared with the source, by sizes and hashes.

    Args:
        source: Source to read; a string is the path of text.
        tokenizer: Settings of the tokenizer; ignored for a source of tokens.
        on_progress: Called with the bytes done and all bytes; training a tokenizer reads the source twice, and both passes count.

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
        mixture: Proportions of sources with the same names.
        tokenizer: Settings of the tokenizer; ignored for sources of tokens; it is trained on all other sources together.
        on_progress: Called as in `write_corpus`, over all sources.

    Raises:
        ValueError: If the names differ from those of the mixture, or can't name folders.
        CorpusError: As in `write_corpus`, or if the sources' vocabularies differ in size.
    """
    if set(sources) != set(mixture.names):
        raise ValueError(
            f"the mixture must weigh the sources {', '.join(sorted(sources))}, got {', '.join(mixture.names)}"
        )
    for name in sources:
        if not NAME.fullmatch(name):
            raise ValueError(f"{NAMED}, got {name!r}")
    return _Request(
        sources=dict(sources),
        mixture=mixture,
        tokenizer=tokenizer,
        validation_fraction=validation_fraction,
    ).fulfil(folder, on_progress)


def write_remixed(corpus: Corpus, folder: Path, mixture: Mixture) -> Corpus:
    """Write the sources of a corpus in another mixture into `folder`, with links to its token files; or open it."""
    with folder_lock(folder):
        if not (folder / MANIFEST).exists():
            for name in (SOURCES, TOKENIZER, TOKENIZER_MANIFEST):
                if (corpus.folder / name).exists() and not (folder / name).exists():
                    (folder / name).symlink_to(os.path.relpath((corpus.folder / name).resolve(), folder.resolve()))
            identity = {
                SOURCES: {name: files.key for name, files in corpus.sources.items()},
                "mixture": mixture.to_dict(),
            }
            write_manifest(folder, {"format": FORMAT, "key": content_key(identity), **identity})
    return Corpus.open(folder)


def discard_corpus(folder: Path) -> None:
    """Remove the manifests of a corpus, so that the next one is written over it."""
    for manifest in (folder / MANIFEST, *folder.glob(f"{SOURCES}/*/{MANIFEST}")):
        manifest.unlink(missing_ok=True)


def write_own_data(folder: Path, name: str) -> Corpus:
    """Write or open the corpus of a training program that reads its own data; only the name identifies the data.

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
            if (folder / MANIFEST).exists():  # another process wrote it meanwhile
                return self._reopen(folder)
            return self._write(folder, on_progress)

    def _reopen(self, folder: Path) -> Corpus:
        corpus = Corpus.open(folder)
        if corpus.mixture != self.mixture:
            raise OtherCorpusError(
                f"{folder}: holds {_described(corpus.mixture)}, not {_described(self.mixture)}; choose another folder, or "
                f"remove its {MANIFEST} to keep the tokenized sources"
            )
        made_by = tokenizer_name(self.tokenizer)
        if (there := kept_name(folder)) != made_by:
            raise OtherCorpusError(
                f"{folder}: holds a corpus in tokens of {there}, not of {made_by}; choose another folder"
            )
        for name, files in corpus.sources.items():
            self._compare(files, name)
        return corpus

    def _compare(self, files: TokenFiles, name: str) -> None:
        """Refuse token files that belong to another source."""
        source, manifest = self.sources[name], files.manifest
        try:
            there, recorded = Source(**manifest["source"]), recorded_files(manifest)
        except (ValueError, TypeError) as error:
            raise CorpusError(f"{files.folder / MANIFEST}: source: not a valid source ({error})") from error
        now = {file.path: file for file in source.fingerprint(recorded)}
        found = {path: file.content for path, file in now.items()}
        before = {file.path: file.content for file in recorded}
        changed = sorted(path for path in {*found, *before} if found.get(path) != before.get(path))
        differences = [
            f"{key} is {source.to_dict().get(key)!r} here but {there.to_dict().get(key)!r} there"
            for key in READ_BY
            if source.to_dict().get(key) != there.to_dict().get(key)
        ]
        if manifest["validation_fraction"] != self.validation_fraction:
            differences.append(
                f"validation_fraction is {self.validation_fraction} here but {manifest['validation_fraction']} there"
            )
        if changed:
            differences.append(f"{len(changed)} of {len({*found, *before})} files differ, the first is {changed[0]}")
        if differences:
            raise OtherCorpusError(
                f"{files.folder}: holds the corpus of {there}, not of {source} as it is now: {'; '.join(differences)}; "
                "restore them, or choose another folder"
            )
        if any(now[file.path] != file for file in recorded):  # touched: otherwise each opening would hash them again
            with suppress(OSError):
                write_manifest(files.folder, with_times(manifest, now))

    def _write(self, folder: Path, on_progress: OnProgress | None) -> Corpus:
        prints = {name: source.fingerprint() for name, source in self.sources.items()}
        progress = PassProgress(on_progress, prints, passes=2 if self.tokenizer.is_trained else 1)
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
                    (place / MANIFEST).unlink()  # the tokenizer of these finished files is gone
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
