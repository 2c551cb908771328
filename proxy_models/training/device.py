"""Where a training runs: the CPU or one CUDA device, and how its batches get there."""

from __future__ import annotations

import torch
from torch import Tensor

CPU = torch.device("cpu")


def usable(device: str | torch.device) -> torch.device:
    """The device that is meant; "cuda" alone is torch's current one.

    Raises:
        ValueError: If it is neither the CPU nor a CUDA device that torch sees here.
    """
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


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device; to a GPU by way of pinned memory, as any other copy waits for the steps before it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def wait(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
