"""The machine and versions of a training run: recorded with its result, but not part of its key."""

from __future__ import annotations

import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device, *, world_size: int = 1, compiled: bool = False) -> dict[str, Any]:
    """Return machine, device, versions, threads and world size as plain values."""
    transformers = {"transformers": metadata.version("transformers")} if "transformers" in sys.modules else {}
    return {
        "host": platform.node(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "muscale": metadata.version("muscale"),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "world_size": world_size,
        "compiled": compiled,
        **transformers,
    }


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor: a different one may sum products in a different order."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


@cache
def _processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
