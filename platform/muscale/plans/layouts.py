"""The layout of a full run with the best predicted step time among those that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from muscale.plans.step_time import Links, StepTime, links_of, step_time
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import (
    MEMORY_SHARE,
    Checkpointing,
    MemoryEstimate,
    Precision,
    Sharding,
    largest_micro_batch,
    training_memory,
)
from scaling import Accelerator, accelerator

NEAR = 0.02
"""Relative difference of predicted step times below which the simpler layout is taken; the prediction is no finer."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout, its predicted step and its memory."""

    parallelism: Parallelism
    micro_batch: int
    step: StepTime
    memory: MemoryEstimate

    def __str__(self) -> str:
        """The keys of [promote], and what they give."""
        chosen = self.parallelism
        return (
            f'sharding = "{chosen.sharding}", tensor_parallel = {chosen.tensor_parallel}, micro_batch = {self.micro_batch}, '
            f'activation_checkpointing = "{chosen.checkpointing}": {self.step}, {self.memory.total / 2**30:.3g} GiB'
        )


def fitting_layouts(
    model: ModelConfig,
    *,
    workers: int,
    batch_tokens: int,
    device: Accelerator | str,
    links: Links | None = None,
    smallest_batch_tokens: int | None = None,
    optimizer: str = "adamw",
    precision: Precision = "bf16",
    compiled: bool = True,
) -> list[Layout]:
    """All layouts that fit, each with its largest micro-batch, the fastest first.

    Args:
        model: The shape.
        workers: Devices.
        batch_tokens: Of a step, over all devices.
        device: Or its name.
        links: Of the device; None: by its name.
        smallest_batch_tokens: At the beginning of a ramp; None: `batch_tokens`.
        optimizer, precision, compiled: Of the run.

    Raises:
        ValueError: If nothing is known of the device's links.
    """
    device = accelerator(device) if isinstance(device, str) else device
    links = links or links_of(device)
    limit = int(MEMORY_SHARE * device.memory_bytes)
    sequences = (smallest_batch_tokens or batch_tokens) // model.context_length
    found = []
    for parallelism in _candidates(model, workers, sequences, links.node_devices):
        replicas, shards, _ = parallelism.grid(workers, node_ranks=min(workers, links.node_devices))
        state: dict[str, Any] = {
            "precision": precision,
            "optimizer": optimizer,
            "sharding": parallelism.sharding,
            "world_size": replicas if parallelism.sharding == "none" else shards,
            "tensor_parallel": parallelism.tensor_parallel,
            "checkpointing": parallelism.checkpointing,
        }
        micro_batch = largest_micro_batch(model, -(-sequences // (replicas * shards)), limit=limit, **state)
        memory = training_memory(model, micro_batch=micro_batch, **state)
        if memory.total > limit:
            continue
        step = step_time(
            model,
            parallelism,
            workers=workers,
            micro_batch=micro_batch,
            batch_tokens=batch_tokens,
            device=device,
            links=links,
            precision=precision,
            compiled=compiled,
        )
        found.append(Layout(parallelism=parallelism, micro_batch=micro_batch, step=step, memory=memory))
    return sorted(found, key=lambda layout: layout.step.total)


def propose_layout(layouts: list[Layout]) -> Layout | None:
    """The simplest of those within 2 % of the fastest: less tensor parallelism, checkpointing and sharding; None where none fits."""
    near = [layout for layout in layouts if layout.step.total <= (1 + NEAR) * layouts[0].step.total]
    return min(near, key=lambda layout: _complexity(layout.parallelism), default=None)


def _candidates(model: ModelConfig, workers: int, sequences: int, node_devices: int) -> Iterator[Parallelism]:
    """Layouts that so many workers form and the model can be divided into; hybrid only over nodes."""
    degrees = [degree for degree in range(1, workers + 1) if workers % degree == 0 and model.n_kv_heads % degree == 0]
    for sharding, degree, checkpointing in product(get_args(Sharding), degrees, get_args(Checkpointing)):
        if sharding == "hybrid" and (workers <= node_devices or degree > node_devices):
            continue
        parallelism = Parallelism(sharding=sharding, tensor_parallel=degree, checkpointing=checkpointing)
        errors = (
            *parallelism.layout_errors(model),
            *parallelism.unfit(workers, sequences=sequences, node_ranks=node_devices),
        )
        if not errors:
            yield parallelism


def _complexity(parallelism: Parallelism) -> tuple[int, int, int]:
    return (
        parallelism.tensor_parallel,
        get_args(Checkpointing).index(parallelism.checkpointing),
        get_args(Sharding).index(parallelism.sharding),
    )
