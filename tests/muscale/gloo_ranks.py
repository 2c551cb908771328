"""Processes that train full runs together over gloo, kept between runs, as importing Lightning takes longer than a tiny run."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from proxy_models.memory import CHUNK_ENTRIES

if TYPE_CHECKING:
    from muscale.full_run_spec import FullRun

_RANK = """
import os, pickle, sys, traceback
import torch.distributed as dist
from muscale.full_run import ShardedStrategy, train  # makes lightning importable
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from proxy_models import memory
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    run, variables, chunk_entries = pickle.loads(bytes.fromhex(line))
    os.environ.update(variables)
    memory.CHUNK_ENTRIES = chunk_entries
    told = ""
    try:
        train(run, strategy=ShardedStrategy(world_size=int(variables["WORLD_SIZE"])), plugins=[TorchElasticEnvironment()])
    except Exception:
        told = traceback.format_exc()
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()  # which remembers meshes
    print(told.encode().hex(), file=answers, flush=True)
"""


class GlooRanks:
    """Processes, each started when it is first needed and ended by its id."""

    def __init__(self) -> None:
        self._ranks: list[subprocess.Popen[str]] = []

    def train(self, run: FullRun, world_size: int, *, chunk_entries: int = CHUNK_ENTRIES) -> None:
        """Train on the first `world_size` of them; an error of any is this one's."""
        while len(self._ranks) < world_size:
            program = [sys.executable, "-c", _RANK]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
            self._ranks.append(
                subprocess.Popen(
                    program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
                )
            )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        for number, rank in enumerate(self._ranks[:world_size]):
            variables = shared | {"RANK": str(number), "LOCAL_RANK": str(number)}
            assert rank.stdin is not None
            rank.stdin.write(pickle.dumps((run, variables, chunk_entries)).hex() + "\n")
        for rank in self._ranks[:world_size]:
            assert rank.stdout is not None
            answer = rank.stdout.readline()
            if not answer.endswith("\n"):
                self.end()
                raise RuntimeError("a rank ended")
            if told := bytes.fromhex(answer).decode():
                self.end()  # the others may wait for it for ever
                raise RuntimeError(told)

    def end(self) -> None:
        """End them all."""
        for rank in self._ranks:
            rank.kill()
            rank.communicate()
        self._ranks.clear()
