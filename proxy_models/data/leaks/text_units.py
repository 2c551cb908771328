"""Texts as sequences of units that are compared: words, bytes or token ids.

Texts are folded and hashed in batches, since a corpus has more documents than single calls of numpy are cheap for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.leaks.folded_text import (
    Hashes,
    Positions,
    fold,
    letter_places,
    normalized,
    word_hashes,
    word_starts,
)
from proxy_models.data.sources import Split

EXAMPLE = 200
"""Characters of a passage that are shown."""
BATCH_BYTES = 1 << 20  # content that is hashed at a time (assumed)
_SHOWN_TOKENS = 20


@dataclass(frozen=True, kw_only=True)
class TextMeasure:
    """The units in which texts are compared.

    Attributes:
        unit: Name of the units.
        seed: Units of the sequences that are looked up.
        least: Units of the shortest passage that counts within a longer document. 13 words: Brown et al., arXiv 2005.14165,
            appendix C.
        by_document: True if a training text that holds most of a document counts although edits divide it into shorter passages.
    """

    unit: str
    seed: int
    least: int
    by_document: bool = False


WORDS = TextMeasure(unit="words", seed=8, least=13)
SHORT_TEXTS = TextMeasure(unit="words", seed=5, least=13, by_document=True)
BYTES = TextMeasure(unit="bytes", seed=32, least=50)  # of text without words
TOKENS = TextMeasure(unit="tokens", seed=12, least=20)


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Text of one document, or a piece of a long one.

    Attributes:
        line: First line of the text; row of a table; or number of the first token in the file, from 0.
        has_lines: True if later lines of the text are later lines of the file.
        content: UTF-8 without byte 0; or token ids as uint32.
        counts: Whether the text counts in the loss; prompts do not.
    """

    source: str
    file: str
    line: int
    split: Split
    has_lines: bool
    content: bytes
    counts: bool = True


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of a batch of texts, in order.

    Attributes:
        hashes: Equal for equal units.
        text_of: Index of each unit's text.
        begins: Number of each text's first unit.
    """

    texts: list[Text]
    hashes: Hashes
    text_of: NDArray[np.int32]

    @cached_property
    def begins(self) -> Positions:
        return np.searchsorted(self.text_of, np.arange(len(self.texts)))

    def lines(self, units: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the line of each of these units, or the number of the token in its file."""
        text = self.text_of[units]
        lines: NDArray[np.int64] = np.array([one.line for one in self.texts])[text] + units - self.begins[text]
        return lines

    def example(self, unit: int) -> str:
        """Return the beginning of the passage that starts at a unit."""
        return " ".join(map(str, (self.hashes[unit : unit + _SHOWN_TOKENS] - np.uint64(1)).tolist()))


@dataclass(frozen=True, kw_only=True)
class TextUnits(Units):
    """Words or bytes of folded texts, each text closed by byte 0.

    Attributes:
        place: Offset of each unit in `content`.
        ends: Offset of each text's end.
    """

    content: bytes
    place: Positions
    ends: Positions

    def lines(self, units: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        text = self.text_of[units]
        newlines = np.flatnonzero(np.frombuffer(self.content, dtype=np.uint8) == ord("\n"))
        starts = np.concatenate([[0], self.ends[:-1] + 1])
        after = np.searchsorted(newlines, self.place[units]) - np.searchsorted(newlines, starts)[text]
        first = np.array([one.line for one in self.texts])
        has_lines = np.array([one.has_lines for one in self.texts])
        lines: NDArray[np.int64] = first[text] + after * has_lines[text]
        return lines

    def example(self, unit: int) -> str:
        begin, end = int(self.place[unit]), int(self.ends[self.text_of[unit]])
        return " ".join(self.content[begin : min(end, begin + 4 * EXAMPLE)].decode(errors="ignore").split())[:EXAMPLE]


@dataclass(frozen=True, kw_only=True)
class FoldedBatch:
    """A batch of texts, folded."""

    texts: list[Text]
    content: bytes
    folded: NDArray[np.uint8]

    @classmethod
    def of(cls, texts: list[Text]) -> FoldedBatch:
        """Fold some texts."""
        content = normalized(b"".join(text.content + b"\0" for text in texts))
        return cls(texts=texts, content=content, folded=fold(content))

    @cached_property
    def _ends(self) -> Positions:
        return np.flatnonzero(self.folded == 0)

    def n_letters(self) -> NDArray[np.int64]:
        """Return how many bytes of each text belong to words."""
        return np.diff(np.searchsorted(letter_places(self.folded), np.append(0, self._ends)))

    @cached_property
    def words(self) -> TextUnits:
        """The words."""
        starts = word_starts(self.folded)
        return self._units(word_hashes(self.folded, starts), starts)

    @cached_property
    def letters(self) -> TextUnits:
        """The bytes of the words."""
        places = letter_places(self.folded)
        return self._units(self.folded[places].astype(np.uint64), places)

    def _units(self, hashes: Hashes, place: Positions) -> TextUnits:
        text_of = np.searchsorted(self._ends, place).astype(np.int32)
        return TextUnits(
            texts=self.texts, hashes=hashes, text_of=text_of, content=self.content, place=place, ends=self._ends
        )


def token_units(texts: list[Text]) -> Units:
    """Return the token ids of a batch."""
    ids = np.frombuffer(b"".join(text.content for text in texts), dtype=np.uint32)
    sizes = [len(text.content) // ids.itemsize for text in texts]
    return Units(
        texts=texts,
        hashes=ids.astype(np.uint64) + np.uint64(1),
        text_of=np.repeat(np.arange(len(texts), dtype=np.int32), sizes),
    )
