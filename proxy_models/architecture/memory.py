"""Memory that training a decoder takes on each device: parameters, gradients, optimizer state, activations.

Weights, gradients and moments are fp32, whatever the model computes in; weights are gathered, or copied, in that precision.
Activations are counted tensor by tensor, as autograd keeps them for the backward pass of `Decoder` (tests compare the count with
what it keeps, in fp32 and bf16); attention is taken to be fused, so that its weights are never kept (Dao et al., arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from proxy_models.architecture.config import ModelConfig

Precision = Literal["fp32", "bf16", "fp16"]
"""Precision of the residual stream and of all products; weights and moments are always fp32, and fp16 scales the loss."""
Sharding = Literal["none", "zero2", "full", "hybrid"]
"""State sharded across devices: none; optimizer state and gradients (ZeRO-2), with the parameters, though these are gathered for the
duration of a step; parameters too (ZeRO-3, FSDP); or the last inside a node only, and copied over nodes.
Rajbhandari et al., arXiv 1910.02054, section 5."""
MIN_UNIT_PARAMS = 1_000_000
"""Parameters of a unit that is sharded by itself, at least. A smaller collective is nearly all latency: two gloo ranks at width 64
train 1.4 times as fast without one per block."""
Checkpointing = Literal["none", "selective", "full"]
"""Activations of a block that are recomputed in the backward pass; `recomputing` describes each kind."""
CHUNK_ENTRIES = 2**26
"""Largest number of logits in memory at a time: 256 MiB in fp32. Fewer are not chunked; `F.cross_entropy` takes them."""
MEMORY_SHARE = 0.85
"""Share of a device's memory that an estimate may fill; the allocator and communication buffers need the rest (assumed)."""
_FP32 = 4
_COMPUTE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOMENTS = {"adamw": (2, 2), "adam": (2, 2), "lion": (1, 1), "muon": (1, 2), "adafactor": (0, 0)}
"""Numbers of optimizer state for each entry of the blocks' matrices and for each other parameter, which Muon leaves to AdamW.
Adafactor keeps means of rows and columns only, which is little."""


