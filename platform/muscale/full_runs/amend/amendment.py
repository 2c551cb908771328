"""A run that branches off a checkpoint of a full run with stated changes: its segments, numerics, corpus and key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from muscale.full_runs.amend.parent import LineageSegment, Parent, plain, read_again
from muscale.full_runs.full_run import FullRun, HeldOut, InitialState
from muscale.layout import FULL_RUNS
from muscale.settings.config import StudyConfig
from muscale.settings.corpus import cut_records
from muscale.settings.promote import SpikePolicy
from muscale.store.lineage import input_key
from proxy_models.data.corpus import Corpus
from proxy_models.data.mixture import Mixture
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics
from scaling.presentation import Result


@dataclass(frozen=True, kw_only=True)
class Amendment(Result):
    """A run that starts from a checkpoint of a full run, its parent; its tokens count from there.

    Attributes:
        name: Name by which a later run can refer to it.
        parent: The checkpoint at which the run starts, with its history.
        numerics: The parent's shape, parametrization and precision on the run's corpus.
        segments: Segments of the run, from token 0.
        corpus: Training data.
        position: Tokens of the corpus that earlier runs have read; the run starts there.
        on_spike: Spike handling, which changes the results.
        directory: The study's folder.
        reason: Why the parent is amended; empty for a continuation, which follows its parent.
        changes: What an amendment changes, by dotted key.
        control: Steps of the parent's recipe to train for comparison; None: none.
        shared: Warnings about held-out text of earlier corpora in a new corpus's training text.
    """

    name: str
    parent: Parent
    numerics: Numerics
    segments: tuple[Segment, ...]
    corpus: Corpus
    position: int
    on_spike: SpikePolicy | None
    directory: Path
    reason: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    control: int | None = None
    shared: tuple[str, ...] = ()

    @cached_property
    def key(self) -> str:
        """Hash of the parent's run and tokens, and of everything that determines the result."""
        segments = [segment.to_dict() for segment in self.segments]
        parent = [self.parent.run, self.parent.tokens]
        spikes = self.on_spike.identity if self.on_spike else None
        return input_key("continue", parent, self.numerics.to_dict(), segments, self.position, spikes)

    @property
    def n_tokens(self) -> int:
        """Tokens that the run trains, without the parent's."""
        return self.segments[-1].end

    @property
    def compute_flops(self) -> float:
        """6·N·D of the run's own tokens."""
        return 6.0 * self.numerics.model.n_params * self.n_tokens

    @property
    def folder(self) -> Path:
        """Folder of the run's checkpoints, metrics and result."""
        return self.directory / FULL_RUNS / self.key

    @property
    def earlier(self) -> dict[str, LineageSegment]:
        """The last lineage segment on each corpus with another held-out loss, by label."""
        last = {past.corpus: past for past in self.parent.lineage if past.corpus != self.corpus.key}
        return {past.label: past for past in last.values() if not self._has_held_out_loss_of(past)}

    def _has_held_out_loss_of(self, past: LineageSegment) -> bool:
        if past.sources != {name: files.key for name, files in self.corpus.sources.items()}:
            return False
        weights = Corpus.open(self.directory / past.folder).evaluation_weights
        return weights == self.corpus.evaluation_weights and past.evaluation_tokens == self.numerics.evaluation_tokens

    @property
    def lineage(self) -> tuple[LineageSegment, ...]:
        """The parent's lineage, and this run up to its end."""
        own = {"run": self.key, "name": self.name, "tokens": self.n_tokens, "position": self.position}
        return (*self.parent.lineage, LineageSegment.of(self.corpus, self.directory, self.numerics, **own))

    @property
    def planned_share(self) -> float | None:
        """Share of the plan's tokens in the last stage of its corpus; None unless stages end at fractions of the run."""
        mixture = self._planned_mixture
        if mixture is None or not (begins := mixture.last_stage_fraction):
            return None
        return 1 - begins

    def has_stages_of(self, plan_tokens: int) -> bool:
        """Return whether the lineage has read, and will read, the stages of a plan of so many tokens."""
        planned, own = self._planned_mixture, self.corpus.mixture_of(self.numerics.run_tokens)
        same = planned is not None and own == planned.resolve(plan_tokens)
        return same and self.position == self.parent.tokens_before

    @property
    def last_stage_share(self) -> float | None:
        """Share of the lineage's tokens in the last stage; None unless it has read the plan's two stages, and nothing else.

        The run may end before the second stage.
        """
        planned, own = self._planned_mixture, self.corpus.mixture_of(self.numerics.run_tokens)
        total = self.parent.tokens_before + self.n_tokens
        if planned is None or own is None or self.position != self.parent.tokens_before:
            return None
        if len(planned.stages) != 2 or planned.shares_by_stage != own.shares_by_stage:
            return None
        return own.last_stage_share(total)

    @cached_property
    def _planned_mixture(self) -> Mixture | None:
        return Corpus.open(self.directory / self.parent.lineage[0].folder).mixture

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
        """The run's record in the ledger, from the first launch on."""
        return {
            "name": self.name,
            "numerics": self.numerics.to_dict(),
            "segments": [segment.to_dict() for segment in self.segments],
            "folder": str(self.corpus.folder.relative_to(self.directory)),
            "position": self.position,
            "lineage": plain(self.parent.lineage),
            "reason": self.reason,
            "changes": dict(self.changes),
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
            "control": self.control,
            "directory": str(self.folder),
            "notes": self.notes,
        }

    @property
    def notes(self) -> list[str]:
        """Notes and warnings about the run's data."""
        return [
            *read_again(self.corpus, self.parent.lineage, self.position),
            *self._other_order,
            *(f"warning: {line}" for line in self.shared),
            *(
                f"warning: {line}"
                for line in self.corpus.warnings(
                    self.position + self.n_tokens,
                    self.numerics.model.context_length,
                    run_tokens=self.numerics.run_tokens,
                )
            ),
            *(f"warning: {line}" for line in cut_records(self.corpus, self.numerics.model.context_length)),
        ]

    @property
    def _decay_rule(self) -> str:
        before, now = self.parent.recipe, self.segments[0].recipe
        speeds = [one.learning_rate * one.weight_decay / one.batch_tokens for one in (before, now)]
        return "its timescale in tokens is the parent's" if math.isclose(*speeds, rel_tol=1e-9) else "stated"

    @property
    def _other_order(self) -> list[str]:
        before, now = self.parent.numerics.base.context_length, self.numerics.base.context_length
        return [] if before == now else [f"sequences of {now} tokens come in another order: some text is read again"]

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
            f"{'amended' if self.reason else 'continued'} run {self.name} {self.key}: {self.n_tokens:,} tokens after "
            f"{self.parent.tokens_before:,}, N = {model.shown_params}, C = {self.compute_flops:.3g} FLOPs",
            *([f"  because {self.reason}"] if self.reason else []),
            *(f"  {key} = {value}" for key, value in self.changes.items()),
            f"  from checkpoint {self.parent.checkpoint}",
            *format_lineage(self.parent.lineage),
            f"  corpus {self.corpus.key}: {begins}",
            *(f"  {note}" for note in self.notes),
            f"  learning rate {recipe.learning_rate:.4g} ({recipe.learning_rate / parent.learning_rate:.3g}× the parent's)"
            + (f", re-warmed over {recipe.warmup_tokens:,} tokens" if recipe.warmup_tokens else "")
            + f"; {phases}",
            f"  batch {recipe.batch_tokens:,} tokens; weight decay {recipe.weight_decay:.4g} ({self._decay_rule})",
            f"  optimizer {optimizer}",
            *(f"  also evaluated on the held-out text of {label}" for label in self.earlier),
            *([f"  control: {self.control} steps of the parent's recipe, trained first"] if self.control else []),
        ]
        return "\n".join(lines)


def format_lineage(lineage: tuple[LineageSegment, ...]) -> list[str]:
    """Format each lineage segment as one line."""
    return [f"  {number}. {past}" for number, past in enumerate(lineage, 1)]
