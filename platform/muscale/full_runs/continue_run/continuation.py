"""A stage that goes on from a full run's checkpoint: what it trains, with which numbers, and the key that it is known by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from muscale.errors import StageError
from muscale.full_runs.continue_run.corpus import position_in, read_again, require_held_out, write_stage_corpus
from muscale.full_runs.continue_run.lineage import (
    LineageSegment,
    Parent,
    find_parent,
    plain,
    require_checkpoint,
)
from muscale.full_runs.full_run import Beginning, FullRun, HeldOut
from muscale.layout import FULL_RUNS
from muscale.plans.planning import Plan
from muscale.settings.config import StudyConfig
from muscale.settings.corpus import CorpusSettings
from muscale.settings.promote import SpikePolicy
from muscale.settings.stage_file import StageFile
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain, input_key
from muscale.store.tables import ResultKind
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.continued import continued
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics
from scaling.presentation import Result

NOT_FORECAST = "held against no forecast: the law holds for the corpus and the schedule that it was fitted on"


@dataclass(frozen=True, kw_only=True)
class Continuation(Result):
    """What `muscale continue` trains; its tokens count from its own start.

    Attributes:
        name: The stage's.
        parent: The state that it goes on from.
        numerics: The parent's shape, parametrization and precision on the stage's corpus.
        segments: From 0 on.
        corpus: That it reads.
        position: Where it begins in it, tokens.
        on_spike: What is done about spikes, which changes what is computed.
        directory: The study's.
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
        """Hash of the parent's run and tokens, and of everything that the stage computes."""
        segments = [segment.to_dict() for segment in self.segments]
        parent = [self.parent.run, self.parent.tokens]
        mended = asdict(self.on_spike) if self.on_spike else None
        return input_key("continue", parent, self.numerics.to_dict(), segments, self.position, mended)

    @property
    def n_tokens(self) -> int:
        """Of the stage."""
        return self.segments[-1].end

    @property
    def compute_flops(self) -> float:
        """6·N·D of the stage."""
        return 6.0 * self.numerics.model.n_params * self.n_tokens

    @property
    def folder(self) -> Path:
        """Where its checkpoints, metrics and result lie."""
        return self.directory / FULL_RUNS / self.key

    @property
    def earlier(self) -> dict[str, LineageSegment]:
        """The last stretch on each other corpus, by its label."""
        last = {one.corpus: one for one in self.parent.lineage if one.corpus != self.corpus.key}
        return {stretch.label: stretch for stretch in last.values()}

    @property
    def lineage(self) -> tuple[LineageSegment, ...]:
        """With the stage itself, whole."""
        own = {"run": self.key, "name": self.name, "tokens": self.n_tokens, "position": self.position}
        return (*self.parent.lineage, LineageSegment.of(self.corpus, self.directory, self.numerics, **own))

    def full_run(self, config: StudyConfig, seal: str) -> FullRun:
        """The run to train; `seal` is the hash of the parent checkpoint's manifest."""
        held_out = {
            label: HeldOut(corpus=self.directory / one.folder, n_tokens=one.evaluation_tokens)
            for label, one in self.earlier.items()
        }
        beginning = Beginning(
            checkpoint=self.parent.checkpoint,
            seal=seal,
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
            beginning=beginning,
        )

    def facts(self) -> dict[str, Any]:
        """What the ledger keeps of it, from its first launch on."""
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
        """What is to be known of its data."""
        return [
            *read_again(self.corpus, self.parent.lineage),
            *(f"warning: {line}" for line in self.corpus.warnings(self.position + self.n_tokens)),
        ]

    def __str__(self) -> str:
        before, recipe, model = self.parent.recipe, self.segments[0].recipe, self.numerics.model
        phases = ", ".join(f"{type(one.phase).__name__} from {one.start:,} to {one.end:,}" for one in self.segments)
        kept = recipe.optimizer == before.optimizer
        optimizer = (
            f"{recipe.optimizer}, with its moments"
            if kept
            else f"{recipe.optimizer} in place of {before.optimizer}, whose moments are dropped"
        )
        begins = f"read on from {self.position:,} tokens, where it was left" if self.position else "read from its start"
        lines = [
            f"stage {self.name} {self.key}: {self.n_tokens:,} tokens after {self.parent.tokens_before:,}, "
            f"N = {model.n_params:,}, C = {self.compute_flops:.3g} FLOPs",
            f"  goes on from {self.parent.checkpoint}",
            *format_lineage(self.parent.lineage),
            f"  corpus {self.corpus.key}: {begins}",
            *(f"  {note}" for note in self.notes),
            f"  learning rate {recipe.learning_rate:.4g} ({recipe.learning_rate / before.learning_rate:.3g}× the parent's), "
            f"re-warmed over {recipe.warmup_tokens:,} tokens; {phases}",
            f"  optimizer {optimizer}; rate times decay stays",
            *(f"  evaluated on the held-out text of {label} too" for label in self.earlier),
            f"  {NOT_FORECAST}",
        ]
        return "\n".join(lines)


def format_lineage(lineage: tuple[LineageSegment, ...]) -> list[str]:
    """A line for each stretch."""
    return [f"  {number}. {stretch}" for number, stretch in enumerate(lineage, 1)]


def plan_stage(
    path: Path,
    config: StudyConfig,
    ledger: Ledger,
    first: Corpus,
    chain_of: Callable[[Plan], Chain],
    on_progress: Callable[[int, int], None],
) -> Continuation:
    """What a stage file trains; writes its corpus if it is new, and nothing else.

    Args:
        path: The stage file.
        config: The study's.
        ledger: The study's.
        first: The study's corpus.
        chain_of: What a plan trains.
        on_progress: Called with bytes of the corpus that are done and all bytes.

    Raises:
        StudyFileError: If the file can't be used.
        StageError: If there is no such parent, or the stage can't go on from it so.
    """
    stage = StageFile.read(path, vocab_size=config.model.vocab_size)
    try:
        parent = find_parent(stage.parent, ledger, first, chain_of)
        settings = _corpus_settings(stage, parent, config)
        if settings is None:
            corpus = Corpus.open(ledger.directory / parent.lineage[-1].folder)
        else:
            corpus = write_stage_corpus(
                settings,
                first,
                base=path.resolve().parent,
                directory=ledger.directory,
                vocab_size=config.model.vocab_size,
                on_progress=on_progress,
            )
        known = [stretch.seed for stretch in parent.lineage if stretch.corpus == corpus.key]
        seed = [parent.numerics.seed, *known][-1] if stage.seed is None else stage.seed
        segments = _segments(stage, parent)
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
        require_held_out(corpus, numerics.model.context_length, evaluation)
        _require_trainable(numerics, segments[0], config)
        planned = Continuation(
            name=stage.name,
            parent=parent,
            numerics=numerics,
            segments=segments,
            corpus=corpus,
            position=position,
            on_spike=config.promote.spike_policy,
            directory=ledger.directory,
        )
        if ledger.result(ResultKind.CONTINUATION_STARTED, planned.key) is None:  # else it may go on without it
            require_checkpoint(parent)
    except StageError as error:
        raise StageError(f"{path}: {error}") from error
    return planned


def _corpus_settings(stage: StageFile, parent: Parent, config: StudyConfig) -> CorpusSettings | None:
    """[corpus] of the stage, with what it does not say of held-out text as it was before; None: the parent's corpus."""
    own = stage.own_corpus
    if own is None:
        return None
    before = {
        "evaluation_tokens": parent.numerics.evaluation_tokens,
        "validation_fraction": config.corpus.validation_fraction,  # so that text of the study held out stays so
    }
    return own.model_copy(update={name: value for name, value in before.items() if name not in own.model_fields_set})


def _segments(stage: StageFile, parent: Parent) -> tuple[Segment, ...]:
    before = parent.recipe
    if stage.optimizer == before.optimizer:
        raise StageError(
            f"optimizer: must differ from the parent's, omit it to keep the parent's; got {stage.optimizer!r}"
        )
    try:
        return continued(
            before,
            stage.n_tokens,
            learning_rate=stage.learning_rate or stage.learning_rate_factor * before.learning_rate,
            rewarm_tokens=stage.rewarm_tokens,
            schedule=stage.schedule,
            cooldown_fraction=stage.cooldown_fraction,
            final_fraction=stage.final_fraction,
            optimizer=stage.optimizer,
        )
    except ValueError as error:
        raise StageError(f"rewarm_tokens: {error}") from error


def _require_trainable(numerics: Numerics, segment: Segment, config: StudyConfig) -> None:
    """Refuse an optimizer without rules here, and a layout that does not fit the model."""
    try:
        numerics.parametrization(segment.recipe.optimizer)
    except ValueError as error:
        raise StageError(f"optimizer: {error}") from error
    if layout_errors := list(config.promote.parallelism.layout_errors(numerics.model)):
        raise StageError("; ".join(layout_errors))
