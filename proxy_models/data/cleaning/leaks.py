"""Held-out text in training documents: the lines that hold it are removed, as the leak check finds them.

A passage is often cut from the middle of a sentence, so whole lines go rather than words. A document of which less than half would
be left goes as a whole, and so does one that is a single line.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from proxy_models.data.cleaning.cleaning_step import Over, TextVerdict, gathered, save
from proxy_models.data.cleaning.text_shards import Document, Shard
from proxy_models.data.documents import in_sample
from proxy_models.data.leaks.held_out_index import HeldOutIndex, Passage
from proxy_models.data.leaks.leak_search import MOST_HELD_OUT, search_texts, text_indexes
from proxy_models.data.leaks.text_units import Text
from proxy_models.data.sources import Split

LEAST_LEFT = 0.5
"""Share of a document that must be left without its leaked lines, or all of it is removed (assumed)."""
# first and last line, counted from 0, and the number of the held-out document
_Passages = Sequence[tuple[int, int, int]]


@dataclass(frozen=True, kw_only=True)
class Leaks:
    """Remove held-out text from training documents; held-out documents stay as they are."""

    name: ClassVar[str] = "leaks"
    passes: ClassVar[int] = 2

    def identity(self) -> dict[str, Any]:
        """Return the settings."""
        return {}

    def learn(self, shards: Sequence[Shard], over: Over) -> tuple[JudgeByPassages, dict[str, Any]]:
        """Find the passages of every training document."""
        n_bytes = sum(len(text.content) for text in _texts(shards, "validation"))
        share = min(1.0, MOST_HELD_OUT / max(1, n_bytes))
        held_out = (text for text in _texts(shards, "validation") if share == 1 or in_sample(text.content, share))
        indexes = text_indexes(held_out, Counter())
        files = over(partial(_search, indexes))
        leaked = [np.zeros((0, 4), dtype=np.int64)]
        for number, index in enumerate(indexes):
            found = gathered(files, f"passages {number}")
            passages = (
                Passage(source="", first=first, last=last, n_units=n_units)
                for first, last, n_units in found[:, 3:].tolist()
            )
            index.keep(passages, gathered(files, f"sequences {number}"))
            of_document = np.array([int(text.file) for text in index.texts])[index.document[found[:, 3]]]
            rare = np.array(index.is_rare(), dtype=bool)
            leaked.append(np.column_stack([found[:, :3], of_document])[rare])
        rows = np.concatenate(leaked)
        place = files[0].with_name("passages.npy")
        np.save(place, rows[np.lexsort(rows.T[::-1])])
        return JudgeByPassages(place), {"passages": len(rows), "held_out_looked_up": share}


@dataclass(frozen=True)
class JudgeByPassages:
    """Judge by a file of passages, in order: number of the document, first and last line, number of the held-out document."""

    passages: Path

    def __call__(self, shard: Shard) -> Iterator[tuple[Document, TextVerdict]]:
        """Yield every document with its verdict."""
        found = np.load(self.passages, mmap_mode="r")
        begin, end = np.searchsorted(found[:, 0], [shard.first, shard.first + shard.n_documents])
        by_document: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for number, first, last, held_out in found[begin:end].tolist():
            by_document[number].append((first, last, held_out))
        for number, document in enumerate(shard.documents(), shard.first):
            yield document, _verdict(document.text, by_document.get(number, ()))


def _verdict(text: str, passages: _Passages) -> TextVerdict:
    if not passages:
        return TextVerdict(text)
    leaked = {line for first, last, _ in passages for line in range(first, last + 1)}
    lines = list(StringIO(text, newline="\n"))
    left = "".join(line for number, line in enumerate(lines) if number not in leaked)
    removed = "".join(line for number, line in enumerate(lines) if number in leaked)
    if len(left.strip()) < LEAST_LEFT * len(text):
        return TextVerdict("", "most of it is held-out text", removed, passages[0][2])
    return TextVerdict(left, "lines with held-out text", removed, passages[0][2])


def _search(indexes: Sequence[HeldOutIndex], shard: Shard, target: Path) -> None:
    """Save what each index finds in a shard: document, lines and units of each passage, and the known sequences."""
    passages: dict[str, list[tuple[int, ...]]] = {f"passages {number}": [] for number in range(len(indexes))}
    sequences = {f"sequences {number}": [np.zeros(0, dtype=np.int64)] for number in range(len(indexes))}
    for number, found, known in search_texts(indexes, _texts([shard], "train")):
        sequences[f"sequences {number}"].append(known)
        passages[f"passages {number}"] += [
            (int(one.place.file), one.place.line, one.last_line, one.first, one.last, one.n_units)
            for one in found
            if one.place
        ]
    rows = {name: np.array(found, dtype=np.int64).reshape(-1, 6) for name, found in passages.items()}
    save(rows | {name: np.concatenate(known) for name, known in sequences.items()}, target)


def _texts(shards: Iterable[Shard], split: Split) -> Iterator[Text]:
    """Yield the documents on a side, with their numbers instead of files, and lines counted from 0."""
    for shard in shards:
        for number, document in enumerate(shard.documents(), shard.first):
            if document.split == split:
                content = document.text.encode()
                yield Text(source=shard.source, file=str(number), line=0, split=split, has_lines=True, content=content)
