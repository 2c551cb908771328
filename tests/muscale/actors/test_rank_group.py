"""Trials of two ranks in Ray's processes: the results of one rank, also after a rank was lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from muscale import Study
from muscale.actors.cluster import staying_cluster
from muscale.actors.jobs import finish
from muscale.actors.worker import Worker
from muscale.proxies import transfer

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("free_cluster")]

RANKS = ["resources.workers=1", "resources.ranks_per_trial=2", "resources.cpus_per_worker=0.5"]


def followers() -> list[int]:
    """Process ids of the ranks but the first."""
    table = ray._private.state.actors()
    return [row["Pid"] for row in table.values() if (row["ActorClassName"], row["State"]) == ("Follower", "ALIVE")]


@pytest.mark.parametrize("loses_a_rank", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_grid_has_the_losses_of_one_rank_also_after_a_rank_was_lost(
    make_study: Callable[[str], Path], loses_a_rank: bool
) -> None:
    study = Study.open(make_study("study"), RANKS, quiet=True)
    config, ledger = study.config, study.ledger
    numerics = config.shared_numerics(study.corpus)
    first, second, *_ = transfer.jobs(transfer.members(config, numerics, config.hyperparameters))
    with staying_cluster():
        finish([first], ledger, config.resources, lambda *_: None)
        (first_one,) = followers()
        if loses_a_rank:
            os.kill(first_one, signal.SIGKILL)
        finish([second], ledger, config.resources, lambda *_: None)
        assert (followers() != [first_one]) == loses_a_rank
    other = Study.open(make_study("alone"), quiet=True)
    assert other.corpus.key == study.corpus.key
    alone = Worker(other.ledger, compiled=False)
    for job in (first, second):
        together, expected = ledger.outcome(job.chain), alone.reach(job.chain)
        assert together is not None
        assert together.loss == pytest.approx(expected.loss, rel=1e-6)
