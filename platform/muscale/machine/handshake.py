"""A handshake of two training processes, which sum a number, to test whether this machine can train with several workers.

`python -m muscale.machine.handshake` runs one of the two; it prints its findings as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

WORKERS = 2
PATIENCE_SECONDS = 30.0  # several times as long as importing torch takes on a busy machine (assumed)


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """The result of a handshake.

    Attributes:
        torch: The first process's facts about torch and its devices; empty if it ended before reporting them.
        seconds: Time from joining to the sum, on the first process's clock; None if the two did not meet.
        failure: Why the two did not meet; otherwise empty.
    """

    torch: dict[str, Any]
    seconds: float | None
    failure: str


def complete_handshake(patience: float = PATIENCE_SECONDS) -> Handshake:
    """Start both workers, wait for them, and kill those that are left."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="muscale-handshake-") as folder:
        files = [Path(folder) / f"worker-{rank}" for rank in range(WORKERS)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, file in enumerate(files):
                variables = {"RANK": str(rank), "MUSCALE_MEETING": str(Path(folder) / "meeting")}
                command = [sys.executable, "-m", "muscale.machine.handshake"]
                with file.open("wb") as out, file.with_suffix(".err").open("wb") as errors:
                    processes.append(
                        subprocess.Popen(command, env=os.environ | variables, stdout=out, stderr=errors)  # noqa: S603
                    )
            while any(process.poll() is None for process in processes):
                lost = [process.returncode for process in processes if process.returncode not in (None, 0)]
                if lost or time.monotonic() - begun > patience:
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        rows = [_last(file) for file in files]
        if all(process.returncode == 0 for process in processes) and all("sum" in row for row in rows):
            return Handshake(torch=rows[0], seconds=rows[0]["seconds"], failure="")
        return Handshake(torch=rows[0], seconds=None, failure=_failure(files, processes, patience))


def _last(file: Path) -> dict[str, Any]:
    """The last complete line that a worker printed."""
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
    return dict(json.loads(lines[-1])) if lines else {}


def _failure(files: list[Path], processes: list[subprocess.Popen[bytes]], patience: float) -> str:
    for rank, (file, process) in enumerate(zip(files, processes, strict=True)):
        lines = file.with_suffix(".err").read_text(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if process.returncode not in (0, -9):
            return f"worker {rank} ended with exit code {process.returncode}: {said or 'without a message'}"
    return f"they did not connect within {patience:.0f} s"


def _meet() -> None:
    """Run one of the two workers: print facts about torch, join the other, sum."""
    import torch
    import torch.distributed as dist

    from proxy_models.training.compilation import missing_compiler

    rank, meeting = int(os.environ["RANK"]), os.environ["MUSCALE_MEETING"]
    n_gpus = torch.cuda.device_count()
    backend = "nccl" if n_gpus >= WORKERS else "gloo"  # NCCL can't put two workers on one GPU
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if n_gpus else None,  # type: ignore[no-untyped-call]
        "gpus": [
            {"name": torch.cuda.get_device_name(n), "bytes": torch.cuda.get_device_properties(n).total_memory}
            for n in range(n_gpus)
        ],
        "compiler": missing_compiler("cuda" if n_gpus else "cpu"),
        "backend": backend,
    }
    print(json.dumps(facts), flush=True)  # noqa: T201
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    begun = time.monotonic()
    patience = timedelta(seconds=PATIENCE_SECONDS)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=WORKERS, timeout=patience)
    number = torch.full((1000,), rank + 1.0, device=device)
    dist.all_reduce(number)
    if not bool((number == sum(range(1, WORKERS + 1))).all()):
        raise RuntimeError(f"the sum over the workers is wrong: {number[0].item()}")
    print(json.dumps({**facts, "sum": number[0].item(), "seconds": time.monotonic() - begun}), flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    _meet()
