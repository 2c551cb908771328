"""Corpora of variants: they use the study's tokens and are evaluated on its held-out text, which they must not contain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from muscale.actors.corpora import note, noted
from muscale.actors.corpus_hashes import require_unchanged
from muscale.errors import StageError
from muscale.settings import corpus as data
from muscale.settings.config import StudyConfig
from muscale.settings.corpus import CorpusSettings
from muscale.settings.further_corpus import write_corpus
from proxy_models.data.corpus import Corpus
from proxy_models.data.leaks.leak_search import find_leaks

MOST_SHARED = 0.01
"""Limit on the share of the held-out text in a variant's training data, beyond the share in the study's data (assumed)."""


def variant_corpora(
    config: StudyConfig, first: Corpus, directory: Path, on_progress: Callable[[int, int], None]
) -> dict[str, Corpus]:
    """Write or open the corpora of the variants that have one, and return them by name.

    Args:
        on_progress: Receives the bytes read and the total.

    Raises:
        StageError: If data can't be used, have changed, or contain held-out text of the study.
    """
    found = {}
    for name, settings in config.variants.items():
        if not settings.corpus:
            continue
        wanted = settings.corpus_of(config.corpus)
        size = config.model.vocab_size
        try:
            written = write_corpus(
                wanted, first, base=directory, directory=directory, vocab_size=size, on_progress=on_progress
            )
        except StageError as error:
            raise StageError(f"variants.{name}.{error}") from error
        require_unchanged(written.folder)
        found[name] = written.evaluated_on(first)
        if not noted(directory, found[name].key):
            _require_apart(name, config.corpus, wanted, directory)
            note(directory, found[name])
    return found


def _require_apart(name: str, first: CorpusSettings, wanted: CorpusSettings, directory: Path) -> None:
    """Refuse a corpus that trains on the study's held-out text."""
    own, other = data.sources(first, directory), data.sources(wanted, directory)
    shared, repeated = (
        find_leaks(training, own, validation_fraction=first.validation_fraction).repeated_share
        for training in (other, own)
    )
    if shared > repeated + MOST_SHARED:
        raise StageError(
            f"variants.{name}.corpus: trains on {shared:.1%} of the study's held-out text, of which the study's own training data "
            f"repeat {repeated:.1%}: its losses would be flattered; give it the same files, whose held-out part is left out, or others"
        )
