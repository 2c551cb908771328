"""The full-size run: plain Lightning with FSDP2, on the definitions that trained the proxies.

It knows nothing of Ray: the same function runs inside a Ray Train worker, under torchrun, or alone in one process. Batches are
found by position, so a run resumed at another world size sees the same tokens.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from muscale.checkpoints import CHECKPOINTS, Checkpoints
from muscale.compat import import_lightning
from muscale.environment import environment
from muscale.errors import StageError
from muscale.layout import METRICS, RESULT
from muscale.metrics_file import drop_after, last_row
from muscale.parallelism import Parallelism
from muscale.sharding import ShardedStrategy, between_parts, build_decoder, fitting_micro_batch, settle
from proxy_models import compilation
from proxy_models.batches import corpus_loss, evaluation_sets, training_stream
from proxy_models.compilation import Compile
from proxy_models.corpus import Corpus
from proxy_models.decoder import Decoder, next_token_loss
from proxy_models.device import send
from proxy_models.metrics import passes
from proxy_models.numerics import Numerics
from proxy_models.optimizer import make_optimizer
from proxy_models.precision import unsupported
from proxy_models.recipe import Recipe
from proxy_models.segments import Segment
from proxy_models.step import Stepper

L = import_lightning()
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

MIN_UNIT_PARAMS = 1_000_000
"""A smaller collective is nearly all latency: two gloo ranks at width 64 train 1.4 times as fast without one for each block."""
_EVALUATION_BATCH = 64  # sequences on each rank
_FLUSH_EVERY = 20  # steps between writes of the metrics
_MEMORY_SHARE = (
    0.85  # of a GPU's memory, that an estimate may fill; the rest is the allocator's and the communication's (assumed)
)


@dataclass(frozen=True, kw_only=True)
class FullRun:
    """One run, to its annealed end.

    Attributes:
        numerics: Model, data, seed.
        segments: The chain to train.
        directory: Where its checkpoints, metrics and result lie; visible to every worker.
        corpus: Folder of the corpus.
        checkpoint_every_tokens, evaluate_every_tokens: At the first step that passes a multiple of them.
        min_unit_params: Blocks of fewer parameters are gathered with the rest of the model, not each by itself.
        micro_batch: Sequences of one forward and backward pass on a rank; None: its whole share, on a GPU the largest whole
            part of it that fits by the estimate.
        parallelism: How it is laid over the ranks.
        compile: Whether the blocks are compiled, each by itself.
    """

    numerics: Numerics
    segments: tuple[Segment, ...]
    directory: Path
    corpus: Path
    checkpoint_every_tokens: int
    evaluate_every_tokens: int
    min_unit_params: int = MIN_UNIT_PARAMS
    micro_batch: int | None = None
    parallelism: Parallelism = field(default_factory=Parallelism)
    compile: Compile = False

    def __post_init__(self) -> None:
        self.parallelism.require(self.numerics.model)
        self.numerics.require_length(self.n_tokens)

    @property
    def n_tokens(self) -> int:
        """D."""
        return self.segments[-1].end

    def n_steps(self, tokens: int) -> int:
        """Steps that end at or before `tokens`."""
        return self.segments[0].recipe.ramp.n_steps(tokens)

    def segment_at(self, tokens: int) -> Segment:
        """The segment of the step that starts after `tokens` tokens."""
        return next(segment for segment in self.segments if segment.start <= tokens < segment.end)

    def recipe_before(self, tokens: int) -> Recipe:
        """The recipe of the step that ends at `tokens`; at 0 that of the first step."""
        return self.segment_at(max(tokens - 1, 0)).recipe


class FullRunModule(L.LightningModule):  # type: ignore[misc,name-defined]
    """The decoder under Lightning; every definition is `proxy_models`' own."""

    def __init__(self, run: FullRun, start: int, resume: Path | None, *, spent: float) -> None:
        super().__init__()
        self.automatic_optimization = False  # the step is `proxy_models`' own, whole
        self.run, self.start, self.resume = run, start, resume
        self.tokens = start
        self.checkpoints = Checkpoints(run.directory / CHECKPOINTS)
        self.model: Decoder | None = None
        self.compiled = False
        self._spent = spent  # seconds, by earlier attempts up to the start
        self._rows: list[dict[str, Any]] = []

    def configure_model(self) -> None:
        """Build the decoder over the ranks, large blocks each by itself, with initial values that sharding does not change."""
        if self.model is not None:
            return
        run, device = self.run, self.trainer.strategy.root_device
        self.compiled = compilation.decide(run.compile, run.n_tokens - self.start, device.type)
        if self.compiled:
            compilation.configure()
        self.model = build_decoder(
            run.numerics,
            run.segments[0].recipe,
            run.parallelism,
            device=device,
            mesh=self._device_mesh,
            min_unit_params=run.min_unit_params,
            compiled=self.compiled,
        )

    @property
    def data_ranks(self) -> int:
        """Shares that a batch is cut into."""
        return self.run.parallelism.data_ranks(self.trainer.world_size)

    @property
    def data_rank(self) -> int:
        """The number of this rank's share, which those that share its products have too."""
        return int(self.global_rank) // self.run.parallelism.tensor_parallel

    @property
    def decoder(self) -> Decoder:
        """The model, once it is configured."""
        if self.model is None:
            raise RuntimeError("the model is not configured yet")
        return self.model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the last step before the start, whose moments a checkpoint holds, even one at a swap."""
        return self._make_optimizer(self.run.recipe_before(self.start))

    def _make_optimizer(self, recipe: Recipe) -> torch.optim.Optimizer:
        """A recipe's optimizer, its groups by name, after sharding."""
        return make_optimizer(self.decoder, self.run.numerics.parametrization(recipe.optimizer), recipe)

    def train_dataloader(self) -> DataLoader[int]:
        """Nothing but a count of steps: a batch is found by its position."""
        return DataLoader(range(self.run.n_steps(self.run.n_tokens) - self.run.n_steps(self.start)))  # type: ignore[arg-type]

    def on_fit_start(self) -> None:
        """Open the data, and go on from the checkpoint.

        Raises:
            StageError: If the device can't train in the run's precision, or the ranks can't agree on a loss scale.
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
        fitting = fitting_micro_batch(
            run.numerics,
            run.segments[0].recipe,
            run.parallelism,
            world_size=self.trainer.world_size,
            device=self.device,
        )
        self._stepper = Stepper(
            self.decoder,
            self.optimizers(use_pl_optimizer=False),
            run.numerics,
            run.recipe_before(self.start),
            micro_batch=run.micro_batch or fitting,
            rank=self.data_rank,
            mean=_mean,
            before_part=lambda last: between_parts(self.decoder, run.parallelism, last=last),
        )
        if self.resume:
            self.checkpoints.load(self.resume, self._stepper)
        self._started = time.perf_counter() - self._spent

    def training_step(self, _batch: Tensor, _index: int) -> None:
        """Take the step on this rank's share of its batch, then record, evaluate and save, each in its time."""
        run, before = self.run, self.tokens
        segment = run.segment_at(before)
        if segment.recipe != self._stepper.recipe:
            self._go_on_under(segment.recipe)
        batch = segment.recipe.ramp.batch_at(before)
        share = self._stream.batch(before, batch, rank=self.data_rank, world_size=self.data_ranks)
        sequences = send(share, self.device)
        number, rate_factor = run.n_steps(before), segment.rate_factor(before)
        spikes = len(self._stepper.spikes)
        loss, norm = self._stepper.step(sequences, number=number, tokens=before, rate_factor=rate_factor)
        if divergence := self._stepper.divergence:
            raise StageError(f"promote: the run diverged: {divergence.reason}")
        if not torch.isfinite(loss):
            raise StageError(f"promote: the run diverged: the training loss is {float(loss)} at step {number}")
        self.tokens += batch
        left_out = len(self._stepper.spikes) > spikes
        self._record(before, float(loss), float(norm), rate_factor, left_out)

    def _go_on_under(self, recipe: Recipe) -> None:
        """Let an optimizer of the recipe take over; Lightning drops the one before it."""
        optimizer = self._make_optimizer(recipe)
        self.trainer.optimizers = [optimizer]
        self._stepper.go_on_under(recipe, optimizer)

    def _record(self, before: int, loss: float, norm: float, rate_factor: float, left_out: bool) -> None:
        run, tokens = self.run, self.tokens
        at_end = tokens == run.n_tokens
        row = {
            "tokens": tokens,
            "train_loss": loss,
            "grad_norm": norm,
            "rate_factor": rate_factor,
            "seconds": time.perf_counter() - self._started,
            "left_out": left_out,
        }
        if at_end or passes(run.evaluate_every_tokens, before, tokens):
            row |= self.evaluate()
            if not math.isfinite(row["val_loss"]):
                step = run.n_steps(tokens)
                raise StageError(f"promote: the run diverged: the validation loss is not finite at step {step}")
        self._rows.append(row)
        saves = at_end or passes(run.checkpoint_every_tokens, before, tokens)
        if saves or len(self._rows) >= _FLUSH_EVERY:
            self._flush()
        if saves:
            self.checkpoints.save(self._stepper, tokens)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Mean loss over the held-out sequences, exactly, whatever the number of ranks; in fp32 and eager, without dropout.

        Returns:
            `val_loss`, and of a mixture `source_losses` by name; nats per token.
        """
        n_shares = self.data_ranks
        sums = torch.zeros(len(self._held_out), device=self.device)
        self.decoder.eval()
        for source, held_out in enumerate(self._held_out.values()):
            for batch in torch.split(held_out.sequences, _EVALUATION_BATCH * n_shares):
                share = torch.tensor_split(batch, n_shares)[self.data_rank]
                # A rank without a share takes part in the forward pass, as sharded weights are gathered by all.
                with torch.compiler.set_stance("force_eager") if self.compiled else nullcontext():
                    loss = next_token_loss(self.decoder, (share if len(share) else batch[:1]).to(self.device))
                sums[source] += len(share) / len(held_out.sequences) * loss
        self.decoder.train()
        settle(self.decoder)
        if self.trainer.world_size > 1:
            dist.all_reduce(sums)
            sums /= self.run.parallelism.tensor_parallel  # as each share counts once for every rank of its products
        losses = dict(zip(self._held_out, sums.tolist(), strict=True))
        sources = losses if self._corpus.mixture else {}
        return {"val_loss": corpus_loss(self._held_out, losses), "source_losses": sources}

    def _flush(self) -> None:
        if self.global_rank == 0:
            with (self.run.directory / METRICS).open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in self._rows)
        self._rows.clear()


def train(run: FullRun, *, strategy: Any = "auto", plugins: list[Any] | None = None) -> dict[str, Any]:
    """Train the run to its end, from its last whole checkpoint if it has one; a finished run returns its result.

    Args:
        run: What to train.
        strategy: `ShardedStrategy` for several ranks; in one process Lightning's own choice will do.
        plugins: Lightning's, such as the launcher's environment.

    Returns:
        `loss` (validation, nats per token), `source_losses` (of each source of a mixture), `tokens`, `resumed_from` (tokens),
        `seconds` that the steps took, over all attempts, `environment`.

    Raises:
        StageError: If the run diverges.
    """
    finished = run.directory / RESULT
    if finished.exists():
        return dict(json.loads(finished.read_text()))
    run.directory.mkdir(parents=True, exist_ok=True)
    start, resume = Checkpoints(run.directory / CHECKPOINTS).latest() or (0, None)
    metrics = run.directory / METRICS
    if _launched_rank() == 0:
        drop_after(metrics, start)
    module = FullRunModule(
        run, start, resume, spent=last_row(metrics)["seconds"] if start and _launched_rank() == 0 else 0.0
    )
    if isinstance(strategy, ShardedStrategy):
        strategy.parallelism = run.parallelism
    own_choice = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = strategy.root_device if isinstance(strategy, ShardedStrategy) else own_choice
    trainer = L.Trainer(
        strategy=strategy,
        plugins=plugins,
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices="auto" if plugins else 1,
        max_epochs=1,
        use_distributed_sampler=False,  # every rank counts every step
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.directory,
    )
    if start < run.n_tokens:
        trainer.fit(module)
    last = last_row(metrics)  # written before the barrier that ended the last checkpoint
    result = {
        "loss": last["val_loss"],
        "source_losses": last["source_losses"],
        "tokens": run.n_tokens,
        "resumed_from": start,
        "seconds": last["seconds"],
        "environment": environment(
            trainer.strategy.root_device, world_size=trainer.world_size, compiled=module.compiled
        )
        | {"parallelism": asdict(run.parallelism)},
    }
    if trainer.global_rank == 0:
        unfinished = finished.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(result))
        unfinished.replace(finished)
    return result


def _launched_rank() -> int:
    """This process's rank before or after the process group exists."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _mean(loss: Tensor) -> Tensor:
    """Mean over ranks, each having the same number of tokens."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss
