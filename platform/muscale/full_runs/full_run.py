"""The specification of a full run: what is trained, and how. It needs neither Lightning nor a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from muscale.settings.config import StudyConfig
from muscale.settings.parallelism import Parallelism
from muscale.settings.promote import SpikePolicy
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.segments import Segment
from proxy_models.training.compilation import Compile
from proxy_models.training.numerics import Numerics

MIN_UNIT_PARAMS = 1_000_000
"""A smaller collective is nearly all latency: two gloo ranks at width 64 train 1.4 times as fast without one for each block."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out text that a run is evaluated on beside its own: the corpus's folder, and tokens."""

    corpus: Path
    n_tokens: int


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The state of another run that a run goes on from.

    Attributes:
        checkpoint: That run's.
        seal: SHA-256 of the checkpoint's manifest, which has the hashes of its files.
        recipe: Of the last step before it: its moments are of that optimizer.
        position: Where this run begins in its corpus, tokens.
        earlier: What the runs before were evaluated on, by a name each, where it is another corpus's.
    """

    checkpoint: Path
    seal: str
    recipe: Recipe
    position: int = 0
    earlier: Mapping[str, HeldOut] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FullRun:
    """One run, to its annealed end.

    Attributes:
        numerics: Model, data, seed.
        segments: The chain to train.
        directory: Where its checkpoints, metrics and result lie; visible to every worker.
        corpus: Folder of the corpus.
        checkpoint_every_tokens, evaluate_every_tokens: At the first step that passes a multiple of them; it evaluates at its end
            in any case, and where the second is None only there.
        checkpoint_every_minutes: Also when so much time went by since the last checkpoint was begun; None: not by time.
        keep_last, keep_every_tokens: Which checkpoints are kept, as `Checkpoints` states.
        on_spike: What is done about what the guard finds; None: what the guard does by itself.
        min_unit_params: Blocks of fewer parameters are gathered with the rest of the model, not each by itself.
        micro_batch: Sequences of one forward and backward pass on a rank; None: its whole share, on a GPU the largest whole
            part of it that fits by the estimate.
        parallelism: How it is laid over the ranks.
        compile: Whether the blocks are compiled, each by itself.
        beginning: Of a run that goes on from another; None: it begins with initial values. Its tokens count from its own start.
    """

    numerics: Numerics
    segments: tuple[Segment, ...]
    directory: Path
    corpus: Path
    checkpoint_every_tokens: int
    evaluate_every_tokens: int | None
    min_unit_params: int = MIN_UNIT_PARAMS
    micro_batch: int | None = None
    parallelism: Parallelism = field(default_factory=Parallelism)
    compile: Compile = False
    checkpoint_every_minutes: float | None = None
    keep_last: int = 2
    keep_every_tokens: int | None = None
    on_spike: SpikePolicy | None = None
    beginning: Beginning | None = None

    def __post_init__(self) -> None:
        self.parallelism.require(self.numerics.model)
        self.numerics.require_length(self.n_tokens)
        if self.on_spike and (self.numerics.guard is None or self.numerics.guard.action != "skip"):
            raise ValueError('on_spike needs a guard whose action is "skip"')

    @classmethod
    def of(
        cls,
        config: StudyConfig,
        *,
        numerics: Numerics,
        segments: tuple[Segment, ...],
        directory: Path,
        corpus: Path,
        beginning: Beginning | None = None,
    ) -> Self:
        """A run under the settings that a study file has for all of its full runs.

        Raises:
            ValueError: If the settings don't fit the model, or the segments don't fit the numerics.
        """
        settings = config.promote
        return cls(
            numerics=numerics,
            segments=segments,
            directory=directory,
            corpus=corpus,
            beginning=beginning,
            checkpoint_every_tokens=settings.checkpoint_every_tokens,
            checkpoint_every_minutes=settings.checkpoint_every_minutes,
            keep_last=settings.keep_last,
            keep_every_tokens=settings.keep_every_tokens,
            evaluate_every_tokens=settings.evaluates_every,
            on_spike=settings.spike_policy,
            micro_batch=settings.micro_batch,
            parallelism=settings.parallelism,
            compile=config.resources.compile,
        )

    @property
    def n_tokens(self) -> int:
        """D."""
        return self.segments[-1].end

    @property
    def origin(self) -> tuple[int, Path | None]:
        """Where the first step starts: after 0 tokens, with the state of a checkpoint or with initial values."""
        return 0, self.beginning.checkpoint if self.beginning else None

    @property
    def position(self) -> int:
        """Where the first step starts in the corpus, tokens."""
        return self.beginning.position if self.beginning else 0

    def n_steps(self, tokens: int) -> int:
        """Steps that end at or before `tokens`."""
        return self.segments[0].recipe.ramp.n_steps(tokens)

    def segment_at(self, tokens: int) -> Segment:
        """The segment of the step that starts after `tokens` tokens."""
        return next(segment for segment in self.segments if segment.start <= tokens < segment.end)

    def recipe_before(self, tokens: int) -> Recipe:
        """The recipe of the step that ends at `tokens`; at 0 that of the first step, or of the run that this one goes on from."""
        if self.beginning and tokens == 0:
            return self.beginning.recipe
        return self.segment_at(max(tokens - 1, 0)).recipe
