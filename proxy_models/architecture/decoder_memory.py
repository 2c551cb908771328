"""Memory that training or evaluating a decoder takes on each device.

Weights, gradients and moments are fp32, whatever the model computes in; weights are gathered, or copied, in the model's precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder_part import DecoderPart, Moment, of_blocks
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import (
    FP32,
    MOMENTS,
    Checkpointing,
    MemoryEstimate,
    Precision,
    Sharding,
    largest_micro_batch,
)
from proxy_models.architecture.pipeline_counts import PipelineShare, blocks_of_ranks, has_last_stage, in_flight
from proxy_models.architecture.stage_layout import PipelineSchedule

KEPT_APART: Mapping[PipelineSchedule, float] = {"zero_bubble": 1.7, "zero_bubble_v": 1.7, "dualpipe_v": 1.4}
"""Bytes that schedules of `SPLIT_BACKWARD` keep, over the activations in flight: gradients of what blocks compute also stay until
those of the weights follow. Upper bounds of what was traced (tests/benchmarks/RESULTS.md)."""


def training_memory(
    config: ModelConfig,
    *,
    micro_batch: int,
    precision: Precision = "fp32",
    optimizer: str = "adamw",
    sharding: Sharding = "none",
    world_size: int = 1,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    checkpointing: Checkpointing = "none",
    compiled: bool = False,
    pipeline: PipelineShare | None = None,
) -> MemoryEstimate:
    """Estimate the memory of training on each device; in a pipeline, on the device that needs the most.

    Args:
        config: The model.
        micro_batch: Sequences that a device takes at once.
        precision: Precision in which the model computes.
        optimizer: One of `OptimizerName`.
        sharding: State sharded across the devices.
        world_size: Devices that each take a share of the batch; for "hybrid", the devices of one copy.
        tensor_parallel: Devices that share each product; `world_size` counts such a group once.
        context_parallel: Devices that share each sequence; `world_size` counts each of them.
        expert_parallel: Devices that share out the experts of each block; `world_size` counts each of them. The estimate is that of
            the device whose experts get the most rows, `decoder_part.fullest` times the mean.
        checkpointing: Activations that are recomputed, one block at a time.
        compiled: Whether blocks are compiled and so recompute the activation of a gated MLP; False is an upper bound.
        pipeline: The pipeline of which a device has one or two stages; `world_size` counts the devices with the same stages.

    Raises:
        ValueError: If a number is below 1, the optimizer is unknown, or the pipeline has no such micro-batches or stages.
    """
    numbers = {
        "micro_batch": micro_batch,
        "world_size": world_size,
        "tensor_parallel": tensor_parallel,
        "context_parallel": context_parallel,
        "expert_parallel": expert_parallel,
    }
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if optimizer not in MOMENTS:
        raise ValueError(f"optimizer must be one of {', '.join(MOMENTS)}, got {optimizer!r}")
    share, n_owners = 1 if sharding == "none" else world_size, world_size * tensor_parallel
    if pipeline:
        ranks = StageRank.all_of(config, precision, tensor_parallel, context_parallel, pipeline, shards=share)
        again = sharding in ("full", "hybrid")
        estimates = (
            rank.memory(micro_batch, optimizer, n_owners, checkpointing, compiled=compiled, again=again)
            for rank in ranks
        )
        return max(estimates, key=lambda estimate: estimate.total)
    part = DecoderPart(config, precision, tensor_parallel, context_parallel, expert_ranks=expert_parallel, shards=share)
    is_alone, whole = world_size * tensor_parallel == 1, sharding in ("none", "zero2")
    buffers = part.copies(checkpointing) if is_alone else part.gathered(whole=whole)
    moments = part.moments(micro_batch, buffers, checkpointing, compiled=compiled)
    peak = max(*moments, Moment(0, 0, FP32 * part.n_in_step(optimizer, n_owners)), key=sum)
    return MemoryEstimate(
        parameters=FP32 * part.n_held,
        gathered=peak.gathered,
        gradients=FP32 * part.n_held,
        optimizer=FP32 * part.n_moments(optimizer, n_owners),
        reduced=peak.reduced,
        activations=peak.activations,
    )


def state_bytes(model: Member, optimizer: str) -> int:
    """Return the bytes of a whole model's weights and moments, or an upper bound; raise ValueError if the optimizer is unknown."""
    if isinstance(model, ModelConfig):
        estimate = training_memory(model, micro_batch=1, optimizer=optimizer)
        return estimate.parameters + estimate.optimizer
    if optimizer not in MOMENTS:
        raise ValueError(f"optimizer must be one of {', '.join(MOMENTS)}, got {optimizer!r}")
    return FP32 * (1 + max(MOMENTS[optimizer])) * model.n_params_total


