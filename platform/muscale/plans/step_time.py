"""Prediction of a training step's time from shape, layout and links, without a device.

A device's time for a pass is the time of its matrix products and attention, each at the share of the peak that it reaches, and
the time of the bytes that all other operations move. Weights are gathered in the precision of the products and gradients reduced
in fp32 (FSDP2's mixed precision), block by block, while the neighbouring block is computed. The part of a collective that takes
longer than that block is exposed, as are the first and the last collective of a pass. Tensor parallelism gathers and scatters
activations around attention and MLP (sequence parallelism, Korthikanti et al., arXiv 2205.05198, section 4.2.2), and
context parallelism gathers keys and values; all of this is exposed. Collectives are rings.

A pipeline's step lasts as long as its slowest rank computes, plus the time in which the other ranks fill and drain the pipeline
(`idle_seconds`). Its ranks reduce gradients once, after the last micro-batch, which nothing hides. Under "gpipe" and "1f1b" torch
waits for each transfer between stages; under the other schedules only those of the fill and drain are exposed.

In a mixture of experts, products are those of the experts that a token passes, while collectives and the optimizer move all of them.
Groups of rows are assumed to reach the share of the peak that large products reach; small groups reach less (not measured).
Devices that share out experts wait for the fullest of them, whose experts get `fullest` times the mean rows. Rows travel to the
experts and back, forward and backward, and again where a block is recomputed; nothing hides this. The host then waits for the number
of rows, so a forward pass gathers experts when it needs them, and nothing hides that either.

The model leaves out the input pipeline, hosts that are slower than their devices, and faults. `tests/benchmarks/step_time.py`
compares the prediction with published runs; tests/benchmarks/RESULTS.md has the rows ("The predicted step and published runs").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import NamedTuple

from muscale.settings.parallelism import Parallelism, RankGrid
from proxy_models.architecture.families import family_of
from proxy_models.architecture.member import ExpertSizes, Member, StepSizes
from proxy_models.architecture.memory import Precision, fullest
from proxy_models.architecture.pipeline_counts import PipelineShare, blocks_of_ranks, has_last_stage, idle_seconds
from scaling import Accelerator, accelerator

LINK_SHARE = 0.8
"""Share of a link's bandwidth that a large collective reaches (assumed)."""
RING_SECONDS, NODE_HOP_SECONDS, NETWORK_HOP_SECONDS = 8.4e-6, 3.4e-6, 14e-6
"""Latency of a ring, and of one hop by NVLink and by network: from NCCL's own model (src/graph/tuning.cc, protocol Simple)."""
MOVED_SHARE = 0.8
"""Share of the memory bandwidth that operations other than products reach (assumed)."""
EAGER_MOVES = 3.4
"""Ratio of the bytes that such operations move without compilation to those with it: from torchtitan's 8B on 8 H100s, 5,762 tokens per
second eager and 6,667 compiled (benchmarks/llama3_h100_202412_torchtitan.md, table 1)."""
CONTENTION = 0.4
"""Seconds that products lose for each second of a concurrent collective, since both use the device's units, memory and power:
from llm-foundry's 13B on 64 and 70B on 32 H100s with short passes."""
_BACKWARD_PRODUCTS, _BACKWARD_ATTENTION, _BACKWARD_MOVES = 2.0, 2.5, 2.0
"""Ratios of the backward to the forward pass; attention has five products instead of two (Dao, arXiv 2307.08691, section 3.1)."""
_ROW_MOVES = 4  # reads and writes of rows that are sorted by a device's experts and back
_LOGIT_MOVES = 6  # reads and writes of the fp32 logits in the loss and its gradient
_STATE_BYTES = 32  # bytes of a parameter in an AdamW step: weight and two moments read and written, gradient read twice
_FP32 = 4
_PRODUCT_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bandwidths of a device and of its links, in bytes per second, and the shares of its peak that it reaches.

    Attributes:
        memory: Bandwidth of the device's memory.
        node: Bandwidth to the other devices of its node, in one direction.
        network: Bandwidth to other nodes, for each device, in one direction.
        fp32_flops: Peak of fp32 products, with TF32 off.
        products, attention: Shares of the peak that large products and fused attention reach.
    """

    memory: float
    node: float
    network: float
    fp32_flops: float
    products: float
    attention: float
    node_devices: int = 8


_H100 = Links(memory=3.35e12, node=450e9, network=50e9, fp32_flops=67e12, products=0.69, attention=0.35)
_A100 = Links(memory=2.039e12, node=300e9, network=25e9, fp32_flops=19.5e12, products=0.72, attention=0.6)
LINKS: Mapping[str, Links] = {
    "H100 SXM": _H100,
    "H200": replace(_H100, memory=4.8e12),
    "A100 80GB": _A100,
    "A100 40GB": replace(_A100, memory=1.555e12),
}
"""Links by accelerator. NVIDIA's datasheets: memory, half of NVLink's 900 and 600 GB/s, fp32. Network: a 400 Gb/s (DGX
H100) or 200 Gb/s (DGX A100) adapter for each device. Attention: FlashAttention-2's 35 % on H100 (Shah et al., arXiv 2407.08608,
abstract) and 50–73 % on A100 (arXiv 2307.08691, abstract). Products: fitted to one published run of each device, llm-foundry's 7B on
8 H100s and torchtitan's 8B on 64 A100s."""


class _Traffic(NamedTuple):
    """Seconds of the collectives of weights and gradients in a step."""

    total: float
    exposed: float  # hidden by no computation
    contended: float  # lost by computation that hides collectives


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one step on each device.

    Attributes:
        workers: Number of devices.
        micro_batch: Most sequences of a pass on a device.
        batch_tokens: Tokens of a step, over all devices.
        device: Device or its name; its peak is used.
        links: Links of the device; None: from `LINKS`.
        precision: Precision of products and gathered weights.
        recomputed: Share of the products of blocks that the backward pass repeats; None: from the layout's checkpointing.
        attended: `attended_length` if attention stays within documents; None: `Member.attended`. The kernels for documents and
            windows are assumed to be as fast as the one for whole sequences.

    Raises:
        ValueError: If the workers do not form the layout, the device has no entry in `LINKS`, the model's family has no
            `step_sizes`, or for `expert_parallel` none of experts, or a pipeline has no such micro-batches.
    """

    model: Member
    parallelism: Parallelism
    _: KW_ONLY
    workers: int
    micro_batch: int
    batch_tokens: int
    device: Accelerator | str
    links: Links | None = None
    precision: Precision = "bf16"
    compiled: bool = True
    recomputed: float | None = None
    attended: float | None = None

    def __post_init__(self) -> None:
        _, sizes, _ = self._grid, self._sizes, self._passes
        if self.parallelism.expert_parallel > 1 and sizes.experts is None:
            raise ValueError(
                f"the family of {self.model} must have step_sizes with experts, from which the time of a step is predicted; got "
                f"expert_parallel = {self.parallelism.expert_parallel}"
            )

    @property
    def total(self) -> float:
        """Total seconds."""
        return self.products + self.optimizer + self._waits

    @cached_property
    def products(self) -> float:
        """Matrix products, attention and all other computation of a device (mean), slowed by concurrent collectives."""
        blocks = self.model.n_layers * sum(self._block)
        return self._passes * (blocks + self._readout) / self._grid.stages + self._traffic.contended

    @cached_property
    def tensor(self) -> float:
        """Collectives of tensor parallelism."""
        # A block has four calls forward, four backward and four recomputed; embedding sum and last norm have one each way.
        calls = 4 * (2 + (self.parallelism.checkpointing != "none")) * self.model.n_layers + 4
        return self._passes * calls * self._call / self._grid.stages

    @cached_property
    def context(self) -> float:
        """Collectives of context parallelism: keys and values forward, again if recomputed, and their gradients."""
        calls = (2 + (self.parallelism.checkpointing != "none")) * self.model.n_layers
        return self._passes * calls * self._gather_of_keys / self._grid.stages

    @cached_property
    def experts(self) -> float:
        """Exchanges of rows between the ranks that share out experts: two forward, two backward, two again if recomputed."""
        if (shared := self._shared_out) is None:
            return 0.0
        n, links = self.parallelism.expert_parallel, self._links
        near = min(n, self._on_node)
        size = fullest(n) * self._bytes * self._tokens * shared.width / LINK_SHARE
        seconds = RING_SECONDS + max(
            NODE_HOP_SECONDS + size * (near - 1) / n / links.node,
            (NETWORK_HOP_SECONDS + size * (n - near) / n / links.network) if n > near else 0.0,
        )
        return self._passes * shared.blocks * 2 * (2 + (self.parallelism.checkpointing != "none")) * seconds

    @property
    def exposed(self) -> float:
        """Collectives of weights and gradients that no computation hides."""
        return self._traffic.exposed

    @property
    def communication(self) -> float:
        """All collectives of weights and gradients, hidden or not; not part of the sum."""
        return self._traffic.total

    @property
    def optimizer(self) -> float:
        """Update of the weights."""
        stages, _, shards, tensor = self._grid
        apart = shared.blocks * shared.params if (shared := self._shared_out) else 0
        state = (self.model.n_params_total - apart) / stages / tensor / shards
        state += apart / self.parallelism.expert_parallel / self._expert_grid.shards
        return _STATE_BYTES * state / (self._links.memory * MOVED_SHARE)

    @property
    def sends(self) -> float:
        """Activations and gradients that stages of a pipeline pass on while they compute nothing."""
        if (pipeline := self._pipeline) is None:
            return 0.0
        within = self.workers <= self._links.node_devices
        latency, bandwidth = (
            (NODE_HOP_SECONDS, self._links.node) if within else (NETWORK_HOP_SECONDS, self._links.network)
        )
        size = self._bytes * self._tokens * self.model.d_model
        waits = pipeline.n_stages - 1 + (self._passes if pipeline.n_stages == pipeline.ranks else 0)
        return 2 * waits * (latency + size / (LINK_SHARE * bandwidth))

    @cached_property
    def bubble(self) -> float:
        """Time that a device (mean) waits while its pipeline fills and drains, and for slower stages."""
        if (pipeline := self._pipeline) is None:
            return 0.0
        schedule, ranks, calls = pipeline.schedule, pipeline.ranks, 4 * self._call + self._gather_of_keys
        forward, backward = self._block
        forward, backward = forward + calls, backward + calls * (1 + (self.parallelism.checkpointing != "none"))
        seconds, idle, of_blocks = [], [], self.model.block_flops
        mean = sum(of_blocks) / self.model.n_layers
        for rank, stages in enumerate(blocks_of_ranks(self.model, schedule, ranks)):
            n = sum(of_blocks[number] for stage in stages for number in stage) / mean
            readout = self._readout / 3 if has_last_stage(schedule, rank, ranks) else 0.0
            passes = n * forward + readout, n * backward + 2 * readout
            seconds.append(sum(passes))
            idle.append(idle_seconds(schedule, *passes, n * self._weight_products + readout))
        slowest = max(range(ranks), key=seconds.__getitem__)
        return self._passes * (seconds[slowest] - sum(seconds) / ranks) + sum(idle) - idle[slowest]

    @property
    def tokens_per_second(self) -> float:
        """Throughput of one device."""
        return self.batch_tokens / self.workers / self.total

    @property
    def mfu(self) -> float:
        """Share of the peak, by `train_flops_within`."""
        return self.tokens_per_second * self.model.train_flops_within(self.attended) / self._peak

    @property
    def exposed_share(self) -> float:
        """Share of the step in which devices wait for one another, the bubble of a pipeline included."""
        return self._waits / self.total

    @property
    def bubble_share(self) -> float:
        """Share of the step in which devices wait for other stages of their pipeline."""
        return self.bubble / self.total

    def __str__(self) -> str:
        bubble = f", {self.bubble_share:.0%} in the pipeline's bubble" if self._pipeline else ""
        return (
            f"{self.total:.3g} s a step, {self.tokens_per_second:,.0f} tokens per second and device, MFU {self.mfu:.0%}, "
            f"{self.exposed_share - self.bubble_share:.0%} in exposed communication{bubble}"
        )

    @cached_property
    def _sizes(self) -> StepSizes:
        if (sizes := family_of(self.model).step_sizes(self.model)) is None:
            raise ValueError(
                f"the family of {self.model} must have step_sizes, from which the time of a step is predicted"
            )
        return sizes

    @cached_property
    def _links(self) -> Links:
        return self.links or links_of(accelerator(self.device))

    @property
    def _waits(self) -> float:
        """Seconds in which devices wait for one another."""
        return self.tensor + self.context + self.experts + self.exposed + self.sends + self.bubble

    @property
    def _shared_out(self) -> ExpertSizes | None:
        """Sizes of experts if ranks share these out."""
        return self._sizes.experts if self.parallelism.expert_parallel > 1 else None

    @property
    def _expert_grid(self) -> RankGrid:
        """Replicas and shards of a rank's experts; its `tensor` is the distance between ranks that have the same experts."""
        n, (stages, replicas, shards, _) = self.parallelism.expert_parallel, self._grid
        return RankGrid(stages, replicas // n if shards == 1 else replicas, max(1, shards // n), n)

    @property
    def _on_node(self) -> int:
        return min(self.workers, self._links.node_devices)

    @cached_property
    def _grid(self) -> RankGrid:
        return self.parallelism.grid(self.workers, node_ranks=self._on_node)

    @property
    def _bytes(self) -> int:
        return _PRODUCT_BYTES[self.precision]

    @property
    def _peak(self) -> float:
        return accelerator(self.device).peak_flops["bf16"] if self._bytes == 2 else self._links.fp32_flops

    @cached_property
    def _share(self) -> int:
        """Sequences of a batch that a rank gets."""
        return math.ceil(self.batch_tokens / self.model.context_length / self.parallelism.data_ranks(self.workers))

    @cached_property
    def _pipeline(self) -> PipelineShare | None:
        return self.parallelism.pipeline(self._share)

    @cached_property
    def _passes(self) -> int:
        if self._pipeline:
            return self._pipeline.micro_batches(self.micro_batch)
        return math.ceil(self._share / self.micro_batch)

    @property
    def _sequences(self) -> float:
        """Sequences of a pass (mean): the last has fewer if the micro-batch does not divide the share."""
        return self._share / self._passes

    @cached_property
    def _tokens(self) -> float:
        """Tokens of a pass on each of the ranks that share its products and sequences."""
        return self._sequences * self.model.context_length / self._grid.tensor / self.parallelism.context_parallel

    @cached_property
    def _call(self) -> float:
        """Seconds of a collective of tensor parallelism."""
        tensor = self._grid.tensor
        return self._collective(self._bytes * self._tokens * tensor * self.model.d_model, tensor, 1)

    @cached_property
    def _gather_of_keys(self) -> float:
        """Seconds of a collective of context parallelism."""
        tensor, positions = self._grid.tensor, self._sequences * self.model.context_length
        keys = 2 * self._sizes.key_width / tensor * self._bytes * positions
        return self._collective(keys, self.parallelism.context_parallel, tensor)

    @cached_property
    def _readout(self) -> float:
        """Seconds of the readout and loss of a pass, forward and backward."""
        vocab_size = self.model.vocab_size
        moved = _LOGIT_MOVES * _FP32 * vocab_size * self._tokens
        return self._computing(6 * vocab_size * self.model.d_model * self._tokens, 0.0, moved)

    @property
    def _weight_products(self) -> float:
        """Seconds of the products of a block's backward pass that compute gradients of weights."""
        return self._computing(2 * self._sizes.block_entries * self._tokens, 0.0, 0.0)

    @cached_property
    def _block(self) -> tuple[float, float]:
        """Seconds of a block's forward and backward pass."""
        model, sizes, checkpointing = self.model, self._sizes, self.parallelism.checkpointing
        in_full = checkpointing == "full"
        again = float(in_full) if self.recomputed is None else self.recomputed
        products = 2 * sizes.block_entries * self._tokens
        length = model.attended if self.attended is None else self.attended
        attention = 2 * length * sizes.attention_width * self._tokens  # the causal half
        moved = sizes.block_moves
        if (shared := self._shared_out) is not None:
            part = shared.blocks / model.n_layers * self._tokens
            more = fullest(self.parallelism.expert_parallel)
            products += 2 * (more - 1) * shared.entries * part
            moved += _ROW_MOVES * more * shared.width * shared.blocks / model.n_layers
        is_compiled = self.compiled and self.parallelism.can_compile
        moved *= self._bytes * self._tokens * (1 if is_compiled else EAGER_MOVES)
        return self._computing(products, attention, moved), self._computing(
            products * (_BACKWARD_PRODUCTS + again),
            attention * (_BACKWARD_ATTENTION + in_full),
            moved * (_BACKWARD_MOVES + (checkpointing != "none")),
        )

    def _computing(self, products: float, attention: float, moved: float) -> float:
        links, peak = self._links, self._peak
        return (
            products / (peak * links.products)
            + attention / (peak * links.attention)
            + moved / (links.memory * MOVED_SHARE)
        )

    @cached_property
    def _traffic(self) -> _Traffic:
        model, again = self.model, self.parallelism.sharding in ("full", "hybrid")
        tables, layers = self._sizes.table_params, model.n_layers
        _, _, shards, tensor = self._grid
        block, outside = (model.n_params_total - tables) / layers / tensor, tables / tensor
        apart = 0.0
        if (shared := self._shared_out) is not None:
            block -= shared.blocks * shared.params / layers
            apart = shared.blocks * shared.params / layers / self.parallelism.expert_parallel
        if self._pipeline:
            return self._traffic_of_stages(self._pipeline, block, outside / 2, 1 + self._passes * again)
        forward, backward = self._block
        total = exposed = contended = 0.0
        for number in range(self._passes):
            gather, start = (
                self._collective(self._bytes * n, shards, tensor) if number == 0 or again else 0.0
                for n in (block, outside)
            )
            is_last = number == self._passes - 1
            reduction, end = (self._reduction(n, self._grid, is_last=is_last) for n in (block, outside))
            reduction += self._reduction(apart, self._expert_grid, is_last=is_last)
            behind = reduction + (gather if again else 0.0)
            alone = 0.0
            if number == 0 or again:
                alone = self._collective(self._bytes * apart, self._expert_grid.shards, self._expert_grid.tensor)
                behind += alone if again else 0.0
            total += layers * (gather + alone + behind) + start + end
            exposed += start + gather + layers * alone + behind + end
            for wanted, hiding in ((gather, forward), (behind, backward)):
                exposed += (layers - 1) * max(0.0, wanted - hiding)
                contended += (layers - 1) * CONTENTION * min(wanted, hiding)
        return _Traffic(total=total, exposed=exposed, contended=contended)

    def _traffic_of_stages(self, pipeline: PipelineShare, block: float, table: float, times: int) -> _Traffic:
        """Seconds of the collectives of a rank with one table: its blocks are gathered so many times, and reduced once."""
        of_ranks = blocks_of_ranks(self.model, pipeline.schedule, pipeline.ranks)
        layers = max(sum(map(len, stages)) for stages in of_ranks)
        gather, start = (
            self._collective(self._bytes * n, self._grid.shards, self._grid.tensor) for n in (block, table)
        )
        at_end = layers * self._reduction(block, self._grid, is_last=True) + self._reduction(
            table, self._grid, is_last=True
        )
        forward, _ = self._block
        hidden = times * (layers - 1)
        return _Traffic(
            total=times * layers * gather + start + at_end,
            exposed=gather + start + at_end + hidden * max(0.0, gather - forward),
            contended=hidden * CONTENTION * min(gather, forward),
        )

    def _reduction(self, n_params: float, grid: RankGrid, *, is_last: bool) -> float:
        """Seconds to reduce gradients over shards, and after the last pass over replicas."""
        _, replicas, shards, tensor = grid
        over_shards = self._collective(_FP32 * n_params, shards, tensor)
        if not is_last:
            return over_shards
        return over_shards + 2 * self._collective(_FP32 * n_params / shards, replicas, tensor * shards)

    def _collective(self, size: float, ranks: int, stride: int) -> float:
        """Seconds of a gather or scatter over ranks `stride` apart; neighbours share a node and its network adapters."""
        return _ring(size, ranks, max(1, min(ranks, self._on_node // stride)), self._links)


def links_of(device: Accelerator) -> Links:
    """Return the entry of `LINKS`; raise ValueError if there is no entry."""
    if device.name not in LINKS:
        raise ValueError(f"links are known for {', '.join(LINKS)}, got {device.name!r}")
    return LINKS[device.name]


def _ring(n_bytes: float, ranks: int, per_node: int, links: Links) -> float:
    """Seconds of a ring all-gather or reduce-scatter of `n_bytes` in total; the ring enters each node through all its adapters."""
    if ranks == 1 or n_bytes == 0:
        return 0.0
    nodes = math.ceil(ranks / per_node)
    bandwidth = links.node if nodes == 1 else min(links.node, per_node * links.network)
    latency = RING_SECONDS + (nodes - 1) * NETWORK_HOP_SECONDS + (ranks - nodes) * NODE_HOP_SECONDS
    return latency + n_bytes * (ranks - 1) / ranks / (LINK_SHARE * bandwidth)
