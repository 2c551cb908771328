"""Where no step ends, each rank's place is named, before the collective that waits times out."""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from muscale import json_lines
from muscale.full_runs.records.goodput import ATTEMPTS
from muscale.full_runs.train.roll_call import RankState, describe
from proxy_models.training.step import Stepper
from tests.muscale.forked_ranks import ended, small_corpus, small_run, start


def hang_on_rank_1(rank: int, *, log: Path) -> None:
    """Rank 1 takes no fourth step; rank 0 logs to a file."""
    logging.getLogger("muscale").addHandler(logging.FileHandler(log.with_suffix(f".{rank}")))
    step = Stepper.step

    def hanging(self: Stepper, *args: Any, number: int, **rest: Any) -> Any:
        if rank == 1 and number == 3:
            time.sleep(4.5)
            os._exit(0)
        return step(self, *args, number=number, **rest)

    Stepper.step = hanging  # type: ignore[method-assign]


def test_a_rank_that_hangs_is_named_and_its_peer_does_not_wait_for_ever(tmp_path: Path) -> None:
    run = small_run(small_corpus(tmp_path), tmp_path / "run", step_timeout_minutes=3 / 60)
    log = tmp_path / "log"
    assert ended(start(run, 2, fault=functools.partial(hang_on_rank_1, log=log))) == [1, 0]
    first, *ranks = log.with_suffix(".0").read_text().splitlines()
    waiting, hung = sorted(ranks)
    assert 1 <= float(re.search(r"[\d.]+", first)[0]) < 3  # type: ignore[index]
    assert re.fullmatch(r"  after step 3, hanging \(test_roll_call\.py:\d+\): rank 1 on \S+", hung)
    assert re.fullmatch(r"  after step 3, all_gather_\w+ \(distributed_c10d\.py:\d+\): rank 0 on \S+", waiting)
    stopped = json_lines.read(run.directory / ATTEMPTS)[-1]
    assert (stopped["step"], stopped["kind"]) == (3, "lost")
    assert "Timed out waiting 3000ms" in stopped["error"]


def test_ranks_that_are_behind_or_alone_come_first() -> None:
    waits = "all_gather_single (distributed_c10d.py:1)"
    ranks = [RankState(rank=rank, host=f"gpu{rank // 8}", step=100, line=waits) for rank in range(16)]
    ranks[3] = replace(ranks[3], step=99, line="read (batches.py:2)")
    ranks[9] = replace(ranks[9], line="")
    assert describe(ranks, 300.0).splitlines() == [
        "no step has finished for 300 s:",
        "  after step 99, read (batches.py:2): rank 3 on gpu0",
        "  after step 100, without an answer: rank 9 on gpu1",
        f"  after step 100, {waits}: ranks 0 on gpu0, 1 on gpu0, 2 on gpu0, 4 on gpu0, 5 on gpu0, 6 on gpu0, 7 on gpu0, 8 on gpu1 "
        "and 6 more",
    ]