def activation_bytes(
    config: ModelConfig,
    micro_batch: int,
    precision: Precision = "fp32",
    checkpointing: Checkpointing = "none",
    *,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    compiled: bool = False,
) -> int:
    """Return the bytes that autograd keeps for the backward pass of `micro_batch` sequences.

    Each device that shares products keeps its own heads and columns of the MLP, its own positions of the residual stream,
    and all positions of the matrices' inputs. Logits of such devices are always chunked, and chunked logits are not kept.
    """
    part = DecoderPart(config, precision, tensor_parallel, context_parallel, expert_ranks=expert_parallel)
    n_positions = micro_batch * part.own_positions
    blocks = part.kept_by_blocks(checkpointing, compiled=compiled)
    return n_positions * (blocks + part.kept_by_head(n_positions)) + part.bias_bytes


@dataclass(frozen=True)
class StageRank:
    """A device of a pipeline: the weights of all its stages, and what is specific to each stage.

    FSDP2 keeps a stage's weights gathered, under "full" and "hybrid" from a backward pass to the next forward pass. It adds up
    whole gradients in fp32, which are reduced at the end of the step. torch makes a buffer for each micro-batch that a stage
    receives, activations and gradients apart.

    Attributes:
        blocks: Numbers of blocks of the device's stages, without and with experts if the model has any.
    """

    part: DecoderPart
    pipeline: PipelineShare
    rank: int
    blocks: tuple[tuple[int, int], ...]

    @classmethod
    def all_of(
        cls,
        config: ModelConfig,
        precision: Precision,
        tensor_parallel: int,
        context_parallel: int,
        pipeline: PipelineShare,
        *,
        shards: int,
    ) -> Iterator[StageRank]:
        """Generate the devices of a pipeline that may need the most: of equal neighbours the outer two."""
        schedule, ranks = pipeline.schedule, pipeline.ranks

        def kinds(blocks: range) -> tuple[int, int]:
            n_sparse = sum(map(config.is_sparse, blocks))
            return len(blocks) - n_sparse, n_sparse

        shapes = [
            (tuple(map(kinds, stages)), rank == 0, has_last_stage(schedule, rank, ranks))
            for rank, stages in enumerate(blocks_of_ranks(config, schedule, ranks))
        ]
        for rank, shape in enumerate(shapes):
            if 0 < rank < ranks - 1 and shapes[rank - 1] == shape == shapes[rank + 1]:
                continue
            blocks, is_first, is_last = shape
            of_rank = of_blocks(config, *map(sum, zip(*blocks, strict=True)))
            part = DecoderPart(of_rank, precision, tensor_parallel, context_parallel, is_first, is_last, shards=shards)
            yield cls(part, pipeline, rank, blocks)

    def memory(
        self,
        micro_batch: int,
        optimizer: str,
        n_owners: int,
        checkpointing: Checkpointing,
        *,
        compiled: bool,
        again: bool,
    ) -> MemoryEstimate:
        """Return the device's estimate; `again`: each forward pass gathers weights again.

        `n_owners` is as for `DecoderPart.n_moments`.
        """
        part = self.part
        moments = self._moments(micro_batch, checkpointing, compiled=compiled, again=again)
        in_step = Moment(0, 0, FP32 * part.n_in_step(optimizer, n_owners))
        moments.append((FP32 * part.n_held, in_step))
        gradients, peak = max(moments, key=lambda moment: moment[0] + sum(moment[1]))
        return MemoryEstimate(
            parameters=FP32 * part.n_held,
            gathered=peak.gathered,
            gradients=gradients,
            optimizer=FP32 * part.n_moments(optimizer, n_owners),
            reduced=peak.reduced,
            activations=peak.activations + self._at_edges(self.pipeline.sequences),
        )

    def _at_edges(self, sequences: int) -> int:
        """Bytes of what stages receive for so many sequences: activations except in the first stage, gradients except in the last.

        An evaluation receives no gradients, but torch keeps until its end what all stages except the last have sent.
        """
        edges = 2 * len(self.blocks) - self.part.has_embedding - self.part.has_readout
        return edges * sequences * self._stream

    def evaluating(self, sequences: int, at_work: int) -> int:
        """Bytes of an evaluation with a micro-batch of `sequences` for each rank of the pipeline.

        The weights are gathered, with a pass `at_work`, or while the last unit arrives and the buffer of another stays.
        """
        part, unit = self.part, self.largest_unit
        arriving = part.compute * (2 * unit + part.put_together)
        weights = part.compute * part.n_params + max(part.compute * unit + at_work, arriving)
        return weights + self._at_edges(self.pipeline.ranks * sequences)

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest unit that is gathered and reduced by itself."""
        return max(self.part.block, self.part.table, self.part.embedding)

    @property
    def _stream(self) -> int:
        """Bytes of the device's residual stream of a sequence."""
        part = self.part
        return part.own_positions * (part.compute * part.config.d_model // part.ranks)

    def _moments(
        self, micro_batch: int, checkpointing: Checkpointing, *, compiled: bool, again: bool
    ) -> list[tuple[int, Moment]]:
        """Return the moments of a step that may be its peak, with the bytes of gradients, without what `_at_edges` counts."""
        part, number = self.part, self.pipeline.micro_batches(micro_batch)
        size = self.pipeline.sequences // number
        n_positions, stream = size * part.own_positions, size * self._stream
        of_token = part.kept_by_block(checkpointing, compiled=compiled)
        kept, in_block = n_positions * of_token, n_positions * part.in_block(of_token, checkpointing)
        last, of_stages = len(self.blocks) - 1, []
        n_blocks = [sum(of_stage) for of_stage in self.blocks]
        of_dense = part.dense.kept_by_block(checkpointing, compiled=compiled) if part.dense else of_token
        for stage, (n_dense, n_sparse) in enumerate(self.blocks):
            of_blocks = n_dense * of_dense + n_sparse * of_token
            receives = not (part.has_embedding and stage == 0)  # its input, a buffer, is the first that its block keeps
            of_head = n_positions * part.kept_by_head(n_positions) if part.has_readout and stage == last else stream
            of_stages.append(n_positions * of_blocks + of_head - receives * stream)
        whole, block = part.compute * part.n_params, part.compute * part.block
        n_dense, n_sparse = min(self.blocks, key=sum)
        dense = part.compute * part.dense.block if part.dense else block
        bytes_of_blocks = [dense] * n_dense + [block] * n_sparse
        gathered = whole - again * sum(bytes_of_blocks[:-2])  # after a stage's forward pass
        late = part.compute * part.largest_matrix  # gradient of the MLP's last matrix
        apart = KEPT_APART.get(self.pipeline.schedule, 1.0)
        # At the end of a step FSDP2 copies gradients into a buffer for their reduction.
        reducing = FP32 * (self.largest_unit + part.reordered)
        ending = Moment(whole - part.compute * self.largest_unit, reducing, part.bias_bytes)
        params = self._params_of_stages
        in_time = in_flight(self.pipeline.schedule, self.rank, self.pipeline.ranks, number)
        together = max(sum(map(mul, has_gradients, params)) for _, has_gradients in in_time)
        moments = [(FP32 * together, ending)]
        for in_stages, has_gradients in in_time:
            in_all = int(apart * (part.bias_bytes + sum(map(mul, in_stages, of_stages))))
            found = [
                Moment(gathered, late, in_all + in_block),
                Moment(gathered, block, in_all - kept + stream),
                Moment(whole, late, in_all + in_block - again * (max(n_blocks) - 1) * kept),
            ]
            if again:  # the second block of a stage arrives, while the first block's buffer stays
                arriving = part.n_params - part.n_last * part.block + 3 * part.block + part.put_together
                found.append(Moment(part.compute * arriving, 0, in_all - kept))
            if part.has_readout:
                forward, backward = part.in_loss(n_positions)
                found.append(Moment(gathered, 0, in_all + forward))
                found.append(Moment(gathered, FP32 * part.table, in_all + backward))
            gradients = FP32 * sum(map(mul, has_gradients, params))
            moments += [(gradients, moment) for moment in found]
        return moments

    @property
    def _params_of_stages(self) -> list[int]:
        """Parameters of each of the device's stages."""
        part = self.part
        dense = part.dense.block if part.dense else part.block
        found = [n_dense * dense + n_sparse * part.block for n_dense, n_sparse in self.blocks]
        if part.has_embedding:
            found[0] += part.embedding + part.positions
        found[-1] += part.n_params - sum(found)  # the readout and the last norm, if the device has them
        return found


def evaluation_memory(
    config: ModelConfig,
    sequences: int,
    training: MemoryEstimate,
    precision: Precision = "fp32",
    *,
    sharding: Sharding = "none",
    world_size: int = 1,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    pipeline: PipelineShare | None = None,
) -> int:
    """Return an upper bound of the bytes on each device during an evaluation within training: state without gradients, and a pass.

    The pass takes `sequences` at a time. FSDP2 gathers a unit into a buffer and copies the weights from it; the buffer stays until
    the next unit is gathered. The readout stays gathered from the first pass on, since no backward pass follows. In a pipeline, a
    stage's weights may all be gathered; the buffers of training are freed before.
    """
    held = training.parameters + training.optimizer
    share = 1 if sharding == "none" else world_size
    part = DecoderPart(config, precision, tensor_parallel, context_parallel, expert_ranks=expert_parallel, shards=share)
    n, table, block, experts = part.n_params, part.table, part.unit, part.block - part.unit
    stream = part.compute * config.d_model * sequences * part.own_positions // tensor_parallel
    shared = {
        "tensor_parallel": tensor_parallel,
        "context_parallel": context_parallel,
        "expert_parallel": expert_parallel,
    }
    at_work = evaluation_bytes(config, sequences, precision, **shared)
    if pipeline:
        ranks = StageRank.all_of(config, precision, tensor_parallel, context_parallel, pipeline, shards=share)
        most = max(rank.evaluating(sequences, at_work) for rank in ranks)
        return held + most + 2 * stream
    copied = part.put_together
    if world_size * tensor_parallel == 1:
        moments = [(max(table, part.largest_matrix) * (precision != "fp32"), at_work)]
    elif sharding in ("none", "zero2"):
        moments = [(n + max(table, block, experts), at_work)]
    else:
        moments = [
            (3 * table, stream),  # the readout once, the embedding twice
            # The readout, the embedding's buffer, the first block twice; then the first block's buffer, the second block twice.
            (2 * table + 2 * block + copied, 2 * stream),
            (table + 3 * block + copied, 2 * stream),
            (table + max(table, 2 * block + experts), at_work),
        ]
        if experts:  # gathered in the middle of a block, whose own buffer is freed then
            moments.append((table + block + 2 * experts + copied, at_work))
    return held + max(part.compute * weights + rest for weights, rest in moments)


def evaluation_bytes(
    config: ModelConfig,
    sequences: int,
    precision: Precision = "fp32",
    *,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
) -> int:
    """Return an upper bound of the bytes of a pass without gradients: all tensors of a block, the last norm and the loss."""
    block = of_blocks(config, *((0, 1) if config.n_experts else (1, 0)))
    one_block = activation_bytes(
        block,
        sequences,
        precision,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        expert_parallel=expert_parallel,
    )
    part = DecoderPart(config, precision, tensor_parallel, context_parallel)
    forward, _ = part.in_loss(sequences * part.own_positions)
    return one_block + forward


def fitting(
    config: ModelConfig, sequences: int, *, limit: int, precision: Precision, optimizer: str, ranks: int = 1
) -> tuple[int, Checkpointing]:
    """Return a training's micro-batch, and the weakest checkpointing whose estimate fits in `limit` bytes.

    `sequences` is the number on one device; with several `ranks` the state is sharded over as many devices.

    If nothing fits, return one sequence under full checkpointing, since the estimate may be too high.
    """
    kinds: tuple[Checkpointing, ...] = ("none", "selective", "full")
    for kind in kinds:
        of_device: dict[str, Any] = {"precision": precision, "optimizer": optimizer, "checkpointing": kind}
        if ranks > 1:
            of_device |= {"sharding": "full", "world_size": ranks}
        estimate = partial(training_memory, config, **of_device)
        size = largest_micro_batch(estimate, sequences, limit=limit)
        if estimate(micro_batch=size).total <= limit:
            return size, kind
    return 1, "full"
