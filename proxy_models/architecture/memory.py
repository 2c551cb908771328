"""Memory that training takes on each device: kinds of sharding and checkpointing, the estimate, and what holds for any model."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from typing import Literal

from proxy_models.architecture.member import Member
from proxy_models.architecture.pipeline_counts import PipelineShare

Precision = Literal["fp32", "bf16", "fp16"]
"""Precision of the residual stream and of all products; weights and moments are always fp32, and fp16 scales the loss."""
Sharding = Literal["none", "zero2", "full", "hybrid"]
"""State sharded across devices. "none": nothing. "zero2": optimizer state, gradients and parameters, but parameters are gathered for
the duration of a step (ZeRO-2). "full": parameters too (ZeRO-3, FSDP). "hybrid": "full" inside a node, copied over nodes.
Rajbhandari et al., arXiv 1910.02054, section 5."""
MIN_UNIT_PARAMS = 1_000_000
"""Smallest number of parameters of a separately sharded unit. A smaller collective costs almost only latency: two gloo ranks at width
64 train 1.4 times as fast without a unit per block."""
Checkpointing = Literal["none", "selective", "full"]
"""Activations of a block that are recomputed in the backward pass; `recomputing` describes each kind."""
CHUNK_ENTRIES = 2**26
"""Largest number of logits in memory at a time: 256 MiB in fp32. `F.cross_entropy` computes up to this number without chunks."""
MEMORY_SHARE = 0.85
"""Share of a device's memory that an estimate may fill; the allocator and communication buffers need the rest (assumed)."""
FP32 = 4
"""Bytes of a weight, a gradient and a moment."""
MOMENTS = {
    "adamw": (2, 2),
    "adam": (2, 2),
    "lion": (1, 1),
    "muon": (1, 2),
    "adafactor": (0, 0),
    "lamb": (2, 2),
    "soap": (11, 2),
}
"""Numbers of optimizer state per entry of the blocks' matrices and per other parameter, which Muon and SOAP leave to AdamW.
`DecoderPart.n_moments` counts Adafactor's and SOAP's; 11 bounds SOAP's for matrices up to four times as long as wide."""
MAX_ROTATED_DIM = 10_000
"""Largest side of a matrix for which SOAP has a factor and an eigenbasis; its authors' default."""


TOGETHER = 2**22
"""Numbers in the larger factors of the matrices that SOAP computes together. Larger products keep a GPU busy by themselves (assumed),
and what a step makes would grow with the number of matrices."""


def fullest(ranks: int) -> float:
    """Return the rows of the fullest of the ranks that share out experts, over the mean.

    Fitted by eye to short trainings here with the balancing bias at its default, after their first quarter: of 2, 4 and 8 ranks, the
    fullest of a block had on average 1.1 to 1.3, 1.2 to 1.6 and 1.4 to 2.2 times the mean, and in the worst step 1.2 to 1.35, 1.4 to
    1.7 and 1.5 to 2.2 times over all blocks (tests/benchmarks/RESULTS.md). Long trainings are balanced better.
    """
    return float(ranks ** (1 / 3))


def is_chunked(n_positions: int, vocab_size: int) -> bool:
    """Return True if these logits are too many to hold at once."""
    return n_positions * vocab_size > CHUNK_ENTRIES


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on each device at the peak of a step, in a pass that adds to the gradients of earlier passes.

    Attributes:
        parameters: Weights that the device keeps.
        gathered: Weights of two units at a time: a block and the next block, or the readout; a tied table and positions stay from
            the forward pass to the end of the backward pass. All weights under "none" and "zero2", since FSDP2 computes with a
            copy. On one device, the low-precision copies that the backward pass needs. In a pipeline, all weights of its stages.
        gradients: Gradients that the device keeps; in a pipeline they are not sharded before the end of a step, and a peak before the
            first backward pass has none.
        optimizer: Moments that the device keeps.
        reduced: Gradients of whole units before reduction, and the fp32 buffer for the reduction.
        activations: Activations that blocks keep for the backward pass of one micro-batch, and the peak's temporary tensors. In a
            pipeline, those of all micro-batches in flight, and buffers to receive activations and gradients of every micro-batch.
    """

    parameters: int
    gathered: int
    gradients: int
    optimizer: int
    reduced: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all fields; the allocator's fragments and NCCL's buffers come on top."""
        return sum(getattr(self, name) for name in self.__dataclass_fields__)

    def __str__(self) -> str:
        """Return a line of all fields in gibibytes."""
        parts = ", ".join(f"{name} {getattr(self, name) / 2**30:.3g}" for name in self.__dataclass_fields__)
        return f"{self.total / 2**30:.3g} GiB a device: {parts}"


