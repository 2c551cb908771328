"""The rank that the others wait for is named."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from muscale.full_runs.train import rank_flags
from muscale.full_runs.train.rank_flags import RankFlags, Straggler
from tests.muscale.forked_ranks import call_each


def test_who_waited_least_is_the_slowest_and_the_median_says_by_how_much() -> None:
    found = Straggler.of(torch.tensor([3.0, 3.2, 0.2, 3.1]), steps=10)
    assert found.slowest_rank == 2
    assert found.slowest_seconds == pytest.approx((3.05 - 0.2) / 10)


def _agree(rank: int, folder: Path) -> None:
    """One of three ranks, of which the second arrives late at every agreement."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=3)
    rank_flags.AGREEMENTS_NAMED = 4
    flags, named = RankFlags(every_seconds=None, notice=lambda: False, timeout=timedelta(minutes=1)), []
    for _ in range(9):
        time.sleep(0.1 * (rank == 1))
        flags.agree(taken=2)
        named.append(flags.straggler and flags.straggler.slowest_rank)
    (folder / f"{rank}.json").write_text(json.dumps(named))


def test_ranks_agree_on_the_slowest_of_them_now_and_then(tmp_path: Path) -> None:
    call_each(_agree, *((rank, tmp_path) for rank in range(3)))
    named = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert named == [[None, None, None, 1] * 2 + [None]] * 3


def _waits(rank: int, folder: Path) -> None:
    """One of two ranks, of which the second takes part in the first agreement only."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    flags = RankFlags(every_seconds=None, notice=lambda: False, timeout=timedelta(seconds=1))
    flags.agree(taken=1)
    if rank == 0:
        with pytest.raises(RuntimeError, match="1000ms|[Tt]imed out"):
            flags.agree(taken=1)
        (folder / "ended").touch()
    while not (folder / "ended").exists():
        time.sleep(0.05)


def test_an_agreement_ends_after_the_timeout_of_a_step(tmp_path: Path) -> None:
    call_each(_waits, *((rank, tmp_path) for rank in range(2)))
