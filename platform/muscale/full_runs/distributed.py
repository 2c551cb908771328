"""The ranks of one training: who this one is, a way to talk beside the training's own, and joining under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
_side: tuple[object, dist.ProcessGroup] | None = None  # the world that it is of, and the group


def rank() -> int:
    """This process's rank, before or after the process group exists."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def side_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks, apart from the one that gradients go through; None in one process.

    Collectives of two threads must not mix in one group, and NCCL's carry no objects on the CPU. The first call is for all ranks.
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
    """What `make` gives on rank 0, on every rank; called by all of them."""
    group = side_group()
    if group is None:
        return make()
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0, group=group)
    return cast(T, made[0])


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """In one process group with the others that the launcher started, if it told of any and did not make the group itself."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if alone or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield
    dist.destroy_process_group()  # not after an error: a peer that is gone would be waited for
