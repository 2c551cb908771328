"""A device's part of a decoder: parameters, moments of the optimizer, activations.

Activations are counted tensor by tensor, as autograd keeps them for the backward pass of `Decoder` (tests compare the count with
autograd's, in fp32 and bf16). Attention is assumed to be fused, so that its weights are never kept (Dao et al., arXiv 2205.14135).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from proxy_models.architecture import memory
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import (
    FP32,
    MOMENTS,
    Checkpointing,
    Precision,
    fullest,
    most_rotated,
    numbers_in_rotation,
    rotated_numbers,
    rotated_together,
)

_INT64 = 8
_COMPUTE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
LARGEST_FLASH_HEAD = 256


class Buffers(NamedTuple):
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


class Moment(NamedTuple):
    """Bytes that a step takes at one moment besides its state: the fields of `MemoryEstimate`."""

    gathered: int
    reduced: int
    activations: int


@dataclass(frozen=True)
class DecoderPart:
    """The part of a decoder on one of the devices that share its products.

    Attributes:
        has_embedding, has_readout: False if another stage of a pipeline has it; `config` then has this device's number of blocks.
        shards: Devices over which FSDP2 shards the part. It pads the rows of a table or a matrix to a multiple of this number, in
            each shard's memory, in gathered weights and in gradients that are reduced. All counts of parameters include this.
    """

    config: ModelConfig
    precision: Precision
    ranks: int
    context_ranks: int = 1
    has_embedding: bool = True
    has_readout: bool = True
    expert_ranks: int = 1
    shards: int = 1

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
    def positions(self) -> int:
        """Parameters of learned positions."""
        return self._of_group("positions")

    @property
    def tied(self) -> int:
        """Parameters of a readout that is the embedding too."""
        return self.table if self.config.tied else 0

    @property
    def n_last(self) -> int:
        """Number of blocks that are like the last: those with experts in a mixture, otherwise all."""
        return self.config.n_layers - self.config.first_dense_layers

    @cached_property
    def dense(self) -> DecoderPart | None:
        """The part with the first dense blocks of a mixture alone."""
        n_dense = self.config.first_dense_layers
        return replace(self, config=of_blocks(self.config, n_dense, 0)) if n_dense else None

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
        elsewhere = self.config.n_params_by_group["experts"] - self._groups["experts"]  # on other devices
        return (entries - elsewhere) // self.ranks

    @property
    def in_block_matrices(self) -> int:
        """Entries of a block's matrices, as for `block`."""
        return (self.in_blocks - (self.dense.in_blocks if self.dense else 0)) // self.n_last

    @property
    def in_stacks(self) -> int:
        """Entries of the device's experts in a block; 0 without experts."""
        return self._groups["experts"] // self.n_last

    @property
    def unit(self) -> int:
        """Parameters of a block that are gathered together: without experts if devices share these out."""
        return self.block - (self.in_stacks if self.expert_ranks > 1 else 0)

    @property
    def n_held(self) -> int:
        """Parameters that the device keeps."""
        stacks = self._groups["experts"]
        return (self.n_params - stacks) // self.shards + stacks // self._expert_share

    @property
    def _expert_share(self) -> int:
        """Devices over which the device's experts are sharded."""
        return max(1, self.shards // self.expert_ranks)

    @property
    def largest_matrix(self) -> int:
        """Entries of the largest matrix of a block's MLP, or of a stack of experts' matrices."""
        config = self.config
        if config.n_experts is None:
            return config.d_model * config.d_ff // self.ranks
        return (
            config.d_model * max(config.n_experts // self.expert_ranks, config.n_shared_experts) * config.expert_width
        )

    @cached_property
    def _groups(self) -> dict[str, int]:
        """Parameters by group, over all devices that share products."""
        elsewhere = (() if self.has_embedding else ("embedding", "positions")) + (
            () if self.has_readout else ("readout",)
        )
        config, groups = self.config, dict(self.config.n_params_by_group)
        groups["experts"] //= self.expert_ranks
        matrices, _ = self._shapes
        groups["mlp"] += sum(count * self._padding(rows) * columns for (rows, columns), count in matrices.items())
        tables = {"embedding": config.vocab_size, "readout": config.vocab_size, "positions": config.context_length}
        for table, rows in tables.items():
            groups[table] += self._padding(rows) * groups[table] // rows
        return groups | dict.fromkeys(elsewhere, 0)

    def _padding(self, rows: int) -> int:
        """Return the rows that FSDP2 adds to as many, over all devices that share products."""
        return -(rows // self.ranks) % self.shards * self.ranks

    def _of_group(self, name: str) -> int:
        return self._groups[name] // self.ranks

    def copies(self, checkpointing: Checkpointing) -> Buffers:
        """Return the buffers of a single device: low-precision copies, and one matrix' gradient at a time."""
        is_low = bool(self.low)
        copied = is_low * (self.in_blocks if checkpointing == "none" else self.in_block_matrices)
        return Buffers(
            at_readout=copied + is_low * self.table,
            at_block=copied + is_low * self.tied,
            prefetched=0,
            arriving=0,
            readout_gradient=0,
            block_gradient=0,
            whole_block_gradient=(FP32 + self.low) * self.largest_matrix,
        )

    @property
    def put_together(self) -> int:
        """Entries of a block's experts if devices shard within experts, since FSDP2 copies these once more; else 0.

        It shards between experts if their number allows equal shards (`fsdp.shard`).
        """
        return self.in_stacks if (self.config.n_experts or 0) % self.shards else 0

    @property
    def reordered(self) -> int:
        """Entries of a block's last gradient if devices shard within experts; else 0.

        FSDP2's `foreach_reduce` then reorders gradients, and holds the last until the block's are in the buffer for their reduction.
        """
        return self.largest_matrix if self.put_together else 0

    def gathered(self, *, whole: bool) -> Buffers:
        """Return the buffers of one device among several, which gathers unit by unit, or the `whole` model at once."""
        positions, block = self.positions, self.unit
        apart, copied = self.block - block, self.put_together
        arriving = max(2 * block, block + 2 * apart + copied) if apart else 2 * block + copied
        return Buffers(
            at_readout=self.n_params if whole else positions + block + self.table,
            at_block=self.n_params if whole else positions + self.tied + 2 * block + apart,
            prefetched=self.n_params if whole else block,
            arriving=self.n_params if whole else positions + self.tied + arriving,
            readout_gradient=FP32 * (self.table - self.tied),
            block_gradient=FP32 * block,
            whole_block_gradient=(FP32 + self.compute) * block,
        )

    def moments(
        self, micro_batch: int, buffers: Buffers, checkpointing: Checkpointing, *, compiled: bool
    ) -> list[Moment]:
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
            Moment(at_readout, 0, blocks + head + forward),
            Moment(at_readout, FP32 * self.table, blocks + head + backward),
            Moment(arriving, buffers.readout_gradient + tied, blocks),  # before the backward pass of the last block
            Moment(arriving, buffers.block_gradient + tied, blocks - kept),  # … of the second-last block
            Moment(at_block, buffers.readout_gradient + late, blocks + in_block),  # in the last block
            Moment(at_block, buffers.block_gradient + late, blocks - kept + in_block),  # in the second-last block
            # At the end of the second-last block, whose gradients are there while those of the last are reduced.
            Moment(at_block, buffers.whole_block_gradient + tied, blocks - 2 * kept + stream),
            Moment(prefetched, buffers.whole_block_gradient + tied, blocks - kept + stream),
        ]

    def n_moments(self, optimizer: str, n_owners: int) -> int:
        """Return the numbers of optimizer state on the device.

        Adafactor keeps a mean for each row and column of a matrix on every device; its means of gains and biases are too few to count.
        SOAP keeps the state of whole matrices, on the `n_owners` devices that share them.
        """
        config, width, share = self.config, self.config.d_model, self.shards
        if optimizer == "adafactor":
            tables = (1 if config.tied else self.has_embedding + self.has_readout) * (config.vocab_size + width)
            positions = config.context_length + width if config.positions == "learned" and self.has_embedding else 0
            routers = config.n_sparse_layers * ((config.n_experts or 0) + width)
            matrices, stacked = self._shapes
            return sum(n * sum(shape) for shape, n in (matrices + stacked).items()) + routers + tables + positions
        in_matrices, elsewhere = MOMENTS[optimizer]
        if optimizer == "soap":
            matrices, stacked = self._shapes
            in_stack, of_stack = self._in_stack, (config.n_experts or 1) // self.expert_ranks
            in_stacks = sum(in_stack * count // of_stack * rotated_numbers(*shape) for shape, count in stacked.items())
            rotated, _ = most_rotated(matrices, n_owners)
            return rotated + in_stacks + elsewhere * (self.n_params - self.in_blocks) // share
        stacks = self._groups["experts"]
        others = in_matrices * (self.in_blocks - stacks) + elsewhere * (self.n_params - self.in_blocks)
        return others // share + in_matrices * stacks // self._expert_share

    def n_in_step(self, optimizer: str, n_owners: int) -> int:
        """Return the numbers of the tensors that SOAP's step makes at a time; those of other optimizers are not counted.

        The device's parts of all matrices leave, its own matrices arrive, are computed in turn and leave, and its parts come back.
        Arguments are those of `n_moments`.
        """
        if optimizer != "soap":
            return 0
        matrices, stacked = self._shapes
        in_turn = [(shape, min(count, rotated_together(*shape))) for shape, count in matrices.items()]
        in_turn += [(shape, self._in_stack) for shape in stacked]
        largest = max(numbers_in_rotation(*shape, count) for shape, count in in_turn)
        if n_owners == 1:
            return largest
        parts = sum(rows * columns * count for (rows, columns), count in matrices.items()) // (self.shards * self.ranks)
        _, owned = most_rotated(matrices, n_owners)
        return owned + max(owned, parts, largest)

    @property
    def _in_stack(self) -> int:
        """Matrices of each stack of experts that the device computes."""
        return -(-((self.config.n_experts or 0) // self.expert_ranks) // self._expert_share)

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
        return matrices, mlps(n_sparse * config.n_experts // self.expert_ranks, config.expert_width)

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
            of_attention = compute * (width + 2 * mixed + 2 * d_kv) + FP32 * n_heads
            return stream + of_attention + self._products_of_mlp
        block = n_norms * (self._norm // self.ranks + compute * width)
        # Queries, and the keys and values of all positions.
        block += compute * (mixed + 2 * self.context_ranks * (mixed if self._expands_keys else d_kv))
        block += compute * mixed + FP32 * n_heads  # mixed values, and the softmax's normaliser
        if config.qk_norm:
            block += compute * (mixed + d_kv) + FP32 * (n_heads + n_kv_heads)
        block += self._kept_by_mlp(
            {"swiglu": 3 if compiled else 4, "gelu": 2, "gelu_tanh": 2, "relu": 1, "relu2": 2}[config.activation]
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
        return (
            self._arriving(config.experts_per_token * config.expert_width)
            + config.n_shared_experts * config.expert_width
        )

    @property
    def _rows(self) -> int:
        """Numbers of a token in its rows, one for each routed expert."""
        return self.config.experts_per_token * self.config.d_model if self.config.n_experts else 0

    def _arriving(self, numbers: int) -> int:
        """Return the numbers in rows for the device's experts, over its own tokens, if a token's rows have so many."""
        return round(fullest(self.expert_ranks) * numbers)

    @property
    def _products_of_mlp(self) -> int:
        """Bytes per token of the products of an MLP, or of router and experts."""
        config, outputs = self.config, self._arriving(self._rows)
        if not config.n_experts or config.n_shared_experts:
            outputs += config.d_model
        return self.compute * (self._n_up * self._hidden + outputs) + FP32 * (config.n_experts or 0)

    def _kept_by_mlp(self, times: int) -> int:
        """Return the bytes per token that an MLP keeps besides its input: its hidden layer so many times, and what routing needs.

        Routing keeps the scores, a token's gates three times and its places three times, in int64, and the rows before and after the
        experts. The router reads the token in fp32.
        """
        config, hidden = self.config, self.compute * times * self._hidden
        if config.n_experts is None:
            return hidden
        n_chosen, is_root = config.experts_per_token, config.expert_scheme == "sqrt_gate"
        router = FP32 * (config.n_experts * (2 if config.router_z_loss else 1) + (2 + is_root) * n_chosen + 1)
        if self.low:
            reads_alone = not config.n_shared_experts and not config.parallel
            router += (FP32 - (self.low if reads_alone else 0)) * config.d_model
        places = 3 * n_chosen + (2 * self._arriving(n_chosen) if self.expert_ranks > 1 else 0)
        return hidden + self.compute * (self._arriving(self._rows) + self._rows) + router + _INT64 * places

    def in_block(self, kept: int, checkpointing: Checkpointing) -> int:
        """Return the bytes per token in a block's backward pass beyond its `kept` bytes: recomputed tensors and gradients."""
        compute, width = self.compute, self.config.d_model
        # The MLP's hidden layer twice, after rows of experts were freed, or these rows twice; and the stream.
        rows = self._rows
        gradients = compute * (max(2 * self._hidden - rows, rows + self._arriving(rows)) + width // self.ranks)
        if self.ranks > 1:
            gradients += 2 * compute * width  # the MLP's output, gathered and then reordered
        unread = compute * width if checkpointing == "selective" else 0  # the output of a block's last product
        return gradients + self.kept_by_block("none") - kept + unread

    def kept_by_head(self, n_positions: int) -> int:
        """Return the bytes per token that the last norm, the readout and the loss keep; the loss computes logits in fp32."""
        kept = self._norm // self.ranks + self.compute * self.config.d_model
        if self._chunks_logits(n_positions):
            return kept + FP32
        return kept + FP32 * self.config.vocab_size * (2 if self.config.z_loss else 1)

    def in_loss(self, n_positions: int) -> tuple[int, int]:
        """Return the loss's temporary bytes, forward and backward, without kept tensors and the readout's fp32 gradient.

        Forward, they are fp32 logits (of a chunk, if chunked) and their exponentials. Backward, they are the logits in low precision
        and fp32, or the logits in low precision and the chunk's part of the readout's gradient.
        """
        vocab_size, width = -(-self.config.vocab_size // self.ranks), self.config.d_model
        logits = n_positions * vocab_size
        if not self._chunks_logits(n_positions):
            return (FP32 + self.low) * logits, (FP32 + self.low) * logits
        logits = min(memory.CHUNK_ENTRIES, logits)
        backward = max((FP32 + self.low) * logits, self.compute * (logits + vocab_size * width))
        return 2 * FP32 * logits, backward + n_positions * self.compute * width

    def _chunks_logits(self, n_positions: int) -> bool:
        return self.ranks > 1 or memory.is_chunked(n_positions, self.config.vocab_size)

    @property
    def bias_bytes(self) -> int:
        """Bytes of ALiBi's bias, in fp32 and in the precision of the products."""
        if self.config.positions != "alibi":
            return 0
        return (FP32 + self.low) * self.config.n_heads // self.ranks * self.config.context_length**2

    @property
    def _expands_keys(self) -> bool:
        """Whether a GPU's kernel needs a key and a value for each query head, as `attention.cuda_kernel` implies."""
        config = self.config
        is_unfused = self.precision == "fp32" or config.positions == "alibi" or config.head_dim > LARGEST_FLASH_HEAD
        return config.queries_per_kv > 1 and is_unfused and self.context_ranks == 1  # FlexAttention groups heads

    @property
    def _norm(self) -> int:
        """Bytes per token of a norm: its input and its statistics, which a GPU keeps in fp32."""
        return self.compute * self.config.d_model + FP32 * (2 if self.config.norm == "layernorm" else 1)


@cache
def of_blocks(config: ModelConfig, n_dense: int, n_sparse: int) -> ModelConfig:
    return config.with_blocks(n_dense, n_sparse)
