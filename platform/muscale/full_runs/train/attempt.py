"""A rank's attempt at a full run: joins the other ranks, and trains from the last intact checkpoint to the end.

The attempt does not depend on Ray: the same function runs in a Ray Train worker, under torchrun or srun, or in one process.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from muscale.environment import environment
from muscale.errors import StageError
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.checkpoints.run_description import RunDescription
from muscale.full_runs.checkpoints.save import Checkpoints, manifest_hash_by_ranks
from muscale.full_runs.distributed import broadcast_from_rank0, process_group, rank_device
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.records.attempts import Attempt, finished
from muscale.full_runs.train.interventions import Interventions
from muscale.full_runs.train.module import FullRunModule
from muscale.full_runs.train.sharding import ShardedStrategy
from muscale.layout import COLLECTIVES
from proxy_models.architecture.families import import_family
from proxy_models.training.compilation import decide

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def train(run: FullRun, *, device: torch.device | None = None) -> dict[str, Any]:
    """Train the run to its end, from its last intact checkpoint if there is one; return the result, also if it had finished before.

    Args:
        device: Device of this rank, from its launcher; None: `rank_device`.

    Returns:
        `loss` (validation, nats per token), `source_losses` (of each source of a mixture), `tokens`, `resumed_from` (tokens),
        `seconds` of all attempts on steps, evaluations and waits for saves, `environment`, `goodput`, `incidents`.

    Raises:
        StageError: If the run diverges, or its ranks don't fit the layout or the devices.
        ValueError: If the model's family can't be imported here, or its source differs.
        LeaseLostError: If another attempt has begun since; this attempt wrote nothing after that.
        PreemptedError: If the run was preempted; its state is saved.
    """
    import_family(run.numerics.model)
    device = device or rank_device()
    start_timeout, step_timeout = (timedelta(minutes=m) for m in (run.start_timeout_minutes, run.step_timeout_minutes))
    with process_group(device, timeout=start_timeout, records=run.directory / COLLECTIVES):
        if result := broadcast_from_rank0(lambda: finished(run.directory)):
            return result
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        run.require_ranks([world_size])
        run.directory.mkdir(parents=True, exist_ok=True)
        broadcast_from_rank0(lambda: RunDescription.of(run).write(run.directory))
        attempt = broadcast_from_rank0(lambda: Attempt.new(run.directory))
        checkpoints = Checkpoints(
            run.directory / CHECKPOINTS,
            keep_last=run.keep_last,
            keep_every_tokens=run.keep_every_tokens,
            before_write=attempt.require_last,
        )
        start, resume = checkpoints.latest() or _origin(run)
        compiled = decide(run.compile, run.n_tokens - start, device.type)
        machine = environment(device, world_size=world_size, compiled=compiled)
        spent, incidents = broadcast_from_rank0(
            lambda: attempt.begin(tokens=start, step=run.n_steps(start), environment=machine)
        )
        module = FullRunModule(
            run,
            start,
            resume,
            attempt=attempt,
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
            use_distributed_sampler=False,  # every rank counts all steps
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=run.directory,
        )
        if start < run.n_tokens:
            with (
                attempt.recorded(lambda: run.n_steps(module.tokens)),
                module.step_log.flushing(),
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
        return broadcast_from_rank0(lambda: attempt.conclude(blocked=module.step_log.blocked, **facts))


def _origin(run: FullRun) -> tuple[int, Path | None]:
    """Check the checkpoint at the run's start, and return its tokens and path; raise StageError on every rank if it has changed."""
    state = run.initial_state
    if state and manifest_hash_by_ranks(state.checkpoint) != state.manifest_hash:
        raise StageError(
            f"{state.checkpoint}: must be the checkpoint from which the run was started; it is gone, damaged or changed"
        )
    return run.origin
