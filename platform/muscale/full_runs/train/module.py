"""The full-size run under plain Lightning, with the loss, step and schedule of the proxies.

Batches are addressed by position, so a run resumed at another world size sees the same tokens.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from muscale import json_lines
from muscale.errors import DivergedError, PreemptedError, StageError
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.distributed import broadcast_from_rank0
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.records.attempts import Attempt, go_back
from muscale.full_runs.records.preemption import PreemptionNotice
from muscale.full_runs.train.held_out_losses import Evaluation
from muscale.full_runs.train.interventions import Interventions
from muscale.full_runs.train.operations import Garbage, StepProfile, finishes
from muscale.full_runs.train.rank_flags import MOST_SECONDS, RankFlags
from muscale.full_runs.train.sharding import Meshes, build_model, build_pipeline, fitting_micro_batch
from muscale.full_runs.train.step_log import StepLog, StepTaken
from muscale.layout import METRICS, PROFILE
from muscale.store.spike_handling import Incident, record_incident, utc_now
from proxy_models.architecture.families import family_of
from proxy_models.data.batches import training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.recipe import Recipe
from proxy_models.training import compilation
from proxy_models.training.device import send
from proxy_models.training.fsdp import between_parts, rank_mean
from proxy_models.training.guard import Divergence, judge_evaluation
from proxy_models.training.initial_weights import starting_values
from proxy_models.training.metrics import passes
from proxy_models.training.optimizer import initialize, make_optimizer
from proxy_models.training.pipeline import Pipeline
from proxy_models.training.precision import unsupported
from proxy_models.training.step import Stepper


class FullRunModule(L.LightningModule):
    """The model under Lightning; loss, step and schedule are those of `proxy_models`.

    Attributes:
        meshes: Device meshes of this rank, which the strategy sets; None in one process.
    """

    meshes: Meshes | None = None

    def __init__(
        self,
        run: FullRun,
        start: int,
        resume: Path | None,
        *,
        attempt: Attempt,
        spent: float,
        checkpoints: Checkpoints,
        interventions: Interventions,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # `proxy_models` takes the complete step
        self.run, self.start, self.resume = run, start, resume
        self.tokens = self._recorded = start
        self.attempt, self.checkpoints, self.interventions = attempt, checkpoints, interventions
        self.model: nn.Module | None = None
        self._pipeline: Pipeline | None = None
        self._micro_batch: int | None = None
        self.compiled = False
        self.step_log = StepLog(run.directory / METRICS, attempt)
        self._spent = spent  # seconds that earlier attempts took up to the start
        self._notice = PreemptionNotice(run.directory)
        every = run.checkpoint_every_minutes
        self.garbage = Garbage()
        self._flags = RankFlags(
            every_seconds=every and 60 * every, notice=self._notice, timeout=timedelta(minutes=run.step_timeout_minutes)
        )

    def configure_model(self) -> None:
        """Build the model sharded over the ranks; without a checkpoint, with initial values that do not depend on the sharding."""
        if self.model is not None:
            return
        run, device = self.run, self.trainer.strategy.root_device
        self.compiled = compilation.decide(run.compile, run.n_tokens - self.start, device.type)
        if self.compiled:
            compilation.configure()
        recipe = run.segments[0].recipe
        self._micro_batch = run.micro_batch or fitting_micro_batch(run.numerics, recipe, run.parallelism, device=device)
        arguments: dict[str, Any] = {
            "device": device,
            "meshes": self.meshes,
            "min_unit_params": run.min_unit_params,
            "compiled": self.compiled,
            "initial_values": self.resume is None,
            "initial_weights": run.initial_weights,
        }
        if run.parallelism.pipeline_parallel > 1 and self.meshes is not None:
            self._pipeline = build_pipeline(
                run.numerics, recipe, run.parallelism, micro_batch=self._micro_batch, **arguments
            )
            self.model = self._pipeline.module
        else:
            self.model = build_model(run.numerics, recipe, run.parallelism, **arguments)

    @property
    def data_ranks(self) -> int:
        """Number of shares of a batch."""
        return self.run.parallelism.data_ranks(self.trainer.world_size)

    @property
    def data_rank(self) -> int:
        """Index of this rank's share; equal for all ranks that share products or sequences, and of a pipeline."""
        of_stage = self.trainer.world_size // self.run.parallelism.pipeline_parallel
        return int(self.global_rank) % of_stage // self.run.parallelism.sequence_ranks

    @property
    def configured(self) -> nn.Module:
        """The configured model."""
        if self.model is None:
            raise RuntimeError("the model is not configured yet")
        return self.model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the last step before the start; the checkpoint has its moments, even where the optimizer is swapped."""
        return self._make_optimizer(self.run.recipe_before(self.start))

    def _make_optimizer(self, recipe: Recipe) -> torch.optim.Optimizer:
        """Make the optimizer of a recipe, with groups by parameter name, after sharding."""
        return make_optimizer(self.configured, self.run.numerics.parametrization(recipe.optimizer), recipe)

    def train_dataloader(self) -> DataLoader[int]:
        """A loader that only triggers `training_step` until the run's end; batches are addressed by position."""
        return DataLoader(_Calls(self))

    def on_fit_start(self) -> None:
        """Open the data and load the checkpoint; raise StageError if device and ranks do not support the run's precision."""
        run = self.run
        precision = run.numerics.precision
        if reason := unsupported(precision, self.device):
            raise StageError(f"promote: precision {precision} can't be trained here: {reason}")
        if precision == "fp16" and self.trainer.world_size > 1:
            raise StageError(
                "promote: fp16 needs a single process, because each process would scale its own loss; use bf16"
            )
        corpus, numerics = Corpus.open(run.corpus), run.numerics
        if corpus.key != numerics.corpus_key:
            raise StageError(
                f"promote: {run.corpus}: must be the corpus of the run, {numerics.corpus_key}, got {corpus.key}: its text or settings "
                "changed; restore them, or begin another run"
            )
        self._all_count = corpus.all_count
        self._stream = training_stream(
            corpus, numerics.model.context_length, numerics.seed, run_tokens=numerics.run_tokens
        )
        self._evaluation = Evaluation(
            run,
            corpus,
            device=self.device,
            data_rank=self.data_rank,
            data_ranks=self.data_ranks,
            compiled=self.compiled,
        )
        self._go_on_from(self.start, self.resume, self.trainer.optimizers[0])
        self._profile = StepProfile(run.profile, run.directory / PROFILE, self.device)
        self.step_log.count_flops(run, corpus, self.device, self.trainer.world_size)
        self.step_log.start_clock(self._spent)

    def on_train_end(self) -> None:
        """Write the trace, if the run ended within the traced steps."""
        self._profile.stop()

    def on_train_start(self) -> None:
        """Install the preemption handler instead of Lightning's, and evaluate the initial state of a continuation."""
        self._notice.listen()
        metrics = self.run.directory / METRICS
        if self.run.initial_state and self.start == 0 and not broadcast_from_rank0(lambda: json_lines.read(metrics)):
            self.step_log.rows.append({"tokens": 0, **self._evaluate()})
            self.step_log.flush()

    def _go_on_from(self, tokens: int, checkpoint: Path | None, optimizer: torch.optim.Optimizer) -> None:
        """Restore the state after `tokens` tokens: from the checkpoint, or initial weights if there is none."""
        run = self.run
        self._stepper = Stepper(
            self.configured,
            optimizer,
            run.numerics,
            run.recipe_before(tokens),
            micro_batch=self._micro_batch,
            rank=self.data_rank,
            ranks=self.data_ranks,
            mean=partial(rank_mean, stages=run.parallelism.pipeline_parallel),
            before_part=lambda last: between_parts(self.configured, run.parallelism.sharding, last=last),
            pipeline=self._pipeline,
            all_count=self._all_count,
        )
        if checkpoint:
            # A guard with losses of another corpus would take the first losses here for spikes.
            self.checkpoints.load(checkpoint, self._stepper, memory=tokens > 0)
        self.tokens = self._recorded = tokens

    def training_step(self, _batch: Tensor, _index: int) -> None:
        """Take the steps up to the next agreement of the ranks; then read their figures, and evaluate, save and end if due.

        Lightning broadcasts and waits for the device in each call of this method, and so does the read, so a call takes several steps.
        """
        run, before = self.run, self._recorded
        if self.tokens == run.n_tokens:
            return  # Lightning requested one more call before the last one
        try:
            for _ in range(self._flags.steps):
                if self._skips_to_end:
                    break
                self.take_step()
                if self.tokens == run.n_tokens or self._passes_evaluation(before) or self._passes_checkpoint(before):
                    break
        except BaseException:
            with suppress(Exception):  # the device itself may have failed
                self._read_at_failure()
            raise
        n_taken = self.step_log.n_unread
        if not self._read():
            return
        if self._skips_to_end:
            self.tokens = run.n_tokens
            self.step_log.rows.append({"tokens": self.tokens, "seconds": self.step_log.seconds})
        self._recorded = self.tokens
        self._flags.agree(n_taken)
        if self._flags.straggler and self.step_log.rows:
            self.step_log.rows[-1] |= asdict(self._flags.straggler)
        self.garbage.after(n_taken)
        self._act(before)

    @property
    def _skips_to_end(self) -> bool:
        """Whether all remaining batches are skipped."""
        return self.tokens < self.run.n_tokens <= self.interventions.position(self.tokens)

    def _passes_evaluation(self, before: int) -> bool:
        return passes(self.run.evaluate_every_tokens, before, self.tokens)

    def _passes_checkpoint(self, before: int) -> bool:
        return passes(self.run.checkpoint_every_tokens, before, self.tokens)

    def take_step(self) -> None:
        """Take one step on this rank's share of the batch, without waiting for the device."""
        began, run = time.perf_counter(), self.run
        before = self.interventions.position(self.tokens)
        segment = run.segment_at(before)
        if segment.recipe != self._stepper.recipe:
            self._go_on_under(segment.recipe)
        batch = segment.recipe.ramp.batch_at(before)
        position = run.position + before
        share = self._stream.batch(position, batch, rank=self.data_rank, world_size=self.data_ranks)
        sequences = send(share, self.device)
        whole = batch // run.numerics.model.context_length
        number = run.n_steps(before)
        rate_factor = segment.rate_factor(before) * self.interventions.rewarmth(before, batch)
        # also in what is left out
        if self._stream.stage_begins(run.position + self.tokens, before + batch - self.tokens):
            self._stepper.forget()
        self._profile.before(number)
        loss, norm = self._stepper.step(sequences, number=number, tokens=position, rate_factor=rate_factor, of=whole)
        self._profile.after(number)
        self.tokens = before + batch
        self.step_log.add(
            before,
            self.tokens,
            number,
            began=began,
            rate_factor=rate_factor,
            loss=loss,
            norm=norm,
            figures=self._stepper.figures,
        )

    def _read(self) -> bool:
        """Read and record the figures of the steps taken; False if the last step does not count. Raise DivergedError on divergence."""
        last = self.tokens
        for one, row, verdict in self.step_log.read(self._stepper):
            if verdict and self.run.on_spike:
                self.tokens = one.before
                reason = verdict.reason if isinstance(verdict, Divergence) else str(verdict)
                if self._intervene(one.before, one.number, reason):
                    return False
            elif isinstance(verdict, Divergence):
                self.tokens = one.before
                raise DivergedError(f"promote: the run diverged: {verdict.reason}")
            else:
                self._record(one, row)
        return last == self.tokens

    def _read_at_failure(self) -> None:
        """Record the steps taken, up to the first doubtful step, unless the device waits for a lost rank."""
        if finishes(self.device, within=2 * MOST_SECONDS):
            for one, row, verdict in self.step_log.read(self._stepper):
                if isinstance(verdict, Divergence) or (verdict and self.run.on_spike):
                    return
                self._record(one, row)

    def _record(self, step: StepTaken, row: dict[str, Any]) -> None:
        self.step_log.record(row)
        self.tokens = self._recorded = step.after

    def _intervene(self, tokens: int, number: int, reason: str) -> bool:
        """Skip the step after `tokens` tokens, or roll back (True) to skip it; raise DivergedError if no further one is allowed."""
        policy = self.run.on_spike
        if policy is None:
            raise RuntimeError("on_spike is not set")
        if self.interventions.is_spent:
            raise DivergedError(
                f"promote: the run diverged: {reason}, after {policy.max_interventions} interventions; "
                "promote.max_interventions would allow more"
            )
        start, checkpoint = tokens, None
        if policy.action == "rollback":
            start, checkpoint = self.checkpoints.latest() or self.run.origin
        first, last = self.interventions.around(tokens, margin=policy.margin_tokens)
        incident = Incident(
            step=number,
            reason=reason,
            action=policy.action,
            left_out=(max(first, start), last),
            back_to=start if policy.action == "rollback" else None,
            at=utc_now(),
        )
        self.interventions.incidents.append(incident)
        if self.global_rank == 0:
            self.attempt.require_last()
            record_incident(self.run.directory, incident)
        logging.getLogger(__name__).warning("%s", incident)
        if policy.action == "skip":
            return False
        self._roll_back(start, checkpoint)
        return True

    def _roll_back(self, start: int, checkpoint: Path | None) -> None:
        self.step_log.flush()
        self.step_log.start_clock(broadcast_from_rank0(lambda: go_back(self.run.directory, start)))
        recipe = self.run.recipe_before(start)
        if checkpoint is None:
            numerics, member = self.run.numerics, self.run.numerics.model
            parametrization = numerics.parametrization(recipe.optimizer)
            values = starting_values(numerics, recipe, self.run.initial_weights)
            stages = self._pipeline.stages.values() if self._pipeline else ()
            for model in [stage.model for stage in stages] or [self.configured]:
                family_of(member).write_constants(model, member.d_model, member.n_layers)
                initialize(model, parametrization, recipe, seed=numerics.seed, is_stage=bool(stages), values=values)
        optimizer = self._make_optimizer(recipe)
        self.trainer.optimizers = [optimizer]
        self._go_on_from(start, checkpoint, optimizer)

    def _go_on_under(self, recipe: Recipe) -> None:
        """Replace the optimizer by that of the recipe, in Lightning too."""
        optimizer = self._make_optimizer(recipe)
        self.trainer.optimizers = [optimizer]
        self._stepper.go_on_under(recipe, optimizer)

    def _act(self, before: int) -> None:
        """Evaluate and save if due since `before` tokens, and end the run if it was preempted.

        Raises:
            DivergedError: If the run diverged by its validation loss.
            PreemptedError: After the state is saved.
        """
        run, tokens, flags = self.run, self.tokens, self._flags
        at_end = tokens == run.n_tokens
        if at_end or self._passes_evaluation(before):
            losses = self._evaluate()
            divergence = judge_evaluation(
                losses["val_loss"],
                self.step_log.rows[-1].get("grad_norm", math.inf),
                vocab_size=run.numerics.model.vocab_size,
                step=run.n_steps(tokens),
                is_warm=tokens > run.recipe_before(tokens).warmup_tokens,
            )
            if divergence:
                raise DivergedError(f"promote: the run diverged: {divergence.reason} at step {divergence.step}")
            larger = {name: figure.tolist() for name, figure in self._stepper.figures.items() if figure.dim()}
            self.step_log.rows[-1] |= losses | larger
        self.step_log.flush()  # before the save, since a checkpoint implies that the rows before it are written
        if at_end or flags.saves or flags.ends or self._passes_checkpoint(before):
            with self.step_log.blocking():
                self.checkpoints.save(self._stepper, tokens)
                flags.saved()
                if at_end or flags.ends:
                    self.checkpoints.finish()
        if flags.ends and not at_end:
            broadcast_from_rank0(self._notice.obeyed)
            raise PreemptedError(f"promote: preempted, saved at {tokens:,} tokens")

    def _evaluate(self) -> dict[str, Any]:
        """The losses of `Evaluation.measure`, how long they took, and the seconds since the run's start."""
        began = time.perf_counter()
        losses = self._evaluation.measure(self.configured, self._micro_batch, self._pipeline)
        return {**losses, "evaluation_seconds": time.perf_counter() - began, "seconds": self.step_log.seconds}


class _Calls(IterableDataset[int]):
    """One item per remaining call of `training_step`, also after rollbacks."""

    def __init__(self, module: FullRunModule) -> None:
        self._module = module

    def __iter__(self) -> Iterator[int]:
        while self._module.tokens < self._module.run.n_tokens:
            yield self._module.tokens
