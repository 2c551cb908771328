"""Which device a rank takes, by launcher, and when: on GPUs that are not there, up to the first allocation."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from muscale.errors import StageError
from muscale.full_runs.distributed import adopt_slurm, flight_recorder, process_group, rank_device, tasks_of_nodes
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.sharding import fitting_micro_batch, rank_grid
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import as_decoder
from proxy_models.architecture.decoder_memory import training_memory
from proxy_models.architecture.memory import MEMORY_SHARE, largest_micro_batch
from tests.muscale.fake_gpus import first_allocation, write_first_allocation
from tests.muscale.forked_ranks import call_each, small_corpus, small_run


@pytest.fixture
def run(tmp_path: Path) -> FullRun:
    """A run whose directory exists."""
    (tmp_path / "run").mkdir()
    return small_run(small_corpus(tmp_path), tmp_path / "run")


def written(run: FullRun) -> list[Any]:
    """What two ranks wrote: their variables and their calls."""
    return [json.loads((run.directory / f"rank-{rank}.json").read_text()) for rank in range(2)]


def in_order(index: int) -> list[list[str]]:
    """The device is set before the process group is joined, which is given it, and takes the first tensor."""
    gpu = f"cuda:{index}"
    again = [["set", gpu]] * 2  # for the word of rank 0 on the lease, and by Lightning
    return [["set", gpu], ["join", "nccl", gpu], *again, ["allocate", gpu]]


@pytest.fixture
def own_signals() -> Iterator[None]:
    """The handlers of before, as torchrun's agent leaves its own."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
def test_a_rank_of_torchrun_takes_the_gpu_of_its_local_rank(run: FullRun) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    torchrun = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    elastic_launch(torchrun, write_first_allocation)(run, 2)
    assert [calls for _, calls in written(run)] == [in_order(0), in_order(1)]


def test_tasks_of_srun_join_each_other_on_the_gpus_of_their_local_ids(run: FullRun) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    step = {
        "SLURM_JOB_ID": "1234567",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "MASTER_PORT": port,
    }
    ids = ({"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2))
    call_each(write_first_allocation, *((run, 4, step | own) for own in ids))
    assert [calls for _, calls in written(run)] == [in_order(0), in_order(1)]
    assert {variables["TORCH_FR_DUMP_TEMP_FILE"] for variables, _ in written(run)} == {
        str(run.directory / "collectives" / "rank_")
    }
    assert (run.directory / "collectives").is_dir(), "which NCCL does not make"
    assert [variables["LOCAL_WORLD_SIZE"] for variables, _ in written(run)] == ["2", "2"]
    assert {variables["MASTER_ADDR"] for variables, _ in written(run)} == {"localhost"}


def test_a_step_of_srun_is_described_by_torchrun_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {
        "SLURM_JOB_ID": "1234567",
        "SLURM_STEP_NUM_TASKS": "20",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
        "SLURM_STEP_NODELIST": "gpu[017-018,030]",
        "SLURM_NODEID": "2",
        "SLURM_PROCID": "18",
        "SLURM_LOCALID": "2",
    }
    torchrun = {
        "RANK": "18",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "2",
        "WORLD_SIZE": "20",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu017",
        "MASTER_PORT": "19567",
    }
    environ: dict[str, str] = dict(step)
    monkeypatch.setattr(os, "environ", environ)
    adopt_slurm()
    assert environ == step | torchrun
    environ.clear()
    environ.update(step, RANK="3", LOCAL_RANK="3")
    adopt_slurm()
    assert environ == step | {"RANK": "3", "LOCAL_RANK": "3"}, "torchrun inside a step describes its own ranks"
    environ.clear()
    environ.update({"SLURM_JOB_ID": "1234567", "SLURM_NTASKS": "20", "SLURM_PROCID": "0"})
    adopt_slurm()
    assert "RANK" not in environ, "a batch script is one process"
    assert tasks_of_nodes("8(x2),4") == [8, 8, 4]
    assert tasks_of_nodes("2") == [2]


@pytest.mark.parametrize(
    ("variables", "n_gpus", "device"),
    [
        ({}, 8, "cuda:0"),
        ({"LOCAL_RANK": "5"}, 8, "cuda:5"),
        ({"LOCAL_RANK": "5", "SLURM_LOCALID": "5"}, 1, "cuda:0"),
        ({"LOCAL_RANK": "5"}, 0, "cpu"),
    ],
    ids=["one process", "of eight ranks", "a task bound to one", "no GPU"],
)
def test_the_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], n_gpus: int, device: str
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    assert str(rank_device()) == device


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "2"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(StageError, match="local rank 2 sees 2 on this node"):
        rank_device()


def test_ranks_that_do_not_start_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    monkeypatch.setattr(
        os, "environ", {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    )
    with (
        pytest.raises(StageError, match=r"2 of 3.*0:00:00\.3.*: 1, 2.*start_timeout_minutes"),
        process_group(torch.device("cpu"), timeout=timedelta(seconds=0.3), records=tmp_path),
    ):
        pass


def test_what_a_user_says_to_the_flight_recorder_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"})  # the older name
    assert flight_recorder(tmp_path) == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "rank_"),
    }


