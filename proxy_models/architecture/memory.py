"""Memory that training a decoder takes on each device: parameters, gradients, optimizer state, activations.

Weights, gradients and moments are fp32, whatever the model computes in; weights are gathered, or copied, in the model's precision.
Activations are counted tensor by tensor, as autograd keeps them for the backward pass of `Decoder` (tests compare the count with
autograd's, in fp32 and bf16). Attention is assumed to be fused, so that its weights are never kept (Dao et al., arXiv 2205.14135).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.member import Member

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
_FP32 = 4
_COMPUTE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOMENTS = {"adamw": (2, 2), "adam": (2, 2), "lion": (1, 1), "muon": (1, 2), "adafactor": (0, 0)}
"""Numbers of optimizer state per entry of the blocks' matrices and per other parameter, which Muon leaves to AdamW.
`_n_moments` counts Adafactor's."""
LARGEST_FLASH_HEAD = 256


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
            copy. On one device, the low-precision copies that the backward pass needs.
        gradients: Gradients that the device keeps.
        optimizer: Moments that the device keeps.
        reduced: Gradients of whole units before reduction, and the fp32 buffer for the reduction.
        activations: Activations that blocks keep for the backward pass of one micro-batch, and the peak's temporary tensors.
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
    checkpointing: Checkpointing = "none",
    compiled: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of training on each device.

    Args:
        config: The model.
        micro_batch: Sequences that a device takes at once.
        precision: Precision in which the model computes.
        optimizer: "adamw", "adam", "lion", "muon" or "adafactor".
        sharding: State sharded across the devices.
        world_size: Devices that each take a share of the batch; for "hybrid", the devices of one copy.
        tensor_parallel: Devices that share each product; `world_size` counts such a group once.
        checkpointing: Activations that are recomputed, one block at a time.
        compiled: Whether blocks are compiled and so recompute the activation of a gated MLP; False is an upper bound.

    Raises:
        ValueError: If a number is below 1 or the optimizer is unknown.
    """
    numbers = {"micro_batch": micro_batch, "world_size": world_size, "tensor_parallel": tensor_parallel}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if optimizer not in _MOMENTS:
        raise ValueError(f"optimizer must be one of {', '.join(_MOMENTS)}, got {optimizer!r}")
    n, share = _n_params(config, tensor_parallel), 1 if sharding == "none" else world_size
    table, block = _of_units(config, tensor_parallel)
    positions, in_blocks = (
        number // tensor_parallel for number in (config.n_params_by_group["positions"], config.n_matrix_entries)
    )
    compute, is_low = _COMPUTE_BYTES[precision], precision != "fp32"
    tied = table if config.tied else 0
    if world_size * tensor_parallel == 1:
        copied = is_low * (in_blocks if checkpointing == "none" else in_blocks // config.n_layers)
        beside_readout, beside_block, prefetched = copied + is_low * table, copied + is_low * tied, 0
        of_table = of_block = 0
        of_whole_block = (_FP32 + is_low * compute) * config.d_model * config.d_ff  # one matrix at a time
    else:
        prefetched = block
        beside_readout, beside_block = positions + block + table, positions + tied + 2 * block
        if sharding in ("none", "zero2"):
            beside_readout = beside_block = prefetched = n
        of_table, of_block = _FP32 * (table - tied), _FP32 * block
        of_whole_block = of_block + compute * block
    of_matrix = compute * config.d_model * config.d_ff // tensor_parallel  # the MLP's last matrix
    of_tied = compute * tied  # reduced at the end, with the rest of the model
    kept = _kept_by_block(config, precision, checkpointing, tensor_parallel, compiled=compiled)
    n_positions, stream = micro_batch * config.context_length, compute * config.d_model // tensor_parallel
    blocks = n_positions * kept * config.n_layers + _bias_bytes(config, compute, tensor_parallel)
    head = n_positions * _kept_by_head(config, n_positions, precision, tensor_parallel)
    in_block = n_positions * _at_work(config, precision, kept, checkpointing, tensor_parallel)
    forward, backward = _loss_at_work(config, n_positions, precision, tensor_parallel)
    before = blocks - n_positions * kept
    moments = (
        (beside_readout, 0, blocks + head + forward),
        (beside_readout, _FP32 * table, blocks + head + backward),
        (beside_block, of_table + of_tied + of_matrix, blocks + in_block),  # backward pass of the last block
        (beside_block, of_block + of_tied + of_matrix, before + in_block),  # backward pass of the second-last block
        (prefetched, of_whole_block + of_tied, before + n_positions * stream),
    )
    gathered, reduced, activations = max(
        ((compute * weights, gradients, rest) for weights, gradients, rest in moments), key=sum
    )
    return MemoryEstimate(
        parameters=_FP32 * (n // share),
        gathered=gathered,
        gradients=_FP32 * n // share,
        optimizer=_FP32 * _n_moments(config, optimizer, in_blocks, n, share),
        reduced=reduced,
        activations=activations,
    )


def state_bytes(model: Member, optimizer: str) -> int:
    """Return the bytes of weights and moments of a whole model, or an upper bound for a family without an estimate.

    Raises:
        ValueError: If the optimizer is unknown.
    """
    if isinstance(model, ModelConfig):
        estimate = training_memory(model, micro_batch=1, optimizer=optimizer)
        return estimate.parameters + estimate.optimizer
    if optimizer not in _MOMENTS:
        raise ValueError(f"optimizer must be one of {', '.join(_MOMENTS)}, got {optimizer!r}")
    return _FP32 * (1 + max(_MOMENTS[optimizer])) * model.n_params_total


def least_memory(model: Member, optimizer: str, *, sharding: Sharding, world_size: int) -> int:
    """Return a lower bound of the bytes on each device for any model: weights, gradients and the fewest possible moments.

    Args:
        model, optimizer: As for `state_bytes`.
        sharding, world_size: As for `training_memory`.
    """
    share = 1 if sharding == "none" else world_size
    return _FP32 * (2 + min(_MOMENTS[optimizer])) * model.n_params_total // share


def _n_params(config: ModelConfig, tensor_parallel: int) -> int:
    """Return the parameters on one of these devices: its part of matrices and tables, all norms, and biases after a sum."""
    norms = config.n_params_by_group["norms"] + (2 * config.n_layers * config.d_model if config.biases else 0)
    return norms + (config.n_params_total - norms) // tensor_parallel


def _of_units(config: ModelConfig, tensor_parallel: int) -> tuple[int, int]:
    """Return the parameters of the readout and of a block on one of these devices."""
    table, positions, embedding = (
        config.n_params_by_group[name] // tensor_parallel for name in ("readout", "positions", "embedding")
    )
    return table, (_n_params(config, tensor_parallel) - table - positions - embedding) // config.n_layers


def _n_moments(config: ModelConfig, optimizer: str, in_blocks: int, n: int, share: int) -> int:
    """Return the numbers of optimizer state on a device with 1/`share` of `n` parameters.

    Adafactor keeps a mean for each row and column of a matrix on every device, and a mean for each entry of a vector.
    """
    if optimizer == "adafactor":
        width, d_kv, n_mlp = (
            config.d_model,
            config.n_kv_heads * config.head_dim,
            3 if config.activation == "swiglu" else 2,
        )
        tables = (1 if config.tied else 2) * (config.vocab_size + width)
        positions = config.context_length + width if config.positions == "learned" else 0
        return config.n_layers * (6 * width + 2 * d_kv + n_mlp * (width + config.d_ff)) + tables + positions
    in_matrices, elsewhere = _MOMENTS[optimizer]
    return (in_matrices * in_blocks + elsewhere * (n - in_blocks)) // share


def activation_bytes(
    config: ModelConfig,
    micro_batch: int,
    precision: Precision = "fp32",
    checkpointing: Checkpointing = "none",
    *,
    tensor_parallel: int = 1,
    compiled: bool = False,
) -> int:
    """Return the bytes that autograd keeps for the backward pass of `micro_batch` sequences.

    Each device that shares products keeps its own heads and columns of the MLP, its own positions of the residual stream,
    and all positions of the matrices' inputs. Logits of such devices are always chunked, and chunked logits are not kept.
    """
    n_positions = micro_batch * config.context_length
    kept = _kept_by_block(config, precision, checkpointing, tensor_parallel, compiled=compiled)
    blocks = config.n_layers * kept
    head = _kept_by_head(config, n_positions, precision, tensor_parallel)
    return n_positions * (blocks + head) + _bias_bytes(config, _COMPUTE_BYTES[precision], tensor_parallel)


def _kept_by_block(
    config: ModelConfig,
    precision: Precision,
    checkpointing: Checkpointing,
    tensor_parallel: int,
    *,
    compiled: bool = False,
) -> int:
    """Return the bytes per token that a block keeps. A compiled gated MLP recomputes its activation instead of keeping it."""
    compute, width = _COMPUTE_BYTES[precision], config.d_model
    mixed, d_kv, d_ff, n_heads, n_kv_heads = (
        size // tensor_parallel
        for size in (width, config.n_kv_heads * config.head_dim, config.d_ff, config.n_heads, config.n_kv_heads)
    )
    n_up, n_norms = 2 if config.activation == "swiglu" else 1, 1 if config.parallel else 2
    stream = compute * width // tensor_parallel
    if checkpointing == "full":
        return stream
    if checkpointing == "selective":
        return stream + compute * (2 * width + 2 * mixed + 2 * d_kv + n_up * d_ff) + _FP32 * n_heads
    block = n_norms * (_norm(config, compute) // tensor_parallel + compute * width)
    block += compute * (mixed + 2 * (mixed if _expands_keys(config, precision) else d_kv))  # queries, keys, values
    block += compute * mixed + _FP32 * n_heads  # mixed values, and the softmax's normaliser
    if config.qk_norm:
        block += compute * (mixed + d_kv) + _FP32 * (n_heads + n_kv_heads)
    block += compute * {"swiglu": 3 if compiled else 4, "gelu": 2, "relu": 1, "relu2": 2}[config.activation] * d_ff
    return block + (width if config.mlp_dropout else 0)  # a mask of bytes


def _at_work(
    config: ModelConfig, precision: Precision, kept: int, checkpointing: Checkpointing, tensor_parallel: int
) -> int:
    """Return the bytes per token in a block's backward pass beyond the block's `kept` bytes: recomputed tensors and gradients."""
    compute, width = _COMPUTE_BYTES[precision], config.d_model
    gradients = compute * (2 * config.d_ff + width) // tensor_parallel  # the MLP's hidden layer twice, and the stream
    if tensor_parallel > 1:
        gradients += 2 * compute * width  # the MLP's output, gathered and then reordered
    whole = _kept_by_block(config, precision, "none", tensor_parallel)
    unread = compute * width if checkpointing == "selective" else 0  # the output of a block's last product
    return gradients + whole - kept + unread


def _kept_by_head(config: ModelConfig, n_positions: int, precision: Precision, tensor_parallel: int) -> int:
    """Return the bytes per token that the last norm, the readout and the loss keep; the loss computes logits in fp32."""
    compute = _COMPUTE_BYTES[precision]
    kept = _norm(config, compute) // tensor_parallel + compute * config.d_model
    if _chunks_logits(config, n_positions, tensor_parallel):
        return kept + _FP32
    return kept + _FP32 * config.vocab_size * (2 if config.z_loss else 1)


def _loss_at_work(config: ModelConfig, n_positions: int, precision: Precision, tensor_parallel: int) -> tuple[int, int]:
    """Return the loss's temporary bytes, forward and backward, without kept tensors and the readout's fp32 gradient.

    Forward, they are fp32 logits (of a chunk, if chunked) and their exponentials. Backward, they are the logits in low precision and
    fp32, or the logits in low precision and the chunk's part of the readout's gradient.
    """
    vocab_size, compute = -(-config.vocab_size // tensor_parallel), _COMPUTE_BYTES[precision]
    low, logits = compute if precision != "fp32" else 0, n_positions * vocab_size
    if not _chunks_logits(config, n_positions, tensor_parallel):
        return (_FP32 + low) * logits, (_FP32 + low) * logits
    logits = min(CHUNK_ENTRIES, logits)
    of_readout = compute * vocab_size * config.d_model
    backward = max((_FP32 + low) * logits, compute * logits + of_readout)
    return 2 * _FP32 * logits, backward + n_positions * compute * config.d_model


def _chunks_logits(config: ModelConfig, n_positions: int, tensor_parallel: int) -> bool:
    return tensor_parallel > 1 or is_chunked(n_positions, config.vocab_size)


def _bias_bytes(config: ModelConfig, compute: int, tensor_parallel: int) -> int:
    """Return the bytes of ALiBi's bias, in fp32 and in the precision of the products."""
    if config.positions != "alibi":
        return 0
    per_entry = _FP32 + (compute if compute < _FP32 else 0)
    return per_entry * config.n_heads // tensor_parallel * config.context_length**2


