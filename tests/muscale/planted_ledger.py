"""Rows of a ledger that nothing trained: runs with their segments, and a sweep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from muscale.layout import CURVES, STATES
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import decisions, rounds, rungs, runs, segments, trials
from muscale.store.lineage import Chain
from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import branch
from proxy_models.training.numerics import Numerics

IDENTITY = {"model.d_model": 32}
MODEL = ModelConfig(d_model=32, n_layers=1, context_length=32)
NUMERICS = Numerics(model=MODEL, base=MODEL, corpus_key="none", seed=0, evaluation_tokens=512)
RUN = {"d_model": 1, "n_layers": 1, "n_params": 1, "n_tokens": 1, "seed": 0, "learning_rate": 1.0, "stem": "s"}


def chain(seed: int) -> Chain:
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=128).resolve(40 * 128)
    return Chain(numerics=replace(NUMERICS, seed=seed), segments=branch(recipe, 30 * 128, 40 * 128))


def add_run(ledger: Ledger, seed: int, loss: float | None, *, state: bytes | None = None) -> str:
    """A run of two segments with its curve, and with the state of its stem."""
    run = chain(seed)
    assert run.parent is not None
    values: dict[str, Any] = {"trained_from": 0, "source_losses": {}, "seconds": 1.0, "environment": {}}
    for part in (run.parent, run):
        kept = f"{STATES}/{part.key}.pt" if state and part is not run else None
        if kept and state:
            (ledger.directory / kept).parent.mkdir(exist_ok=True)
            (ledger.directory / kept).write_bytes(state)
        (ledger.directory / CURVES).mkdir(exist_ok=True)
        (ledger.directory / CURVES / f"{part.key}.parquet").write_bytes(b"curve")
        ledger.insert(segments, **part.row(), loss=loss, state=kept, **values)
    ledger.insert(runs, purpose="ladder", key=run.key, hyperparameters={}, label="", **RUN)
    return run.key


def add_sweep(ledger: Ledger, sweep: str, loss: float) -> None:
    ledger.insert(rounds, sweep=sweep, round=0, first_trial=0, searcher="random", space={})
    ledger.insert(trials, sweep=sweep, number=0, config={"learning_rate": loss}, until=0)
    ledger.insert(rungs, sweep=sweep, trial=0, rung=0, tokens=1, segment="", loss=loss, seconds=1.0)
    ledger.insert(decisions, sweep=sweep, trial=0, rung=0, until=1, path=[[0, {}]], donor=None)
