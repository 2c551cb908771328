"""GPUs that are not there: torch.cuda reports them and gloo stands for NCCL, so that a rank gets to its first allocation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from muscale.full_runs.full_run import FullRun

H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30)


class AllocatedError(Exception):
    """The first allocation on a GPU, by its name."""


class _Allocations(TorchFunctionMode):
    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if device is not None and torch.device(device).type == "cuda":
            raise AllocatedError(str(torch.device(device)))
        return function(*args, **(kwargs or {}))


def first_allocation(train: Callable[[], object], n_gpus: int) -> list[list[Any]]:
    """What `train` asks of its device up to the first allocation, on a node with `n_gpus`: calls with their arguments.

    In a process of its own, as torch remembers devices.
    """
    calls: list[list[Any]] = []
    join = dist.init_process_group

    def joined(backend: str | None = None, *args: Any, device_id: torch.device | None = None, **rest: Any) -> None:
        calls.append(["join", backend, str(device_id)])
        join("gloo", *args, **rest)

    def current_device() -> int:
        return next((torch.device(call[1]).index for call in reversed(calls) if call[0] == "set"), 0)

    gpus: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: n_gpus,
        "set_device": lambda device: calls.append(["set", str(device)]),
        "current_device": current_device,
        "get_device_properties": lambda _device: H100,
    }
    with (
        patch.multiple(torch.cuda, **gpus),
        patch.object(dist, "init_process_group", joined),
        _Allocations(),
    ):
        try:
            train()
        except AllocatedError as first:
            return [*calls, ["allocate", str(first)]]
    raise RuntimeError("nothing was allocated")


def write_first_allocation(run: FullRun, n_gpus: int, variables: Mapping[str, str] = MappingProxyType({})) -> None:
    """Train on GPUs that are not there, as `muscale train` does, and write to the run's directory what this rank asked of them.

    `variables` are added to the environment. In a process of its own.
    """
    from muscale.full_runs.promote import prepared

    os.environ |= variables
    with patch.object(prepared, "_read", lambda _path: (None, run)):  # no ledger is near, so no config is needed
        calls = first_allocation(lambda: prepared.train_here(run.directory), n_gpus)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCH_FR_DUMP_TEMP_FILE")
    text = json.dumps([{name: os.environ[name] for name in names}, calls])
    (run.directory / f"rank-{os.environ['RANK']}.json").write_text(text)
