"""Directories of the corpora that a study trains on in addition to its own, by the key that runs use for them."""

from __future__ import annotations

import json
from pathlib import Path

from muscale.layout import CORPORA, CORPUS
from proxy_models.data.corpus import Corpus
from proxy_models.files import write_text


def note(directory: Path, corpus: Corpus) -> None:
    """Note where a corpus of `CORPORA` lies, and where its held-out text, unless that is the study's own corpus."""
    held_out = corpus.held_out.folder if corpus.held_out else None
    places = {"folder": corpus.folder.name}
    if held_out and held_out.parent == corpus.folder.parent:
        places["held_out"] = held_out.name
    write_text(_place(directory, corpus.key), json.dumps(places))


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
    places = json.loads(_place(directory, key).read_text())
    corpus, *others = (Corpus.open(directory / CORPORA / Path(place).name) for place in places.values())
    return corpus.evaluated_on(others[0] if others else own)


def _place(directory: Path, key: str) -> Path:
    return directory / CORPORA / f"{key}.json"
