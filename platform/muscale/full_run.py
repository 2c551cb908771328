"""The full-size run: plain Lightning with FSDP2, on the definitions that trained the proxies.

It knows nothing of Ray: the same function runs inside a Ray Train worker, under torchrun, or alone in one process. Batches are
found by position, so a run resumed at another world size sees the same tokens. Checkpoints are sharded
(`torch.distributed.checkpoint`), hashed, and moved into place whole; one whose hashes do not hold is never opened.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from muscale.compat import import_lightning
from muscale.environment import environment
from muscale.errors import StageError
from muscale.layout import METRICS, RESULT
from proxy_models.batches import TokenStream, evaluation_sequences
from proxy_models.corpus import Corpus
from proxy_models.decoder import Decoder, next_token_loss, training_loss
from proxy_models.hyperparameters import Segment
from proxy_models.numerics import Numerics, Precision
from proxy_models.optimizer import clip, initialize, make_optimizer, set_rates
from proxy_models.training import seed_step

L = import_lightning()
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
_PRECISION: dict[Precision, Any] = {"fp32": "32-true", "bf16": "bf16-mixed"}  # Lightning's names
MIN_UNIT_PARAMS = 1_000_000
"""A smaller collective is nearly all latency: two gloo ranks at width 64 train 1.4 times as fast without one for each block."""
_KEEP = 2
_EVALUATION_BATCH = 64  # sequences on each rank
_FLUSH_EVERY = 20  # steps between writes of the metrics


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
    """

    numerics: Numerics
    segments: tuple[Segment, ...]
    directory: Path
    corpus: Path
    checkpoint_every_tokens: int
    evaluate_every_tokens: int
    min_unit_params: int = MIN_UNIT_PARAMS

    @property
    def n_tokens(self) -> int:
        """D."""
        return self.segments[-1].end

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.segments[0].recipe.batch_tokens

    def segment_at(self, tokens: int) -> Segment:
        """The segment of the step that starts after `tokens` tokens."""
        return next(segment for segment in self.segments if segment.start <= tokens < segment.end)


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's model-parallel strategy with all ranks in the data dimension, on a device that the launcher may choose."""

    def __init__(self, *, world_size: int, root_device: torch.device | None = None) -> None:
        super().__init__(data_parallel_size=world_size, tensor_parallel_size=1, save_distributed_checkpoint=True)
        self._chosen_device = root_device

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        if self._chosen_device is not None:
            return self._chosen_device
        return super().root_device if torch.cuda.is_available() else torch.device("cpu")

    @root_device.setter
    def root_device(self, device: torch.device) -> None:
        self._chosen_device = device


