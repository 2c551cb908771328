"""Memory that training a decoder takes on each device: parameters, gradients, optimizer state, activations.

Weights, gradients and moments are fp32, whatever the model computes in; weights are gathered, or copied, in the model's precision.
Activations are counted tensor by tensor, as autograd keeps them for the backward pass of `Decoder` (tests compare the count with
autograd's, in fp32 and bf16). Attention is assumed to be fused, so that its weights are never kept (Dao et al., arXiv 2205.14135).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, NamedTuple

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.member import Member
from proxy_models.architecture.pipeline_counts import PipelineShare, blocks_of_ranks, has_last_stage, in_flight
from proxy_models.architecture.stage_layout import SPLIT_BACKWARD

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
_FP32, _INT64 = 4, 8
_COMPUTE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOMENTS = {
    "adamw": (2, 2),
    "adam": (2, 2),
    "lion": (1, 1),
    "muon": (1, 2),
    "adafactor": (0, 0),
    "lamb": (2, 2),
    "soap": (11, 2),
}
"""Numbers of optimizer state per entry of the blocks' matrices and per other parameter, which Muon and SOAP leave to AdamW.
`_Part.n_moments` counts Adafactor's and SOAP's; 11 bounds SOAP's for matrices up to four times as long as wide."""
MAX_ROTATED_DIM = 10_000
"""Largest side of a matrix for which SOAP has a factor and an eigenbasis; its authors' default."""
LARGEST_FLASH_HEAD = 256
KEPT_APART = 1.7
"""Bytes that schedules of `SPLIT_BACKWARD` keep, over the activations in flight: gradients of what blocks compute also stay until
those of the weights follow. An upper bound; traced were 1.1 to 1.6 (tests/benchmarks/RESULTS.md)."""


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
        gradients: Gradients that the device keeps; in a pipeline they are not sharded before the end of a step.
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
    }
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if optimizer not in _MOMENTS:
        raise ValueError(f"optimizer must be one of {', '.join(_MOMENTS)}, got {optimizer!r}")
    share = 1 if sharding == "none" else world_size
    if pipeline:
        ranks = _StageRank.all_of(config, precision, tensor_parallel, pipeline)
        again = sharding in ("full", "hybrid")
        n_owners = world_size * tensor_parallel
        estimates = (
            rank.memory(micro_batch, optimizer, share, n_owners, checkpointing, compiled=compiled, again=again)
            for rank in ranks
        )
        return max(estimates, key=lambda estimate: estimate.total)
    part = _Part(config, precision, tensor_parallel, context_parallel)
    is_alone, whole = world_size * tensor_parallel == 1, sharding in ("none", "zero2")
    buffers = part.copies(checkpointing) if is_alone else part.gathered(share, whole=whole)
    peak = max(part.moments(micro_batch, buffers, checkpointing, compiled=compiled), key=sum)
    return MemoryEstimate(
        parameters=_FP32 * (part.n_params // share),
        gathered=peak.gathered,
        gradients=_FP32 * part.n_params // share,
        optimizer=_FP32 * part.n_moments(optimizer, share, world_size * tensor_parallel),
        reduced=peak.reduced,
        activations=peak.activations,
    )


def state_bytes(model: Member, optimizer: str) -> int:
    """Return the bytes of a whole model's weights and moments, or an upper bound; raise ValueError if the optimizer is unknown."""
    if isinstance(model, ModelConfig):
        estimate = training_memory(model, micro_batch=1, optimizer=optimizer)
        return estimate.parameters + estimate.optimizer
    if optimizer not in _MOMENTS:
        raise ValueError(f"optimizer must be one of {', '.join(_MOMENTS)}, got {optimizer!r}")
    return _FP32 * (1 + max(_MOMENTS[optimizer])) * model.n_params_total


def rotated_numbers(matrices: Mapping[tuple[int, int], int], n_owners: int) -> int:
    """Return the numbers of SOAP's state, on the rank that owns most, of as many matrices of each shape."""
    return sum(
        -(-count // n_owners)
        * 2
        * (rows * columns + sum(side**2 for side in (rows, columns) if side <= MAX_ROTATED_DIM))
        for (rows, columns), count in matrices.items()
    )


def least_memory(model: Member, optimizer: str, *, sharding: Sharding, world_size: int, stages: int = 1) -> int:
    """Return a lower bound of the bytes on each device for any model: weights, gradients and the fewest possible moments.

    Args:
        model, optimizer: As for `state_bytes`.
        sharding, world_size: As for `training_memory`.
        stages: Devices of a pipeline; gradients are sharded only without one.
    """
    share, numbers = 1 if sharding == "none" else world_size, 2 + min(_MOMENTS[optimizer])
    if stages > 1:
        return _FP32 * (model.n_params_total + (numbers - 1) * model.n_params_total // share) // stages
    return _FP32 * numbers * model.n_params_total // share


def activation_bytes(
    config: ModelConfig,
    micro_batch: int,
    precision: Precision = "fp32",
    checkpointing: Checkpointing = "none",
    *,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    compiled: bool = False,
) -> int:
    """Return the bytes that autograd keeps for the backward pass of `micro_batch` sequences.

    Each device that shares products keeps its own heads and columns of the MLP, its own positions of the residual stream,
    and all positions of the matrices' inputs. Logits of such devices are always chunked, and chunked logits are not kept.
    """
    part = _Part(config, precision, tensor_parallel, context_parallel)
    n_positions = micro_batch * part.own_positions
    blocks = part.kept_by_blocks(checkpointing, compiled=compiled)
    return n_positions * (blocks + part.kept_by_head(n_positions)) + part.bias_bytes


class _Buffers(NamedTuple):
    """Buffers of a step in its readout, in a block, and while the next block is fetched.

    `at_readout`, `at_block`, `prefetched` and `arriving` count gathered or copied parameters, the last while a block's parts become
    whole; the others are bytes of gradients before their reduction: of the readout, of a block in the middle of its pass, and of a
    block at its end.
    """

    at_readout: int
    at_block: int
    prefetched: int
    arriving: int
    readout_gradient: int
    block_gradient: int
    whole_block_gradient: int


class _Moment(NamedTuple):
    """Bytes that a step takes at one moment besides its state: the fields of `MemoryEstimate`."""

    gathered: int
    reduced: int
    activations: int


@dataclass(frozen=True)
class _Part:
    """The part of a decoder on one of the devices that share its products.

    Attributes:
        has_embedding, has_readout: False if another stage of a pipeline has it; `config` then has this device's number of blocks.
    """

    config: ModelConfig
    precision: Precision
    ranks: int
    context_ranks: int = 1
    has_embedding: bool = True
    has_readout: bool = True

    @property
    def own_positions(self) -> int:
        """Positions of a sequence that the device has."""
        return self.config.context_length // self.context_ranks

    @property
    def compute(self) -> int:
        """Bytes of a number in the precision of the products."""
        return _COMPUTE_BYTES[self.precision]

    @property
    def low(self) -> int:
        """Bytes of a copy in low precision; 0 in fp32, which needs no copy."""
        return 0 if self.precision == "fp32" else self.compute

    @property
    def n_params(self) -> int:
        """Parameters: the part of matrices and tables, all norms, and biases after a sum."""
        config, groups = self.config, self._groups
        norms = groups["norms"] + (2 * config.n_layers * config.d_model if config.biases else 0)
        return norms + (sum(groups.values()) - norms) // self.ranks

    @property
    def table(self) -> int:
        """Parameters of the readout."""
        return self._of_group("readout")

    @property
    def embedding(self) -> int:
        """Parameters of an embedding that is not tied."""
        return self._of_group("embedding")

    @property
    def tied(self) -> int:
        """Parameters of a readout that is the embedding too."""
        return self.table if self.config.tied else 0

    @property
    def n_last(self) -> int:
        """Number of blocks that are like the last: those with experts in a mixture, otherwise all."""
        return self.config.n_layers - self.config.first_dense_layers

    @cached_property
    def dense(self) -> _Part | None:
        """The part with the first dense blocks of a mixture alone."""
        n_dense = self.config.first_dense_layers
        return replace(self, config=_of_blocks(self.config, n_dense, 0)) if n_dense else None

    @property
    def block(self) -> int:
        """Parameters of a block; in a mixture, of one with experts."""
        tables = sum(self._of_group(name) for name in ("readout", "positions", "embedding"))
        elsewhere = tables + (self.dense.n_last * self.dense.block if self.dense else 0)
        return (self.n_params - elsewhere) // self.n_last

    @property
    def in_blocks(self) -> int:
        """Entries of the blocks' matrices, without those of routers."""
        entries = self.config.n_matrix_entries + self.config.n_inactive_params - self._groups["router"]
        return entries // self.ranks

    @property
    def in_block_matrices(self) -> int:
        """Entries of a block's matrices, as for `block`."""
        return (self.in_blocks - (self.dense.in_blocks if self.dense else 0)) // self.n_last

    @property
    def in_stacks(self) -> int:
        """Entries of a block's experts; 0 without experts."""
        return self.config.n_params_by_group["experts"] // self.n_last

    @property
    def largest_matrix(self) -> int:
        """Entries of the largest matrix of a block's MLP, or of a stack of experts' matrices."""
        config = self.config
        if config.n_experts is None:
            return config.d_model * config.d_ff // self.ranks
        return config.d_model * max(config.n_experts, config.n_shared_experts) * config.expert_width

    @cached_property
    def _groups(self) -> dict[str, int]:
        """Parameters by group, over all devices that share products."""
        elsewhere = (() if self.has_embedding else ("embedding", "positions")) + (
            () if self.has_readout else ("readout",)
        )
        return self.config.n_params_by_group | dict.fromkeys(elsewhere, 0)

    def _of_group(self, name: str) -> int:
        return self._groups[name] // self.ranks

    def copies(self, checkpointing: Checkpointing) -> _Buffers:
        """Return the buffers of a single device: low-precision copies, and one matrix' gradient at a time."""
        is_low = bool(self.low)
        copied = is_low * (self.in_blocks if checkpointing == "none" else self.in_block_matrices)
        return _Buffers(
            at_readout=copied + is_low * self.table,
            at_block=copied + is_low * self.tied,
            prefetched=0,
            arriving=0,
            readout_gradient=0,
            block_gradient=0,
            whole_block_gradient=(_FP32 + self.low) * self.largest_matrix,
        )

    def put_together(self, share: int) -> int:
        """Return the entries of a block's experts if each of `share` devices has parts of them, since FSDP2 copies these once more.

        It shards between experts if their number allows equal shards (`fsdp.shard`).
        """
        return self.in_stacks if (self.config.n_experts or 0) % share else 0

    def gathered(self, share: int, *, whole: bool) -> _Buffers:
        """Return the buffers of one device among several, which gathers unit by unit, or the `whole` model at once.

        The weights are sharded over `share` devices.
        """
        positions, block = self._of_group("positions"), self.block
        return _Buffers(
            at_readout=self.n_params if whole else positions + block + self.table,
            at_block=self.n_params if whole else positions + self.tied + 2 * block,
            prefetched=self.n_params if whole else block,
            arriving=self.n_params if whole else positions + self.tied + 2 * block + self.put_together(share),
            readout_gradient=_FP32 * (self.table - self.tied),
            block_gradient=_FP32 * block,
            whole_block_gradient=(_FP32 + self.compute) * block,
        )

    def moments(
        self, micro_batch: int, buffers: _Buffers, checkpointing: Checkpointing, *, compiled: bool
    ) -> list[_Moment]:
        """Return the moments of a step that may be its peak."""
        config, compute, n_positions = self.config, self.compute, micro_batch * self.own_positions
        of_token = self.kept_by_block(checkpointing, compiled=compiled)
        kept, in_block = n_positions * of_token, n_positions * self.in_block(of_token, checkpointing)
        blocks = n_positions * self.kept_by_blocks(checkpointing, compiled=compiled) + self.bias_bytes
        head, (forward, backward) = n_positions * self.kept_by_head(n_positions), self.in_loss(n_positions)
        stream = n_positions * (compute * config.d_model // self.ranks)
        tied = compute * self.tied  # gradient that is reduced at the end, with the rest of the model
        late = tied + compute * self.largest_matrix  # and that of the MLP's last matrix
        at_readout, at_block, prefetched, arriving = (compute * n_params for n_params in buffers[:4])
        return [
            _Moment(at_readout, 0, blocks + head + forward),
            _Moment(at_readout, _FP32 * self.table, blocks + head + backward),
            _Moment(arriving, buffers.readout_gradient + tied, blocks),  # before the backward pass of the last block
            _Moment(arriving, buffers.block_gradient + tied, blocks - kept),  # … of the second-last block
            _Moment(at_block, buffers.readout_gradient + late, blocks + in_block),  # in the last block
            _Moment(at_block, buffers.block_gradient + late, blocks - kept + in_block),  # in the second-last block
            _Moment(prefetched, buffers.whole_block_gradient + tied, blocks - kept + stream),
        ]

    def n_moments(self, optimizer: str, share: int, n_owners: int) -> int:
        """Return the numbers of optimizer state on a device with 1/`share` of the parameters.

        Adafactor keeps a mean for each row and column of a matrix on every device, and a mean for each entry of a vector. SOAP keeps
        the state of whole matrices, on the `n_owners` devices that share them.
        """
        config, width = self.config, self.config.d_model
        if optimizer == "adafactor":
            tables = (1 if config.tied else self.has_embedding + self.has_readout) * (config.vocab_size + width)
            positions = config.context_length + width if config.positions == "learned" and self.has_embedding else 0
            routers = config.n_sparse_layers * ((config.n_experts or 0) + width)
            matrices, stacked = self._shapes
            return sum(n * sum(shape) for shape, n in (matrices + stacked).items()) + routers + tables + positions
        in_matrices, elsewhere = _MOMENTS[optimizer]
        if optimizer == "soap":
            matrices, stacked = self._shapes
            rotated = rotated_numbers(matrices, n_owners) + rotated_numbers(stacked, share)
            return rotated + elsewhere * (self.n_params - self.in_blocks) // share
        return (in_matrices * self.in_blocks + elsewhere * (self.n_params - self.in_blocks)) // share

    @property
    def _shapes(self) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
        """Numbers of the blocks' matrices of each shape, and of those in stacks of experts."""
        config, width = self.config, self.config.d_model
        d_kv, n_sparse = config.n_kv_heads * config.head_dim, config.n_sparse_layers
        matrices = Counter([(width, width), (d_kv, width)] * 2 * config.n_layers)

        def mlps(number: int, hidden: int) -> Counter[tuple[int, int]]:
            return Counter([(hidden, width)] * (self._n_up * number) + [(width, hidden)] * number)

        matrices += mlps(config.n_layers - n_sparse, config.d_ff)
        if config.n_experts is None:
            return matrices, Counter()
        if config.n_shared_experts:
            matrices += mlps(n_sparse, config.n_shared_experts * config.expert_width)
        return matrices, mlps(n_sparse * config.n_experts, config.expert_width)

    def kept_by_blocks(self, checkpointing: Checkpointing, *, compiled: bool = False) -> int:
        """Return the bytes per token that all blocks keep."""
        of_dense = self.dense.kept_by_blocks(checkpointing, compiled=compiled) if self.dense else 0
        return self.n_last * self.kept_by_block(checkpointing, compiled=compiled) + of_dense

    def kept_by_block(self, checkpointing: Checkpointing, *, compiled: bool = False) -> int:
        """Return the bytes per token that a block keeps, in a mixture one with experts.

        A compiled gated MLP recomputes its activation instead of keeping it.
        """
        config, compute, width = self.config, self.compute, self.config.d_model
        mixed, d_kv, n_heads, n_kv_heads = (
            size // self.ranks
            for size in (width, config.n_kv_heads * config.head_dim, config.n_heads, config.n_kv_heads)
        )
        n_norms, stream = 1 if config.parallel else 2, compute * width // self.ranks
        if checkpointing == "full":
            return stream
        if checkpointing == "selective":
            of_attention = compute * (width + 2 * mixed + 2 * d_kv) + _FP32 * n_heads
            return stream + of_attention + self._products_of_mlp
        block = n_norms * (self._norm // self.ranks + compute * width)
        # Queries, and the keys and values of all positions.
        block += compute * (mixed + 2 * self.context_ranks * (mixed if self._expands_keys else d_kv))
        block += compute * mixed + _FP32 * n_heads  # mixed values, and the softmax's normaliser
        if config.qk_norm:
            block += compute * (mixed + d_kv) + _FP32 * (n_heads + n_kv_heads)
        block += self._kept_by_mlp(
            {"swiglu": 3 if compiled else 4, "gelu": 2, "relu": 1, "relu2": 2}[config.activation]
        )
        return block + (width if config.mlp_dropout else 0)  # a mask of bytes

    @property
    def _n_up(self) -> int:
        """Matrices of an MLP that read the stream."""
        return 2 if self.config.activation == "swiglu" else 1

    @property
    def _hidden(self) -> int:
        """Hidden values of a token in an MLP, or in all the experts that it passes."""
        config = self.config
        if config.n_experts is None:
            return config.d_ff // self.ranks
        return (config.experts_per_token + config.n_shared_experts) * config.expert_width

    @property
    def _rows(self) -> int:
        """Numbers of a token in its rows, one for each routed expert."""
        return self.config.experts_per_token * self.config.d_model if self.config.n_experts else 0

    @property
    def _products_of_mlp(self) -> int:
        """Bytes per token of the products of an MLP, or of router and experts."""
        config, outputs = self.config, self._rows
        if not config.n_experts or config.n_shared_experts:
            outputs += config.d_model
        return self.compute * (self._n_up * self._hidden + outputs) + _FP32 * (config.n_experts or 0)

    def _kept_by_mlp(self, times: int) -> int:
        """Return the bytes per token that an MLP keeps besides its input: its hidden layer so many times, and what routing needs.

        Routing keeps the scores, a token's gates three times and its places three times, in int64, and the rows before and after the
        experts. The router reads the token in fp32.
        """
        config, hidden = self.config, self.compute * times * self._hidden
        if config.n_experts is None:
            return hidden
        n_chosen, is_root = config.experts_per_token, config.expert_scheme == "sqrt_gate"
        router = _FP32 * (config.n_experts * (2 if config.router_z_loss else 1) + (2 + is_root) * n_chosen + 1)
        if self.low:
            reads_alone = not config.n_shared_experts and not config.parallel
            router += (_FP32 - (self.low if reads_alone else 0)) * config.d_model
        return hidden + 2 * self.compute * self._rows + router + 3 * _INT64 * n_chosen

    def in_block(self, kept: int, checkpointing: Checkpointing) -> int:
        """Return the bytes per token in a block's backward pass beyond its `kept` bytes: recomputed tensors and gradients."""
        compute, width = self.compute, self.config.d_model
        # The MLP's hidden layer twice, after rows of experts were freed, or these rows twice; and the stream.
        gradients = compute * (max(2 * self._hidden - self._rows, 2 * self._rows) + width // self.ranks)
        if self.ranks > 1:
            gradients += 2 * compute * width  # the MLP's output, gathered and then reordered
        unread = compute * width if checkpointing == "selective" else 0  # the output of a block's last product
        return gradients + self.kept_by_block("none") - kept + unread

    def kept_by_head(self, n_positions: int) -> int:
        """Return the bytes per token that the last norm, the readout and the loss keep; the loss computes logits in fp32."""
        kept = self._norm // self.ranks + self.compute * self.config.d_model
        if self._chunks_logits(n_positions):
            return kept + _FP32
        return kept + _FP32 * self.config.vocab_size * (2 if self.config.z_loss else 1)

    def in_loss(self, n_positions: int) -> tuple[int, int]:
        """Return the loss's temporary bytes, forward and backward, without kept tensors and the readout's fp32 gradient.

        Forward, they are fp32 logits (of a chunk, if chunked) and their exponentials. Backward, they are the logits in low precision
        and fp32, or the logits in low precision and the chunk's part of the readout's gradient.
        """
        vocab_size, width = -(-self.config.vocab_size // self.ranks), self.config.d_model
        logits = n_positions * vocab_size
        if not self._chunks_logits(n_positions):
            return (_FP32 + self.low) * logits, (_FP32 + self.low) * logits
        logits = min(CHUNK_ENTRIES, logits)
        backward = max((_FP32 + self.low) * logits, self.compute * (logits + vocab_size * width))
        return 2 * _FP32 * logits, backward + n_positions * self.compute * width

    def _chunks_logits(self, n_positions: int) -> bool:
        return self.ranks > 1 or is_chunked(n_positions, self.config.vocab_size)

    @property
    def bias_bytes(self) -> int:
        """Bytes of ALiBi's bias, in fp32 and in the precision of the products."""
        if self.config.positions != "alibi":
            return 0
        return (_FP32 + self.low) * self.config.n_heads // self.ranks * self.config.context_length**2

    @property
    def _expands_keys(self) -> bool:
        """Whether a GPU's kernel needs a key and a value for each query head, as `attention.cuda_kernel` implies."""
        config = self.config
        is_unfused = self.precision == "fp32" or config.positions == "alibi" or config.head_dim > LARGEST_FLASH_HEAD
        return config.queries_per_kv > 1 and is_unfused and self.context_ranks == 1  # FlexAttention groups heads

    @property
    def _norm(self) -> int:
        """Bytes per token of a norm: its input and its statistics, which a GPU keeps in fp32."""
        return self.compute * self.config.d_model + _FP32 * (2 if self.config.norm == "layernorm" else 1)


@cache
def _of_blocks(config: ModelConfig, n_dense: int, n_sparse: int) -> ModelConfig:
    return config.with_blocks(n_dense, n_sparse)


@dataclass(frozen=True)
class _StageRank:
    """A device of a pipeline: the weights of all its stages, and what is specific to each stage.

    FSDP2 keeps a stage's weights gathered, under "full" and "hybrid" from a backward pass to the next forward pass. It adds up
    whole gradients in fp32, which are reduced at the end of the step. torch makes a buffer for each micro-batch that a stage
    receives, activations and gradients apart.

    Attributes:
        blocks: Numbers of blocks of the device's stages, without and with experts if the model has any.
    """

    part: _Part
    pipeline: PipelineShare
    rank: int
    blocks: tuple[tuple[int, int], ...]

    @classmethod
    def all_of(
        cls, config: ModelConfig, precision: Precision, tensor_parallel: int, pipeline: PipelineShare
    ) -> Iterator[_StageRank]:
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
            blocks, *tables = shape
            of_rank = _of_blocks(config, *map(sum, zip(*blocks, strict=True)))
            part = _Part(of_rank, precision, tensor_parallel, 1, *tables)
            yield cls(part, pipeline, rank, blocks)

    def memory(
        self,
        micro_batch: int,
        optimizer: str,
        share: int,
        n_owners: int,
        checkpointing: Checkpointing,
        *,
        compiled: bool,
        again: bool,
    ) -> MemoryEstimate:
        """Return the device's estimate, with 1/`share` of weights and moments; `again`: each forward pass gathers weights again.

        `n_owners` is as for `_Part.n_moments`.
        """
        part = self.part
        moments = self._moments(micro_batch, checkpointing, compiled=compiled, again=again, share=share)
        peak = max(moments, key=sum)
        return MemoryEstimate(
            parameters=_FP32 * (part.n_params // share),
            gathered=peak.gathered,
            gradients=_FP32 * part.n_params,
            optimizer=_FP32 * part.n_moments(optimizer, share, n_owners),
            reduced=peak.reduced,
            activations=peak.activations + self.received,
        )

    @property
    def received(self) -> int:
        """Bytes of the buffers for what the stages receive: activations except in the first stage, gradients except in the last."""
        edges = 2 * len(self.blocks) - self.part.has_embedding - self.part.has_readout
        return edges * self.pipeline.sequences * self._stream

    def evaluating(self, at_work: int, share: int) -> int:
        """Bytes of gathered weights with a pass `at_work`, or while the last unit arrives and the buffer of another stays."""
        part, unit = self.part, self.largest_unit
        arriving = part.compute * (2 * unit + part.put_together(share))
        return part.compute * part.n_params + max(part.compute * unit + at_work, arriving)

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest unit that is gathered and reduced by itself."""
        return max(self.part.block, self.part.table, self.part.embedding)

    @property
    def _stream(self) -> int:
        """Bytes of the residual stream of a sequence."""
        config = self.part.config
        return config.context_length * (self.part.compute * config.d_model // self.part.ranks)

    def _moments(
        self, micro_batch: int, checkpointing: Checkpointing, *, compiled: bool, again: bool, share: int
    ) -> list[_Moment]:
        """Return the moments of a step that may be its peak, without the buffers of `received`."""
        part, number = self.part, self.pipeline.micro_batches(micro_batch)
        config, size = part.config, self.pipeline.sequences // number
        n_positions, stream = size * config.context_length, size * self._stream
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
        counts = in_flight(self.pipeline.schedule, self.rank, self.pipeline.ranks, number)
        in_all = part.bias_bytes + max(
            sum(n * of_stage for n, of_stage in zip(count, of_stages, strict=True)) for count in counts
        )
        if self.pipeline.schedule in SPLIT_BACKWARD:
            in_all = int(KEPT_APART * in_all)
        whole, block = part.compute * part.n_params, part.compute * part.block
        n_dense, n_sparse = min(self.blocks, key=sum)
        dense = part.compute * part.dense.block if part.dense else block
        bytes_of_blocks = [dense] * n_dense + [block] * n_sparse
        gathered = whole - again * sum(bytes_of_blocks[:-2])  # after a stage's forward pass
        late = part.compute * part.largest_matrix  # gradient of the MLP's last matrix
        moments = [
            _Moment(gathered, late, in_all + in_block),
            _Moment(gathered, block, in_all - kept + stream),
            _Moment(whole, late, in_all + in_block - again * (max(n_blocks) - 1) * kept),
            # At the end of a step FSDP2 copies gradients into a buffer for their reduction.
            _Moment(whole - part.compute * self.largest_unit, _FP32 * self.largest_unit, part.bias_bytes),
        ]
        if again:  # the second block of a stage arrives, while the first block's buffer stays
            arriving = part.n_params - part.n_last * part.block + 3 * part.block + part.put_together(share)
            moments.append(_Moment(part.compute * arriving, 0, in_all - kept))
        if part.has_readout:
            forward, backward = part.in_loss(n_positions)
            moments += [
                _Moment(gathered, 0, in_all + forward),
                _Moment(gathered, _FP32 * part.table, in_all + backward),
            ]
        return moments


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
    pipeline: PipelineShare | None = None,
) -> int:
    """Return an upper bound of the bytes on each device during an evaluation within training: state without gradients, and a pass.

    The pass takes `sequences` at a time. FSDP2 gathers a unit into a buffer and copies the weights from it; the buffer stays until
    the next unit is gathered. The readout stays gathered from the first pass on, since no backward pass follows. In a pipeline, the
    buffers of a training step stay, and a stage's weights may all be gathered.
    """
    held = training.parameters + training.optimizer
    part = _Part(config, precision, tensor_parallel, context_parallel)
    n, table, block = part.n_params, part.table, part.block
    stream = part.compute * config.d_model * sequences * part.own_positions // tensor_parallel
    shared = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
    at_work = evaluation_bytes(config, sequences, precision, **shared)
    if pipeline:
        ranks = _StageRank.all_of(config, precision, tensor_parallel, pipeline)
        most = max(rank.received + rank.evaluating(at_work, world_size) for rank in ranks)
        return held + most + 2 * stream
    copied = part.put_together(world_size)
    if world_size * tensor_parallel == 1:
        moments = [(max(table, part.largest_matrix) * (precision != "fp32"), at_work)]
    elif sharding in ("none", "zero2"):
        moments = [(n + max(table, block), at_work)]
    else:
        moments = [
            (3 * table, stream),  # the readout once, the embedding twice
            # The readout, the embedding's buffer, the first block twice; then the first block's buffer, the second block twice.
            (2 * table + 2 * block + copied, 2 * stream),
            (table + 3 * block + copied, 2 * stream),
            (table + max(table, 2 * block), at_work),
        ]
    return held + max(part.compute * weights + rest for weights, rest in moments)


def evaluation_bytes(
    config: ModelConfig,
    sequences: int,
    precision: Precision = "fp32",
    *,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
) -> int:
    """Return an upper bound of the bytes of a pass without gradients: all tensors of a block, the last norm and the loss."""
    block = _of_blocks(config, *((0, 1) if config.n_experts else (1, 0)))
    one_block = activation_bytes(
        block, sequences, precision, tensor_parallel=tensor_parallel, context_parallel=context_parallel
    )
    part = _Part(config, precision, tensor_parallel, context_parallel)
    forward, _ = part.in_loss(sequences * part.own_positions)
    return one_block + forward


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
