"""The lean loop that trains proxies: one warm process, one model for each shape, segments in, results out.

The loop uses the same definitions (step, groups, schedule, data order) as the full-size Lightning module, without a trainer's
overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from proxy_models.architecture.families import import_family
from proxy_models.architecture.memory import Checkpointing
from proxy_models.architecture.model_ranks import Ranks
from proxy_models.data.batches import EvaluationSet, corpus_loss, evaluation_sets, training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.segments import Segment
from proxy_models.training import compilation
from proxy_models.training.averaging import AVERAGED_SHARE, Tail
from proxy_models.training.compilation import Compile
from proxy_models.training.device import CPU, evaluation_batch, fitting_on, memory_limit, send, usable
from proxy_models.training.guard import Divergence, Spike, judge_evaluation
from proxy_models.training.initial_weights import starting_values
from proxy_models.training.metrics import WAIT_EVERY, Curve, Recorder
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize, make_optimizer
from proxy_models.training.precision import unsupported
from proxy_models.training.running_average import RunningAverage
from proxy_models.training.state import TrainState, without_moments
from proxy_models.training.step import Stepper
from proxy_models.training.warm import WARM_SHARE, WarmModel, WarmModels

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class SegmentResult:
    """Result of training one segment.

    Attributes:
        state: The state at its end; None after a divergence, and on all ranks but the first.
        loss: Validation loss of the last weights, nats per token; None after a divergence.
        source_losses: Validation loss of each source of a mixture; empty for a single source and after a divergence.
        averaged_loss: Validation loss of the weights averaged over the last `AVERAGED_SHARE` of all tokens so far.
        spikes: Steps that the guard left out.
        seconds: Wall time of the steps, without evaluation.
    """

    state: TrainState | None = field(repr=False)
    loss: float | None
    source_losses: Mapping[str, float] = field(default_factory=dict)
    averaged_loss: float | None
    curve: Curve = field(repr=False)
    divergence: Divergence | None
    spikes: tuple[Spike, ...] = ()
    seconds: float
    compiled: bool = False


class Trainer:
    """Trains segments of any shape on one corpus at a time; reusing it for another run changes no bit of that run."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        device: str | torch.device = CPU,
        compile: Compile = "auto",
        micro_batch: int | None = None,
        device_share: float = 1.0,
        mesh: DeviceMesh | None = None,
        initial_weights: Path | None = None,
    ) -> None:
        """Open a trainer.

        Args:
            device: "cpu", "cuda" or "cuda:<number>". Initial values and batches are the same everywhere; the losses
                differ by rounding, and dropout in its draws. On a GPU a run repeats bit for bit only
                under `torch.use_deterministic_algorithms`, as attention's gradients may be summed in any order.
            compile: True to compile the steps; "auto" if `compilation.pays` for the segment's tokens. Never without a compiler.
            micro_batch: Sequences of one forward and backward pass; None: all of the batch, on a GPU the largest divisor of it
                that fits by the estimate, with activation checkpointing where one sequence does not. The numbers
                are the same but for rounding (and the draws of dropout), so it is in no key.
            device_share: Share of a GPU's memory that is this trainer's, where several processes share it.
            mesh: One dimension of all ranks of the process group, which shard each model and share each batch: all of them
                make every call. The numbers are those of one process but for rounding and the draws of dropout.
            initial_weights: Folder of the weights of `Numerics.initial_weights`.

        Raises:
            ValueError: If `micro_batch` or `device_share` is out of its range, or there is no such device.
        """
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1 sequence, got {micro_batch}")
        if not 0 < device_share <= 1:
            raise ValueError(f"device_share must lie in (0, 1], got {device_share}")
        self.corpus, self._initial_weights = corpus, initial_weights
        self.device = usable(device)
        self._compile, self._micro_batch = compile, micro_batch
        if compile and compilation.missing_compiler(self.device.type) is None:
            compilation.configure()
        self._share = device_share
        idle = None if self.device == CPU else int(WARM_SHARE * device_share * memory_limit(self.device))
        self._warm = WarmModels(self.device, limit=idle, mesh=mesh)
        self._rank, self._ranks = (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
        self._evaluation: dict[tuple[int, int], dict[str, EvaluationSet]] = {}

    def read(self, corpus: Corpus) -> None:
        """Train on another corpus from now on, with the models that are warm."""
        self.corpus = corpus
        self._evaluation.clear()

    def train(
        self,
        numerics: Numerics,
        segment: Segment,
        state: TrainState | None = None,
        *,
        averaged: bool = False,
        on_step: Callable[[int, float], None] | None = None,
        moves: Callable[[], None] | None = None,
    ) -> SegmentResult:
        """Train one segment from `state` (None: from the initial values or weights) and evaluate at its end.

        Args:
            segment: The segment to train; it starts where `state` ends.
            state: The state to go on from; without its moments if the segment begins with a swap of the optimizer.
            averaged: Also evaluate the weights averaged as in `Tail`.
            on_step: Called every few steps with (tokens seen, training loss).
            moves: Called at every step that this thread took or, on a GPU, launched.

        Raises:
            ValueError: If the model's family is not here or differs, the state does not end where the segment starts or was
                trained under another table, the average begins before it, or `numerics` is of another corpus, of other initial
                weights, of a run that is shorter, or of a precision that this device does not have; if several ranks are to train
                in fp16.
        """
        import_family(numerics.model)
        begins = Tail().begins(segment.end, segment.recipe.batch_tokens) if averaged else segment.end
        self._validate(numerics, segment, state, begins)
        compiled = compilation.decide(self._compile, segment.end - segment.start, self.device.type)
        generators = () if self.device == CPU else (self.device,)
        with torch.random.fork_rng(devices=generators):  # leave the caller's generator untouched
            warm = self._warm.get(numerics.model, compiled=compiled, precision=numerics.precision)
            stepper = self._prepare(warm, numerics, segment, state)
            weights = warm.family.stored(warm.module).values()
            average = RunningAverage(weights, begins=begins) if averaged else None
            batch = evaluation_batch(self.device, stepper.micro_batch)
            recorder = Recorder(segment.start, self.device)
            divergence = self._walk(numerics, segment, stepper, average, recorder, on_step, moves)
        seconds = recorder.seconds
        end: TrainState | None = None
        loss: float | None = None
        source_losses: dict[str, float] = {}
        averaged_loss: float | None = None
        if not divergence:
            source_losses = self._source_losses(warm, numerics, batch)
            loss = corpus_loss(self._held_out(numerics), source_losses)
            divergence = judge_evaluation(
                loss,
                recorder.last_norm,
                vocab_size=numerics.model.vocab_size,
                step=segment.recipe.ramp.n_steps(segment.end),
                is_warm=segment.end > segment.recipe.warmup_tokens,
            )
            if divergence:
                loss, source_losses = None, {}
        if not divergence:
            end = self._state(stepper, segment.end)
            if average:
                average.write()
                averaged_loss = corpus_loss(self._held_out(numerics), self._source_losses(warm, numerics, batch))
        return SegmentResult(
            state=end,
            loss=loss,
            source_losses=source_losses if (self.corpus.held_out or self.corpus).mixture else {},
            averaged_loss=averaged_loss,
            curve=recorder.curve(),
            divergence=divergence,
            spikes=stepper.spikes,
            seconds=seconds,
            compiled=compiled,
        )

    def _state(self, stepper: Stepper, tokens: int) -> TrainState | None:
        """The state at the end, gathered from all ranks tensor by tensor, for the first of them."""
        parts = stepper.capture() | stepper.memory()
        tensors = {name: tensor.cpu() for name, tensor in Ranks.of(stepper.module).to_first(parts)}
        if self._rank:
            return None
        return TrainState(tokens=tokens, parametrization=stepper.parametrization, tensors=tensors)

    def _prepare(self, warm: WarmModel, numerics: Numerics, segment: Segment, state: TrainState | None) -> Stepper:
        """Write the initial values or the state into the warm model, and give it an optimizer in the same state."""
        module, recipe = warm.module, segment.recipe
        module.train()
        module.zero_grad()  # an exception may have left gradients here
        parametrization = numerics.parametrization(recipe.optimizer)
        if warm.family.state_buffers:
            warm.family.write_constants(module, numerics.model.d_model, numerics.model.n_layers)
        values = starting_values(numerics, recipe, self._initial_weights) if state is None else None
        initialize(module, parametrization, recipe, seed=numerics.seed, values=values)
        optimizer = make_optimizer(module, parametrization, recipe)
        micro_batch, checkpointing = self._fitting(numerics, recipe)
        warm.family.set_checkpointing(module, checkpointing)
        together: dict[str, Any] = {}
        if self._ranks > 1:
            from proxy_models.training.fsdp import between_parts, rank_mean  # slow to import

            together = {"rank": self._rank, "ranks": self._ranks, "mean": rank_mean}
            together["before_part"] = lambda last: between_parts(module, last=last)
        together["all_count"] = self.corpus.all_count
        stepper = Stepper(module, optimizer, numerics, recipe, loss=warm.loss, micro_batch=micro_batch, **together)
        if state:
            same = state.parametrization.optimizer == recipe.optimizer
            tensors = state.tensors if same else without_moments(state.tensors)
            stepper.restore(tensors)
            stepper.remember(tensors)
        return stepper

    def _fitting(self, numerics: Numerics, recipe: Recipe) -> tuple[int | None, Checkpointing]:
        """The micro-batch of a training, and what is recomputed in its backward pass."""
        if self._micro_batch:
            return self._micro_batch, "none"
        return fitting_on(
            self.device,
            numerics.model,
            -(-recipe.ramp.first_batch_tokens // numerics.model.context_length // self._ranks),
            precision=numerics.precision,
            optimizer=recipe.optimizer,
            share=(1 - WARM_SHARE) * self._share,
            ranks=self._ranks,
        )

    def _walk(
        self,
        numerics: Numerics,
        segment: Segment,
        stepper: Stepper,
        average: RunningAverage | None,
        recorder: Recorder,
        on_step: Callable[[int, float], None] | None,
        moves: Callable[[], None] | None,
    ) -> Divergence | None:
        stream = training_stream(
            self.corpus, numerics.model.context_length, numerics.seed, run_tokens=numerics.run_tokens
        )
        first = segment.recipe.ramp.n_steps(segment.start)
        for number, (tokens, batch) in enumerate(segment.steps(), start=first):
            share = stream.batch(tokens, batch, rank=self._rank, world_size=self._ranks)
            sequences, after = send(share, self.device), tokens + batch
            rate_factor = segment.rate_factor(tokens)
            if stream.stage_begins(tokens, batch):
                stepper.forget()
            loss, norm = stepper.step(
                sequences,
                number=number,
                tokens=tokens,
                rate_factor=rate_factor,
                of=batch // numerics.model.context_length,
            )
            recorder.add(after, loss, norm, rate_factor, stepper.figures)
            if average:
                average.add(tokens)
            if moves:
                moves()
            waits = (number + 1 - first) % WAIT_EVERY == 0 or after == segment.end
            if waits or self.device == CPU:
                stepper.settle()
                if stepper.divergence:
                    return stepper.divergence
            if waits:
                if divergence := _divergence(recorder.losses, first):
                    return divergence
                if on_step:
                    on_step(after, float(loss))
        return None

    def _validate(self, numerics: Numerics, segment: Segment, state: TrainState | None, average_begins: int) -> None:
        at = state.tokens if state else 0
        recipe = segment.recipe
        if at != segment.start:
            raise ValueError(f"the segment starts at {segment.start} tokens but the state ends at {at}")
        if state:
            optimizer = state.parametrization.optimizer if segment.begins_with_swap else recipe.optimizer
            numerics.parametrization(optimizer).require(state.parametrization)
        if average_begins < segment.start:
            raise ValueError(
                f"the averaged part before {segment.end} begins at {average_begins} tokens, before the segment's start at "
                f"{segment.start}: rungs must lie at least a factor {1 / (1 - AVERAGED_SHARE):.2f} apart"
            )
        if numerics.corpus_key != self.corpus.key:
            raise ValueError(
                f"corpus_key must be that of the trainer's corpus, {self.corpus.key}, got {numerics.corpus_key}"
            )
        if numerics.stages_by_fraction != self.corpus.stages_by_fraction:
            raise ValueError(
                f"stages_by_fraction must be the corpus's, {self.corpus.stages_by_fraction}, got {numerics.stages_by_fraction}"
            )
        numerics.require_length(segment.end)
        if reason := unsupported(numerics.precision, self.device):
            raise ValueError(f"precision {numerics.precision} can't be trained on {self.device}: {reason}")
        if numerics.precision == "fp16" and self._ranks > 1:
            raise ValueError("precision fp16 needs a single rank, because each rank would scale its own loss; use bf16")
        if recipe.ramp.first_batch_tokens % numerics.model.context_length:
            raise ValueError(
                f"batch_tokens must be a multiple of context_length={numerics.model.context_length}, "
                f"got {recipe.ramp.first_batch_tokens}"
            )

    def _source_losses(self, warm: WarmModel, numerics: Numerics, batch: int) -> dict[str, float]:
        return {name: warm.evaluate(held_out, batch) for name, held_out in self._held_out(numerics).items()}

    def _held_out(self, numerics: Numerics) -> dict[str, EvaluationSet]:
        size = (numerics.model.context_length, numerics.evaluation_tokens)
        if size not in self._evaluation:
            self._evaluation[size] = {
                name: held_out.to(self.device) for name, held_out in evaluation_sets(self.corpus, *size).items()
            }
        return self._evaluation[size]


def _divergence(losses: list[Tensor], first: int) -> Divergence | None:
    """Return the divergence among the steps since the last check; step `first` has the first loss."""
    finite = torch.isfinite(torch.stack(losses[-WAIT_EVERY:]))
    if bool(finite.all()):
        return None
    within = len(losses) - len(finite) + int((~finite).nonzero()[0])
    return Divergence(
        step=first + within, reason=f"the training loss is {float(losses[within])} at step {first + within}"
    )