class Checkpoints:
    """Sharded checkpoints of one run: `tokens=<n>` holds the state after n tokens and a manifest of its files' hashes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def latest(self) -> tuple[int, Path] | None:
        """Tokens and path of the newest checkpoint whose hashes hold, or None."""
        found = sorted(
            ((int(path.name.removeprefix("tokens=")), path) for path in self.folder.glob("tokens=*[0-9]")), reverse=True
        )
        return next(((tokens, path) for tokens, path in found if _is_whole(path)), None)

    def save(self, module: Decoder, optimizer: torch.optim.Optimizer, tokens: int) -> None:
        """Write the state of all ranks; rank 0 hashes it and moves it into place, then drops the oldest."""
        path = self.folder / f"tokens={tokens}"
        unfinished = self.folder / f"tokens={tokens}.unfinished"
        if _rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        _barrier()
        weights, moments = get_state_dict(module, optimizer)
        save_sharded({"model": weights, "optimizer": moments}, checkpoint_id=unfinished)
        _barrier()
        if _rank() == 0:
            manifest = {file.name: _sha256(file) for file in sorted(unfinished.iterdir())}
            (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
            shutil.rmtree(path, ignore_errors=True)
            unfinished.rename(path)
            kept = sorted(self.folder.glob("tokens=*[0-9]"), key=lambda p: int(p.name.removeprefix("tokens=")))
            for old in kept[:-_KEEP]:
                shutil.rmtree(old)
        _barrier()

    def load(self, path: Path, module: Decoder, optimizer: torch.optim.Optimizer) -> None:
        """Read a checkpoint that `latest` found whole, at whatever world size this is."""
        weights, moments = get_state_dict(module, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        load_sharded(state, checkpoint_id=path)
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class FullRunModule(L.LightningModule):  # type: ignore[misc,name-defined]
    """The decoder under Lightning; every definition is `proxy_models`' own."""

    def __init__(self, run: FullRun, start: int, resume: Path | None) -> None:
        super().__init__()
        self.run, self.start, self.resume = run, start, resume
        self.checkpoints = Checkpoints(run.directory / CHECKPOINTS)
        self.model: Decoder | None = None
        self.final_loss: float | None = None
        self._rows: list[dict[str, float]] = []

    def configure_model(self) -> None:
        """Build the decoder, shard it, large blocks each by itself, and write its initial values, which sharding does not change."""
        if self.model is not None:
            return
        run = self.run
        self.model = Decoder(run.numerics.model).to(self.device)
        if self._device_mesh is not None:
            mesh = self._device_mesh["data_parallel"]
            for block in self.model.blocks:
                if sum(parameter.numel() for parameter in block.parameters()) >= run.min_unit_params:
                    fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        recipe = run.segments[0].recipe
        initialize(self.model, run.numerics.parametrization(recipe.optimizer), recipe, seed=run.numerics.seed)

    @property
    def decoder(self) -> Decoder:
        """The model, once it is configured."""
        if self.model is None:
            raise RuntimeError("the model is not configured yet")
        return self.model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer, its groups by name, after sharding."""
        recipe = self.run.segments[0].recipe
        return make_optimizer(self.decoder, self.run.numerics.parametrization(recipe.optimizer), recipe)

    def train_dataloader(self) -> DataLoader[int]:
        """Nothing but a count of steps: a batch is found by its position."""
        return DataLoader(range(self.run.n_tokens // self.run.batch_tokens))  # type: ignore[arg-type]

    def on_fit_start(self) -> None:
        """Open the data, and go on from the checkpoint."""
        run = self.run
        corpus = Corpus.open(run.corpus)
        model = run.numerics.model
        self._stream = TokenStream(tokens=corpus.train, context_length=model.context_length, seed=run.numerics.seed)
        self._held_out = evaluation_sequences(corpus.validation, model.context_length, run.numerics.evaluation_tokens)
        if self.resume:
            self.checkpoints.load(self.resume, self.decoder, self._optimizer)
        self._started = time.perf_counter()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers(use_pl_optimizer=False)  # type: ignore[no-any-return]

    @property
    def tokens(self) -> int:
        """Tokens seen before the step that is under way."""
        return int(self.start + self.trainer.global_step * self.run.batch_tokens)

    def training_step(self, _batch: Tensor, _index: int) -> Tensor:
        """Loss of this rank's share of the step's batch."""
        sequences = self._stream.batch(
            self.tokens, self.run.batch_tokens, rank=self.global_rank, world_size=self.trainer.world_size
        )
        seed_step(self.run.numerics, self.tokens, self.global_rank)
        loss = training_loss(self.decoder, sequences.to(self.device))
        self._loss = _mean(loss.detach())
        if not torch.isfinite(self._loss):
            step = self.tokens // self.run.batch_tokens
            raise StageError(f"promote: the run diverged: the training loss is {float(self._loss)} at step {step}")
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *_args: Any, **_options: Any) -> None:
        """Clip by the global norm, and set the rates of this step."""
        segment = self.run.segment_at(self.tokens)
        self._norm = clip(self.decoder.parameters(), segment.recipe.clip_norm)
        set_rates(optimizer, segment.rate_factor(self.tokens))

    def on_train_batch_end(self, *_args: Any) -> None:
        """Record, evaluate and save, each in its time."""
        run, tokens = self.run, self.tokens
        before, at_end = tokens - run.batch_tokens, tokens == run.n_tokens

        def passed(every: int) -> bool:
            return tokens // every > before // every

        row = {
            "tokens": tokens,
            "train_loss": float(self._loss),
            "grad_norm": float(self._norm),
            "rate_factor": run.segment_at(before).rate_factor(before),
            "seconds": time.perf_counter() - self._started,
        }
        if at_end or passed(run.evaluate_every_tokens):
            row["val_loss"] = self.final_loss = self.evaluate()
        self._rows.append(row)
        saves = at_end or passed(run.checkpoint_every_tokens)
        if saves or len(self._rows) >= _FLUSH_EVERY:
            self._flush()
        if saves:
            self.checkpoints.save(self.decoder, self._optimizer, tokens)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out sequences, exactly, whatever the number of ranks."""
        world_size = self.trainer.world_size
        self.decoder.eval()
        total = torch.zeros((), device=self.device)
        for batch in torch.split(self._held_out, _EVALUATION_BATCH * world_size):
            share = torch.tensor_split(batch, world_size)[self.global_rank]
            # A rank without a share takes part in the forward pass, as sharded weights are gathered by all.
            loss = next_token_loss(self.decoder, (share if len(share) else batch[:1]).to(self.device))
            total += loss * len(share)
        self.decoder.train()
        if world_size > 1:
            dist.all_reduce(total)
        return float(total) / len(self._held_out)

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
        `loss` (validation, nats per token), `tokens`, `resumed_from` (tokens), `seconds` of this attempt, `environment`.

    Raises:
        StageError: If the run diverges.
    """
    finished = run.directory / RESULT
    if finished.exists():
        return dict(json.loads(finished.read_text()))
    run.directory.mkdir(parents=True, exist_ok=True)
    start, resume = Checkpoints(run.directory / CHECKPOINTS).latest() or (0, None)
    module = FullRunModule(run, start, resume)
    trainer = L.Trainer(
        strategy=strategy,
        plugins=plugins,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices="auto" if plugins else 1,
        max_steps=(run.n_tokens - start) // run.batch_tokens,
        precision=_PRECISION[run.numerics.precision],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.directory,
    )
    _drop_metrics_after(run.directory / METRICS, start)
    started = time.perf_counter()
    if start < run.n_tokens:
        trainer.fit(module)
    loss = module.final_loss if start < run.n_tokens else _last_evaluation(run.directory / METRICS)
    result = {
        "loss": loss,
        "tokens": run.n_tokens,
        "resumed_from": start,
        "seconds": time.perf_counter() - started,
        "environment": environment(world_size=trainer.world_size),
    }
    if trainer.global_rank == 0:
        unfinished = finished.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(result))
        unfinished.replace(finished)
    return result


def _last_evaluation(metrics: Path) -> float:
    return float(json.loads(metrics.read_text().splitlines()[-1])["val_loss"])


def _drop_metrics_after(metrics: Path, tokens: int) -> None:
    """Forget the steps that will be trained again; a torn last line goes with them."""
    if _launched_rank() != 0 or not metrics.exists():
        return
    kept = [json.dumps(row) + "\n" for row in _whole_rows(metrics) if row["tokens"] <= tokens]
    unfinished = metrics.with_suffix(".unfinished")
    unfinished.write_text("".join(kept))
    unfinished.replace(metrics)


def _whole_rows(metrics: Path) -> Iterator[dict[str, Any]]:
    for line in metrics.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _is_whole(checkpoint: Path) -> bool:
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        return all(_sha256(checkpoint / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _launched_rank() -> int:
    """This process's rank before or after the process group exists."""
    return _rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _mean(loss: Tensor) -> Tensor:
    """Mean over ranks, each having the same number of tokens."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss
