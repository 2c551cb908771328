"""One rank of many without the others: what it builds and holds is real, what it is sent is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from proxy_models.architecture.memory import fullest
from proxy_models.architecture.shared_experts import ExpertShare


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a group without others, in which nothing can be sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts the rank before every line that one prints
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # which remembers the rank
        sys.excepthook = hook


@contextmanager
def fullest_rank(n: int, rows: int) -> Iterator[None]:
    """Be the fullest of `n` ranks that share out experts: its own `rows` leave for all of them alike, and more arrive."""
    arriving = round(fullest(n) * rows / n)

    def counts(_share: ExpertShare, load: Tensor) -> tuple[Tensor, list[int], list[int]]:
        received = load.new_zeros(n, len(load) // n)
        received[:, 0] = arriving
        return received, [rows // n] * n, [arriving] * n

    with patch.object(ExpertShare, "_counts", counts):
        yield
