"""What a stage reads: the parent's corpus from where it stopped, or another one in the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from muscale.errors import StageError
from muscale.full_runs.continue_run.lineage import LineageSegment
from muscale.layout import CORPORA
from muscale.settings import corpus as data
from muscale.settings.corpus import CorpusSettings
from proxy_models.data.batches import evaluation_sets
from proxy_models.data.corpus import Corpus
from proxy_models.data.kept_tokenizer import TOKENIZER
from proxy_models.data.sources import at_home
from proxy_models.data.token_files import STATED
from proxy_models.data.tokenizer import BytesTokenizer, FileTokenizer, Tokenizer
from proxy_models.hashing import content_key

SAME = "the tokens of a stage must be those of the run that it goes on from"


def write_stage_corpus(
    settings: CorpusSettings,
    first: Corpus,
    *,
    base: Path,
    directory: Path,
    vocab_size: int,
    on_progress: Callable[[int, int], None],
) -> Corpus:
    """Write the corpus of a stage into a folder of the study, in the tokens of the first one; or open it.

    Args:
        settings: [corpus] of the stage file.
        first: The study's own corpus.
        base: What paths are relative to: the stage file's folder.
        directory: The study's.
        vocab_size: The model's.
        on_progress: Called with bytes that are done and all bytes.

    Raises:
        StageError: If the data can't be used, or are in other tokens.
    """
    try:
        settings = _encoded_as(first, settings, base)
        data.check(settings, base, vocab_size)
        identity = [settings.identity(), str(base.resolve())]
        folder = directory / CORPORA / content_key(identity)
        corpus = data.write(settings, base, folder, vocab_size, on_progress)
    except ValueError as error:
        raise StageError(str(error) if str(error).startswith("corpus") else f"corpus: {error}") from error
    _require(_tokenizers(corpus), first)
    if corpus.vocab_size > vocab_size:
        raise StageError(f"corpus: {SAME}: ids below {vocab_size}, got {corpus.vocab_size}")
    return corpus


def require_held_out(corpus: Corpus, context_length: int, n_tokens: int) -> None:
    """Refuse a corpus whose held-out split is shorter than what is to be evaluated.

    Raises:
        StageError: If it is.
    """
    try:
        evaluation_sets(corpus, context_length, n_tokens)
    except ValueError as error:
        raise StageError(f"corpus.evaluation_tokens: {error}") from error


def position_in(corpus: Corpus, lineage: Sequence[LineageSegment], seed: int) -> int:
    """Where a stage begins in its corpus: behind what was read of it before, in the same order, so that nothing is repeated.

    Raises:
        StageError: If it would be read in another order, or its mixture is planned for the length of one run.
    """
    before = [stretch for stretch in lineage if stretch.corpus == corpus.key]
    if not before:
        return 0
    if corpus.stages_by_fraction:
        raise StageError(
            "corpus: the mixture of this corpus ends with the run that read it, as its stages end at fractions of that run; "
            "state [corpus] with the mixture to go on with"
        )
    last = before[-1]
    if seed != last.seed:
        raise StageError(
            f"seed: must be {last.seed}, as {last.label} read this corpus in that order and another one would repeat "
            f"tokens; got {seed}"
        )
    return last.position + last.tokens


def read_again(corpus: Corpus, lineage: Sequence[LineageSegment]) -> list[str]:
    """A line for each source that an earlier stretch read as part of another corpus: it is read from its start."""
    lines = []
    for name, files in corpus.sources.items():
        known = [one for one in lineage if one.corpus != corpus.key and files.key in one.sources.values()]
        if known and corpus.evaluation_weights[name]:
            lines.append(
                f"{name} was read before, by {known[-1].label}: it is read again from its start, in another order"
            )
    return lines


def _encoded_as(first: Corpus, settings: CorpusSettings, base: Path) -> CorpusSettings:
    """The settings with the tokenizer of the first corpus, if they name none; refused if they name another."""
    texts = [source for source in data.sources(settings, base).values() if source.kind != "tokens"]
    if not texts:
        return settings
    if "tokenizer" in settings.model_fields_set:
        if settings.tokenizer == "bpe":
            raise StageError(f'corpus.tokenizer: {SAME}, and "bpe" would train another one; leave corpus.tokenizer out')
        path = base / at_home(settings.tokenizer)
        named: Tokenizer = (
            BytesTokenizer() if settings.tokenizer == "bytes" else FileTokenizer(path, settings.end_of_document)
        )
        _require({named.key}, first)
        return settings
    known = _tokenizers(first) - {STATED}
    if not known:
        raise StageError(f"corpus: {SAME}, which was given as tokens: text can't be encoded alike; give tokens too")
    tokenizer = first.tokenizer()
    if isinstance(tokenizer, FileTokenizer):
        kept = {"tokenizer": str((first.folder / TOKENIZER).resolve()), "end_of_document": tokenizer.end_name}
        return settings.model_copy(update=kept)
    return settings


def _tokenizers(corpus: Corpus) -> set[str]:
    return {str(files.manifest["tokenizer"]) for files in corpus.sources.values()}


def _require(found: set[str], first: Corpus) -> None:
    if more := found - (known := _tokenizers(first)):
        hint = "give text instead of tokens" if more == {STATED} else "leave corpus.tokenizer out"
        raise StageError(
            f"corpus.tokenizer: {SAME}: hash {', '.join(sorted(known))}, got {', '.join(sorted(more))}; {hint}"
        )
