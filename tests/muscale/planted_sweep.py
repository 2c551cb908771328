"""A sweep in the ledger whose losses are a formula's: what trackers and exports make of it without training anything."""

from __future__ import annotations

import math
from pathlib import Path

from muscale.search.record import RungResult
from muscale.search.sweep import Sweep
from muscale.settings.config import StudyConfig
from muscale.store.ledger import Ledger
from tests.muscale.planted_ladder import numerics_of

SETTINGS = ("sweep.scheduler=asha", "sweep.rungs=2", "sweep.trials=4", "sweep.n_seeds=0")
SPACE = (
    "sweep.space.learning_rate={ distribution = 'log_uniform', low = 0.004, high = 0.03 }",
    "sweep.space.init_scale={ distribution = 'ordinal', values = [0.5, 1.0, 2.0] }",
)


def open_sweep(path: Path, ledger: Ledger) -> Sweep:
    """The sweep of a study file, over a rate and an ordinal."""
    config = StudyConfig.read(path, [*SETTINGS, *SPACE])
    return Sweep(config=config, ledger=ledger, numerics=numerics_of(config))


def plant(sweep: Sweep, *, more: int = 0) -> None:
    """Four trials: one completed, one stopped at the first rung, one diverged, one at work; and further ones that completed."""
    record = sweep.record()
    if not record.rounds:
        record.begin_round("random", sweep.config.sweep.space)
        configs = [(0.008, 1.0), (0.004, 0.5), (0.03, 2.0), (0.012, 1.0)]
        for rate, scale in configs:
            record.start({"learning_rate": rate, "init_scale": scale}, 0)
        for trial, loss in enumerate((2.0, 2.5, None)):
            add_result(sweep, trial, 0, loss)
        record = sweep.record()
        record.go_on(0, 1)
        add_result(sweep, 0, 1, 1.8)
    for number in range(more):
        record = sweep.record()
        trial = record.start({"learning_rate": 0.008 + 1e-4 * number, "init_scale": 1.0}, 1)
        for rung, loss in enumerate((2.1, 1.9)):
            add_result(sweep, trial, rung, loss + 0.01 * math.cos(trial))


def add_result(sweep: Sweep, trial: int, rung: int, loss: float | None) -> None:
    result = RungResult(trial=trial, rung=rung, loss=loss, segment=f"segment {trial} {rung}", tokens=8192, seconds=0.5)
    sweep.record().add_result(result)
