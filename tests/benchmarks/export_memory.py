"""Peak host memory of what reads a finished run: its bundle, the export to Llama's layout, the evaluation of a checkpoint.

    python tests/benchmarks/export_memory.py [--width 1024] [--layers 14]

A run of four steps is trained first; then each of the three has a process of its own. Figures are MiB above the process before it
began: `resident` is the peak of its memory, `anonymous` of the part that no file backs, which alone must fit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from muscale.bundles.bundle import FORECAST, Bundle
from muscale.bundles.bundle_writing import FinishedRun, write_bundle
from muscale.full_runs.checkpoints.evaluate import evaluate_checkpoint
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.store.lineage import Chain
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics

BATCH, STEPS = 64, 4


def trained(folder: Path, width: int, layers: int) -> FinishedRun:
    """A run of four steps."""
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(" ".join(map(str, np.random.default_rng(0).integers(0, 9999, 20_000))))
    corpus = write_corpus(folder / "corpus", str(folder / "text"))
    model, base = (ModelConfig(d_model=d, n_layers=layers, vocab_size=8192, context_length=64) for d in (width, 64))
    numerics = Numerics(model=model, base=base, corpus_key=corpus.key, seed=0, evaluation_tokens=1024)
    segments = chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH), BATCH * STEPS)
    run = FullRun(
        numerics=numerics,
        segments=segments,
        directory=folder / "run",
        corpus=corpus.folder,
        checkpoint_every_tokens=BATCH * STEPS,
        evaluate_every_tokens=None,
    )
    return FinishedRun(
        chain=Chain(numerics=numerics, segments=segments),
        directory=run.directory,
        corpus=corpus,
        n_tokens=BATCH * STEPS,
        loss=train(run)["loss"],
        outcome=(FORECAST, {}),
        facts={},
        card=no_card,
        config={},
        lineage={},
        runs=pd.DataFrame(),
    )


def no_card(_averaging: object) -> str:
    """A function of the module: processes of their own get the run by pickle."""
    return "# card\n"


def memory(field: str) -> float:
    """A field of this process's status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def measured(name: str, run: FinishedRun, folder: Path, results: Connection) -> None:
    """Do one of the three, and send its seconds and its peaks."""
    torch.set_num_threads(2)
    before, began, anonymous = (memory("VmRSS"), memory("RssAnon")), time.perf_counter(), [0.0]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            anonymous.append(memory("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    match name:
        case "bundle":
            write_bundle(run, folder / "bundle")
        case "export":
            Bundle.open(folder / "bundle").export(folder / "llama")
        case "evaluation":
            evaluate_checkpoint(run.directory)
    done.set()
    sampler.join()
    results.send((time.perf_counter() - began, memory("VmHWM") - before[0], max(anonymous) - before[1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=14)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = trained(folder, arguments.width, arguments.layers)
        n_params = run.chain.numerics.model.n_params_total
        print(f"{n_params / 1e6:.0f}M parameters, {4 * n_params / 2**20:.0f} MiB of weights")
        processes = multiprocessing.get_context("spawn")
        for name in ("bundle", "export", "evaluation"):
            here, there = processes.Pipe()
            process = processes.Process(target=measured, args=(name, run, folder, there))
            process.start()
            there.close()
            seconds, resident, anonymous = here.recv()
            process.join()
            print(f"{name:10} {seconds:6.1f} s   resident {resident:7.0f}   anonymous {anonymous:7.0f}")


if __name__ == "__main__":
    main()
