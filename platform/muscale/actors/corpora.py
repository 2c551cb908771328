"""Directories of the corpora that a study trains on in addition to its own, by the key that runs use for them."""

from __future__ import annotations

import json
from pathlib import Path

from muscale.layout import CORPORA, CORPUS
from proxy_models.data.corpus import Corpus
from proxy_models.files import atomic_write


def note(directory: Path, corpus: Corpus) -> None:
    """Note where a corpus of `CORPORA` lies, which is evaluated on the study's own."""
    with atomic_write(_place(directory, corpus.key)) as unfinished:
        unfinished.write_text(json.dumps({"folder": corpus.folder.name}))


def noted(directory: Path, key: str) -> bool:
    """Whether it is known where the corpus of this key lies."""
    return _place(directory, key).exists()


def open_corpus(directory: Path, key: str) -> Corpus | None:
    """The corpus of a key, the study's or a recorded one, or None; raises CorpusError if its files are gone or damaged."""
    own = Corpus.open(directory / CORPUS)
    if key == own.key:
        return own
    if not noted(directory, key):
        return None
    folder = directory / CORPORA / Path(json.loads(_place(directory, key).read_text())["folder"]).name
    return Corpus.open(folder).evaluated_on(own)


def _place(directory: Path, key: str) -> Path:
    return directory / CORPORA / f"{key}.json"
