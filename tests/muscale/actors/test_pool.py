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
from muscale.actors.cluster import Cluster, staying_cluster
from muscale.actors.pool import PooledWorker, WorkerPool, result_of
from muscale.errors import StageError, WorkerLostError
from muscale.layout import LEDGER
from muscale.settings.tables import ResourceSettings
from muscale.store.ledger import Ledger

pytestmark = pytest.mark.cluster

TWO = ResourceSettings(workers=2, cpus_per_worker=0.5)


class Planted:
    """Answers with its process's id and the study that it serves, or ends it."""

    def __init__(self, resources: ResourceSettings, package: str) -> None:
        pass

    def serve(self, ledger: Ledger) -> None:
        self.study = ledger.directory.name
        if (ledger.directory / "dies").exists():
            os._exit(1)
        if (ledger.directory / "is no study").exists():
            raise OSError("no corpus")

    def reach(self, chain: Any) -> Any:
        if chain == "study":
            return self.study
        if chain == "end":
            os._exit(1)
        if chain == "fail":
            raise OSError("the tape is torn")
        return os.getpid()


@pytest.fixture(scope="module")
def shared_pool(ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    ray_cluster.end_workers()
    pool = WorkerPool(Ledger(tmp_path_factory.mktemp("none") / LEDGER), TWO, Planted)
    yield pool
    pool.end()


@pytest.fixture
def pool(shared_pool: WorkerPool, ledger: Ledger) -> Iterator[WorkerPool]:
    """The pool, with workers of the tests before it; some of them may be dead."""
    shared_pool.serve(ledger, TWO)
    yield shared_pool
    for worker in tuple(shared_pool._leased):
        shared_pool.give_back(worker)


@pytest.fixture
def no_workers(shared_pool: WorkerPool) -> None:
    """None of the tests before."""
    shared_pool.end()


def other_study(folder: Path, fault: str) -> Ledger:
    """The ledger of a study that workers can't begin to serve."""
    (folder / "other").mkdir()
    (folder / "other" / fault).touch()
    return Ledger(folder / "other" / LEDGER)


def leased(pool: WorkerPool, wanted: int = 1) -> PooledWorker:
    """A worker, waited for."""
    while not (worker := pool.lease(wanted)):
        pool.wait(seconds=60)
    return worker


def pid(worker: PooledWorker) -> int:
    return int(result_of(worker.actor.reach.remote("")))


@pytest.mark.usefixtures("no_workers")
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


def test_workers_that_die_as_they_start_are_not_started_for_ever(pool: WorkerPool, tmp_path: Path) -> None:
    pool.serve(other_study(tmp_path, "dies"), TWO)
    with pytest.raises(StageError, match=r"^a worker can't start: "):
        leased(pool)


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


def test_a_study_that_a_worker_cannot_serve_ends_in_its_reason_and_the_next_is_served(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.serve(other_study(tmp_path, "is no study"), TWO)
    with pytest.raises(StageError, match=r"^a worker can't start: OSError: no corpus$"):
        leased(pool, 2)
    assert pool.serve(Ledger(tmp_path / "a third" / LEDGER), TWO)
    assert result_of(leased(pool).actor.reach.remote("study")) == "a third"


@pytest.mark.usefixtures("no_workers")
def test_a_worker_for_which_there_is_no_device_is_never_leased(ledger: Ledger) -> None:
    all_cpus = int(ray.cluster_resources()["CPU"])  # type: ignore[no-untyped-call]
    pool = WorkerPool(ledger, ResourceSettings(workers=2, cpus_per_worker=all_cpus), Planted)
    try:
        leased(pool, 2)
        pool.wait(seconds=1)
        assert pool.lease() is None
    finally:
        pool.end()


@pytest.mark.usefixtures("no_workers")
def test_stages_and_studies_share_workers_which_end_where_other_resources_are_wanted(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "WorkerPool", partial(WorkerPool, actor=Planted))
    other = Ledger(tmp_path / "other" / LEDGER)
    with staying_cluster() as cluster:
        cluster.connect(TWO)
        with cluster.workers(ledger, TWO) as pool:
            at_work, at_rest = leased(pool, 2), leased(pool)
            warm = {pid(at_rest)}
            pool.give_back(at_rest)
        with cluster.workers(ledger, TWO) as pool:
            both = leased(pool), leased(pool)
            assert pid(both[0]) in warm
            with pytest.raises(WorkerLostError):
                pid(at_work)
            warm.add(pid(both[1]))
            for worker in both:
                pool.give_back(worker)
        with cluster.workers(other, TWO.model_copy(update={"workers": 1})) as pool:
            alone = leased(pool, 2)
            assert pool.lease(2) is None, "two are warm, and one may work"
            assert result_of(alone.actor.reach.remote("study")) == "other"
            assert pid(alone) in warm
            pool.give_back(alone)
        with cluster.workers(other, TWO.model_copy(update={"cpus_per_worker": 0.25})) as pool:
            assert pid(leased(pool)) not in warm
            with pytest.raises(WorkerLostError):
                pid(alone)
