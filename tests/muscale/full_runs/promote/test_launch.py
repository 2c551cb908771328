"""How many workers a full run starts with, and how a divergence or a file `preempt` ends it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muscale import StageError, json_lines
from muscale.errors import PreemptedError
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.launch import largest_fitting, launch
from muscale.full_runs.records.goodput import ATTEMPTS
from muscale.full_runs.records.preemption import NOTICE, OBEYED
from muscale.full_runs.train.attempt import train
from muscale.layout import FAILURE, RESULT
from muscale.settings.promote import PromoteSettings
from muscale.settings.tables import ResourceSettings
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from tests.muscale.forked_ranks import BATCH, STEPS, call_each, small_corpus, small_run
from tests.quick import quick_and_soak


def test_the_largest_group_that_nodes_have_room_for_is_chosen() -> None:
    nodes = [{"CPU": 8.0, "GPU": 3.0}, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 64.0}]
    each = {"CPU": 1.0, "GPU": 1.0}
    assert largest_fitting((2, 4, 6, 8), nodes, each) == 4, "three and two"
    assert largest_fitting((2, 4, 6, 8), nodes, {"CPU": 1.0, "GPU": 0.0}) == 8
    assert largest_fitting((6, 8), nodes, each) == 6, "waited for, as Ray does"
    assert largest_fitting((2, 4), [], each) == 2
    assert largest_fitting((1, 2, 5, 6), [{"CPU": 1.0}], {"CPU": 0.2}) == 5, "1.0 // 0.2 is 4"


def write_world_size(config: dict[str, Any]) -> None:
    """A worker that trains nothing."""
    import ray.train

    context = ray.train.get_context()
    if context.get_world_rank() == 0:
        (config["run"].directory / RESULT).write_text(json.dumps({"world_size": context.get_world_size()}))


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_workers_that_share_products_start_in_whole_groups(tmp_path: Path) -> None:
    import ray

    n_cpus = int(ray.cluster_resources()["CPU"])  # type: ignore[no-untyped-call]
    each = ResourceSettings(cpus_per_worker=2 / 3 if n_cpus == 2 else n_cpus // 2 or 0.4)  # room for two or three
    settings = PromoteSettings(workers=4, workers_min=2, tensor_parallel=2)
    found = launch(
        small_run(small_corpus(tmp_path), tmp_path / "run"), settings, each, name="groups", worker=write_world_size
    )
    assert found["world_size"] == 2


def diverging(directory: Path) -> FullRun:
    """A run with a rate at which it can't but diverge."""
    run = small_run(small_corpus(directory), directory / "run")
    return replace(run, segments=chain(Hyperparameters(learning_rate=1e12, batch_tokens=BATCH), BATCH * STEPS))


def _as_ray_s_worker(run: FullRun, rank: int) -> None:
    """A worker of Ray Train by itself, to which Ray has given a rank."""
    import ray.train
    import ray.train.torch
    import torch

    from muscale.full_runs.promote.launch import train_worker

    ray.train.get_context = lambda: SimpleNamespace(get_world_rank=lambda: rank)  # type: ignore[assignment,return-value]
    ray.train.torch.get_device = lambda: torch.device("cpu")
    train_worker({"run": run, "threads": 1})


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_worker_leaves_the_reason_of_a_divergence_and_none_fails(tmp_path: Path, rank: int) -> None:
    """Ray would treat an error like a lost worker."""
    run = diverging(tmp_path)
    run.directory.mkdir()
    call_each(_as_ray_s_worker, (run, rank))
    reason = run.directory / FAILURE
    assert reason.exists() is (rank == 0)
    assert rank or "diverged" in reason.read_text()


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_divergence_reaches_the_user_without_another_attempt(tmp_path: Path) -> None:
    run, halves = diverging(tmp_path), ResourceSettings(cpus_per_worker=0.5)
    with pytest.raises(StageError, match=r"diverged: .* at step \d+.*" + str(run.directory)):
        launch(run, PromoteSettings(workers=2, max_failures=2), halves, name="diverging")
    assert [one["event"] for one in json_lines.read(run.directory / ATTEMPTS)].count("start") == 1


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("how", quick_and_soak(("a file", "ctrl_c"), "ctrl_c"))
def test_a_run_that_is_asked_to_end_saves_and_the_next_command_resumes(tmp_path: Path, how: str) -> None:
    run, settings = small_run(small_corpus(tmp_path), tmp_path / "run"), PromoteSettings(workers=2, max_failures=2)
    run = replace(run, segments=chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH), BATCH * 150))

    def starts() -> int:
        return [one["event"] for one in json_lines.read(run.directory / ATTEMPTS)].count("start")

    def ask() -> None:
        deadline = time.monotonic() + 600
        while not starts() and time.monotonic() < deadline:
            time.sleep(0.05)
        if how == "ctrl_c":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            (run.directory / NOTICE).touch()

    asking = threading.Thread(target=ask)
    asking.start()
    halves = ResourceSettings(cpus_per_worker=0.5)
    with pytest.raises(PreemptedError):
        launch(run, settings, halves, name="asked")
    asking.join()
    assert starts() == 1
    if how == "ctrl_c":  # in one process, which takes half the time
        assert train(run)["resumed_from"] > 0
        return
    assert launch(run, settings, halves, name="again")["resumed_from"] > 0
    assert starts() == 2
    assert not any((run.directory / name).exists() for name in (NOTICE, OBEYED))
