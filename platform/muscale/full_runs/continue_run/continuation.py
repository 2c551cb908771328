"""The continuation of a full run from one of its checkpoints: its segments, numerics, corpus and key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from muscale.errors import StageError
from muscale.full_runs.continue_run.parent import (
    LineageSegment,
    Parent,
    find_parent,
    plain,
    position_in,
    read_again,
    require_checkpoint,
)
from muscale.full_runs.full_run import FullRun, HeldOut, InitialState
from muscale.layout import FULL_RUNS
from muscale.settings.config import StudyConfig
from muscale.settings.continuation_file import ContinuationFile
from muscale.settings.corpus import CorpusSettings
from muscale.settings.further_corpus import write_corpus
from muscale.settings.own_model import require_same_family
from muscale.settings.promote import SpikePolicy
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.lineage import input_key
from proxy_models.data.batches import evaluation_sets
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.continued import continued
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics
from scaling.presentation import Result

NOT_FORECAST = "no forecast: the law holds only for the corpus and the schedule that it was fitted on"


@dataclass(frozen=True, kw_only=True)
class Continuation(Result):
    """A training that starts from a checkpoint of a full run; its tokens count from the continuation's start.

    Attributes:
        name: Name in the continuation's file.
        parent: The checkpoint at which the continuation starts, with its history.
        numerics: The parent's shape, parametrization and precision on the continuation's corpus.
        segments: Segments of the continuation, from token 0.
        corpus: Training data.
        position: Tokens of the corpus that earlier runs have read; the continuation starts there.
        on_spike: Spike handling, which changes the results.
        directory: The study's folder.
    """

    name: str
    parent: Parent
    numerics: Numerics
    segments: tuple[Segment, ...]
    corpus: Corpus
    position: int
    on_spike: SpikePolicy | None
    directory: Path

    @cached_property
    def key(self) -> str:
        """Hash of the parent's run and tokens, and of everything that determines the result."""
        segments = [segment.to_dict() for segment in self.segments]
        parent = [self.parent.run, self.parent.tokens]
        spikes = asdict(self.on_spike) if self.on_spike else None
        return input_key("continue", parent, self.numerics.to_dict(), segments, self.position, spikes)

    @property
    def n_tokens(self) -> int:
        """Tokens that the continuation trains, without the parent's."""
        return self.segments[-1].end

    @property
    def compute_flops(self) -> float:
        """6·N·D of the continuation's tokens."""
        return 6.0 * self.numerics.model.n_params * self.n_tokens

    @property
    def folder(self) -> Path:
        """Folder of the continuation's checkpoints, metrics and result."""
        return self.directory / FULL_RUNS / self.key

    @property
    def earlier(self) -> dict[str, LineageSegment]:
        """The last lineage segment on each other corpus, by label."""
        last = {past.corpus: past for past in self.parent.lineage if past.corpus != self.corpus.key}
        return {past.label: past for past in last.values()}

    @property
    def lineage(self) -> tuple[LineageSegment, ...]:
        """The parent's lineage, and this continuation up to its end."""
        own = {"run": self.key, "name": self.name, "tokens": self.n_tokens, "position": self.position}
        return (*self.parent.lineage, LineageSegment.of(self.corpus, self.directory, self.numerics, **own))

    def full_run(self, config: StudyConfig, manifest_hash: str) -> FullRun:
        """The run to train, from a parent checkpoint with this manifest hash."""
        held_out = {
            label: HeldOut(corpus=self.directory / one.folder, n_tokens=one.evaluation_tokens)
            for label, one in self.earlier.items()
        }
        initial_state = InitialState(
            checkpoint=self.parent.checkpoint,
            manifest_hash=manifest_hash,
            recipe=self.parent.recipe,
            position=self.position,
            earlier=held_out,
        )
        return FullRun.of(
            config,
            numerics=self.numerics,
            segments=self.segments,
            directory=self.folder,
            corpus=self.corpus.folder,
            initial_state=initial_state,
        )

    def facts(self) -> dict[str, Any]:
        """The continuation's record in the ledger, from the first launch on."""
        return {
            "name": self.name,
            "numerics": self.numerics.to_dict(),
            "segments": [segment.to_dict() for segment in self.segments],
            "folder": str(self.corpus.folder.relative_to(self.directory)),
            "position": self.position,
            "lineage": plain(self.parent.lineage),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        parent = {"run": self.parent.run, "tokens": self.parent.tokens, "checkpoint": str(self.parent.checkpoint)}
        return {
            "key": self.key,
            **self.facts(),
            "parent": parent,
            "lineage": plain(self.lineage),
            "n_tokens": self.n_tokens,
            "tokens_before": self.parent.tokens_before,
            "compute_flops": self.compute_flops,
            "directory": str(self.folder),
            "notes": self.notes,
        }

    @property
    def notes(self) -> list[str]:
        """Notes and warnings about the continuation's data."""
        return [
            *read_again(self.corpus, self.parent.lineage),
            *(f"warning: {line}" for line in self.corpus.warnings(self.position + self.n_tokens)),
        ]

    def __str__(self) -> str:
        parent, recipe, model = self.parent.recipe, self.segments[0].recipe, self.numerics.model
        phases = ", ".join(f"{type(one.phase).__name__} from {one.start:,} to {one.end:,}" for one in self.segments)
        same = recipe.optimizer == parent.optimizer
        optimizer = (
            f"{recipe.optimizer}, moments kept"
            if same
            else f"{recipe.optimizer} replaces {parent.optimizer}, moments dropped"
        )
        begins = f"continues at {self.position:,} tokens" if self.position else "from its start"
        lines = [
            f"continuation {self.name} {self.key}: {self.n_tokens:,} tokens after {self.parent.tokens_before:,}, "
            f"N = {model.shown_params}, C = {self.compute_flops:.3g} FLOPs",
            f"  from checkpoint {self.parent.checkpoint}",
            *format_lineage(self.parent.lineage),
            f"  corpus {self.corpus.key}: {begins}",
            *(f"  {note}" for note in self.notes),
            f"  learning rate {recipe.learning_rate:.4g} ({recipe.learning_rate / parent.learning_rate:.3g}× the parent's), "
            f"re-warmed over {recipe.warmup_tokens:,} tokens; {phases}",
            f"  optimizer {optimizer}; learning rate times weight decay unchanged",
            *(f"  also evaluated on the held-out text of {label}" for label in self.earlier),
            f"  {NOT_FORECAST}",
        ]
        return "\n".join(lines)


def format_lineage(lineage: tuple[LineageSegment, ...]) -> list[str]:
    """Format each lineage segment as one line."""
    return [f"  {number}. {past}" for number, past in enumerate(lineage, 1)]


def plan_continuation(
    path: Path,
    config: StudyConfig,
    ledger: Ledger,
    first: Corpus,
    numerics: Numerics,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Continuation:
    """Read a continuation file, and write its corpus if it is new; trains nothing.

    Args:
        on_progress: Called with written bytes and total bytes of the corpus.

    Raises:
        StudyFileError: If the file can't be used.
        StageError: If there is no such parent, or it can't be continued this way.
    """
    file = ContinuationFile.read(path, vocab_size=config.model.vocab_size)
    try:
        parent = find_parent(file.parent, ledger, first, numerics)
        require_same_family(parent.numerics.model, config.model)
        settings = _corpus_settings(file, parent, config)
        if settings is None:
            corpus = Corpus.open(ledger.directory / parent.lineage[-1].folder)
        else:
            corpus = write_corpus(
                settings,
                first,
                base=path.resolve().parent,
                directory=ledger.directory,
                vocab_size=config.model.vocab_size,
                on_progress=on_progress,
            )
        seeds = [past.seed for past in parent.lineage if past.corpus == corpus.key]
        seed = [parent.numerics.seed, *seeds][-1] if file.seed is None else file.seed
        segments = _segments(file, parent)
        evaluation = settings.evaluation_tokens if settings else parent.numerics.evaluation_tokens
        numerics = replace(
            parent.numerics,
            corpus_key=corpus.key,
            seed=seed,
            evaluation_tokens=evaluation,
            guard=config.promote.guard,
            stages_by_fraction=corpus.stages_by_fraction,
            run_tokens=None,
        ).for_run(segments[-1].end)
        position = position_in(corpus, parent.lineage, seed)
        _require_trainable(numerics, segments[0], config, corpus)
        planned = Continuation(
            name=file.name,
            parent=parent,
            numerics=numerics,
            segments=segments,
            corpus=corpus,
            position=position,
            on_spike=config.promote.spike_policy,
            directory=ledger.directory,
        )
        if ledger.result(ResultKind.CONTINUATION_STARTED, planned.key) is None:  # a started one needs no checkpoint
            require_checkpoint(parent)
    except StageError as error:
        raise StageError(f"{path}: {error}") from error
    return planned


def _corpus_settings(file: ContinuationFile, parent: Parent, config: StudyConfig) -> CorpusSettings | None:
    """[corpus] of the file, with inherited settings for held-out text; None: the parent's corpus."""
    own = file.own_corpus
    if own is None:
        return None
    defaults = {
        "evaluation_tokens": parent.numerics.evaluation_tokens,
        "validation_fraction": config.corpus.validation_fraction,  # so that the study's held-out text stays held out
    }
    return own.model_copy(update={name: value for name, value in defaults.items() if name not in own.model_fields_set})


def _segments(file: ContinuationFile, parent: Parent) -> tuple[Segment, ...]:
    before = parent.recipe
    if file.optimizer == before.optimizer:
        raise StageError(
            f"optimizer: must differ from the parent's, omit it to keep the parent's; got {file.optimizer!r}"
        )
    try:
        return continued(
            before,
            file.n_tokens,
            learning_rate=file.learning_rate or file.learning_rate_factor * before.learning_rate,
            rewarm_tokens=file.rewarm_tokens,
            schedule=file.schedule,
            cooldown_fraction=file.cooldown_fraction,
            final_fraction=file.final_fraction,
            optimizer=file.optimizer,
        )
    except ValueError as error:
        raise StageError(f"rewarm_tokens: {error}") from error


def _require_trainable(numerics: Numerics, segment: Segment, config: StudyConfig, corpus: Corpus) -> None:
    """Refuse too little held-out text, an optimizer without muP rules, and a parallel layout that does not fit the model."""
    try:
        evaluation_sets(corpus, numerics.model.context_length, numerics.evaluation_tokens)
    except ValueError as error:
        raise StageError(f"corpus.evaluation_tokens: {error}") from error
    try:
        numerics.parametrization(segment.recipe.optimizer)
    except ValueError as error:
        raise StageError(f"optimizer: {error}") from error
    if layout_errors := list(config.promote.parallelism.layout_errors(numerics.model)):
        raise StageError("; ".join(layout_errors))
