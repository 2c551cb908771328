"""Tasks of a benchmark, done by a few processes and kept in a file: the same command resumes."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd
import torch
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from muscale import json_lines
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import EMBEDDED
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from proxy_models.training.trainer import Trainer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Task = TypeVar("Task", bound="DataclassInstance")


def do_missing(
    wanted: Sequence[Task],
    do: Callable[[Task], dict[str, Any]],
    store: Path,
    *,
    workers: int,
    hours: float = math.inf,
) -> list[dict[str, Any]]:
    """Do what the file does not know, in spawned processes; returns the rows of the wanted tasks that are done.

    Args:
        wanted: Tasks: dataclasses of plain values.
        do: What a task gives, as plain values.
        store: The file, a line for each task: its fields and what it gave.
        workers: Processes.
        hours: Time after which no further task begins.
    """
    tasks = {tuple(asdict(task).values()): task for task in wanted}
    names = [*asdict(wanted[0])]
    known = {tuple(row.get(name) for name in names) for row in json_lines.read(store)}
    missing = [task for values, task in tasks.items() if values not in known]
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    if missing:
        with (
            ProcessPoolExecutor(workers, get_context("spawn")) as pool,
            Progress(*columns) as progress,
        ):
            bar = progress.add_task("runs", total=len(missing))
            end = time.monotonic() + 3600 * hours
            futures = {pool.submit(do, task): task for task in missing}
            for future in as_completed(futures):
                if not future.cancelled():
                    json_lines.append(store, {**asdict(futures[future]), **future.result()})
                    progress.advance(bar)
                if time.monotonic() > end:
                    pool.shutdown(wait=False, cancel_futures=True)
    rows = {tuple(row.get(name) for name in names): row for row in json_lines.read(store)}
    return [rows[values] for values in tasks if values in rows]


def parser_of(documentation: str | None, name: str, *, seeds: int, workers: int = 2) -> argparse.ArgumentParser:
    """Options of a benchmark of trainings: seeds, workers, hours and the folder that keeps what is finished."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument("--hours", type=float, default=math.inf, help="begin no further run after so many hours")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks") / name)
    return parser


def trained(
    options: argparse.Namespace,
    wanted: Sequence[Task],
    train: Callable[[Path, Task], dict[str, Any]],
    store: str = "runs.jsonl",
    *,
    workers: int | None = None,
) -> pd.DataFrame:
    """Train what the folder does not know, on the standard library's own source; `train` is given the corpus's folder."""
    options.folder.mkdir(parents=True, exist_ok=True)
    corpus = write_corpus(options.folder / "corpus", EMBEDDED)
    do = partial(train, corpus.folder)
    rows = do_missing(wanted, do, options.folder / store, workers=workers or options.workers, hours=options.hours)
    return pd.DataFrame(rows)


@cache
def trainer_of(corpus: Path, *, compile: bool = False) -> Trainer:
    """The process's own trainer, of one thread."""
    torch.set_num_threads(1)
    return Trainer(Corpus.open(corpus), compile=compile)


def final_loss(trainer: Trainer, numerics: Numerics, values: Hyperparameters, n_tokens: int) -> float:
    """Validation loss at the annealed end, NaN after a divergence."""
    state, loss = None, None
    for segment in chain(values, n_tokens):
        result = trainer.train(numerics, segment, state)
        if result.divergence:
            return math.nan
        state, loss = result.state, result.loss
    return math.nan if loss is None else loss


def row_of(
    corpus: Path, values: Hyperparameters, n_tokens: int, *, compile: bool = False, **numerics: Any
) -> dict[str, Any]:
    """A task's row, its `loss`; `numerics` are all but the corpus's."""
    trainer = trainer_of(corpus, compile=compile)
    of_run = Numerics(corpus_key=trainer.corpus.key, **{"evaluation_tokens": 65_536, **numerics})
    return {"loss": final_loss(trainer, of_run, values, n_tokens)}
