"""The full-size run: plain Lightning with FSDP2, with the loss, step and schedule of the proxies.

It is independent of Ray: the same function runs in a Ray Train worker, under torchrun or srun, or in one process. Batches are
addressed by position, so a run resumed at another world size sees the same tokens.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from muscale import json_lines
from muscale.environment import environment
from muscale.errors import PreemptedError, StageError
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.checkpoints.held_out import evaluation_of, source_losses
from muscale.full_runs.checkpoints.run_description import RunDescription
from muscale.full_runs.checkpoints.save import Checkpoints, manifest_hash_by_ranks
from muscale.full_runs.distributed import broadcast_from_rank0, process_group, rank, rank_device
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.lightning_import import import_lightning
from muscale.full_runs.records import attempts
from muscale.full_runs.records.preemption import PreemptionNotice
from muscale.full_runs.train.interventions import Interventions
from muscale.full_runs.train.operations import Garbage, StepProfile, finishes
from muscale.full_runs.train.rank_flags import MOST_SECONDS, RankFlags
from muscale.full_runs.train.sharding import ShardedStrategy, build_model, fitting_micro_batch
from muscale.layout import COLLECTIVES, METRICS, PROFILE
from muscale.store.spike_handling import Incident, record_incident, utc_now
from proxy_models.architecture.families import family_of, import_family
from proxy_models.data.batches import EvaluationSet, corpus_loss, evaluation_sets, training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.recipe import Recipe
from proxy_models.training import compilation
from proxy_models.training.attended import attended_length
from proxy_models.training.device import datasheet_flops, evaluation_batch, send
from proxy_models.training.fsdp import between_parts, rank_mean, settle
from proxy_models.training.guard import Divergence, Verdict, judge_evaluation
from proxy_models.training.metrics import passes
from proxy_models.training.optimizer import initialize, make_optimizer
from proxy_models.training.precision import unsupported
from proxy_models.training.step import Stepper

L = import_lightning()
from lightning.fabric.plugins.environments.lightning import LightningEnvironment  # noqa: E402
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A step whose figures are still on the device."""

    before: int  # tokens, as `after`
    after: int
    number: int
    rate_factor: float
    loss: Tensor
    norm: Tensor
    step_seconds: float
    seconds: float  # since the run's start, at the step's end


