"""Processes that call a function together over gloo, kept between calls and forked from one that has imported all they need."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from proxy_models.architecture.memory import CHUNK_ENTRIES

if TYPE_CHECKING:
    from muscale.full_runs.full_run import FullRun

processes = multiprocessing.get_context("forkserver")
"""Forked from one process, so that torch, Lightning and the package are imported once and not by each of them."""
processes.set_forkserver_preload(
    [
        "muscale.full_runs.train.attempt",
        "torch.distributed.checkpoint",
        "muscale.store.open_ledger",
        "psycopg",
        "tests.muscale.frozen",
    ]
)


def _serve(runs: Connection) -> None:
    """Make one call after the other, and answer each with its error, if any, and its result."""
    import torch
    import torch.distributed as dist
    from torch._inductor import config as inductor
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from proxy_models.architecture import memory

    torch.set_num_threads(1)
    inductor.emulate_precision_casts = True  # compiled ranks round where eager ones do
    while True:
        function, arguments, variables, memory.CHUNK_ENTRIES = runs.recv()
        os.environ.update(variables)
        failure, result = "", None
        try:
            result = function(*arguments)
        except Exception:
            failure = traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # which remembers meshes
        # A training freezes what it began with; unless that is collected, each of its process groups keeps threads that never rest.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        runs.send((failure, result))


class GlooRanks:
    """Processes, each started when it is first needed and ended by its id."""

    def __init__(self) -> None:
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def train(self, run: FullRun, world_size: int, *, chunk_entries: int = CHUNK_ENTRIES) -> None:
        """Train on the first `world_size` of them; an error of any is this one's."""
        from muscale.full_runs.train.attempt import train

        self.call(train, run, world_size=world_size, chunk_entries=chunk_entries)

    def call(
        self, function: Callable[..., Any], *arguments: Any, world_size: int, chunk_entries: int = CHUNK_ENTRIES
    ) -> list[Any]:
        """The results of a module's function on the first `world_size` of them; an error of any is this one's."""
        while len(self._ranks) < world_size:
            here, there = processes.Pipe()
            rank = processes.Process(target=_serve, args=(there,), daemon=True)
            rank.start()
            there.close()
            self._ranks.append((rank, here))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
        shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        for number, (_, connection) in enumerate(self._ranks[:world_size]):
            connection.send(
                (function, arguments, shared | {"RANK": str(number), "LOCAL_RANK": str(number)}, chunk_entries)
            )
        results = []
        for _, connection in self._ranks[:world_size]:
            try:
                failure, result = connection.recv()
            except EOFError:
                failure, result = "a rank ended", None
            results.append(result)
            if failure:
                self.end()  # the others may wait for it for ever
                raise RuntimeError(failure)
        return results

    def end(self) -> None:
        for rank, connection in self._ranks:
            rank.kill()
            rank.join()
            connection.close()
        self._ranks.clear()