def least_memory(model: Member, optimizer: str, *, sharding: Sharding, world_size: int, stages: int = 1) -> int:
    """Return a lower bound of the bytes on each device for any model: weights, gradients and the fewest possible moments.

    Args:
        model, optimizer: As for `state_bytes`.
        sharding, world_size: As for `training_memory`.
        stages: Devices of a pipeline; gradients are sharded only without one.
    """
    share, numbers = 1 if sharding == "none" else world_size, 2 + min(MOMENTS[optimizer])
    if stages > 1:
        return FP32 * (model.n_params_total + (numbers - 1) * model.n_params_total // share) // stages
    return FP32 * numbers * model.n_params_total // share


def least_work(costs: Sequence[int], n_ranks: int) -> list[int]:
    """Return an owner of each matrix: in descending cost, each matrix goes to the rank with the least work."""
    work, owners = [(0, rank) for rank in range(n_ranks)], [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        done, owners[number] = work[0]
        heapreplace(work, (done + costs[number], owners[number]))
    return owners


def rotated_numbers(rows: int, columns: int) -> int:
    """Return the numbers of SOAP's state of a matrix: two moments, and a factor and an eigenbasis of each side that has them."""
    return 2 * (rows * columns + sum(side**2 for side in (rows, columns) if side <= MAX_ROTATED_DIM))


def rotated_together(rows: int, columns: int) -> int:
    """Return the number of matrices of this shape that SOAP computes together."""
    return max(1, TOGETHER // max(rows, columns) ** 2)


def most_rotated(matrices: Mapping[tuple[int, int], int], n_owners: int) -> tuple[int, int]:
    """Return the numbers of SOAP's state, and the entries, of as many matrices of each shape on the rank that owns most."""
    shapes = [shape for shape, count in matrices.items() for _ in range(count)]
    costs = [rotated_numbers(*shape) for shape in shapes]
    numbers, entries = Counter[int](), Counter[int]()
    for owner, cost, (rows, columns) in zip(least_work(costs, n_owners), costs, shapes, strict=True):
        numbers[owner] += cost
        entries[owner] += rows * columns
    return max(numbers.values(), default=0), max(entries.values(), default=0)


def numbers_in_rotation(rows: int, columns: int, count: int) -> int:
    """Return the numbers of the tensors that SOAP makes at a time for `count` matrices that it computes together.

    They are the larger of two moments: the update before its last rotation, and the renewal of the larger side's eigenbasis.
    """
    factor = max((side**2 for side in (rows, columns) if side <= MAX_ROTATED_DIM), default=0)
    stacked = count > 1
    return count * max((3 + stacked) * rows * columns, (1 + stacked) * rows * columns + 4 * factor)


def largest_micro_batch(
    estimate: Callable[..., MemoryEstimate], share: int, *, limit: int, pipeline: PipelineShare | None = None
) -> int:
    """Return the largest divisor of a device's `share` of a batch whose `estimate(micro_batch=…)` is at most `limit`, or the least.

    In a `pipeline`, only the divisors that `PipelineShare.sizes` of this share has are considered.

    Raises:
        ValueError: As `PipelineShare.sizes`, and as the estimate.
    """
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    sizes = replace(pipeline, sequences=share).sizes if pipeline else divisors
    n_fitting = bisect_right(sizes, limit, key=lambda size: estimate(micro_batch=size).total)
    return sizes[max(n_fitting, 1) - 1]
