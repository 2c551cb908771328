"""[corpus.clean] of the study file: from settings to the steps that clean the text before it is tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from muscale.settings.strict import StrictTable, broken
from proxy_models.data.cleaning.clean import MOST_REMOVED
from proxy_models.data.cleaning.cleaning_step import CleaningStep
from proxy_models.data.cleaning.exact_duplicates import ExactDuplicates
from proxy_models.data.cleaning.heuristics import Heuristics, StopWords
from proxy_models.data.cleaning.languages import Languages
from proxy_models.data.cleaning.leaks import Leaks
from proxy_models.data.cleaning.line_duplicates import LineDuplicates
from proxy_models.data.cleaning.near_duplicates import NearDuplicates
from proxy_models.data.cleaning.quality import Quality
from proxy_models.data.sources import Source, at_home

Share = Annotated[float, Field(ge=0, le=1)]
DuplicateScope = Literal["none", "source", "global"]
LanguageCode = Annotated[str, Field(pattern="^[a-z]{2,3}$")]


class LineDuplicatesSettings(StrictTable):
    """[corpus.clean.line_duplicates]: lines that are removed since they occur in many documents."""

    min_characters: PositiveInt = 30  # shorter lines stay
    max_documents: PositiveInt = 10  # lines that occur in more are removed


class HeuristicsSettings(StrictTable):
    """[corpus.clean.heuristics]: documents that break a rule are removed; the defaults are Gopher's."""

    min_words: PositiveInt = 50  # smallest number of words of a document
    max_words: PositiveInt = 100_000  # largest number
    min_word_length: Annotated[float, Field(ge=0)] = 3.0  # smallest mean length of a document's words
    max_word_length: Annotated[float, Field(gt=0)] = 10.0  # largest mean length
    max_symbols: Annotated[float, Field(ge=0)] = 0.1  # largest number of hash signs, or of ellipses, per word
    max_bullets: Share = 0.9  # largest share of lines that begin with a bullet point
    max_ellipses: Share = 0.3  # largest share of lines that end with an ellipsis
    min_alphabetic: Share = 0.8  # smallest share of words with a letter
    min_stop_words: Annotated[int, Field(ge=0)] = 2  # smallest number of different words of the list
    stop_words: StopWords = "en"  # "none" for text without stop words, such as code
    repetition: bool = True  # remove documents that repeat themselves


class QualitySettings(StrictTable):
    """[corpus.clean.quality]: documents with a low score are removed; a classifier learns it from texts that the user scored."""

    scores: str  # a .jsonl or .csv file, relative to the study file
    text: str = "text"  # key, or column, of the text
    score: str = "score"  # key, or column, of the score
    min_score: float | None = None  # lowest score of a document that stays; or set keep
    keep: Annotated[float, Field(gt=0, lt=1)] | None = None  # share of documents that stay


class CleanSettings(StrictTable):
    """[corpus.clean]: steps in the order exact_duplicates, line_duplicates, languages, heuristics, near_duplicates, quality, leaks."""

    exact_duplicates: DuplicateScope = "none"  # of whole documents; "source": within each source, "global": over all
    line_duplicates: LineDuplicatesSettings | None = None
    languages: tuple[LanguageCode, ...] = ()  # codes of those to keep (ISO 639)
    heuristics: HeuristicsSettings | None = None
    near_duplicates: DuplicateScope = "none"  # likewise, of documents that share most of their word sequences
    near_duplicates_threshold: Annotated[float, Field(gt=0, le=1)] = 0.8  # Jaccard similarity
    quality: QualitySettings | None = None
    leaks: bool = False  # remove held-out text from training documents
    most_removed: Share = MOST_REMOVED  # of a source's bytes, by one step; more stops with a question

    def identity(self) -> dict[str, Any]:
        """Settings that determine the cleaned text."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude={"most_removed"})

    def steps(self, directory: Path) -> Iterator[CleaningStep]:
        """The steps that are on; paths are relative to `directory`.

        Raises:
            ValueError: If the settings of a step contradict each other.
        """
        if self.exact_duplicates != "none":
            yield ExactDuplicates(scope=self.exact_duplicates)
        if self.line_duplicates:
            yield LineDuplicates(**self.line_duplicates.model_dump())
        if self.languages:
            yield Languages(languages=self.languages)
        if self.heuristics:
            yield Heuristics(**self.heuristics.model_dump())
        if self.near_duplicates != "none":
            yield NearDuplicates(scope=self.near_duplicates, threshold=self.near_duplicates_threshold)
        if self.quality:
            named = self.quality.model_dump() | {"scores": directory / at_home(self.quality.scores)}
            yield Quality(**named)
        if self.leaks:
            yield Leaks()

    @property
    def is_on(self) -> bool:
        """Whether there is a step."""
        return any(True for _ in self.steps(Path()))

    def errors(self, sources: Mapping[str, Source]) -> list[str]:
        """Broken rules across keys, one per line; reads no file."""
        if faulty := broken("corpus.clean.quality", lambda: [*self.steps(Path())]):
            return faulty
        given = [name for name, source in sources.items() if source.kind == "tokens"]
        problems = [f'corpus.clean: needs text, but {name} is of kind "tokens"' for name in given]
        prompted = [name for name, source in sources.items() if source.has_prompts]
        return problems + [f"corpus.clean: {name} has prompts, which cleaned text does not keep" for name in prompted]
