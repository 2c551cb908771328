"""[corpus] of the study file: from settings to the sources, the tokenizer, the mixture, and the corpus on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, PositiveInt

from muscale.errors import StageError, refusing
from muscale.layout import CLEANED
from muscale.settings.cleaning import CleanSettings
from muscale.settings.strict import StrictTable, broken
from proxy_models.architecture.families import family_of
from proxy_models.architecture.member import Member
from proxy_models.data.cleaning.clean import clean
from proxy_models.data.cleaning.cleaned import Cleaned
from proxy_models.data.cleaning.shard_passes import Map
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus, write_mixture
from proxy_models.data.mixture import Mixture, MixtureStage
from proxy_models.data.sources import EMBEDDED, OPTIONAL, READ_BY, Kind, OnError, Source, TokenDtype, at_home
from proxy_models.data.tokenizer import (
    BYTE_ALPHABET,
    MIN_TRAINED_VOCAB,
    FileTokenizer,
    TokenizerKind,
    TokenizerSettings,
)
from proxy_models.hashing import content_key

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FileSettings(StrictTable):
    """Keys that say how the files of a source are read; in [corpus] and in [corpus.sources.NAME]."""

    kind: Kind = "text"  # format of the files; "cleaned": a folder that `muscale data clean` wrote
    field: str = "text"  # key of JSON, or column of a table, that holds the text
    prompt_field: str | None = None  # text before that of `field`, which alone then counts in the loss
    messages_field: str | None = None  # a chat instead of `field`; the assistant's messages count in the loss
    dtype: TokenDtype | None = None  # for kind "tokens" alone; none: the files or their indices state it
    vocab_size: PositiveInt | None = None  # for kind "tokens", which needs it
    encoding: str | None = None  # for text and CSV; none: UTF-8, or detected
    on_error: OnError = "stop"  # "skip" leaves out files that can't be read, and counts them
    language: str | None = None  # shown next to the tokens per word


class SourceSettings(FileSettings):
    """[corpus.sources.NAME]: a source of a mixture."""

    path: str  # of a file or folder, relative to the study file
    weight: Weight | None = None  # share of tokens, on any common scale; set here or in every stage


class StageSettings(StrictTable):
    """An entry of [[corpus.stages]]: a part of every run with separate proportions; the last stage has no end.

    Stages that end at a number of tokens cost least, since runs of several lengths share their beginnings. With fractions every
    run has the whole curriculum, and is trained from its start.
    """

    weights: dict[str, Weight] = Field(min_length=1)  # of the sources, by name
    until_tokens: PositiveInt | None = None  # tokens of a run at which the stage ends
    # share of each run at which the stage ends; in all stages but the last, or in none
    until_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None


class CorpusSettings(FileSettings):
    """[corpus]: the training data, and how much of it is held out."""

    source: str = EMBEDDED  # the standard library's source; or a file or folder, relative to the study file
    sources: dict[str, SourceSettings] = Field(default_factory=dict)  # instead of source and the keys of its files
    stages: tuple[StageSettings, ...] = ()
    # "bytes"; or "bpe" or "unigram", trained to model.vocab_size ids; or a tokenizer.json or SentencePiece .model, relative to the
    # study file
    tokenizer: str = "bytes"
    # for such a file: the token that closes documents; none: its own, or its only usual name
    end_of_document: str | None = None
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1  # of the text, held out
    evaluation_tokens: PositiveInt = 32_768  # held-out tokens on which every loss is measured
    # share of held-out words in documents that the training text also holds, beyond which the gate closes (assumed)
    most_leaked: Annotated[float, Field(ge=0, le=1)] = 0.02
    clean: CleanSettings | None = None  # what is removed from the text before it is tokenized

    @property
    def has_prompts(self) -> bool:
        """Whether some of the text does not count in the loss."""
        stated: tuple[FileSettings, ...] = (self, *self.sources.values())
        return any(one.prompt_field is not None or one.messages_field is not None for one in stated)

    @property
    def stages_by_fraction(self) -> bool:
        """Whether stages end at fractions of a run."""
        return any(stage.until_fraction is not None for stage in self.stages)

    def identity(self) -> dict[str, Any]:
        """Settings that identify the corpus; except for the first two, defaults are left out."""
        plain = self.model_dump(mode="json")
        for source in plain["sources"].values():
            for name in OPTIONAL:  # keys that are newer than the identities of finished corpora
                if name == "language" or source[name] == _DEFAULTS[name]:
                    del source[name]
        named = (*READ_BY, "sources", "stages", "end_of_document")
        given = {name: plain[name] for name in named if getattr(self, name) not in (_DEFAULTS[name], {}, ())}
        if self.clean and self.clean.is_on:
            given["clean"] = self.clean.identity()
        values = {"source": self.source, "validation_fraction": self.validation_fraction, **given}
        return {f"corpus.{name}": value for name, value in values.items()} | {"tokenizer": self.tokenizer}

    def cross_field_errors(self, model_vocab_size: int) -> list[str]:
        """Broken rules across keys, one per line; reads no file."""
        problems = []
        if self.sources:
            problems += [
                f"corpus.{name}: can't be combined with corpus.sources, got {getattr(self, name)!r}"
                for name in ONE_SOURCE
                if name in self.model_fields_set
            ]
        elif self.stages:
            problems.append("corpus.stages: need corpus.sources, to which they give weights")
        for name, source in self.sources.items():
            if (source.weight is None) != bool(self.stages):
                rule = "can't be combined with corpus.stages" if self.stages else "missing, a value is required"
                problems.append(f"corpus.sources.{name}.weight: {rule}")
        if problems:
            return problems
        problems += broken("corpus.sources" if self.sources else "corpus", sources, self, Path())
        problems += broken("corpus.stages" if self.stages else "corpus.sources", mixture, self)
        problems += broken("corpus.tokenizer", tokenizer, self, Path(), model_vocab_size)
        if self.clean and not problems:
            problems += self.clean.errors(sources(self, Path()))
        needed = vocabularies(self)
        for reason, size in needed.items():
            if model_vocab_size < size:
                problems.append(f"model.vocab_size: must be at least {size}, for {reason}, got {model_vocab_size}")
        return problems


ONE_SOURCE = ("source", *FileSettings.model_fields)  # keys of [corpus] that describe a single source
_DEFAULTS: dict[str, Any] = {name: field.default for name, field in CorpusSettings.model_fields.items()}


def vocabularies(settings: CorpusSettings) -> dict[str, int]:
    """Smallest vocabularies that a model needs, by reason; only reasons that are known without reading a file."""
    stated: Mapping[str, FileSettings] = settings.sources or {"corpus": settings}
    needed = {f"the tokens of {name}": s.vocab_size for name, s in stated.items() if s.vocab_size}
    if any(s.kind != "tokens" for s in stated.values()):
        if settings.tokenizer == "bytes":
            needed["the tokenizer bytes"] = BYTE_ALPHABET
        elif settings.tokenizer in MIN_TRAINED_VOCAB:
            needed[f"the tokenizer {settings.tokenizer}"] = MIN_TRAINED_VOCAB[settings.tokenizer]
    return needed


def sources(settings: CorpusSettings, directory: Path) -> dict[str, Source]:
    """Sources by name; paths are relative to the study's directory.

    Raises:
        ValueError: If the settings of a source contradict each other.
    """
    if not settings.sources:
        return {"corpus": _source(settings.source, settings, directory)}
    return {name: _source(source.path, source, directory) for name, source in settings.sources.items()}


def _source(path: str, settings: FileSettings, directory: Path) -> Source:
    how = {name: getattr(settings, name) for name in FileSettings.model_fields}
    return Source(path=path if path == EMBEDDED else str(directory / at_home(path)), **how)


def mixture(settings: CorpusSettings) -> Mixture | None:
    """Proportions of several sources; None for a single source.

    Raises:
        ValueError: If the weights or the stages contradict each other.
    """
    if not settings.sources:
        return None
    if not settings.stages:
        return Mixture.constant({name: source.weight or 0.0 for name, source in settings.sources.items()})
    for number, stage in enumerate(settings.stages):
        if set(stage.weights) != set(settings.sources):
            raise ValueError(
                f"stage {number} must give weights to the sources {', '.join(sorted(settings.sources))}, "
                f"got {', '.join(sorted(stage.weights))}"
            )
    if settings.stages_by_fraction and any(stage.until_tokens is not None for stage in settings.stages):
        raise ValueError(
            "until_tokens and until_fraction can't be combined, because runs have several lengths; got both"
        )
    return Mixture(
        stages=tuple(
            MixtureStage(weights=s.weights, until_tokens=s.until_tokens, until_fraction=s.until_fraction)
            for s in settings.stages
        )
    )


def tokenizer(settings: CorpusSettings, directory: Path, model_vocab_size: int) -> TokenizerSettings:
    """Settings of the tokenizer; "bpe" and "unigram" fill the model's vocabulary.

    Raises:
        ValueError: If the vocabulary is too small to be trained, or a closing token is named for another kind.
    """
    name, end = settings.tokenizer, settings.end_of_document
    if name == "bytes":
        return TokenizerSettings(end_of_document=end)
    if name in ("bpe", "unigram"):
        kind = cast("TokenizerKind", name)
        return TokenizerSettings(
            kind=kind, vocab_size=max(MIN_TRAINED_VOCAB[name], model_vocab_size), end_of_document=end
        )
    return TokenizerSettings(kind="file", path=str(directory / at_home(name)), end_of_document=end)


def check(settings: CorpusSettings, directory: Path, model_vocab_size: int) -> None:
    """Check that the files exist and that the model's vocabulary is large enough; writes nothing.

    Raises:
        ValueError: Naming key, file, rule and value; CorpusError is a subclass.
    """
    for name, source in sources(settings, directory).items():
        with refusing(f"corpus.sources.{name}.path" if settings.sources else "corpus.source", raising=ValueError):
            source.files()
    chosen = tokenizer(settings, directory, model_vocab_size)
    if chosen.path is None:
        return
    with refusing("corpus.tokenizer", raising=ValueError):
        found = FileTokenizer(Path(chosen.path), chosen.end_of_document)
    if found.vocab_size > model_vocab_size:
        raise ValueError(
            f"model.vocab_size: must be at least the {found.vocab_size} ids of {chosen.path}, got {model_vocab_size}"
        )


def write(
    settings: CorpusSettings,
    directory: Path,
    folder: Path,
    model_vocab_size: int,
    on_progress: Callable[[int, int], None],
    *,
    parallel_map: Map = map,
) -> Corpus:
    """Write the corpus into `folder`, or open the corpus that is there; clean the text first if the settings say so.

    Args:
        parallel_map: `map`, or a function like it that calls in parallel; used to clean.

    Raises:
        CorpusError: If the data can't be used, or the folder holds another corpus.
    """
    named = tokenized_sources(settings, directory, folder.parent, on_progress, parallel_map=parallel_map)
    proportions = mixture(settings)
    chosen = tokenizer(settings, directory, model_vocab_size)
    fraction = settings.validation_fraction
    if proportions is None:
        return write_corpus(
            folder, named["corpus"], validation_fraction=fraction, tokenizer=chosen, on_progress=on_progress
        )
    return write_mixture(
        folder, named, proportions, validation_fraction=fraction, tokenizer=chosen, on_progress=on_progress
    )


def tokenized_sources(
    settings: CorpusSettings,
    directory: Path,
    parent: Path,
    on_progress: Callable[[int, int], None],
    *,
    parallel_map: Map = map,
) -> dict[str, Source]:
    """Sources whose text is tokenized: those of the settings, or their cleaned text, which is written into `parent` if need be."""
    if settings.clean and settings.clean.is_on:
        return dict(write_cleaned(settings, directory, parent, on_progress, parallel_map=parallel_map).sources)
    return sources(settings, directory)


def write_cleaned(
    settings: CorpusSettings,
    directory: Path,
    parent: Path,
    on_progress: Callable[[int, int], None],
    *,
    confirm: Callable[[str], bool] = lambda question: False,
    parallel_map: Map = map,
) -> Cleaned:
    """Write the cleaned text of the sources into a folder of `parent` that is named by the settings, or open it.

    Args:
        confirm: Asked if a step would remove more than `most_removed` of a source.

    Raises:
        CorpusError: If the data can't be used, or a step removes too much.
    """
    steps, named, folder = settings.clean or CleanSettings(), sources(settings, directory), parent / CLEANED
    paths = {name: s.path if s.path == EMBEDDED else os.path.relpath(s.path, folder) for name, s in named.items()}
    listed = {name: source.to_dict() | {"path": paths[name]} for name, source in named.items()}
    return clean(
        named,
        folder / content_key([steps.identity(), listed, settings.validation_fraction]),
        list(steps.steps(directory)),
        validation_fraction=settings.validation_fraction,
        most_removed=steps.most_removed,
        confirm=confirm,
        on_progress=on_progress,
        parallel_map=parallel_map,
    )


def require_fitting_model(corpus: Corpus, model: Member) -> None:
    """Refuse a model that can't read the written corpus.

    Raises:
        StageError: If the model's vocabulary is too small, its losses can't leave out prompts, or it separates documents by another id
            than the corpus.
    """
    if corpus.vocab_size > model.vocab_size:
        raise StageError(
            f"model.vocab_size: must be at least the corpus's {corpus.vocab_size} ids, got {model.vocab_size}"
        )
    require_weighted_losses(corpus, model)
    separator, end = getattr(model, "document_separator", None), corpus.end_of_document
    if separator is not None and end is not None and separator != end:
        raise StageError(f"model.document_separator: documents of the corpus are closed by id {end}, got {separator}")


def require_weighted_losses(corpus: Corpus, model: Member) -> None:
    """Refuse a corpus with prompts for a custom family whose losses count every token.

    Raises:
        StageError: If so.
    """
    if not (corpus.all_count or family_of(model).has_weighted_losses):
        raise StageError(
            "corpus: has prompts, which do not count in the loss, but the custom losses of the model's family count every token; take "
            "the weight of tokens that count (proxy_models.architecture.family.Loss), and set has_weighted_losses"
        )


def cut_records(corpus: Corpus, context_length: int) -> Iterator[str]:
    """Yield a line for each source with training records that are longer than the context, which are cut at its end."""
    for name in corpus.sources:
        packing = corpus.packing(name, "train", context_length)
        if packing and packing.n_cut:
            yield (
                f"{name}: {packing.n_cut:,} of {packing.n_records:,} training records are longer than model.context_length = "
                f"{context_length} tokens; what is beyond is not read"
            )
