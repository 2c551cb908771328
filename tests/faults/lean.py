"""A worker's trainings without Ray, in processes that are killed: what is on record before and after, and what a kill cost."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from muscale.actors.worker import Worker
from muscale.layout import CORPUS, LEDGER
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import branch
from proxy_models.training.numerics import Numerics
from tests.muscale.conftest import write_text
from tests.muscale.gloo_ranks import processes

BATCH = 128
RATES = (0.003, 0.01, 0.03)
STEPS = 60
PROGRESS = "progress"  # lines of each segment's start and progress: its key and tokens

Rows = dict[str, set[tuple[Any, ...]]]


def begin(directory: Path) -> Path:
    """A study's directory with a corpus; returns it."""
    write_text(directory / "text", documents=12, words=300)
    write_corpus(directory / CORPUS, str(directory / "text"))
    return directory


def chains(directory: Path) -> list[Chain]:
    """Two runs of each rate, on one stem: four segments a rate."""
    model = ModelConfig(d_model=16, n_layers=1, context_length=32)
    worker = Worker(Ledger(directory / LEDGER), compiled=False)
    numerics = Numerics(model=model, base=model, corpus_key=worker.trainer.corpus.key, seed=0, evaluation_tokens=512)
    recipes = [Hyperparameters(learning_rate=rate, batch_tokens=BATCH).resolve(2 * STEPS * BATCH) for rate in RATES]
    return [
        Chain(numerics=numerics, segments=branch(recipe, stable * BATCH, (stable + 10) * BATCH))
        for recipe in recipes
        for stable in (STEPS // 2, STEPS)
    ]


def train(directory: Path) -> None:
    """Train all of them, as far as the ledger does not know them."""
    torch.set_num_threads(1)
    wanted = chains(directory)
    worker = Worker(Ledger(directory / LEDGER), compiled=False)
    with (directory / PROGRESS).open("a", buffering=1) as progress:
        for chain in wanted:
            worker.reach(chain, lambda tokens, _loss: print(tokens, file=progress))


def started(directory: Path, target: Any = train, *args: Any) -> BaseProcess:
    """A process of its own that trains."""
    process: BaseProcess = processes.Process(target=target, args=(directory, *args))
    process.start()
    return process


def finish(directory: Path) -> None:
    """The same once more, to its end."""
    process = started(directory)
    process.join(300)
    assert process.exitcode == 0, process.exitcode


def rows(ledger: Path, *, leave_out: tuple[str, ...] = ("leases",)) -> Rows:
    """Every row that is on record, by table; where a training state lies may change, as it may be pruned."""
    if not ledger.exists():
        return {}
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found: Rows = {}
        for table in set(tables) - set(leave_out):
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "state"]
            found[table] = set(connection.execute(f"SELECT {', '.join(columns)} FROM {table}"))
        return found


def assert_kept(before: Rows, after: Rows) -> None:
    """No recorded row has changed or gone."""
    for table, known in before.items():
        assert known <= after[table], f"{table}: recorded rows don't change"


def losses(ledger: Path) -> dict[str, float]:
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
        return dict(connection.execute("SELECT key, loss FROM segments"))


@dataclass
class Tally:
    """Of one kind of fault; written where the soak tests' owner finds it."""

    kind: str
    injected: int = 0
    survived: int = 0
    lost: int = 0
    whole: int = 0  # that a study takes

    @contextmanager
    def kept_by(self, record_property: Callable[[str, object], None]) -> Iterator[Tally]:
        """Report at the end of the block, also of one that fails."""
        try:
            yield self
        finally:
            self.report(record_property)

    def report(self, record_property: Callable[[str, object], None]) -> None:
        """Into pytest's report (--junit-xml), and the log that -o log_cli=true shows."""
        summary = (
            f"injected {self.injected}, survived {self.survived}, "
            f"work lost {self.lost:,} tokens, of studies of {self.whole:,}"
        )
        record_property(self.kind, summary)
        logging.getLogger(__name__).warning("%s: %s", self.kind, summary)
