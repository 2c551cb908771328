"""What training a decoder takes in memory on each device: parameters, gradients, optimizer state, activations.

Weights, gradients and moments are fp32, whatever matrices are multiplied in. Activations are counted tensor by tensor, as
autograd keeps them for the backward pass of `Decoder` (tests compare the count with what it keeps, in fp32 and bf16); attention
is taken to be fused, so that its weights are never kept (Dao et al., arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from proxy_models.config import ModelConfig
    from proxy_models.numerics import Precision

Sharding = Literal["none", "optimizer", "full"]
"""What is cut across devices: nothing; optimizer state and gradients (ZeRO-2); parameters too (ZeRO-3, FSDP).
Rajbhandari et al., arXiv 1910.02054, section 5."""
Checkpointing = Literal["none", "full"]
_FP32 = 4
_COMPUTE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOMENTS = {"adamw": (2, 2), "adam": (2, 2), "lion": (1, 1), "muon": (1, 2), "adafactor": (0, 0)}
"""Numbers of optimizer state for each entry of the blocks' matrices and for each other parameter, which Muon leaves to AdamW.
Adafactor keeps means of rows and columns only, which is little."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on each device.

    Attributes:
        parameters: What the device keeps of the weights.
        gathered: Weights outside the blocks, whole from the forward pass to the end of the backward pass, and those of the
            block that is computed; 0 where parameters are not cut.
        gradients: What it keeps of the gradients.
        optimizer: What it keeps of the moments.
        activations: Kept between forward and backward of one micro-batch, with the matrices in low precision.
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
    checkpointing: Checkpointing = "none",
) -> MemoryEstimate:
    """Memory of training on each of `world_size` devices.

    Args:
        config: The model.
        micro_batch: Sequences that a device takes at once.
        precision: What matrices are multiplied in.
        optimizer: "adamw", "adam", "lion", "muon" or "adafactor".
        sharding: What is cut across the devices.
        world_size: Devices that share it.
        checkpointing: "full" keeps the input of each block only, and computes the block again (Chen et al.,
            arXiv 1604.06174); one block's activations stand at a time.

    Raises:
        ValueError: If a number is below 1 or the optimizer is not known.
    """
    for name, value in (("micro_batch", micro_batch), ("world_size", world_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if optimizer not in _MOMENTS:
        raise ValueError(f"optimizer must be one of {', '.join(_MOMENTS)}, got {optimizer!r}")
    n = config.n_params_total
    share = 1 if sharding == "none" else world_size
    kept = n // world_size if sharding == "full" else n
    groups = config.n_params_by_group
    outside = groups["embedding"] + groups["positions"] + groups["readout"]
    gathered = outside + (n - outside) // config.n_layers
    in_blocks = config.n_matrix_entries
    moments_in_blocks, moments_elsewhere = _MOMENTS[optimizer]
    moments = moments_in_blocks * in_blocks + moments_elsewhere * (n - in_blocks)
    return MemoryEstimate(
        parameters=_FP32 * kept,
        gathered=_FP32 * gathered if sharding == "full" and world_size > 1 else 0,
        gradients=_FP32 * n // share,
        optimizer=_FP32 * moments // share,
        activations=activation_bytes(config, micro_batch, precision, checkpointing),
    )


def activation_bytes(
    config: ModelConfig, micro_batch: int, precision: Precision = "fp32", checkpointing: Checkpointing = "none"
) -> int:
    """Bytes that autograd keeps for the backward pass of `micro_batch` sequences.

    In low precision these are also a copy of every matrix, and one of a norm's output for each matrix that reads it, as
    autocast makes them.
    """
    compute = _COMPUTE_BYTES[precision]
    width, d_kv, d_ff = config.d_model, config.n_kv_heads * config.head_dim, config.d_ff
    is_low, n_up = compute < _FP32, 2 if config.activation == "swiglu" else 1
    copies = (3, n_up) if is_low else (1, 0 if config.parallel else 1)  # for attention and MLP
    block = _norm(config) + compute * width * sum(copies)
    block += compute * (width + 2 * d_kv)  # queries, keys, values
    block += compute * width + _FP32 * config.n_heads  # mixed values, and the softmax's normaliser
    if config.qk_norm:
        block += _FP32 * (width + d_kv + config.n_heads + config.n_kv_heads)
    if not config.parallel:
        block += _norm(config)
    kept_of_mlp = {"swiglu": 4, "gelu": 2, "relu": 1, "relu2": 2}[config.activation]
    block += compute * kept_of_mlp * d_ff
    if config.mlp_dropout:
        block += width  # a mask of bytes
    head = (
        _norm(config)
        + compute * width
        + _FP32 * config.vocab_size
        + (_FP32 * config.vocab_size if config.z_loss else 0)
    )
    blocks = _FP32 * width * config.n_layers + block if checkpointing == "full" else block * config.n_layers
    matrices = compute * (config.n_matrix_entries + config.vocab_size * width) if is_low else 0
    return micro_batch * config.context_length * (blocks + head) + matrices


def _norm(config: ModelConfig) -> int:
    """Bytes a token of a norm: its fp32 input and its statistics."""
    statistics = 2 if config.norm == "layernorm" else 1
    return _FP32 * (config.d_model + statistics)
