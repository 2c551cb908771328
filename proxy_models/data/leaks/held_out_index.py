"""Index of held-out texts, in which the passages that they share with training texts are looked up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.leaks.folded_text import Hashes, Positions, windows
from proxy_models.data.leaks.text_units import Text, TextMeasure, Units

SECTION = 2000
"""Units of a section; a longer document is judged section by section (assumed)."""
FREQUENT_HELD_OUT = 3  # a sequence in more held-out documents is boilerplate (assumed)
FREQUENT_TRAINING = (
    10  # so is one that is found more often in training texts (Brown et al., arXiv 2005.14165, appendix C)
)
SHARE_OF_SHORT = 0.7  # of the units of a short document that a training text must hold in order (assumed)
LEAST_EDITED = 8  # units of the shortest document that may be edited; shorter ones are like others by chance (assumed)
SHARE_OF_HITS = 0.4  # of its units that known sequences must cover, before the texts are compared (assumed)
SHARE_OF_WHOLE = 0.8  # of a longer document; so much of it counts even if it is found often (assumed)
_GAP, _SHIFT = 32, 8  # units that an edit may replace, and by which it may move what follows (assumed)
_MOST_PLACES = 100_000  # passages whose places are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """Passage of a held-out text that a training text holds.

    Attributes:
        source: Source of the training text.
        first, last: Units of the index that it spans; the last is exclusive.
        n_units: Units that agree.
        place: The training text, with the passage's line and no content; None beyond `_MOST_PLACES`.
        last_line: Line at which the passage ends.
        example: Beginning of the passage.
    """

    source: str
    first: int
    last: int
    n_units: int
    place: Text | None = None
    last_line: int = 0
    example: str = ""


class HeldOutTexts:
    """Held-out texts in one measure, gathered for an index."""

    def __init__(self, measure: TextMeasure) -> None:
        self.measure = measure
        self.texts: list[Text] = []
        self._parts: list[tuple[Hashes, NDArray[np.int32], NDArray[np.int32]]] = []

    def add(self, units: Units, wanted: NDArray[np.bool_]) -> None:
        """Add those texts of a batch for which `wanted` is true."""
        chosen = np.flatnonzero(wanted[units.text_of])
        text = units.text_of[chosen]
        number = (np.cumsum(wanted) - 1 + len(self.texts))[text]
        first_lines = np.array([one.line for one in units.texts])[text]
        self._parts.append(
            (units.hashes[chosen], number.astype(np.int32), (units.lines(chosen) - first_lines).astype(np.int32))
        )
        self.texts += [replace(units.texts[i], content=b"") for i in np.flatnonzero(wanted)]

    def units(self) -> list[NDArray[Any]]:
        """Return hash, text and line of each unit of all texts, and let go of the batches."""
        units = [np.concatenate(part) for part in zip(*self._parts, strict=True)]
        self._parts.clear()
        return units


class HeldOutIndex:
    """All units of some held-out texts, and the known sequences of `measure.seed` units.

    Attributes:
        document: Index of each unit's text.
        found: Passages that were kept.
    """

    def __init__(self, held_out: HeldOutTexts) -> None:
        """Index the sequences of the texts."""
        self.measure, self.texts = held_out.measure, held_out.texts
        self.found: list[Passage] = []
        self._hashes, self.document, self._lines = held_out.units()
        self._sizes = np.bincount(self.document, minlength=len(self.texts))
        self._begins = np.cumsum(self._sizes) - self._sizes
        seed = self.measure.seed
        sequences = windows(self._hashes, seed)
        places = np.flatnonzero(self.document[: len(sequences)] == self.document[seed - 1 :])
        self._known, first, number = np.unique(sequences[places], return_index=True, return_inverse=True)
        self._first_place = places[first]
        self._number_at = np.full(len(self._hashes), -1, dtype=np.int32)
        self._number_at[places] = number
        in_documents = np.unique(number * len(self.texts) + self.document[places]) // len(self.texts)
        self._is_frequent = np.bincount(in_documents, minlength=len(self._known)) > FREQUENT_HELD_OUT
        self._times_found = np.zeros(len(self._known), dtype=np.int64)
        bits = min(27, max(10, (16 * len(self._known)).bit_length()))  # at most 128 MiB (assumed)
        self._shift = np.uint64(64 - bits)
        self._may_be_known = np.zeros(1 << bits, dtype=np.bool_)
        self._may_be_known[self._known >> self._shift] = True

    def line_of(self, passage: Passage) -> int:
        """Return the line of the held-out file at which a passage begins; or its row, or the number of its token."""
        return int(self.texts[self.document[passage.first]].line + self._lines[passage.first])

    def size_of(self, passage: Passage) -> int:
        """Return the units of the held-out document."""
        return int(self._sizes[self.document[passage.first]])

    def search(self, units: Units) -> tuple[list[Passage], Positions]:
        """Return the passages that a batch of training texts holds, and the numbers of all known sequences in it."""
        at, number = self._hits(units)
        found = list(self._passages(units, at, number))
        places = np.array([(begin, end - 1) for begin, end, _ in found], dtype=np.int64)
        lines = units.lines(places.ravel()).reshape(-1, 2).tolist()
        passages = [
            replace(
                passage,
                place=replace(units.texts[units.text_of[begin]], line=line, content=b""),
                last_line=last_line,
                example=units.example(begin),
            )
            for (begin, _, passage), (line, last_line) in zip(found, lines, strict=True)
        ]
        return passages, number

    def keep(self, passages: Iterable[Passage], sequences: Positions) -> None:
        """Count what was found in some training texts."""
        for passage in passages:
            self.found.append(passage if len(self.found) < _MOST_PLACES else replace(passage, place=None, example=""))
        seen, times = np.unique(sequences, return_counts=True)
        self._times_found[seen] += times

    def _hits(self, units: Units) -> tuple[Positions, Positions]:
        """Return where known sequences begin, and the numbers of these sequences."""
        seed = self.measure.seed
        sequences = windows(units.hashes, seed)
        may_be_known = self._may_be_known[sequences >> self._shift]
        at = np.flatnonzero(may_be_known & (units.text_of[: len(sequences)] == units.text_of[seed - 1 :]))
        if not len(at) or not len(self._known):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        number = np.minimum(np.searchsorted(self._known, sequences[at]), len(self._known) - 1)
        is_known = self._known[number] == sequences[at]
        return at[is_known], number[is_known]

    def _passages(self, units: Units, at: Positions, number: Positions) -> Iterator[tuple[int, int, Passage]]:
        """Yield passages of at least a sequence, each with its units in the training text: hits that follow each other in both."""
        is_rare = ~self._is_frequent[number]
        at, held_out = at[is_rare], self._first_place[number[is_rare]]
        if not len(at):
            return
        document, text = self.document[held_out], units.text_of[at]
        order = np.lexsort((at, document, text))
        at, held_out, document, text = at[order], held_out[order], document[order], text[order]
        step, shift = np.diff(at), np.diff(at - held_out)
        seed = self.measure.seed
        is_end = (np.diff(document) != 0) | (np.diff(text) != 0) | (step > _GAP + seed) | (np.abs(shift) > _SHIFT)
        begins = np.concatenate([[0], np.flatnonzero(is_end) + 1])
        first = np.minimum.reduceat(held_out, begins)
        last = np.maximum.reduceat(held_out, begins) + seed
        gained = np.concatenate([[0], np.where(is_end, 0, np.minimum(step, seed))])
        n_units = np.minimum(np.add.reduceat(gained, begins) + seed, last - first)
        ends = np.maximum.reduceat(at, begins) + seed
        at, document, sizes = at[begins], document[begins], self._sizes[document[begins]]
        is_enough = n_units >= np.minimum(self.measure.least, sizes)
        may_be_edited = self.measure.by_document & (sizes >= LEAST_EDITED) & (n_units >= SHARE_OF_HITS * sizes)
        for i in np.flatnonzero(is_enough | may_be_edited):
            where, end, source = int(at[i]), int(ends[i]), units.texts[units.text_of[at[i]]].source
            passage = Passage(source=source, first=int(first[i]), last=int(last[i]), n_units=int(n_units[i]))
            if is_enough[i]:
                yield where, end, passage
            elif edited := self._edited(units, where, passage, int(document[i])):
                yield where, end, edited

    def _edited(self, units: Units, at: int, passage: Passage, document: int) -> Passage | None:
        """Compare a whole short document with the text around a hit; None if they differ by more than a few edits."""
        begin, size = int(self._begins[document]), int(self._sizes[document])
        start = at - (passage.first - begin) - _SHIFT
        around = np.arange(max(0, start), min(len(units.hashes), start + size + 2 * _SHIFT))
        around = around[units.text_of[around] == units.text_of[at]]
        here, held_out = units.hashes[around].tolist(), self._hashes[begin : begin + size].tolist()
        agreed = sum(
            block.size for block in SequenceMatcher(None, here, held_out, autojunk=False).get_matching_blocks()
        )
        return (
            replace(passage, first=begin, last=begin + size, n_units=agreed)
            if agreed >= SHARE_OF_SHORT * size
            else None
        )

    def rare(self) -> list[Passage]:
        """Return the passages found that are no boilerplate."""
        return [passage for passage, is_rare in zip(self.found, self.is_rare(), strict=True) if is_rare]

    def is_rare(self) -> list[bool]:
        """Return for each passage found whether it is no boilerplate."""
        if self.measure.by_document:
            times = Counter(int(self.document[passage.first]) for passage in self.found)
            return [times[int(self.document[passage.first])] <= FREQUENT_TRAINING for passage in self.found]
        return [
            passage.last - passage.first >= SHARE_OF_WHOLE * self.size_of(passage)
            or bool(np.median(self._times_found[self._sequences_of(passage)]) <= FREQUENT_TRAINING)
            for passage in self.found
        ]

    def _sequences_of(self, passage: Passage) -> NDArray[np.int32]:
        numbers = self._number_at[passage.first : passage.last - self.measure.seed + 1]
        return numbers[numbers >= 0]

    def repeated(self, passages: Iterable[Passage]) -> NDArray[np.bool_]:
        """Return for each unit whether it belongs to one of these passages, or to another copy of one among the held-out texts."""
        changes = np.zeros(len(self._hashes) + 1, dtype=np.int32)
        is_found = np.zeros(len(self._known) + 1, dtype=np.bool_)  # the last: no sequence
        for passage in passages:
            changes[passage.first] += 1
            changes[passage.last] -= 1
            is_found[self._sequences_of(passage)] = True
        copies = np.flatnonzero(is_found[self._number_at])
        changes[copies] += 1
        changes[copies + self.measure.seed] -= 1
        repeated = np.cumsum(changes[:-1]) > 0
        ends = np.append((repeated[1:] != repeated[:-1]) | (np.diff(self.document) != 0), True)
        last = np.flatnonzero(ends)
        sizes = np.diff(last, prepend=-1)
        is_long = sizes >= np.minimum(self.measure.least, self._sizes[self.document[last]])
        without_short: NDArray[np.bool_] = repeated & np.repeat(is_long, sizes)
        return without_short

    def sections(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of each unit's section, and the units of each section."""
        within = (np.arange(len(self.document)) - self._begins[self.document]) // SECTION
        starts = np.append(True, (np.diff(within) != 0) | (np.diff(self.document) != 0))
        section = np.cumsum(starts) - 1
        return section, np.bincount(section)
