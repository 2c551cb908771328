"""A small full run, and gloo processes that train it, each started and ended by its id; one of them may be broken on purpose."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from muscale.errors import EXIT_PREEMPTED, PreemptedError
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, CheckpointFolder
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.layout import METRICS, RESULT
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus, write_mixture
from proxy_models.data.mixture import Mixture
from proxy_models.data.sources import Source
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from tests.muscale.gloo_ranks import processes

BATCH, STEPS = 256, 16
LETTERS = {"near": "abc", "far": "vwxyz"}
Fault = Callable[[int], None]


def _train(run: FullRun, rank: int, world_size: int, store: Path, fault: Fault | None) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "GROUP_RANK": "0"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    if fault:
        fault(rank)
    try:
        train(run)
    except PreemptedError:
        sys.exit(EXIT_PREEMPTED)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a thread may wait for a peer that is gone


def small_corpus(folder: Path, letters: str = "abcdefgh") -> Corpus:
    """Words of four letters in random order."""
    text = folder / "text"
    text.mkdir(parents=True)
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(list(letters), size=4)) for _ in range(30)]
    for number in range(30):
        (text / f"{number}.txt").write_text(" ".join(generator.choice(words, size=300)))
    return write_corpus(folder / "tokens", str(text))


def small_mixture(folder: Path, mixture: Mixture) -> Corpus:
    """A mixture of `LETTERS`, two sources that have no letter in common."""
    for name, letters in LETTERS.items():
        (folder / name).mkdir()
        generator = np.random.default_rng(0)
        for number in range(30):
            (folder / name / f"{number}.txt").write_text("".join(generator.choice(list(letters), size=1500)))
    return write_mixture(folder / "mixed", {name: Source(path=str(folder / name)) for name in LETTERS}, mixture)


def small_run(corpus: Corpus, directory: Path, *, layers: int = 1, **settings: Any) -> FullRun:
    """Sixteen steps of eight sequences, with checkpoints after six and twelve of them and at the end."""
    model, base = (ModelConfig(d_model=width, n_layers=layers, context_length=32) for width in (32, 16))
    given: dict[str, Any] = {
        "numerics": Numerics(model=model, base=base, corpus_key=corpus.key, seed=0, evaluation_tokens=1120),
        "segments": chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH), BATCH * STEPS),
        "directory": directory,
        "corpus": corpus.folder,
        "checkpoint_every_tokens": BATCH * 6,
        "evaluate_every_tokens": BATCH * 100,
    }
    return FullRun(**(given | settings))


def start(run: FullRun, world_size: int, *, fault: Fault | None = None) -> list[BaseProcess]:
    """Processes that train the run together; `fault`, a module's function, is called by each with its rank before."""
    run.directory.mkdir(parents=True, exist_ok=True)
    store = Path(tempfile.mkdtemp(dir=run.directory)) / "store"
    ranks: list[BaseProcess] = [
        processes.Process(target=_train, args=(run, rank, world_size, store, fault)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return ranks


def ended(ranks: Sequence[BaseProcess]) -> list[int | None]:
    """Exit code of each, minus the signal that killed it."""
    try:
        for process in ranks:
            process.join(timeout=60)
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def call_each(function: Callable[..., None], *arguments: tuple[Any, ...]) -> None:
    """Call a module's function in a process for each of its arguments, all at once."""
    each = [processes.Process(target=function, args=given) for given in arguments]
    for process in each:
        process.start()
    assert ended(each) == [0] * len(each)


def train_on(run: FullRun, world_size: int) -> None:
    """Train to the end on so many ranks."""
    assert ended(start(run, world_size)) == [0] * world_size


def rows(run: FullRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory / METRICS).read_text().splitlines()]


def losses(run: FullRun) -> list[float]:
    """Training loss of each step."""
    return [row["train_loss"] for row in rows(run) if "train_loss" in row]


def result(run: FullRun) -> dict[str, Any]:
    return dict(json.loads((run.directory / RESULT).read_text()))


def interrupt(run: FullRun, *, after: int) -> None:
    """Leave of a finished run what a kill soon after so many steps would have left."""
    (run.directory / RESULT).unlink()
    for tokens, path in CheckpointFolder(run.directory / CHECKPOINTS).found():
        if tokens > after * BATCH:
            shutil.rmtree(path)
