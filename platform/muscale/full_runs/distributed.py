"""The ranks of one training: device, process group, and a side group for objects. torchrun, srun or Ray Train starts the ranks.

A launcher describes a rank by torchrun's environment variables; Ray Train sets them too, and `adopt_slurm` derives them from srun's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from muscale.errors import StageError, refusing
from muscale.formatting import listed

T = TypeVar("T")
_side: tuple[object, dist.ProcessGroup] | None = None  # the process group, and its side group
_FIRST_PORT = 15000  # for a Slurm job's ranks: plus the last four digits of its id, as in Lightning's SLURMEnvironment

_COLLECTIVES_KEPT = 2000  # by the flight recorder: some twenty steps of 32 blocks, each gathered twice and reduced once


def rank() -> int:
    """This process's rank, also before the process group exists."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def adopt_slurm() -> None:
    """Describe a task of an srun step by torchrun's variables, unless torchrun has set them or the step has a single task.

    MASTER_ADDR (default: the step's first node) and MASTER_PORT are kept if set. Variables of srun:
    https://slurm.schedmd.com/srun.html, "Output environment variables".
    """
    step = os.environ
    if "RANK" in step or int(step.get("SLURM_STEP_NUM_TASKS", "1")) == 1:  # the batch script itself has no step
        return
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    first = SLURMEnvironment.resolve_root_node_address(step["SLURM_STEP_NODELIST"])
    node = int(step["SLURM_NODEID"])
    step |= {
        "RANK": step["SLURM_PROCID"],
        "LOCAL_RANK": step["SLURM_LOCALID"],
        "GROUP_RANK": str(node),
        "WORLD_SIZE": step["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(tasks_of_nodes(step["SLURM_STEP_TASKS_PER_NODE"])[node]),
    }
    step.setdefault("MASTER_ADDR", first)
    step.setdefault("MASTER_PORT", str(_FIRST_PORT + int(step["SLURM_JOB_ID"][-4:])))


def tasks_of_nodes(text: str) -> list[int]:
    """Tasks on each node, from SLURM_STEP_TASKS_PER_NODE: "8(x2),4" is 8, 8, 4."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in runs for _ in range(int(nodes or 1))]


def rank_device() -> torch.device:
    """The device of this rank under torchrun, srun or in one process: GPU LOCAL_RANK of the node, or the CPU without CUDA.

    Under Slurm, a task that sees a single GPU (`--gpus-per-task=1`) takes that GPU.

    Raises:
        StageError: If the node has fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count == 1 and "SLURM_LOCALID" in os.environ:
        index = 0
    if index >= count:
        raise StageError(
            f"promote: each rank needs its own GPU; local rank {index} sees {count} on this node; start one rank per GPU"
        )
    return torch.device("cuda", index)


def flight_recorder(folder: Path) -> dict[str, str]:
    """Environment variables that make NCCL write each rank's last collectives to `folder/rank_N` when a collective times out.

    A variable that is already set, also by its older name, is kept. Names as in torch 2.13's libtorch (FlightRecorder.hpp,
    ProcessGroupNCCL.hpp); `torchfrtrace FOLDER` compares the ranks.
    """
    ours = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): str(_COLLECTIVES_KEPT),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(folder / "rank_"),
    }
    return {names[0]: value for names, value in ours.items() if not any(name in os.environ for name in names)}


def side_group(timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """A second gloo group of all ranks, besides the group for gradients; None in one process.

    Collectives of two threads must not share a group, and NCCL can't send CPU objects. All ranks must make the first call, which
    sets the timeout; None: torch's 30 minutes.
    """
    global _side
    if not dist.is_initialized():
        return None
    if _side is None or _side[0] is not dist.group.WORLD:
        _side = dist.group.WORLD, dist.new_group(backend="gloo", timeout=timeout)
    return _side[1]


def barrier() -> None:
    """Wait for all ranks."""
    if group := side_group():
        dist.barrier(group=group)


def broadcast_from_rank0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0, and return its value on every rank; all ranks call this."""
    group = side_group()
    if group is None:
        return make()
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0, group=group)
    return cast(T, made[0])


def of_all_ranks(value: T) -> list[T]:
    """The value of each rank, by rank; all ranks call this."""
    group = side_group()
    if group is None:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def process_group(device: torch.device, *, timeout: timedelta, records: Path) -> Iterator[None]:
    """Take the device, and join the process group of the launcher's ranks, unless there is a single rank or the group exists.

    Args:
        timeout: Time limit for all ranks to join, and for collectives until a strategy sets another.
        records: Folder for the flight recorder of a GPU group.

    Raises:
        StageError: If ranks do not arrive in time; the message names them.
    """
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)  # first, since NCCL and the mesh take the current device
    if joins := int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        if gpu:
            os.environ |= flight_recorder(records)
            records.mkdir(parents=True, exist_ok=True)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=_meet(timeout),
            rank=rank(),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
            device_id=device if gpu else None,
        )
    side_group(timeout)
    yield
    if joins:
        dist.destroy_process_group()  # not after an error, since it would wait for a lost peer


def _meet(timeout: timedelta) -> Store:
    """The ranks' store, once all ranks have reached it; torch's own rendezvous only counts the missing ranks."""
    here, n_ranks = rank(), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves the store
    arrived = [f"muscale/arrived/{number}" for number in range(n_ranks)]
    with refusing(f"promote: rank {here} did not reach the store of rank 0 at {address}:{port}", dist.DistError):
        store = TCPStore(
            address, port, n_ranks, is_master=here == 0 and not by_agent, timeout=timeout, wait_for_workers=False
        )
        store.set(arrived[here], "")
    try:
        store.wait(arrived, timeout)
    except dist.DistError as error:
        with suppress(dist.DistError):  # rank 0 may have given up first
            absent = [number for number, key in enumerate(arrived) if not store.check([key])]
            raise StageError(
                f"promote: {len(absent)} of {n_ranks} ranks did not start within {timeout}: "
                f"{listed(absent)}; see their logs, or raise "
                "promote.start_timeout_minutes"
            ) from error
        raise
    return store
