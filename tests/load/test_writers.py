"""Many write one ledger at once: nothing is lost, nothing stands there twice, and all share one sequence without gaps.

Of the file and of PostgreSQL the writers are processes, from a server that has the package imported. Of the actor they are
threads of a few workers of Ray: sixty-four processes that each join a cluster are more than a machine of two cores starts.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from muscale.settings.tables import StorageSettings
from muscale.store.ledger import Ledger
from muscale.store.ledger_actor import ActorStorage
from muscale.store.ledger_tables import ResultKind, rungs
from muscale.store.open_ledger import open_ledger
from muscale.store.postgresql import URL_VARIABLE
from tests.muscale.gloo_ranks import processes

N_ROWS = 10  # that a writer adds alone, and as many that all of them add
FEW, MANY = 8, 64
MANY_WORKERS, THREADS = 8, 8  # of Ray; few writers are two workers with four threads each


def write(ledger: Ledger, writer: int) -> None:
    """Add a row that all others add, too, then one of its own, again and again."""
    row = {"sweep": "s", "rung": 0, "tokens": 1, "segment": f"by {writer}", "loss": 1.0, "seconds": 1.0}
    for number in range(N_ROWS):
        ledger.insert(rungs, **row, trial=number)
        ledger.insert(rungs, **row, trial=N_ROWS * (1 + writer) + number)
        ledger.record_result(ResultKind.CHECK, str(number), {"by": writer})
        ledger.record_result(ResultKind.GATE, f"{writer} {number}", {"by": writer})


def write_alone(kind: str, directory: Path, writer: int, url: str) -> None:
    """In a process of its own, whose server may be older than the URL; ends with another code than 0 if anything is refused."""
    os.environ[URL_VARIABLE] = url
    ledger = open_ledger(StorageSettings.model_validate({"ledger": kind}), directory, "s")
    write(ledger, writer)
    ledger.close()


def require_all(ledger: Ledger, n_writers: int) -> None:
    """Every row once, each with what one writer gave it, in one sequence."""
    rungs = ledger.rungs("s")
    assert [row["sequence"] for row in rungs] == list(range(1, N_ROWS * (1 + n_writers) + 1))
    assert sorted(row["trial"] for row in rungs) == list(range(N_ROWS * (1 + n_writers)))
    writers = {row["trial"]: int(row["segment"].removeprefix("by ")) for row in rungs}
    assert all(writers[trial] == trial // N_ROWS - 1 for trial in writers if trial >= N_ROWS)
    assert set(writers.values()) == set(range(n_writers))
    for number in range(N_ROWS):
        assert (ledger.result(ResultKind.CHECK, str(number)) or {})["by"] in range(n_writers)
        assert all(ledger.result(ResultKind.GATE, f"{w} {number}") == {"by": w} for w in range(n_writers))


def write_by_processes(kind: str, directory: Path, n_writers: int) -> None:
    ledger = open_ledger(StorageSettings.model_validate({"ledger": kind}), directory, "s")
    assert ledger.rungs("s") == []
    writers = [
        processes.Process(target=write_alone, args=(kind, directory, n, os.environ[URL_VARIABLE]))
        for n in range(n_writers)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(240)
    assert [writer.exitcode for writer in writers] == [0] * n_writers
    require_all(ledger, n_writers)
    ledger.close()


@pytest.mark.usefixtures("postgres")
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_eight_processes_write_every_row_once(tmp_path: Path, kind: str) -> None:
    write_by_processes(kind, tmp_path, FEW)


@pytest.mark.soak
@pytest.mark.usefixtures("postgres")
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_sixty_four_processes_write_every_row_once(tmp_path: Path, kind: str) -> None:
    write_by_processes(kind, tmp_path, MANY)


def write_by_workers(directory: Path, n_workers: int, n_threads: int) -> None:
    import ray

    class Writers:
        def write(self, ledger: Ledger, first: int) -> int:
            with ThreadPoolExecutor(n_threads) as threads:
                list(threads.map(partial(write, ledger), range(first, first + n_threads)))
            return os.getpid()

    ledger = open_ledger(StorageSettings(ledger="actor", path=str(directory / "s.sqlite")), directory, "s")
    remote: Any = ray.remote(num_cpus=0)(Writers)
    workers = [remote.remote() for _ in range(n_workers)]
    try:
        calls = [worker.write.remote(ledger.for_worker(), n_threads * n) for n, worker in enumerate(workers)]
        assert len(set(ray.get(calls, timeout=240))) == n_workers
        require_all(ledger, n_workers * n_threads)
    finally:
        assert isinstance(ledger.storage, ActorStorage)
        for actor in (*workers, ledger.storage.actor()):
            ray.kill(actor)
        ledger.close()


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_eight_writers_reach_the_actor_and_every_row_is_written_once(tmp_path: Path) -> None:
    write_by_workers(tmp_path, 2, 4)


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_sixty_four_writers_reach_the_actor_and_every_row_is_written_once(tmp_path: Path) -> None:
    write_by_workers(tmp_path, MANY_WORKERS, THREADS)
