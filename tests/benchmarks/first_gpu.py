"""Measure on a machine's first NVIDIA GPU what the record lacks, in at most ten minutes, and write one file.

    python tests/benchmarks/first_gpu.py [--minutes 10] [--out first_gpu.json] [--tiny]

The parts in this order, each in a process that is ended when the time is over: attention (causal, within documents, in a window),
full runs of the largest of GPT-3's shapes that fits (compiled, eager; speed against the prediction, memory against the estimate),
and the checks of `muscale doctor --gpu` (losses against the CPU, waits of the host, collectives, proxies that share the device).
The file is written after each part, and says which parts were left out or cut. `--tiny` runs on a CPU and shows that the script
works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from muscale.environment import device_name
from muscale.formatting import finite
from muscale.machine.gpu.gpu_checks import check_gpus, predicted_mfu
from muscale.machine.gpu.training import Case, Device, measure
from proxy_models.architecture.attention import attend
from proxy_models.architecture.decoder_memory import training_memory
from proxy_models.architecture.memory import MEMORY_SHARE, largest_micro_batch
from proxy_models.architecture.sparse_attention import number_documents, visible_blocks
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import EMBEDDED
from tests.benchmarks.full_run_gpu import SHAPES, TINY, shape

PARTS = {"attention": 1.5, "runs": 4.5, "checks": 3.5}
"""Minutes that each part takes on an H100 or H200 (assumed, from runs of its pieces)."""
DOCUMENT, WINDOW, MOST_SEQUENCES = 512, 1024, 8


def attention(device: Device, *, time_: int, heads: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of attention forward and backward in bf16, for each kind of mask and size of a head."""
    for head_dim in (64, 128):
        states = [
            torch.randn(2, time_, heads, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        separators = torch.zeros(2, time_, dtype=torch.int64, device=device)
        separators[:, ::DOCUMENT] = 1
        documents, at = number_documents(separators, 1), torch.device(device)
        for kind, of, window in (("causal", None, None), ("documents", documents, None), ("window", None, WINDOW)):
            mask = of
            if device == "cuda" and (of is not None or window):
                mask = visible_blocks(of, window, time_, at)  # type: ignore[assignment]
            call = partial(attend, bias=None, dropout=0.0, documents=mask, window=window)
            yield {"kind": kind, "head_dim": head_dim, "time": time_, "milliseconds": 1e3 * seconds(call, states)}


def seconds(call: Callable[..., Tensor], states: list[Tensor]) -> float:
    """Median seconds of a pass forward and backward."""
    timer = Timer(
        "torch.autograd.grad(call(*states).sum(), states)", globals={"torch": torch, "call": call, "states": states}
    )
    return float(timer.blocked_autorange(min_run_time=1.0).median)


def runs(device: Device) -> Iterator[dict[str, Any]]:
    """Speed and memory of short full runs of the largest shape that fits, compiled and eager."""
    model, micro_batch = TINY, 2
    if device == "cuda":
        limit = int(MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory)
        for model in map(shape, reversed(SHAPES)):
            estimate = partial(training_memory, model, precision="bf16", sharding="full", world_size=1)
            micro_batch = largest_micro_batch(estimate, MOST_SEQUENCES, limit=limit)
            if estimate(micro_batch=micro_batch).total <= limit:
                break
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus", EMBEDDED).folder
        for compiled in (True, False):
            case = Case(
                name=f"{model.n_params}-{'compiled' if compiled else 'eager'}",
                model=model,
                device=device,
                ranks=1,
                precision="bf16" if device == "cuda" else "fp32",
                sequences=4 * micro_batch,
                micro_batch=micro_batch,
                steps=14,
                compile=compiled and device == "cuda",
            )
            found = measure(case, corpus, Path(folder))
            predicted = predicted_mfu(found, device_name(torch.device(device, 0))) if device == "cuda" else None
            yield found.to_dict() | {"name": case.name, "predicted_mfu": predicted}


def within(limit: float, part: str, device: Device, size: dict[str, int]) -> Any:
    """The figures of a part, measured in a process that is ended with its ranks after so many seconds; or how it ended."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_figures, args=(sender, part, device, size))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(limit) else f"cut after {limit / 60:.1f} minutes"
    except EOFError:
        process.join()
        return f"failed with exit code {process.exitcode}; its error is above"
    finally:
        with suppress(psutil.NoSuchProcess):
            measuring = psutil.Process(process.pid)
            for each in [*measuring.children(recursive=True), measuring]:
                each.kill()
        process.join()


def send_figures(sender: Connection, part: str, device: Device, size: dict[str, int]) -> None:
    """Measure a part and send its figures."""
    # imported once and not by every rank; on a GPU a fork of what has imported this may not use CUDA
    if device == "cpu":
        multiprocessing.get_context("forkserver").set_forkserver_preload(["muscale.full_runs.train.attempt"])
    parts: dict[str, Callable[[], Any]] = {
        "attention": lambda: list(attention(device, **size)),
        "runs": lambda: list(runs(device)),
        "checks": lambda: check_gpus(device).to_dict(),
    }
    sender.send(finite(parts[part]()))


def main() -> None:
    """Measure part after part, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("first_gpu.json"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device: Device = "cpu" if options.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; --tiny shows that the script works")
    size = {"time_": 256, "heads": 2} if options.tiny else {"time_": 4096, "heads": 16}
    began, found = time.monotonic(), {"at": datetime.now(UTC).isoformat(), "torch": torch.__version__, "device": device}
    for part in PARTS:
        left = options.minutes - (time.monotonic() - began) / 60
        enough = left >= PARTS[part]
        found[part] = (
            within(60 * left, part, device, size) if enough else f"left out: {left:.1f} minutes left of {PARTS[part]}"
        )
        options.out.write_text(json.dumps(finite(found), indent=1))
        print(f"{part}: {(time.monotonic() - began) / 60:.1f} minutes so far, in {options.out}", flush=True)


if __name__ == "__main__":
    main()
