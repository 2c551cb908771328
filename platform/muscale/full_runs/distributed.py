"""The ranks of one training: rank, a side group for objects, the process group under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
_side: tuple[object, dist.ProcessGroup] | None = None  # the process group it was made for, and the side group


def rank() -> int:
    """This process's rank, also before the process group exists."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def side_group() -> dist.ProcessGroup | None:
    """A second gloo group of all ranks, beside the one for gradients; None in one process.

    Collectives of two threads must not share a group, and NCCL can't send CPU objects. All ranks must make the first call.
    """
    global _side
    if not dist.is_initialized():
        return None
    if _side is None or _side[0] is not dist.group.WORLD:
        _side = dist.group.WORLD, dist.new_group(backend="gloo")
    return _side[1]


def barrier() -> None:
    """Wait for all ranks."""
    if group := side_group():
        dist.barrier(group=group)


def broadcast_from_rank0(make: Callable[[], T]) -> T:
    """The value of `make` on rank 0, returned on every rank; all ranks call it."""
    group = side_group()
    if group is None:
        return make()
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0, group=group)
    return cast(T, made[0])


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the process group of the launcher's ranks, unless there is only one or the group exists."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if alone or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield
    dist.destroy_process_group()  # not after an error: it would wait for a lost peer