def _rank_of_two(run: FullRun, rank: int) -> None:
    """One of two ranks on unequal GPUs, of nodes that have two ranks and one."""
    os.environ["LOCAL_WORLD_SIZE"] = str(2 - rank)
    dist.init_process_group("gloo", init_method=f"file://{run.directory / 'store'}", rank=rank, world_size=2)
    memory = SimpleNamespace(total_memory=(80 << 30, 1)[rank])
    recipe = replace(run.segments[0].recipe, batch_tokens=15 * 32)  # shares of eight and seven sequences
    with patch.object(torch.cuda, "get_device_properties", lambda _device: memory):
        estimate = partial(training_memory, as_decoder(run.numerics.model), world_size=2)
        alone = largest_micro_batch(estimate, 8, limit=int(MEMORY_SHARE * memory.total_memory))
        together = fitting_micro_batch(run.numerics, recipe, run.parallelism, device=torch.device("cuda:0"))
    try:
        rank_grid(Parallelism(sharding="hybrid"))
    except ValueError as error:
        refusal = str(error)
    grid = rank_grid(Parallelism(sharding="hybrid", shard_ranks=1))
    (run.directory / f"rank-{rank}.json").write_text(json.dumps([alone, together, refusal, grid._asdict()]))


def test_ranks_on_unequal_gpus_and_nodes_agree(run: FullRun) -> None:
    call_each(_rank_of_two, (run, 0), (run, 1))
    (wide, *first), (narrow, *second) = written(run)
    assert (wide, narrow) == (8, 1)
    assert first == second
    micro_batch, refusal, grid = first
    assert micro_batch == 1, "the least, as each pass gathers weights on all of them"
    assert "got 2 on the node of rank 0 and 1 on the node of rank 1" in refusal
    assert (grid["replicas"], grid["shards"]) == (2, 1), "groups that are given go by no node"


def _ray_worker(run: FullRun) -> None:
    """A worker of Ray Train as Ray leaves it: its group joined, its variables set, its device known to Ray alone."""
    import ray.train
    import ray.train.torch

    from muscale.full_runs.promote.launch import train_worker

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
    dist.init_process_group("gloo", init_method=f"file://{run.directory / 'store'}", rank=0, world_size=1)
    ray.train.get_context = lambda: SimpleNamespace(get_world_rank=lambda: 0)  # type: ignore[assignment,return-value]
    ray.train.torch.get_device = lambda: torch.device("cuda:3")
    calls = first_allocation(lambda: train_worker({"run": run, "threads": 1}), 4)
    (run.directory / "calls.json").write_text(json.dumps(calls))


def test_a_worker_of_ray_train_takes_the_gpu_that_ray_gave_it(run: FullRun) -> None:
    call_each(_ray_worker, (run,))
    found = json.loads((run.directory / "calls.json").read_text())
    assert found == [["set", "cuda:3"], ["set", "cuda:3"], ["allocate", "cuda:3"]]
