"""Rules of Gopher's data (Rae et al., arXiv 2112.11446, appendix A.1.1): quality and repetition, with the paper's numbers as defaults.

The paper's words are separated by white space. For repetition, words are those of `shingles`, and shares are of their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from proxy_models.data.cleaning.cleaning_step import JudgeAlone, Over
from proxy_models.data.cleaning.shingles import runs_of, word_hashes
from proxy_models.data.cleaning.text_shards import Shard

MOST_LINES = 0.30  # largest share of lines, and of paragraphs, that occurred before in the document (table A1)
MOST_IN_LINES = 0.20  # the same as a share of characters
MOST_IN_TOP = {2: 0.20, 3: 0.18, 4: 0.16}  # share of the most frequent run of so many words
MOST_IN_REPEATED = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}  # share of all repeated runs
BULLETS = ("•", "‣", "◦", "●", "-", "*", "·", "–")  # the paper names only the bullet point
# The paper's English words; for other languages the most frequent function words, chosen here.
STOP_WORDS = {
    "en": {"the", "be", "to", "of", "and", "that", "have", "with"},
    "de": {"der", "die", "das", "und", "ist", "in", "zu", "mit"},
    "es": {"el", "la", "de", "que", "y", "en", "es", "con"},
    "fr": {"le", "la", "les", "de", "et", "est", "que", "des"},
    "it": {"il", "la", "di", "che", "e", "un", "per", "con"},
    "nl": {"de", "het", "een", "en", "van", "is", "dat", "met"},
    "pt": {"o", "a", "de", "que", "e", "do", "da", "com"},
}
_PARAGRAPHS = re.compile(r"\n\s*\n")
StopWords = Literal["en", "de", "es", "fr", "it", "nl", "pt", "none"]


@dataclass(frozen=True, kw_only=True)
class Heuristics:
    """Remove documents that break one of the rules.

    Attributes:
        min_words, max_words: Bounds of the number of words.
        min_word_length, max_word_length: Bounds of the mean length of a word in characters.
        max_symbols: Largest number of hash signs, or of ellipses, per word.
        max_bullets: Largest share of lines that begin with a bullet point.
        max_ellipses: Largest share of lines that end with an ellipsis.
        min_alphabetic: Smallest share of words with a letter.
        min_stop_words: Smallest number of distinct stop words.
        stop_words: StopWords of the stop words; "none" for text that has none, such as code.
        repetition: Whether documents that repeat themselves are removed.
    """

    min_words: int = 50
    max_words: int = 100_000
    min_word_length: float = 3.0
    max_word_length: float = 10.0
    max_symbols: float = 0.1
    max_bullets: float = 0.9
    max_ellipses: float = 0.3
    min_alphabetic: float = 0.8
    min_stop_words: int = 2
    stop_words: StopWords = "en"
    repetition: bool = True
    name: ClassVar[str] = "heuristics"
    passes: ClassVar[int] = 1

    def identity(self) -> dict[str, Any]:
        """Return the settings."""
        return asdict(self)

    def learn(self, shards: Sequence[Shard], over: Over) -> tuple[JudgeAlone, dict[str, Any]]:
        """Return the judge; there is nothing to learn."""
        return JudgeAlone(self.reason_of), {}

    def reason_of(self, text: str) -> str:
        """Return the first rule that a text breaks, with the value; "" if there is none."""
        about = _Text(text)
        return next(self._broken(about), "") or (next(_repetition(about), "") if self.repetition else "")

    def _broken(self, about: _Text) -> Iterator[str]:
        n_words, stop_words = len(about.words), STOP_WORDS.get(self.stop_words)
        if not self.min_words <= n_words <= self.max_words:
            yield f"{n_words:,} words"
        length = sum(map(len, about.words)) / max(1, n_words)
        if not self.min_word_length <= length <= self.max_word_length:
            yield f"{length:.1f} characters per word"
        for symbol, count in (("#", about.text.count("#")), ("…", about.text.count("...") + about.text.count("…"))):
            if count > self.max_symbols * n_words:
                yield f"{count / max(1, n_words):.2f} {symbol} per word"
        lines = [line.strip() for line in about.lines]
        checks: tuple[tuple[str, float, Callable[[str], bool]], ...] = (
            ("lines begin with a bullet point", self.max_bullets, lambda line: line.startswith(BULLETS)),
            ("lines end with an ellipsis", self.max_ellipses, lambda line: line.endswith(("...", "…"))),
        )
        for what, most, holds in checks:
            if (share := sum(map(holds, lines)) / max(1, len(lines))) > most:
                yield f"{share:.0%} of {what}"
        alphabetic = sum(any(map(str.isalpha, word)) for word in about.words) / max(1, n_words)
        if alphabetic < self.min_alphabetic:
            yield f"{alphabetic:.0%} of words have a letter"
        if stop_words and (found := len(stop_words.intersection(about.text.lower().split()))) < self.min_stop_words:
            yield f"{found} distinct stop words"


@dataclass(frozen=True)
class _Text:
    text: str

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]


def _repetition(about: _Text) -> Iterator[str]:
    for what, parts in (("lines", about.lines), ("paragraphs", _PARAGRAPHS.split(about.text.strip()))):
        again = list(_occurred_before(parts))
        if (share := len(again) / max(1, len(parts))) > MOST_LINES:
            yield f"{share:.0%} of {what} occurred before"
        if (share := sum(map(len, again)) / max(1, len(about.text))) > MOST_IN_LINES:
            yield f"{share:.0%} of characters are in {what} that occurred before"
    words, lengths = word_hashes(about.text)
    ends = np.append(0, np.cumsum(lengths))
    for n, most in (MOST_IN_TOP | MOST_IN_REPEATED).items():
        _, first, run, count = np.unique(runs_of(words, n), return_index=True, return_inverse=True, return_counts=True)
        if not len(count) or count.max() == 1:
            return  # longer runs occur once, too
        if n in MOST_IN_TOP:
            sizes = (ends[first + n] - ends[first]) * count
            n_bytes = sizes[count == count.max()].max()
        else:
            again = first[run] != np.arange(len(run))
            covered = np.convolve(again, np.ones(n, dtype=np.int64)) > 0  # words of any run that occurred before
            n_bytes = lengths[covered].sum()
        if (share := n_bytes / ends[-1]) > most:
            yield f"{share:.0%} of text is in {'the most frequent' if n in MOST_IN_TOP else 'repeated'} runs of {n} words"


def _occurred_before(parts: Sequence[str]) -> Iterator[str]:
    seen: set[str] = set()
    for part in parts:
        if part in seen:
            yield part
        seen.add(part)
