"""A second corpus for a continuation or a variant, in the study's tokens unless a variant has another tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from muscale.errors import StageError
from muscale.layout import CORPORA
from muscale.settings import corpus as data
from muscale.settings.corpus import CorpusSettings
from proxy_models.data.corpus import Corpus
from proxy_models.data.kept_tokenizer import TOKENIZER
from proxy_models.data.sources import at_home
from proxy_models.data.token_files import STATED
from proxy_models.data.tokenizer import MIN_TRAINED_VOCAB, BytesTokenizer, FileTokenizer, Tokenizer
from proxy_models.hashing import content_key

SAME = "a further corpus must have the tokenizer of the study's"


def further_errors(settings: CorpusSettings, vocab_size: int) -> list[str]:
    """Return the broken rules of a [corpus] that does not continue the earlier one; its default would be another text."""
    if not {"source", "sources"} & settings.model_fields_set:
        stated = ", ".join(sorted(settings.model_fields_set)) or "no key"
        return [f"corpus.source: missing: a [corpus] here is a new corpus; leave [corpus] out to read on, got {stated}"]
    return settings.cross_field_errors(vocab_size)


def write_corpus(
    settings: CorpusSettings,
    first: Corpus,
    *,
    base: Path,
    directory: Path,
    vocab_size: int,
    on_progress: Callable[[int, int], None],
    any_tokenizer: bool = False,
) -> Corpus:
    """Write a further corpus into a folder of the study, or open it.

    Args:
        first: Corpus whose tokenizer is used.
        base: Folder to which paths in the settings are relative.
        on_progress: Called with written bytes and total bytes.
        any_tokenizer: Whether the settings' own tokenizer is used instead.

    Raises:
        StageError: If the data can't be used, or have another tokenizer.
    """
    try:
        settings = settings if any_tokenizer else _encoded_as(first, settings, base)
        data.check(settings, base, vocab_size)
        identity = [settings.identity(), str(base.resolve())]
        if settings.tokenizer in MIN_TRAINED_VOCAB:
            identity.append(str(vocab_size))
        folder = directory / CORPORA / content_key(identity)
        corpus = data.write(settings, base, folder, vocab_size, on_progress)
    except ValueError as error:
        raise StageError(str(error) if str(error).startswith(("corpus", "model")) else f"corpus: {error}") from error
    if not any_tokenizer:
        _require(tokenizers(corpus), first)
    if corpus.vocab_size > vocab_size:
        raise StageError(f"corpus: {SAME}: ids below {vocab_size}, got {corpus.vocab_size}")
    return corpus


def _encoded_as(first: Corpus, settings: CorpusSettings, base: Path) -> CorpusSettings:
    """The settings with the first corpus's tokenizer, if they name none; another tokenizer is refused."""
    texts = [source for source in data.sources(settings, base).values() if source.kind != "tokens"]
    if not texts:
        return settings
    if "tokenizer" in settings.model_fields_set:
        if settings.tokenizer in MIN_TRAINED_VOCAB:
            raise StageError(
                f'corpus.tokenizer: {SAME}, and "{settings.tokenizer}" would train a new one; leave corpus.tokenizer out'
            )
        path = base / at_home(settings.tokenizer)
        named: Tokenizer = (
            BytesTokenizer() if settings.tokenizer == "bytes" else FileTokenizer(path, settings.end_of_document)
        )
        _require({named.key}, first)
        return settings
    if not tokenizers(first) - {STATED}:
        raise StageError(f"corpus: {SAME}, whose data was given as tokens, so text can't be encoded; give tokens")
    tokenizer = first.tokenizer()
    if isinstance(tokenizer, FileTokenizer):
        kept = {"tokenizer": str((first.folder / TOKENIZER).resolve()), "end_of_document": tokenizer.end_name}
        return settings.model_copy(update=kept)
    return settings


def tokenizers(corpus: Corpus) -> set[str]:
    """Keys of the tokenizers of a corpus's sources; `STATED` if a source was given as tokens."""
    return {str(files.manifest["tokenizer"]) for files in corpus.sources.values()}


def _require(found: set[str], first: Corpus) -> None:
    if more := found - (known := tokenizers(first)):
        hint = "give text instead of tokens" if more == {STATED} else "leave corpus.tokenizer out"
        raise StageError(
            f"corpus.tokenizer: {SAME}: hash {', '.join(sorted(known))}, got {', '.join(sorted(more))}; {hint}"
        )
