"""A worker of a planned run: its device, micro-batch and memory."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import psutil

from muscale.plans.plan import Plan
from muscale.plans.step_time import LINKS
from muscale.settings.config import StudyConfig
from proxy_models.architecture.memory import MEMORY_SHARE, MemoryEstimate, largest_micro_batch, least_memory

_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of a worker.

    Attributes:
        name: Name for messages.
        memory_bytes: Memory of the device; None if unknown here.
        workers_on_it: Workers that share the device.
        has_bf16: Whether a GPU computes bf16 products natively; None for a CPU, or if unknown here.
    """

    name: str
    memory_bytes: float | None
    workers_on_it: int = 1
    has_bf16: bool | None = None


def device_of(config: StudyConfig) -> Device:
    """The device of a worker: the plan's accelerator, the GPU that this process sees, or this machine's CPU."""
    if config.resources.gpus_per_worker:
        if known := config.plan.device:
            return Device(name=known.name, memory_bytes=known.memory_bytes, has_bf16="bf16" in known.peak_flops)
        import torch

        if torch.cuda.is_available():
            seen = torch.cuda.get_device_properties(0)
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            return Device(name=str(seen.name), memory_bytes=float(seen.total_memory), has_bf16=has_bf16)
        return Device(name="a GPU", memory_bytes=None)
    if os.environ.get("RAY_ADDRESS"):  # the workers run on other machines
        return Device(name="a node of the cluster", memory_bytes=None)
    return Device(name="this machine", memory_bytes=float(_host_memory()), workers_on_it=config.promote.workers)


def _host_memory() -> int:
    """Memory of this machine or container, in bytes."""
    total = int(psutil.virtual_memory().total)
    limit = _CGROUP.read_text().strip() if _CGROUP.exists() else "max"
    return min(total, int(limit)) if limit.isdigit() else total


@dataclass(frozen=True, kw_only=True)
class PlannedWorker:
    """One worker of a plan, standing for all, which are alike; `config` is the study's, with the resources for the promotion."""

    plan: Plan
    config: StudyConfig

    @cached_property
    def device(self) -> Device:
        """The worker's device."""
        return device_of(self.config)

    @property
    def node_ranks(self) -> int:
        """Workers on the worker's node, if the accelerator's node size is known; otherwise all workers."""
        workers, links = self.config.promote.workers, LINKS.get(self.config.plan.accelerator or "")
        return min(workers, links.node_devices) if links else workers

    @cached_property
    def micro_batch(self) -> int:
        """Sequences per pass: the setting or the share if that is less, or on a GPU the largest part of the share that fits.

        If shares differ by one sequence, the larger one counts. A pipeline's share is cut into several passes for each of its workers.
        """
        settings, h = self.config.promote, self.plan.hyperparameters
        if settings.micro_batch:
            return min(settings.micro_batch, self._share(h.batch_tokens))
        first = self._share(h.batch_tokens >> h.batch_doublings)
        pipeline = settings.parallelism.pipeline(first, doublings=h.batch_doublings)
        with suppress(ValueError):  # a model that can't be traced, or a layout that is not possible
            if self.config.resources.gpus_per_worker and self.device.memory_bytes:
                from proxy_models.training.traced_memory import estimated_memory  # imports torch

                estimate = partial(estimated_memory, self.plan.model, **self._conditions)
                limit = int(MEMORY_SHARE * self.device.memory_bytes)
                share = first if pipeline else self._share(h.batch_tokens)
                return largest_micro_batch(estimate, share, limit=limit, pipeline=pipeline)
            if pipeline:
                return pipeline.sizes[-1]
        return self._share(h.batch_tokens)

    @property
    def evaluation_batch(self) -> int:
        """Sequences per pass of an evaluation."""
        from proxy_models.training.device import EVALUATION_BATCH

        most = self.config.promote.micro_batch or self.micro_batch
        return min(most, EVALUATION_BATCH) if self.config.resources.gpus_per_worker else EVALUATION_BATCH

    @property
    def least_memory(self) -> int:
        """Bytes of the worker's weights, gradients and moments, at least."""
        layout, ranks = self.config.promote.parallelism, self._conditions["world_size"]
        sharding = layout.sharding
        if sharding == "none" and layout.expert_parallel > 1:  # nearly all weights may be those of experts
            sharding, ranks = "zero2", layout.expert_parallel
        return least_memory(
            self.plan.model,
            self.plan.hyperparameters.optimizer,
            sharding=sharding,
            world_size=ranks,
            stages=layout.pipeline_parallel,
        )

    def memory(self) -> MemoryEstimate:
        """Memory that training at the full batch takes.

        Raises:
            ValueError: If a custom model is not imported or can't be traced.
        """
        from proxy_models.training.traced_memory import estimated_memory  # imports torch

        return estimated_memory(self.plan.model, micro_batch=self.micro_batch, **self._conditions)

    def evaluation_memory(self, training: MemoryEstimate) -> int:
        """Bytes that evaluation needs in addition to the training state."""
        from proxy_models.training.traced_memory import estimated_evaluation  # imports torch

        names = ("sharding", "world_size", "tensor_parallel", "context_parallel", "expert_parallel", "pipeline")
        layout = {name: value for name, value in self._conditions.items() if name in names}
        return estimated_evaluation(self.plan.model, self.evaluation_batch, training, self.plan.precision, **layout)

    @cached_property
    def _conditions(self) -> dict[str, Any]:
        """Settings that memory depends on, without the micro-batch."""
        layout = self.config.promote.parallelism
        grid = layout.grid(self.config.promote.workers, node_ranks=self.node_ranks)
        of_training = {"precision": self.plan.precision, "optimizer": self.plan.hyperparameters.optimizer}
        return of_training | layout.memory_conditions(grid, self._share(self.plan.hyperparameters.batch_tokens))

    def _share(self, batch_tokens: int) -> int:
        """Sequences of a batch that a worker gets."""
        shares = self.config.promote.parallelism.data_ranks(self.config.promote.workers)
        return -(-batch_tokens // (shares * self.plan.model.context_length))
