"""A short full run on this machine, with the code of every full run: its losses, speed and memory, and a trace of some steps.

Each rank is a separate process that joins a group even if it is alone, as a Ray Train worker does, so that FSDP2 is active.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from muscale import json_lines
from muscale.errors import last_line
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.full_run import FullRun
from muscale.layout import METRICS, PROFILE
from muscale.machine.gpu.traces import StepTrace
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Checkpointing, MemoryEstimate, Precision
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from proxy_models.training.traced_memory import estimated_memory

Device = Literal["cuda", "cpu"]
WARM_STEPS = 4
"""First steps, which compile and choose algorithms; left out of the speed."""
_SECONDS = 900.0  # time limit of one case; compiling 24 layers takes a minute or two
_processes = multiprocessing.get_context("forkserver")  # a fork of this process could not use CUDA


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        device: "cuda", with one GPU per rank, or "cpu".
        precision: Precision of products and gathered weights.
        sequences: Sequences of a batch, over all ranks.
        micro_batch: Sequences of a pass on a rank.
        steps: Number of steps, at least WARM_STEPS + 1.
        profile: First and last step of the trace; None: no trace.
        compile: Whether blocks are compiled, if there is a compiler.
    """

    name: str
    model: Member
    device: Device
    ranks: int
    precision: Precision
    sequences: int
    micro_batch: int
    steps: int
    profile: tuple[int, int] | None = None
    compile: bool = False
    checkpointing: Checkpointing = "none"

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.model.context_length

    @property
    def parallelism(self) -> Parallelism:
        """FSDP2 over all ranks."""
        return Parallelism(checkpointing=self.checkpointing)

    @property
    def estimate(self) -> MemoryEstimate:
        """Estimated memory of each device."""
        return estimated_memory(
            self.model,
            micro_batch=self.micro_batch,
            precision=self.precision,
            sharding=self.parallelism.sharding,
            world_size=self.ranks,
            checkpointing=self.checkpointing,
            compiled=self.compile,
        )

    def full_run(self, corpus: Path, directory: Path) -> FullRun:
        """The run, with an evaluation and a checkpoint at the end."""
        n_tokens = self.steps * self.batch_tokens
        numerics = Numerics(
            model=self.model,
            base=self.model,
            corpus_key=Corpus.open(corpus).key,
            seed=0,
            evaluation_tokens=16 * self.model.context_length,
            precision=self.precision,
        )
        return FullRun(
            numerics=numerics,
            segments=chain(Hyperparameters(learning_rate=0.002, batch_tokens=self.batch_tokens), n_tokens),
            directory=directory,
            corpus=corpus,
            checkpoint_every_tokens=2 * n_tokens,
            evaluate_every_tokens=None,
            min_unit_params=0,
            micro_batch=self.micro_batch,
            parallelism=self.parallelism,
            compile=self.compile,
            profile=self.profile,
        )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of a case.

    Attributes:
        seconds: Time from the start of the processes to their end.
        failure: Why the case did not finish; otherwise empty. After a failure nothing else is known.
        mfu: MFU of each step; empty if the device's peak is not known.
        peak_bytes: Most memory that torch allocated on a GPU, from the rank with the most; None on a CPU.
        trace: Trace of rank 0.
    """

    case: Case
    seconds: float
    failure: str = ""
    losses: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    mfu: tuple[float, ...] = ()
    peak_bytes: int | None = None
    compiled: bool = False
    trace: StepTrace | None = None

    @property
    def median_seconds(self) -> float:
        """Median time of the steps that neither warm up nor are traced."""
        return self._median(self.step_seconds)

    @property
    def median_mfu(self) -> float | None:
        """Median MFU of the same steps."""
        return self._median(self.mfu) if self.mfu else None

    def _median(self, of_steps: tuple[float, ...]) -> float:
        first, last = self.case.profile or (0, 0)
        return statistics.median(
            value
            for step, value in enumerate(of_steps, start=1)
            if step > WARM_STEPS and not first <= step <= last + 1  # step last + 1 waits for the trace to be written
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "case": asdict(self.case),
            "trace": self.trace and self.trace.to_dict(),
            "estimated_bytes": self.case.estimate.total,
        }


def measure(case: Case, corpus: Path, folder: Path) -> Measurement:
    """Train the case with one process per rank; processes that still run at the end are killed."""
    directory, began = folder / case.name, time.monotonic()
    directory.mkdir()
    run = case.full_run(corpus, directory / "run")
    ranks = [_processes.Process(target=_train, args=(case, run, rank, directory)) for rank in range(case.ranks)]
    for rank in ranks:
        rank.start()
    try:
        failure = _wait(list(ranks), directory)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    seconds = time.monotonic() - began
    if failure:
        return Measurement(case=case, seconds=seconds, failure=failure)
    shutil.rmtree(run.directory / CHECKPOINTS)  # gigabytes
    rows = [row for row in json_lines.read(run.directory / METRICS) if "train_loss" in row]
    facts = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(case.ranks)]
    return Measurement(
        case=case,
        seconds=seconds,
        losses=tuple(row["train_loss"] for row in rows),
        step_seconds=tuple(row["step_seconds"] for row in rows),
        mfu=tuple(row["mfu"] for row in rows if "mfu" in row),
        peak_bytes=max((fact["peak_bytes"] for fact in facts), key=lambda peak: peak or 0),
        compiled=facts[0]["compiled"],
        trace=StepTrace.read(run.directory / PROFILE / "trace-rank0.json.gz") if case.profile else None,
    )


def _wait(ranks: list[BaseProcess], directory: Path) -> str:
    """Wait until all ranks have succeeded, one has failed, or the time is up; return the failure, or ""."""
    ends = time.monotonic() + _SECONDS
    running: dict[Any, int] = {rank.sentinel: number for number, rank in enumerate(ranks)}
    while running:
        ended = wait(list(running), timeout=max(0.0, ends - time.monotonic()))
        if not ended:
            return f"not at its end after {_SECONDS:.0f} s"
        for sentinel in ended:
            number = running.pop(sentinel)
            rank = ranks[number]
            rank.join()
            if rank.exitcode:
                said = directory / f"failure-{number}.txt"
                return f"rank {number}: {said.read_text() if said.exists() else f'exit code {rank.exitcode}'}"
    return ""


def _train(case: Case, run: FullRun, rank: int, directory: Path) -> None:
    """Run one rank; its output and its failure go to files."""
    with (directory / f"rank-{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    world = {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks), "GROUP_RANK": "0"}
    os.environ |= world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        facts = _trained(case, run, rank, directory)
        (directory / f"rank-{rank}.json").write_text(json.dumps(facts))
    except Exception as error:
        (directory / f"failure-{rank}.txt").write_text(last_line(error))
        os._exit(1)  # a thread may wait for a peer that is gone


def _trained(case: Case, run: FullRun, rank: int, directory: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from muscale.full_runs.distributed import rank_device
    from muscale.full_runs.train.attempt import train

    on_gpu = case.device == "cuda"
    device = rank_device() if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=case.ranks,
        timeout=timedelta(seconds=_SECONDS),
        device_id=device if on_gpu else None,
    )
    result = train(run, device=device)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    dist.destroy_process_group()
    return {"peak_bytes": peak, "compiled": result["environment"]["compiled"]}
