"""Documents of a training step: where each part of its sequences comes from.

A batch is a function of the position, so the documents can be named at any time without a record: tokens belong to files by the
manifest's counts, and to documents by the closing tokens. A record's line or row is found by reading its file again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from proxy_models.data.batches import Stream
from proxy_models.data.corpus import Corpus
from proxy_models.data.documents import pieces
from proxy_models.data.sources import Source
from proxy_models.data.token_files import STATED, TokenFiles
from proxy_models.data.tokenizer import Tokenizer
from proxy_models.data.uncounted import ids

_BLOCK_TOKENS = 1 << 20
_ONE_FILE = ("jsonl", "parquet")  # kinds whose files can be read alone
COLUMNS = ("sequence", "source", "epoch", "file", "line", "token", "tokens", "text")


def batch_documents(
    corpus: Corpus, stream: Stream, context_length: int, tokens_seen: int, batch_tokens: int
) -> pd.DataFrame:
    """Return the parts of documents that a step trains on, in the order of the batch.

    Args:
        stream: Training batches of the corpus.
        tokens_seen: Position in the run before the step.
        batch_tokens: Tokens of the step.

    Returns:
        A table with `COLUMNS`: the number of the sequence in the batch; the source; the pass over it, from 1; the file, relative to
        the source; the line at which the part begins, from 1, or of JSON Lines the document's line, or of a table its row, from 0;
        the part's first token in the source's training split; its tokens in the sequence; and their text. File and line are missing
        where the manifest does not tell them apart or the file is no longer there; text and line of a source of tokens are missing.
    """
    sources = {name: _TrainingTokens(files, _tokenizer(corpus, files)) for name, files in corpus.sources.items()}
    rows: list[dict[str, Any]] = []
    for number, place in enumerate(stream.places(tokens_seen, batch_tokens)):
        own = {"sequence": number, "source": place.source, "epoch": place.epoch}
        rows += [own | part for part in sources[place.source].parts(place.start, place.start + context_length + 1)]
    for name, tokens in sources.items():
        tokens.add_lines([row for row in rows if row["source"] == name])
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"line": "Int64"})


def _tokenizer(corpus: Corpus, files: TokenFiles) -> Tokenizer | None:
    return None if files.manifest["tokenizer"] == STATED else corpus.tokenizer()


@dataclass(frozen=True)
class _TrainingTokens:
    """Training tokens of one source.

    Attributes:
        tokenizer: Tokenizer of the text; None for a source of tokens.
    """

    files: TokenFiles
    tokenizer: Tokenizer | None

    @cached_property
    def _starts(self) -> list[int]:
        """First training token of each of the manifest's files, and the end; shorter if an older manifest lacks a count."""
        counts: list[int | None] = [_training_tokens(entry) for entry in self.files.manifest["files"]]
        if counts.count(None) == 1:
            counts[counts.index(None)] = self.files.n_tokens - sum(count or 0 for count in counts)
        known = counts[: counts.index(None)] if None in counts else counts
        return list(accumulate((count or 0 for count in known), initial=0))

    def parts(self, start: int, end: int) -> Iterator[dict[str, Any]]:
        """Yield the parts of documents between two tokens."""
        tokens = ids(np.asarray(self.files.train[start:end]))
        ends = np.flatnonzero(tokens == self.tokenizer.end_of_document) + 1 if self.tokenizer else np.zeros(0, int)
        borders = {*ends.tolist(), *(first - start for first in self._starts if start < first < end)}
        inner = sorted(border for border in borders if 0 < border < len(tokens))
        for first, last in zip([0, *inner], [*inner, len(tokens)], strict=True):
            index = int(np.searchsorted(self._starts, start + first, side="right")) - 1
            known = index < len(self._starts) - 1
            yield {
                "file": self.files.manifest["files"][index]["path"] if known else None,
                "line": None,
                "token": start + first,
                "tokens": last - first,
                "text": self._text(tokens[first:last]),
            }

    def _text(self, tokens: np.ndarray[Any, Any]) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode(tokens[tokens != self.tokenizer.end_of_document])

    def add_lines(self, rows: Sequence[dict[str, Any]]) -> None:
        """Set the line of each row of this source, and for cleaned text the file."""
        if self.tokenizer is None:
            return
        source = Source(**self.files.manifest["source"])
        by_file: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(rows, key=lambda row: int(row["token"])):
            by_file.setdefault(row["file"], []).append(row)
        for index, entry in enumerate(self.files.manifest["files"][: len(self._starts) - 1]):
            if own := by_file.get(entry["path"]):
                before = self._n_before(self._starts[index], [row["token"] for row in own], lines=source.kind == "text")
                places = None if source.kind == "text" else _places(source, entry, self._fraction, set(before))
                for row, count in zip(own, before, strict=True):
                    place = (entry["path"], count + 1) if places is None else places.get(count, (entry["path"], None))
                    row["file"], row["line"] = place

    @property
    def _fraction(self) -> float:
        return float(self.files.manifest["validation_fraction"])

    def _n_before(self, start: int, positions: Sequence[int], *, lines: bool) -> list[int]:
        """Return the number of ends of lines, or of documents, from `start` to each of the ascending positions."""
        counts, count = [], 0
        for position in positions:
            for first in range(start, position, _BLOCK_TOKENS):
                block = ids(np.asarray(self.files.train[first : min(position, first + _BLOCK_TOKENS)]))
                count += self._n_in(block, lines=lines)
            counts.append(count)
            start = position
        return counts

    def _n_in(self, block: np.ndarray[Any, Any], *, lines: bool) -> int:
        if lines:
            return (self._text(block) or "").count("\n")
        return int(np.count_nonzero(block == self.tokenizer.end_of_document)) if self.tokenizer else 0


def _training_tokens(entry: dict[str, Any]) -> int | None:
    """Training tokens of a file; None for a file on both sides in a manifest from before they were counted."""
    whole = {"train": entry["tokens"], "validation": 0}
    found: int | None = entry.get("training_tokens", whole.get(entry["split"]))
    return found


def _places(source: Source, entry: dict[str, Any], fraction: float, wanted: set[int]) -> dict[int, tuple[str, int]]:
    """Return file and line or row by number of the training document in a file; none if the file's size has changed.

    A document of cleaned text has the file and line from which it came.
    """
    path = source.files()[0] / entry["path"] if Path(source.path).exists() else Path(source.path)
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return {}
    alone = replace(source, path=str(path)) if source.kind in _ONE_FILE else source
    name = path.name if alone is not source else entry["path"]
    found: dict[int, tuple[str, int]] = {}
    count, begins = 0, True
    for piece in pieces(alone, fraction):
        if piece.read_from != name or piece.split != "train":
            continue
        if begins and count in wanted:
            found[count] = piece.file if piece.file != name else entry["path"], piece.line
            if len(found) == len(wanted):
                break
        count, begins = count + piece.closes, piece.closes
    return found