def is_chunked(n_positions: int, vocab_size: int) -> bool:
    """Return True if so many logits are too many to hold at once."""
    return n_positions * vocab_size > CHUNK_ENTRIES


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on each device.

    Attributes:
        parameters: Weights that the device keeps.
        gathered: Weights of two units at a time: a block, and the next one or the readout, which is as large as the embedding;
            a tied table and positions stay from the forward pass to the end of the backward pass. All weights under "none"
            and "zero2", as FSDP2 computes with a copy. On one device, the copies in low precision that the backward pass needs.
        gradients: Gradients that it keeps.
        optimizer: Moments that it keeps.
        activations: Kept between forward and backward of one micro-batch.
    """

    parameters: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all; allocator and communication buffers come on top."""
        return self.parameters + self.gathered + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        """A line of gibibytes."""
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
    checkpointing: Checkpointing = "none",
) -> MemoryEstimate:
    """Memory of training on each device.

    Args:
        config: The model.
        micro_batch: Sequences that a device takes at once.
        precision: What the model computes in.
        optimizer: "adamw", "adam", "lion", "muon" or "adafactor".
        sharding: State sharded across the devices.
        world_size: Devices that each take a share of the batch; of "hybrid", those of one copy.
        tensor_parallel: Devices that share each product; `world_size` counts such a group once.
        checkpointing: Activations that are recomputed, those of one block at a time.

    Raises:
        ValueError: If a number is below 1 or the optimizer is not known.
    """
    numbers = {"micro_batch": micro_batch, "world_size": world_size, "tensor_parallel": tensor_parallel}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if optimizer not in _MOMENTS:
        raise ValueError(f"optimizer must be one of {', '.join(_MOMENTS)}, got {optimizer!r}")
    n = _n_params(config, tensor_parallel)
    share = 1 if sharding == "none" else world_size
    table, positions, embedding = (
        config.n_params_by_group[name] // tensor_parallel for name in ("readout", "positions", "embedding")
    )
    in_blocks = config.n_matrix_entries // tensor_parallel
    if world_size * tensor_parallel == 1:
        copied = in_blocks if checkpointing == "none" else in_blocks // config.n_layers
        gathered = 0 if precision == "fp32" else copied + table
    elif sharding in ("none", "zero2"):
        gathered = n
    else:
        block = (n - table - positions - embedding) // config.n_layers
        gathered = positions + block + (table if config.tied else max(block, table))
    moments_in_blocks, moments_elsewhere = _MOMENTS[optimizer]
    moments = moments_in_blocks * in_blocks + moments_elsewhere * (n - in_blocks)
    return MemoryEstimate(
        parameters=_FP32 * (n // share),
        gathered=_COMPUTE_BYTES[precision] * gathered,
        gradients=_FP32 * n // share,
        optimizer=_FP32 * moments // share,
        activations=activation_bytes(config, micro_batch, precision, checkpointing, tensor_parallel=tensor_parallel),
    )


def _n_params(config: ModelConfig, tensor_parallel: int) -> int:
    """Parameters that one of so many devices has: its part of matrices and tables, all norms, and biases after a sum."""
    norms = config.n_params_by_group["norms"] + (2 * config.n_layers * config.d_model if config.biases else 0)
    return norms + (config.n_params_total - norms) // tensor_parallel


def activation_bytes(
    config: ModelConfig,
    micro_batch: int,
    precision: Precision = "fp32",
    checkpointing: Checkpointing = "none",
    *,
    tensor_parallel: int = 1,
) -> int:
    """Bytes that autograd keeps for the backward pass of `micro_batch` sequences.

    Devices that share products each keep their own heads and columns of the MLP, their own positions of the residual stream,
    and all positions of what the matrices read. Their logits are always chunked.

    Chunked logits are not kept; those of one chunk and their exponentials are in memory while the loss is computed. The loss is
    computed from logits in fp32.
    """
    compute = _COMPUTE_BYTES[precision]
    width = config.d_model
    mixed, d_kv, d_ff, n_heads, n_kv_heads = (
        size // tensor_parallel
        for size in (width, config.n_kv_heads * config.head_dim, config.d_ff, config.n_heads, config.n_kv_heads)
    )
    n_up, n_norms = 2 if config.activation == "swiglu" else 1, 1 if config.parallel else 2
    norm = _norm(config, compute) // tensor_parallel
    block = n_norms * (norm + compute * width)
    block += compute * (mixed + 2 * d_kv)  # queries, keys, values
    block += compute * mixed + _FP32 * n_heads  # mixed values, and the softmax's normaliser
    if config.qk_norm:
        block += compute * (mixed + d_kv) + _FP32 * (n_heads + n_kv_heads)
    kept_of_mlp = {"swiglu": 4, "gelu": 2, "relu": 1, "relu2": 2}[config.activation]
    block += compute * kept_of_mlp * d_ff
    if config.mlp_dropout:
        block += width  # a mask of bytes
    again = compute * width // tensor_parallel + (
        compute * (2 * width + 2 * mixed + 2 * d_kv + n_up * d_ff) + _FP32 * n_heads
        if checkpointing == "selective"
        else 0
    )
    blocks = block * config.n_layers if checkpointing == "none" else again * config.n_layers + block
    n_positions, vocab_size = micro_batch * config.context_length, -(-config.vocab_size // tensor_parallel)
    if tensor_parallel > 1 or is_chunked(n_positions, vocab_size):
        head, standing = compute * width + _FP32, 2 * _FP32 * min(CHUNK_ENTRIES, n_positions * vocab_size)
    else:
        head, standing = compute * width + _FP32 * vocab_size * (2 if config.z_loss else 1), 0
    return n_positions * (blocks + norm + head) + standing


def evaluation_bytes(
    config: ModelConfig, sequences: int, precision: Precision = "fp32", *, tensor_parallel: int = 1
) -> int:
    """Bytes at work in a pass without gradients, at most: all that a block, the last norm and the loss make of `sequences`."""
    one_block = activation_bytes(replace(config, n_layers=1), sequences, precision, tensor_parallel=tensor_parallel)
    n_positions = sequences * config.context_length
    again = 0 if is_chunked(n_positions, config.vocab_size) else _FP32 * n_positions * config.vocab_size
    return one_block + again  # their logarithms, beside whole logits


def largest_micro_batch(
    config: ModelConfig,
    share: int,
    *,
    limit: int,
    precision: Precision = "fp32",
    optimizer: str = "adamw",
    sharding: Sharding = "none",
    world_size: int = 1,
    tensor_parallel: int = 1,
    checkpointing: Checkpointing = "none",
) -> int:
    """The largest divisor of a device's `share` of a batch whose estimate is at most `limit` bytes; 1 where none is.

    Raises:
        ValueError: As `training_memory`.
    """
    sizes = [size for size in range(share, 1, -1) if share % size == 0]
    for size in sizes:
        estimate = training_memory(
            config,
            micro_batch=size,
            precision=precision,
            optimizer=optimizer,
            sharding=sharding,
            world_size=world_size,
            tensor_parallel=tensor_parallel,
            checkpointing=checkpointing,
        )
        if estimate.total <= limit:
            return size
    return 1


def fitting(
    config: ModelConfig, sequences: int, *, limit: int, precision: Precision, optimizer: str, ranks: int = 1
) -> tuple[int, Checkpointing]:
    """The micro-batch of a training, and the least checkpointing with which it is estimated to fit in `limit` bytes.

    `sequences` are those of one device; with several `ranks` the state is sharded over as many devices.

    Where nothing fits, one sequence under full checkpointing: the estimate may be too high.
    """
    kinds: tuple[Checkpointing, ...] = ("none", "selective", "full")
    for kind in kinds:
        of_device: dict[str, Any] = {"precision": precision, "optimizer": optimizer, "checkpointing": kind}
        if ranks > 1:
            of_device |= {"sharding": "full", "world_size": ranks}
        size = largest_micro_batch(config, sequences, limit=limit, **of_device)
        if training_memory(config, micro_batch=size, **of_device).total <= limit:
            return size, kind
    return 1, "full"


def _norm(config: ModelConfig, compute: int) -> int:
    """Bytes a token of a norm: its input and its statistics, which a GPU keeps in fp32."""
    statistics = 2 if config.norm == "layernorm" else 1
    return compute * config.d_model + _FP32 * statistics
