"""The pool: leases, limits, warmth from one stage to the next, workers that die or never start."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from muscale.actors import pool as pool_module
from muscale.actors.cluster import staying_cluster
from muscale.actors.pool import PooledWorker, WorkerPool, result_of
from muscale.errors import StageError, WorkerLostError
from muscale.layout import LEDGER
from muscale.settings.tables import ResourceSettings
from muscale.store.ledger import Ledger

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("free_cluster")]

TWO = ResourceSettings(workers=2, cpus_per_worker=0.5)


class Planted:
    """Answers with its process's id, or ends it."""

    def __init__(self, ledger: Ledger, resources: ResourceSettings, package: str) -> None:
        if (ledger.directory / "dies").exists():
            os._exit(1)

    def reach(self, chain: Any) -> int:
        if chain == "end":
            os._exit(1)
        if chain == "fail":
            raise OSError("the tape is torn")
        return os.getpid()


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / LEDGER)


@pytest.fixture
def pool(ledger: Ledger) -> Iterator[WorkerPool]:
    pool = WorkerPool(ledger, TWO, Planted)
    yield pool
    pool.end()


def leased(pool: WorkerPool, wanted: int = 1) -> PooledWorker:
    """A worker, waited for."""
    while not (worker := pool.lease(wanted)):
        pool.wait(seconds=60)
    return worker


def pid(worker: PooledWorker) -> int:
    return int(result_of(worker.actor.reach.remote("")))


def test_workers_are_started_as_they_are_wanted_within_the_resources_and_the_last_given_back_is_leased_next(
    pool: WorkerPool,
) -> None:
    first = leased(pool)
    assert pool.lease(0) is None, "nobody wants another"
    second = leased(pool, 5)
    assert pool.lease(5) is None
    pids = [pid(first), pid(second)]
    assert len(set(pids)) == 2
    for worker in (second, first):
        pool.give_back(worker)
    assert [pid(leased(pool)) for _ in range(2)] == pids


def test_a_worker_that_dies_is_replaced_and_idle_ones_that_died_with_it_are_not_leased(pool: WorkerPool) -> None:
    first, second = leased(pool, 2), leased(pool)
    dead = [pid(first), pid(second)]
    pool.give_back(second)
    ended = [worker.actor.reach.remote("end") for worker in (first, second)]
    for task in ended:
        with pytest.raises(WorkerLostError):
            result_of(task)
    pool.discard(first)
    assert pid(leased(pool)) not in dead


def test_what_a_training_raises_is_raised_as_itself(pool: WorkerPool) -> None:
    with pytest.raises(OSError, match="^the tape is torn$"):
        result_of(leased(pool).actor.reach.remote("fail"))


def test_workers_that_die_as_they_start_are_not_started_for_ever(pool: WorkerPool, ledger: Ledger) -> None:
    (ledger.directory / "dies").touch()
    with pytest.raises(StageError, match=r"^a worker can't start: "):
        leased(pool)


def test_a_worker_for_which_there_is_no_device_is_never_leased(ledger: Ledger) -> None:
    all_cpus = int(ray.cluster_resources()["CPU"])  # type: ignore[no-untyped-call]
    pool = WorkerPool(ledger, ResourceSettings(workers=2, cpus_per_worker=all_cpus), Planted)
    try:
        leased(pool, 2)
        pool.wait(seconds=1)
        assert pool.lease() is None
    finally:
        pool.end()


def test_idle_workers_end_while_others_are_at_work(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = leased(pool, 2), leased(pool)
    for worker in (first, second):
        pool.give_back(worker)
    monkeypatch.setattr(pool_module, "IDLE_SECONDS", 0.0)
    time.sleep(0.01)
    pool.end_idle()
    assert leased(pool) is second, "nobody is at work"
    pool.end_idle()
    with pytest.raises(WorkerLostError):
        while pid(first):  # Ray ends an actor in its own time
            time.sleep(0.1)
    assert pid(leased(pool)) != pid(second)


def test_stages_of_a_study_share_workers_and_another_study_has_its_own(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "WorkerPool", partial(WorkerPool, actor=Planted))
    other = Ledger(tmp_path / "other" / LEDGER)
    with staying_cluster() as cluster:
        cluster.connect(TWO)
        with cluster.workers(ledger, TWO) as pool:
            at_work, at_rest = leased(pool, 2), leased(pool)
            warm = pid(at_rest)
            pool.give_back(at_rest)
        with cluster.workers(ledger, TWO) as pool:
            assert pid(leased(pool)) == warm
            with pytest.raises(WorkerLostError):
                pid(at_work)
        with cluster.workers(other, TWO) as pool:
            assert pid(leased(pool)) != warm
            with pytest.raises(WorkerLostError):
                pid(at_rest)
