"""The largest model that fits into memory, in training and in serving; every byte is an argument."""

from dataclasses import dataclass

from scaling.decisions.accelerators import Accelerator, accelerator, require_positive
from scaling.presentation import Result

TRAINING_BYTES = 16.0
"""Bytes per parameter under Adam in mixed precision: 2 for the parameter, 2 for its gradient, 12 for its fp32 copy and two moments
(Rajbhandari et al. 1910.02054, sec. 3.1)."""
SERVING_BYTES = 2.0
"""Bytes per parameter in bf16."""
SHARE = 0.7
"""Share of a device's memory that the model may take (assumed); the rest is for activations, or the cache of keys and values."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimit(Result):
    """Limit by the bytes that each parameter needs, spread evenly over devices.

    Attributes:
        what: use of the model, such as "training".
        memory_bytes: memory of one device.
        bytes_per_param: bytes of a parameter with its gradient and state.
        n_devices: devices that share one copy.
        share: share of the memory that the model may take, above 0, at most 1.

    Raises:
        ValueError: a number breaks its rule.
    """

    what: str
    memory_bytes: float
    bytes_per_param: float
    n_devices: int = 1
    share: float = SHARE

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bytes_per_param", "n_devices"):
            require_positive(name, getattr(self, name))
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share!r}")

    @classmethod
    def training(
        cls,
        device: Accelerator | str,
        *,
        n_devices: int,
        bytes_per_param: float = TRAINING_BYTES,
        share: float = SHARE,
    ) -> "MemoryLimit":
        """Limit in training: parameters, gradients and optimiser state, all sharded over the devices (ZeRO-3, FSDP)."""
        return cls(
            what="training",
            memory_bytes=accelerator(device).memory_bytes,
            bytes_per_param=bytes_per_param,
            n_devices=n_devices,
            share=share,
        )

    @classmethod
    def serving(
        cls,
        device: Accelerator | str,
        *,
        n_devices: int = 1,
        bytes_per_param: float = SERVING_BYTES,
        share: float = SHARE,
    ) -> "MemoryLimit":
        """Limit in serving: parameters alone, on the devices of one replica."""
        return cls(
            what="serving",
            memory_bytes=accelerator(device).memory_bytes,
            bytes_per_param=bytes_per_param,
            n_devices=n_devices,
            share=share,
        )

    @property
    def max_params(self) -> float:
        """Parameters of the largest model that fits, with every parameter counted."""
        return self.share * self.memory_bytes * self.n_devices / self.bytes_per_param

    def __str__(self) -> str:
        return (
            f"{self.what}: at most {self.max_params:.4g} parameters at {self.bytes_per_param:g} bytes each in {self.share:.0%} "
            f"of {self.n_devices:,} × {self.memory_bytes / 1e9:.4g} GB"
        )