def _expands_keys(config: ModelConfig, precision: Precision) -> bool:
    """Whether a GPU's kernel needs a key and a value for each query head, as `attention.cuda_kernel` implies."""
    return config.queries_per_kv > 1 and (
        precision == "fp32" or config.positions == "alibi" or config.head_dim > LARGEST_FLASH_HEAD
    )


def evaluation_memory(
    config: ModelConfig,
    sequences: int,
    training: MemoryEstimate,
    precision: Precision = "fp32",
    *,
    sharding: Sharding = "none",
    world_size: int = 1,
    tensor_parallel: int = 1,
) -> int:
    """Return an upper bound of the bytes on each device during an evaluation within training: state without gradients, and a pass.

    The pass takes `sequences` at a time. FSDP2 gathers a unit into a buffer and copies the weights from it; the buffer stays until
    the next unit is gathered. The readout stays gathered from the first pass on, since no backward pass follows.
    """
    n, table, block = _n_params(config, tensor_parallel), *_of_units(config, tensor_parallel)
    stream = _COMPUTE_BYTES[precision] * config.d_model * sequences * config.context_length // tensor_parallel
    at_work = evaluation_bytes(config, sequences, precision, tensor_parallel=tensor_parallel)
    if world_size * tensor_parallel == 1:
        moments = [(max(table, config.d_model * config.d_ff) * (precision != "fp32"), at_work)]
    elif sharding in ("none", "zero2"):
        moments = [(n + max(table, block), at_work)]
    else:
        moments = [
            (3 * table, stream),  # the readout once, the embedding twice
            (2 * table + 2 * block, 2 * stream),  # the readout, the embedding's buffer, the first block twice
            (table + max(table, 2 * block), at_work),
        ]
    held = training.parameters + training.optimizer
    return held + max(_COMPUTE_BYTES[precision] * weights + rest for weights, rest in moments)


def evaluation_bytes(
    config: ModelConfig, sequences: int, precision: Precision = "fp32", *, tensor_parallel: int = 1
) -> int:
    """Return an upper bound of the bytes of a pass without gradients: all tensors of a block, the last norm and the loss."""
    one_block = activation_bytes(replace(config, n_layers=1), sequences, precision, tensor_parallel=tensor_parallel)
    forward, _ = _loss_at_work(config, sequences * config.context_length, precision, tensor_parallel)
    return one_block + forward


def largest_micro_batch(estimate: Callable[..., MemoryEstimate], share: int, *, limit: int) -> int:
    """Return the largest divisor of a device's `share` of a batch whose `estimate(micro_batch=…)` is at most `limit`, or 1."""
    sizes = [size for size in range(1, share + 1) if share % size == 0]
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


def _norm(config: ModelConfig, compute: int) -> int:
    """Return the bytes per token of a norm: its input and its statistics, which a GPU keeps in fp32."""
    statistics = 2 if config.norm == "layernorm" else 1
    return compute * config.d_model + _FP32 * statistics
