"""Corpora of variants: they are evaluated on the study's held-out text, which they must not train on.

A variant with another tokenizer is evaluated on the same text in its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from muscale.actors.corpora import note, noted
from muscale.actors.corpus_hashes import require_unchanged
from muscale.errors import StageError
from muscale.layout import CORPORA
from muscale.settings import corpus as data
from muscale.settings.compare import TOKENIZER, VariantSettings
from muscale.settings.config import StudyConfig
from muscale.settings.corpus import CorpusSettings, require_fitting_model
from muscale.settings.further_corpus import tokenizers, write_corpus
from proxy_models.data.corpus import Corpus
from proxy_models.data.leaks.leak_search import find_leaks
from proxy_models.data.token_files import recorded_files

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
        if not (settings.has_corpus(config.corpus) or "vocab_size" in settings.model):
            continue
        model = config.variant_model(name)
        write = partial(
            write_corpus, base=directory, directory=directory, vocab_size=model.vocab_size, on_progress=on_progress
        )
        try:
            if not settings.has_corpus(config.corpus):
                require_fitting_model(first, model)
                continue
            new_tokens = settings.names_tokenizer(config.corpus)
            written = write(settings.corpus_of(config.corpus), first, any_tokenizer=new_tokens)
            require_fitting_model(written, model)
            held_out = first
            if tokenizers(written) != tokenizers(first):
                same_text = settings.corpus.keys() <= TOKENIZER
                held_out = written if same_text else write(VariantSettings().corpus_of(config.corpus), written)
                _require_same_text(first, held_out)
        except StageError as error:
            raise StageError(f"variants.{name}.{error}") from error
        for folder in {written.folder, held_out.folder}:
            require_unchanged(folder)
        found[name] = written.evaluated_on(held_out)
        if not noted(directory, found[name].key):
            _require_apart(name, config.corpus, settings.corpus_of(config.corpus), directory, on_progress)
            note(directory, found[name])
    return found


def _require_same_text(first: Corpus, held_out: Corpus) -> None:
    """Require that a corpus in other tokens has the study's text, which may have changed since the study's corpus was written."""
    for name, files in first.sources.items():
        if files.manifest["text"] is None:
            raise StageError(
                "corpus.tokenizer: must stay the study's, because its data was given as tokens and the text is not known"
            )
        if recorded_files(files.manifest) != recorded_files(held_out.sources[name].manifest):
            raise StageError(
                f"corpus.tokenizer: the files of {name} must be the ones that the study's corpus was written from, because "
                "losses are compared on its held-out text; they have changed: restore them"
            )


def _require_apart(
    name: str, first: CorpusSettings, wanted: CorpusSettings, directory: Path, on_progress: Callable[[int, int], None]
) -> None:
    """Refuse a corpus that trains on the study's held-out text."""
    own = data.tokenized_sources(first, directory, directory, on_progress)
    other = data.tokenized_sources(wanted, directory, directory / CORPORA, on_progress)
    shared, repeated = (
        find_leaks(training, own, validation_fraction=first.validation_fraction).repeated_share
        for training in (other, own)
    )
    if shared > repeated + MOST_SHARED:
        raise StageError(
            f"variants.{name}.corpus: trains on {shared:.1%} of the study's held-out text, of which the study's own training data "
            f"repeat {repeated:.1%}: its losses would be too low; give it the same files, without their held-out part, or other files"
        )
