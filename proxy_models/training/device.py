"""The device of a training, the CPU or one CUDA device: its choice, transfers, and the FLOP/s in its datasheet."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from proxy_models.architecture.families import family_of
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import MEMORY_SHARE, Checkpointing, Precision

CPU = torch.device("cpu")
EVALUATION_BATCH = 64
"""Largest number of sequences in a pass of evaluation."""
_HALF_PRECISION = {
    r"H100 PCIe": 756e12,
    r"H100 NVL": 835e12,
    r"G?H200|H100": 989e12,
    r"GB200": 2500e12,
    r"B200": 2250e12,
    r"A100": 312e12,
    r"L40S": 362e12,
    r"L4": 121e12,
}
"""FLOP/s of one GPU in bf16 or fp16 with fp32 sums, dense, by a pattern in the name that the driver reports; the first match
counts. Source: NVIDIA's datasheets of A100, H100, H200, GH200, L4, L40S, HGX B200 and GB200 NVL72; half of a rate that is stated
for sparse matrices."""


def usable(device: str | torch.device) -> torch.device:
    """Resolve a device, "cuda" to torch's current one; raise ValueError if it is neither the CPU nor a CUDA device found here."""
    try:
        meant = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:<number>", got {device!r}') from error
    if meant.type == "cpu":
        return CPU
    if meant.type != "cuda":
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:<number>", got {str(device)!r}')
    if (meant.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {meant}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here"
        )
    return meant if meant.index is not None else torch.device("cuda", torch.cuda.current_device())


def memory_limit(device: torch.device) -> int:
    """Return the bytes that an estimate may fill on a GPU."""
    return int(MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)


def fitting_on(
    device: torch.device,
    config: Member,
    sequences: int,
    *,
    precision: Precision,
    optimizer: str = "adamw",
    share: float = 1.0,
    ranks: int = 1,
) -> tuple[int | None, Checkpointing]:
    """Return `Family.fitting` for a share of the GPU memory, the smallest of all ranks; on a CPU the whole batch (None) and "none".

    Each pass has collectives, so all ranks call this function and run the same number of passes.
    """
    if device.type == "cpu":
        return None, "none"
    limit = int(share * memory_limit(device))
    if ranks > 1:
        from proxy_models.training.fsdp import least_of_ranks  # a late import, since it is slow

        limit = least_of_ranks(limit, device)
    return family_of(config).fitting(
        config, sequences, limit=limit, precision=precision, optimizer=optimizer, ranks=ranks
    )


def evaluation_batch(device: torch.device, micro_batch: int | None, *, stages: int = 1) -> int:
    """Return the sequences in a pass of evaluation: on a GPU at most training's micro-batch, since more may not fit.

    A pipeline of `stages` ranks takes that many micro-batches at once. On a CPU the number is constant, since another number would
    sum the losses in another order.
    """
    if device.type == "cpu" or not micro_batch:
        return EVALUATION_BATCH
    return min(micro_batch * stages, max(stages, EVALUATION_BATCH))


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to the device; to a GPU through pinned memory, since other copies wait for earlier steps."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def wait(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def datasheet_flops(name: str, precision: Precision) -> float | None:
    """Return the vendor's FLOP/s for the GPU of this name (`torch.cuda.get_device_name`), or None if unknown.

    The result is the denominator of model FLOP utilisation (Chowdhery et al., arXiv 2204.02311, appendix B). It is None for fp32,
    whose rate depends on whether TF32 is allowed, and for a slice of a GPU (MIG).
    """
    if precision == "fp32" or "MIG" in name.split():
        return None
    return next((flops for part, flops in _HALF_PRECISION.items() if re.search(rf"\b({part})\b", name)), None)
