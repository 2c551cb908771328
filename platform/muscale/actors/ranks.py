"""Ranks that train one proxy together: the first rank is the process of a Tune trial, and starts and directs the others."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from muscale.errors import WorkerLostError, last_line
from muscale.fingerprint import require_same_package
from muscale.settings.tables import ResourceSettings
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics
from proxy_models.training.state import TrainState
from proxy_models.training.trainer import Trainer

_GRACE_SECONDS = 20.0  # between the first rank's error and another's, where both are one


def join(store: Store, rank: int, ranks: int, *, device: str, seconds: float) -> DeviceMesh:
    """Return the mesh of all ranks once all have joined; each rank has its own device, the first that it sees.

    NCCL reaches GPUs of a node that a process does not see: https://github.com/NVIDIA/nccl (src/transport/p2p.cc).

    Args:
        device: "cpu" or "cuda".
        seconds: Time limit of a collective; inf: torch's default.
    """
    gpu = device == "cuda"
    if gpu:
        torch.cuda.set_device(0)  # first: NCCL and the mesh take the current one
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=None if math.isinf(seconds) else timedelta(seconds=seconds),
        device_id=torch.device("cuda", 0) if gpu else None,
    )
    return init_device_mesh(device, (ranks,))


def _join(store: Store, rank: int, resources: ResourceSettings) -> DeviceMesh:
    return join(store, rank, resources.ranks_per_trial, device=resources.device, seconds=60 * resources.stall_minutes)


class Follower:
    """Process of a rank of a trial other than the first."""

    def __init__(self, resources: ResourceSettings, package: str) -> None:
        require_same_package(package)
        torch.set_num_threads(resources.threads)
        self._resources = resources
        self._trainer: Trainer | None = None

    def join(self, address: str, port: int, rank: int) -> None:
        """Meet the other ranks at the first one's store."""
        self._mesh = _join(TCPStore(address, port, is_master=False), rank, self._resources)

    def train(self, corpus: Path, initial_weights: Path, *args: Any, **kwargs: Any) -> None:
        """Train as `Trainer.train` on the corpus and from the weights of these folders, for the first rank, which keeps the result."""
        if self._trainer is None or self._trainer.corpus.folder != corpus:
            self._trainer = None  # before the next one takes memory
            resources = self._resources
            self._trainer = Trainer(
                Corpus.open(corpus),
                device=resources.device,
                compile=resources.compile,
                mesh=self._mesh,
                initial_weights=initial_weights,
            )
        self._trainer.train(*args, **kwargs)


class Followers:
    """The other ranks, as held by the first rank; they end with its process.

    Attributes:
        mesh: Device mesh of all ranks.
    """

    def __init__(self, resources: ResourceSettings, package: str) -> None:
        """Start them in the placement group of this actor, the bundle of each by its rank, and join them."""
        remote: Any = ray.remote(num_cpus=resources.cpus_per_worker, num_gpus=resources.gpus_per_worker)(Follower)
        group = cast(PlacementGroup, get_current_placement_group())
        self._actors = [
            remote.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            ).remote(resources, package)
            for rank in range(1, resources.ranks_per_trial)
        ]
        ray.get([actor.__ray_ready__.remote() for actor in self._actors])
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        with self._all_calling(
            [actor.join.remote(address, store.port, rank) for rank, actor in enumerate(self._actors, start=1)]
        ):
            self.mesh = _join(store, 0, resources)

    @contextmanager
    def training(
        self,
        corpus: Path,
        initial_weights: Path,
        numerics: Numerics,
        segment: Segment,
        state: TrainState | None,
        *,
        averaged: bool,
    ) -> Iterator[None]:
        """Have them train while the block trains the same as the first rank; raise WorkerLostError if one of them died."""
        kept = ray.put(state)
        with self._all_calling(
            [
                actor.train.remote(corpus, initial_weights, numerics, segment, kept, averaged=averaged)
                for actor in self._actors
            ]
        ):
            yield

    @contextmanager
    def _all_calling(self, tasks: list[Any]) -> Iterator[None]:
        """The others make the same call as the block. Should one of them fail while the block waits for it, this process ends."""
        over = threading.Event()
        threading.Thread(target=_end_with_any, args=(tasks, over), name="ranks", daemon=True).start()
        try:
            yield
            over.set()
            ray.get(tasks)
        except Exception as error:
            over.set()
            for task in ray.wait(tasks, num_returns=len(tasks), timeout=_GRACE_SECONDS)[0]:
                _require_alive(task, error)
            raise


def _end_with_any(tasks: list[Any], over: threading.Event) -> None:
    """End this process if another rank's training fails and its own is not over soon: it may wait for that rank for ever."""
    waiting = list(tasks)
    while waiting and not over.is_set():
        ended, waiting = ray.wait(waiting, timeout=1.0)
        for task in ended:
            try:
                ray.get(task)
            except Exception:
                if not over.wait(_GRACE_SECONDS):
                    os._exit(1)


def _require_alive(task: Any, error: Exception) -> None:
    try:
        ray.get(task)
    except RayActorError as died:
        raise WorkerLostError(f"a rank of the trial died: {last_line(died)}") from error
    except Exception:
        return  # what it raised is the first rank's error too, or came of it
