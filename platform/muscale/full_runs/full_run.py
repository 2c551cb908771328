"""The specification of a full run; needs neither Lightning nor a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from muscale.errors import StageError
from muscale.plans.cadence import Cadence
from muscale.settings.config import StudyConfig
from muscale.settings.parallelism import COMPILED_EXPERTS, Parallelism
from muscale.settings.promote import SpikePolicy
from proxy_models.architecture.memory import MIN_UNIT_PARAMS
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.segments import Segment
from proxy_models.training.compilation import Compile, pays
from proxy_models.training.numerics import Numerics


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Further held-out text for evaluation: corpus folder and number of tokens."""

    corpus: Path
    n_tokens: int


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """The state of another run from which a run starts, or of the same run from which a part of it is trained again.

    Attributes:
        checkpoint: Checkpoint of that run.
        manifest_hash: SHA-256 of the checkpoint's manifest, which has the hashes of its files.
        recipe: Recipe of the last step before the checkpoint; the moments belong to its optimizer.
        position: Tokens of the corpus at which token 0 of this run is.
        earlier: Held-out text of earlier corpora, by name.
        tokens: Tokens of this run at the checkpoint; 0 if the checkpoint is another run's.
    """

    checkpoint: Path
    manifest_hash: str
    recipe: Recipe
    position: int = 0
    earlier: Mapping[str, HeldOut] = field(default_factory=dict)
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class FullRun:
    """A run up to its annealed end.

    Attributes:
        numerics: Model, data, seed.
        directory: Folder for checkpoints, metrics and result; visible to every worker.
        corpus: Folder of the corpus.
        checkpoint_every_tokens, evaluate_every_tokens: Act at the first step that passes a multiple; evaluate also at the end, and
            with None only there.
        checkpoint_every_minutes: Also save this long after the last checkpoint was started; None: not by time.
        keep_last, keep_every_tokens: As in `Checkpoints`.
        on_spike: Spike policy; None: the guard's default action.
        min_unit_params: Blocks, embeddings and readouts with fewer parameters are sharded together with the rest of the model.
        micro_batch: Sequences per forward and backward pass on a rank; None: the rank's share, or on a GPU the largest
            divisor of that share that fits by the estimate.
        parallelism: Layout over the ranks.
        compile: Whether each block is compiled.
        start_timeout_minutes: Limit until all ranks have joined; also for the first step, and for agreements outside the steps.
        step_timeout_minutes: Limit for the collectives of each later step, and for agreements between steps.
        profile: First and last step that each rank traces, counted from the run's start; None: no trace.
        initial_state: State of another run; None: initial values. Tokens count from this run's start.
        initial_weights: Folder of the weights of `Numerics.initial_weights`.
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
    start_timeout_minutes: float = 30.0
    step_timeout_minutes: float = 10.0
    profile: tuple[int, int] | None = None
    initial_state: InitialState | None = None
    initial_weights: Path | None = None

    def __post_init__(self) -> None:
        self.parallelism.require(self.numerics.model)
        if self.compile and self.parallelism.expert_parallel > 1:
            raise ValueError(COMPILED_EXPERTS.format(self.parallelism.expert_parallel))
        if self.initial_state is None:  # a run that branches off another may read on behind that one's end
            self.numerics.require_length(self.n_tokens)
        if self.on_spike and (self.numerics.guard is None or self.numerics.guard.action != "skip"):
            raise ValueError('on_spike needs a guard whose action is "skip"')

    def unfit(self, world_size: int) -> Iterator[str]:
        """Reasons against a number of ranks, by the batches of all segments; each with rule and value."""
        context = self.numerics.model.context_length
        ramps = {(of.recipe.ramp.first_batch_tokens // context, of.recipe.batch_doublings) for of in self.segments}
        for sequences, doublings in sorted(ramps):
            yield from self.parallelism.unfit(
                world_size, sequences=sequences, doublings=doublings, micro_batch=self.micro_batch
            )

    def require_ranks(self, sizes: Sequence[int]) -> None:
        """Refuse numbers of ranks of which none fits; raise StageError with the reasons against the last."""
        if all(reasons := [list(self.unfit(size)) for size in sizes]):
            raise StageError(f"promote.workers: {'; '.join(reasons[-1])}")

    @classmethod
    def of(
        cls,
        config: StudyConfig,
        *,
        numerics: Numerics,
        segments: tuple[Segment, ...],
        directory: Path,
        corpus: Path,
        initial_state: InitialState | None = None,
        initial_weights: Path | None = None,
    ) -> Self:
        """Make a run with the [promote] and [resources] of a study file; raise ValueError if they don't fit model or segments."""
        settings, resources = config.promote, config.resources
        cadence = Cadence.of(
            settings,
            numerics.model,
            optimizer=segments[0].recipe.optimizer,
            n_tokens=segments[-1].end,
            evaluation_tokens=numerics.evaluation_tokens,
        )
        compile_by_default = resources.compile or ("auto" if resources.gpus_per_worker else False)
        if not settings.parallelism.can_compile:
            compile_by_default = False
        return cls(
            numerics=numerics,
            segments=segments,
            directory=directory,
            corpus=corpus,
            initial_state=initial_state,
            initial_weights=initial_weights,
            checkpoint_every_tokens=cadence.checkpoint_every_tokens,
            checkpoint_every_minutes=cadence.checkpoint_every_minutes,
            keep_last=settings.keep_last,
            keep_every_tokens=settings.keep_every_tokens,
            evaluate_every_tokens=cadence.evaluate_every_tokens,
            profile=settings.profiled_steps,
            on_spike=settings.spike_policy,
            micro_batch=settings.micro_batch,
            start_timeout_minutes=settings.start_timeout_minutes,
            step_timeout_minutes=settings.step_timeout_minutes,
            parallelism=settings.parallelism,
            compile=compile_by_default if settings.compile is None else settings.compile,
        )

    @property
    def n_tokens(self) -> int:
        """Tokens of the complete run, D."""
        return self.segments[-1].end

    @property
    def origin(self) -> tuple[int, Path | None]:
        """Tokens and checkpoint at the first step: those of `initial_state`, or 0 and None."""
        return (self.initial_state.tokens, self.initial_state.checkpoint) if self.initial_state else (0, None)

    @property
    def position(self) -> int:
        """Tokens of the corpus at which token 0 of the run is."""
        return self.initial_state.position if self.initial_state else 0

    def up_to(self, end: int, directory: Path) -> Self:
        """The run's steps that end at or before `end` tokens, in another folder; compiled if the whole run would be."""
        compiled = pays(self.n_tokens - self.origin[0]) if self.compile == "auto" else self.compile
        segments = tuple(replace(one, end=min(one.end, end)) for one in self.segments if one.start < end)
        return replace(self, segments=segments, directory=directory, compile=compiled, profile=None)

    def n_steps(self, tokens: int) -> int:
        """Steps that end at or before `tokens`."""
        return self.segments[0].recipe.ramp.n_steps(tokens)

    def segment_at(self, tokens: int) -> Segment:
        """The segment of the step that starts after `tokens` tokens."""
        return next(segment for segment in self.segments if segment.start <= tokens < segment.end)

    def recipe_before(self, tokens: int) -> Recipe:
        """The recipe of the step that ends at `tokens`; at 0 the recipe of the initial state or of the first step."""
        if self.initial_state and tokens == 0:
            return self.initial_state.recipe
        return self.segment_at(max(tokens - 1, 0)).recipe
