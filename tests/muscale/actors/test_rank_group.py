"""Trials of two ranks in Ray's processes: the results of one rank, in sweeps and grids, also after a rank was lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from muscale import Study
from muscale.actors.jobs import finish_stage
from muscale.actors.worker import Worker
from muscale.progress import Display
from muscale.proxies import transfer
from muscale.search.sweep import Sweep
from muscale.store.cancels import cancel_trial

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

RANKS = ["resources.workers=1", "resources.ranks_per_trial=2", "resources.cpus_per_worker=0.5"]


def followers() -> list[int]:
    """Process ids of the ranks but the first."""
    table = ray._private.state.actors()
    return [row["Pid"] for row in table.values() if (row["ActorClassName"], row["State"]) == ("Follower", "ALIVE")]


def test_a_population_that_copies_and_diverges_has_the_losses_of_one_rank(make_study: Callable[[str], Path]) -> None:
    settings = [
        *("sweep.scheduler=pbt", "sweep.searcher=random", "sweep.trials=4", "sweep.rungs=2", "sweep.top_k=1"),
        *("sweep.n_seeds=0", "sweep.space.learning_rate={distribution='log_uniform', low=0.002, high=1e4}"),
    ]
    study = Study.open(make_study("study"), [*RANKS, *settings], quiet=True)
    found = study.sweep()
    assert len(found.copies)
    other = Study.open(make_study("alone"), settings, quiet=True)
    sweep, alone = Sweep.of(other.config, other.ledger, other.corpus), Worker(other.ledger, compiled=False)
    record = Sweep.of(study.config, study.ledger, study.corpus).record()
    losses = {}
    for (trial, rung), result in record.results.items():
        outcome = alone.reach(sweep.plan.rung(record.path_towards(trial, rung), rung))
        if not outcome.diverged:
            losses[result.segment] = outcome.loss if outcome.averaged_loss is None else outcome.averaged_loss
    found_losses = {result.segment: result.loss for result in record.results.values() if result.loss is not None}
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert len(losses) < len(record.results)


@pytest.mark.parametrize("fault", ["cancel", "kill"])
def test_a_sweep_outlasts_a_cancel_and_the_loss_of_a_rank_in_the_middle_of_a_trial(
    make_study: Callable[[str], Path], fault: str
) -> None:
    settings = [
        *("sweep.scheduler=asha", "sweep.searcher=random", "sweep.trials=3", "sweep.rungs=3", "sweep.top_k=1"),
        *("sweep.n_seeds=0", "sweep.n_tokens=131072"),
    ]
    study = Study.open(make_study("study"), [*RANKS, *settings], quiet=True)
    sweep = Sweep.of(study.config, study.ledger, study.corpus)

    def disturb() -> None:
        deadline = time.monotonic() + 600
        while not (0 in sweep.record().configs and followers()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)  # into the first rung, which takes several seconds
        if fault == "cancel":
            cancel_trial(study.ledger, sweep.key, 0, "in the way")
        else:
            os.kill(followers()[0], signal.SIGKILL)

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    found = study.sweep()
    disturbing.join()
    record = sweep.record()
    assert record.last_rung(0) == 0 if fault == "cancel" else len(record.results) == 5
    assert set(found.trials["status"]) == {"completed", "stopped"} | ({"cancelled"} if fault == "cancel" else set())
    assert study.ledger.retrained() == []


@pytest.mark.parametrize("loses_a_rank", [False, True])
def test_a_grid_has_the_losses_of_one_rank_also_after_a_rank_was_lost(
    make_study: Callable[[str], Path], loses_a_rank: bool
) -> None:
    study = Study.open(make_study("study"), RANKS, quiet=True)
    config, ledger = study.config, study.ledger
    numerics = config.shared_numerics(study.corpus, study.directory)
    jobs = transfer.jobs(transfer.members(config, numerics, config.hyperparameters))[:2]

    def kill() -> None:
        deadline = time.monotonic() + 600
        while not (found := followers()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(found[0], signal.SIGKILL)

    killing = threading.Thread(target=kill)
    if loses_a_rank:
        killing.start()
    finish_stage("transfer", jobs, ledger, config.resources, Display(quiet=True))
    if loses_a_rank:
        killing.join()
    other = Study.open(make_study("alone"), quiet=True)
    assert other.corpus.key == study.corpus.key
    alone = Worker(other.ledger, compiled=False)
    for job in jobs:
        together, expected = ledger.outcome(job.chain), alone.reach(job.chain)
        assert together is not None
        assert together.loss == pytest.approx(expected.loss, rel=1e-6)