class FullRunModule(L.LightningModule):  # type: ignore[misc,name-defined]
    """The model under Lightning; loss, step and schedule are those of `proxy_models`."""

    def __init__(
        self,
        run: FullRun,
        start: int,
        resume: Path | None,
        *,
        spent: float,
        checkpoints: Checkpoints,
        interventions: Interventions,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # the complete step of `proxy_models`
        self.run, self.start, self.resume = run, start, resume
        self.tokens = self._recorded = start
        self.checkpoints, self.interventions = checkpoints, interventions
        self.blocked = 0.0  # seconds, by checkpoints since the last row
        self.model: nn.Module | None = None
        self.compiled = False
        self._spent = spent  # seconds, by earlier attempts up to the start
        self._taken: list[_Taken] = []
        self._rows: list[dict[str, Any]] = []
        self._notice = PreemptionNotice(run.directory)
        every = run.checkpoint_every_minutes
        self.garbage = Garbage()
        self._flags = RankFlags(
            every_seconds=every and 60 * every,
            notice=self._notice,
            timeout=timedelta(minutes=run.step_timeout_minutes),
        )

    def configure_model(self) -> None:
        """Build the model sharded over the ranks; without a checkpoint, with initial values that do not depend on the sharding."""
        if self.model is not None:
            return
        run, device = self.run, self.trainer.strategy.root_device
        self.compiled = compilation.decide(run.compile, run.n_tokens - self.start, device.type)
        if self.compiled:
            compilation.configure()
        self.model = build_model(
            run.numerics,
            run.segments[0].recipe,
            run.parallelism,
            device=device,
            mesh=self._device_mesh,
            min_unit_params=run.min_unit_params,
            compiled=self.compiled,
            initial_values=self.resume is None,
        )

    @property
    def data_ranks(self) -> int:
        """Number of shares of a batch."""
        return self.run.parallelism.data_ranks(self.trainer.world_size)

    @property
    def data_rank(self) -> int:
        """Index of this rank's share; ranks of one tensor-parallel group have the same."""
        return int(self.global_rank) // self.run.parallelism.tensor_parallel

    @property
    def configured(self) -> nn.Module:
        """The configured model."""
        if self.model is None:
            raise RuntimeError("the model is not configured yet")
        return self.model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the last step before the start, whose moments are in the checkpoint even at a swap."""
        return self._make_optimizer(self.run.recipe_before(self.start))

    def _make_optimizer(self, recipe: Recipe) -> torch.optim.Optimizer:
        """The optimizer of a recipe, with groups by parameter name, after sharding."""
        return make_optimizer(self.configured, self.run.numerics.parametrization(recipe.optimizer), recipe)

    def train_dataloader(self) -> DataLoader[int]:
        """A loader that only triggers `training_step` until the run's end; batches are addressed by position."""
        return DataLoader(_Calls(self))

    def on_fit_start(self) -> None:
        """Open the data and load the checkpoint.

        Raises:
            StageError: If the device does not support the run's precision, or fp16 is used with several ranks.
        """
        run = self.run
        precision = run.numerics.precision
        if reason := unsupported(precision, self.device):
            raise StageError(f"promote: precision {precision} can't be trained here: {reason}")
        if precision == "fp16" and self.trainer.world_size > 1:
            raise StageError("promote: fp16 is for one process, as each would scale its own loss; use bf16")
        self._corpus = Corpus.open(run.corpus)
        numerics, length = run.numerics, run.numerics.model.context_length
        self._stream = training_stream(self._corpus, length, numerics.seed, run_tokens=numerics.run_tokens)
        self._held_out = evaluation_sets(self._corpus, length, numerics.evaluation_tokens)
        before = run.initial_state.earlier if run.initial_state else {}
        self._earlier = {n: evaluation_sets(Corpus.open(h.corpus), length, h.n_tokens) for n, h in before.items()}
        self._go_on_from(self.start, self.resume, self.optimizers(use_pl_optimizer=False))
        self._profile = StepProfile(run.profile, run.directory / PROFILE, self.device)
        self._flops_share = self._flops_per_token_of_peak()
        self._started = time.perf_counter() - self._spent

    def on_train_end(self) -> None:
        """Write the trace of a run that ended in its steps."""
        self._profile.stop()

    def _flops_per_token_of_peak(self) -> float | None:
        """FLOPs per token over the peak FLOP/s of all ranks' devices; None where the peak is not known."""
        if self.device.type != "cuda":
            return None
        numerics = self.run.numerics
        peak = datasheet_flops(torch.cuda.get_device_name(self.device), numerics.precision)
        if not peak:
            return None
        attended = attended_length(numerics.model, self._corpus, self.run.n_tokens)
        return numerics.model.train_flops_within(attended) / (peak * int(self.trainer.world_size))

    def on_train_start(self) -> None:
        """Install the preemption handler in place of Lightning's, and evaluate the initial state of a continuation."""
        self._notice.listen()
        metrics = self.run.directory / METRICS
        if self.run.initial_state and self.start == 0 and not broadcast_from_rank0(lambda: json_lines.read(metrics)):
            began = time.perf_counter()
            row = {"tokens": 0, **self.evaluate(), "evaluation_seconds": time.perf_counter() - began}
            self._rows.append({**row, "seconds": time.perf_counter() - self._started})
            self._flush()

    def _go_on_from(self, tokens: int, checkpoint: Path | None, optimizer: torch.optim.Optimizer) -> None:
        """Set the state after `tokens` tokens: the checkpoint's, or initial weights if there is none."""
        run = self.run
        self._stepper = Stepper(
            self.configured,
            optimizer,
            run.numerics,
            run.recipe_before(tokens),
            micro_batch=run.micro_batch
            or fitting_micro_batch(
                run.numerics,
                run.segments[0].recipe,
                run.parallelism,
                device=self.device,
            ),
            rank=self.data_rank,
            ranks=self.data_ranks,
            mean=rank_mean,
            before_part=lambda last: between_parts(self.configured, run.parallelism.sharding, last=last),
        )
        if checkpoint:
            # A guard with another corpus's losses would take the first ones here for spikes.
            self.checkpoints.load(checkpoint, self._stepper, memory=tokens > 0)
        self.tokens = self._recorded = tokens

    def training_step(self, _batch: Tensor, _index: int) -> None:
        """Take the steps up to the next agreement of the ranks; then read their figures, and evaluate, save and end if that is due.

        Lightning broadcasts and waits for the device in each of its calls, and so does the read: not in each step, therefore.
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
            with suppress(Exception):  # as the device may be what failed
                self._read_at_failure()
            raise
        n_taken = len(self._taken)
        if not self._read():
            return
        if self._skips_to_end:
            self.tokens = run.n_tokens
            self._rows.append({"tokens": self.tokens, "seconds": time.perf_counter() - self._started})
        self._recorded = self.tokens
        self._flags.agree(n_taken)
        if self._flags.straggler and self._rows:
            self._rows[-1] |= asdict(self._flags.straggler)
        self.garbage.after(n_taken)
        self._act(before)

    @property
    def _skips_to_end(self) -> bool:
        """Whether the last batches are skipped."""
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
        self._profile.before(number)
        loss, norm = self._stepper.step(sequences, number=number, tokens=position, rate_factor=rate_factor, of=whole)
        self._profile.after(number)
        self.tokens, ended = before + batch, time.perf_counter()
        self._taken.append(
            _Taken(
                before=before,
                after=self.tokens,
                number=number,
                rate_factor=rate_factor,
                loss=loss,
                norm=norm,
                step_seconds=ended - began,
                seconds=ended - self._started,
            )
        )

    def _read(self) -> bool:
        """Read the figures of the steps taken, and record those that count; False if the last one does not.

        Raises:
            StageError: If the run diverged.
        """
        last = self._taken[-1].after if self._taken else None
        for one, row, verdict in self._figures():
            if verdict and self.run.on_spike:
                self.tokens = one.before
                reason = verdict.reason if isinstance(verdict, Divergence) else str(verdict)
                if self._intervene(one.before, one.number, reason):
                    return False
            elif isinstance(verdict, Divergence):
                self.tokens = one.before
                raise StageError(f"promote: the run diverged: {verdict.reason}")
            else:
                self._record(one, row)
        return last in (None, self.tokens)

    def _read_at_failure(self) -> None:
        """Record the steps taken, up to the first that is in question, unless the device waits for a rank that is lost."""
        if finishes(self.device, within=2 * MOST_SECONDS):
            for one, row, verdict in self._figures():
                if isinstance(verdict, Divergence) or (verdict and self.run.on_spike):
                    return
                self._record(one, row)

    def _figures(self) -> Iterator[tuple[_Taken, dict[str, Any], Verdict | None]]:
        """Each step taken, its row and what is wrong with it; waits for the device."""
        taken, self._taken = self._taken, []
        began = time.perf_counter()
        figures = (
            torch.stack([figure.float() for one in taken for figure in (one.loss, one.norm)]).tolist() if taken else []
        )
        self._stepper.settle()
        waited = (time.perf_counter() - began) / max(len(taken), 1)
        for count, (one, loss, norm) in enumerate(zip(taken, figures[::2], figures[1::2], strict=True), start=1):
            verdict, seconds = self._stepper.verdicts.get(one.number), one.step_seconds + waited
            if not isinstance(verdict, Divergence) and not math.isfinite(loss):
                reason = f"the training loss is {loss} at step {one.number}"
                verdict = Divergence(step=one.number, reason=reason)
            rate = (one.after - one.before) / seconds
            row = {
                "tokens": one.after,
                "train_loss": loss,
                "grad_norm": norm,
                "rate_factor": one.rate_factor,
                "left_out": verdict is not None,
                "step_seconds": seconds,
                "tokens_per_second": rate,
                **({"mfu": rate * self._flops_share} if self._flops_share else {}),
                "seconds": one.seconds + count * waited,
            }
            yield one, row, verdict

    def _record(self, step: _Taken, row: dict[str, Any]) -> None:
        self._rows.append(row | {"blocked_seconds": self.blocked})
        self.tokens = self._recorded = step.after
        self.blocked = 0.0

    def _intervene(self, tokens: int, number: int, reason: str) -> bool:
        """Skip the step after `tokens` tokens, or roll back to skip it on the way; True if rolled back.

        Raises:
            StageError: If the policy allows no further intervention.
        """
        policy = self.run.on_spike
        if policy is None:
            raise RuntimeError("on_spike is not set")
        if self.interventions.is_spent:
            raise StageError(
                f"promote: the run diverged: {reason}, after {policy.max_interventions} interventions; "
                "promote.max_interventions would allow more"
            )
        start, checkpoint = tokens, None
        if policy.action == "rollback":
            start, checkpoint = self.checkpoints.latest() or self.run.origin
        incident = Incident(
            step=number,
            reason=reason,
            action=policy.action,
            left_out=self.interventions.around(tokens, margin=policy.margin_tokens if start < tokens else 0),
            back_to=start if policy.action == "rollback" else None,
            at=utc_now(),
        )
        self.interventions.incidents.append(incident)
        if self.global_rank == 0:
            record_incident(self.run.directory, incident)
        logging.getLogger(__name__).warning("%s", incident)
        if policy.action == "skip":
            return False
        self._roll_back(start, checkpoint)
        return True

    def _roll_back(self, start: int, checkpoint: Path | None) -> None:
        self._flush()
        seconds = broadcast_from_rank0(lambda: attempts.go_back(self.run.directory, start))
        self._started = time.perf_counter() - seconds
        recipe = self.run.recipe_before(start)
        if checkpoint is None:
            parametrization = self.run.numerics.parametrization(recipe.optimizer)
            initialize(self.configured, parametrization, recipe, seed=self.run.numerics.seed)
        optimizer = self._make_optimizer(recipe)
        self.trainer.optimizers = [optimizer]
        self._go_on_from(start, checkpoint, optimizer)

    def _go_on_under(self, recipe: Recipe) -> None:
        """Replace the optimizer by the recipe's, in Lightning too."""
        optimizer = self._make_optimizer(recipe)
        self.trainer.optimizers = [optimizer]
        self._stepper.go_on_under(recipe, optimizer)

    def _act(self, before: int) -> None:
        """Evaluate and save what has become due since `before` tokens, and end the run if it was preempted.

        Raises:
            StageError: If the run diverged by its validation loss.
            PreemptedError: Once the state is saved.
        """
        run, tokens, flags = self.run, self.tokens, self._flags
        at_end = tokens == run.n_tokens
        if at_end or self._passes_evaluation(before):
            began, losses = time.perf_counter(), self.evaluate()
            divergence = judge_evaluation(
                losses["val_loss"],
                self._rows[-1].get("grad_norm", math.inf),
                vocab_size=run.numerics.model.vocab_size,
                step=run.n_steps(tokens),
                is_warm=tokens > run.recipe_before(tokens).warmup_tokens,
            )
            if divergence:
                raise StageError(f"promote: the run diverged: {divergence.reason} at step {divergence.step}")
            ended = time.perf_counter()
            self._rows[-1] |= {**losses, "evaluation_seconds": ended - began, "seconds": ended - self._started}
        self._flush()  # before the save: a checkpoint implies that the rows before it are written
        if at_end or flags.saves or flags.ends or self._passes_checkpoint(before):
            with self._blocking():
                self.checkpoints.save(self._stepper, tokens)
                flags.saved()
                if at_end or flags.ends:
                    self.checkpoints.finish()
        if flags.ends and not at_end:
            broadcast_from_rank0(lambda: self._notice.file.unlink(missing_ok=True))  # the notice was followed
            raise PreemptedError(f"promote: preempted, saved at {tokens:,} tokens")

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """Count the time in the block as blocked by a checkpoint."""
        began = time.perf_counter()
        yield
        self.blocked += time.perf_counter() - began

    def evaluate(self) -> dict[str, Any]:
        """Mean loss over the held-out sequences.

        Returns:
            `val_loss`, and of a mixture `source_losses` by name; of a continuation on another corpus
            `earlier_losses` by name; nats per token.
        """
        losses = evaluation_of(self._corpus, self._held_out, self._losses(self._held_out))
        earlier = {name: corpus_loss(sets, self._losses(sets)) for name, sets in self._earlier.items()}
        return losses | ({"earlier_losses": earlier} if earlier else {})

    def _losses(self, sets: Mapping[str, EvaluationSet]) -> dict[str, float]:
        """Mean loss of each set, independent of the number of ranks; in the run's precision, eager, without dropout."""
        with torch.compiler.set_stance("force_eager") if self.compiled else nullcontext():
            losses = source_losses(
                self.configured,
                family_of(self.run.numerics.model).evaluation_loss,
                sets,
                device=self.device,
                batch=evaluation_batch(self.device, self._stepper.micro_batch),
                rank=self.data_rank,
                ranks=self.data_ranks,
            )
        settle(self.configured)
        if self.trainer.world_size > 1:
            dist.all_reduce(losses)
            losses /= self.run.parallelism.tensor_parallel  # as each share counts once for every rank of its products
        return dict(zip(sets, losses.tolist(), strict=True))

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Write the metrics of recorded steps, however the block ends: their time counts, even if they are trained again."""
        try:
            yield
        finally:
            self._flush()

    def _flush(self) -> None:
        if rank() == 0 and self._rows:
            json_lines.append(self.run.directory / METRICS, *self._rows)
        self._rows.clear()


def train(run: FullRun, *, device: torch.device | None = None) -> dict[str, Any]:
    """Train the run to its end, from its last intact checkpoint if there is one; a finished run returns its result.

    Args:
        run: What to train.
        device: Of this rank, by its launcher; None: `rank_device`.

    Returns:
        `loss` (validation, nats per token), `source_losses` (of each source of a mixture), `tokens`, `resumed_from` (tokens),
        `seconds` that the steps took, over all attempts, `environment`, `goodput`, `incidents`.

    Raises:
        StageError: If the run diverges, or its ranks can't be laid over the devices.
        ValueError: If the model's family can't be imported here, or has another source.
        PreemptedError: If it was preempted; its state is saved.
    """
    import_family(run.numerics.model)
    device = device or rank_device()
    start_timeout, step_timeout = (timedelta(minutes=m) for m in (run.start_timeout_minutes, run.step_timeout_minutes))
    with process_group(device, timeout=start_timeout, records=run.directory / COLLECTIVES):
        if finished := broadcast_from_rank0(lambda: attempts.finished(run.directory)):
            return finished
        run.directory.mkdir(parents=True, exist_ok=True)
        broadcast_from_rank0(lambda: RunDescription.of(run).write(run.directory))
        checkpoints = Checkpoints(
            run.directory / CHECKPOINTS, keep_last=run.keep_last, keep_every_tokens=run.keep_every_tokens
        )
        start, resume = checkpoints.latest() or _origin(run)
        spent, incidents = broadcast_from_rank0(
            lambda: attempts.begin(run.directory, tokens=start, step=run.n_steps(start))
        )
        module = FullRunModule(
            run,
            start,
            resume,
            spent=spent,
            checkpoints=checkpoints,
            interventions=Interventions(run.on_spike, run.segments[0].recipe.ramp, incidents),
        )
        trainer = L.Trainer(
            strategy=ShardedStrategy(
                run.parallelism, device, step_timeout=step_timeout, step=lambda: run.n_steps(module.tokens)
            )
            if dist.is_initialized()
            else "auto",
            plugins=[TorchElasticEnvironment() if dist.is_initialized() else LightningEnvironment()],
            accelerator="cpu" if device.type == "cpu" else "gpu",
            devices=1 if device.type == "cpu" else [device.index],
            max_epochs=1,
            use_distributed_sampler=False,  # every rank counts every step
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=run.directory,
        )
        if start < run.n_tokens:
            with (
                attempts.recorded(run.directory, lambda: run.n_steps(module.tokens)),
                module.flushing(),
                module.garbage.controlled(),
            ):
                trainer.fit(module)
        facts = {
            "tokens": run.n_tokens,
            "resumed_from": start,
            "environment": {
                **environment(trainer.strategy.root_device, world_size=trainer.world_size, compiled=module.compiled),
                "parallelism": asdict(run.parallelism),
            },
        }
        return broadcast_from_rank0(lambda: attempts.conclude(run.directory, blocked=module.blocked, **facts))


def _origin(run: FullRun) -> tuple[int, Path | None]:
    """Tokens and checkpoint at the run's start, after a check of the checkpoint.

    Raises:
        StageError: On every rank, if the checkpoint has changed.
    """
    state = run.initial_state
    if state and manifest_hash_by_ranks(state.checkpoint) != state.manifest_hash:
        raise StageError(
            f"{state.checkpoint}: must be the checkpoint from which the run was started; it is gone, damaged or changed"
        )
    return run.origin


class _Calls(IterableDataset[int]):
    """One item per remaining call of `training_step`, also after rollbacks."""

    def __init__(self, module: FullRunModule) -> None:
        self._module = module

    def __iter__(self) -> Iterator[int]:
        while self._module.tokens < self._module.run.n_tokens:
            yield self._module.tokens
