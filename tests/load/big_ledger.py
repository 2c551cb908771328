"""A study's ledger with as many runs and rungs as wanted, written in bulk: what years of searching leave behind.

Ten sweeps share the trials, each with ten rungs, and every trial has one annealed run with losses on ten sources. Each stem
was trained under a lease, which is free now, and one trial in a hundred still has its training states. The first
sweep is the one that the study file describes, with the keys that its trainings would have, so that the report, the table and
a resumed search find it; the others were made under settings that have changed since.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from muscale.layout import STATES
from muscale.search.sweep import Sweep
from muscale.search.sweep_jobs import history_of
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import metadata
from muscale.study import Study
from proxy_models.hashing import content_key

N_SWEEPS, N_RUNGS, N_SOURCES = 10, 10, 10
SETTINGS = (
    "sweep.n_tokens=1048576",
    f"sweep.rungs={N_RUNGS}",
    "sweep.reduction_factor=1.25",
    "sweep.n_seeds=0",
    "sweep.trials=1000000",
)
_AT_ONCE = 20_000
_STAMP = "2026-11-22T00:00:00.000000+00:00"


def open_study(path: Path, *settings: str) -> Study:
    """The micro-study with ten rungs; its corpus is written, as keys depend on it."""
    study = Study.open(path, [*SETTINGS, *settings], quiet=True)
    assert study.corpus.n_tokens > 0
    return study


def plant(study: Study, n_runs: int) -> None:
    """Fill the ledger of an open study with so many runs and ten times as many rungs."""
    sweep = Sweep.of(study.config, study.ledger, study.corpus)
    n_trials = n_runs // N_SWEEPS
    for number in range(N_SWEEPS):
        write(study.ledger, "rounds", [_round(sweep, number)])
        rows = _trials(sweep, number, n_trials)
        while some := list(islice(rows, _AT_ONCE // N_RUNGS)):
            for table in ("leases", "segments", "trials", "rungs", "runs"):
                write(study.ledger, table, [row for trial in some for row in trial[table]])


def write(ledger: Ledger, table: str, rows: list[dict[str, Any]]) -> None:
    ledger.write(_insert, table, rows)


def _insert(connection: sa.Connection, table: str, rows: list[dict[str, Any]]) -> None:
    connection.execute(sa.insert(metadata.tables[table]), rows)


def _key(sweep: Sweep, number: int) -> str:
    return sweep.key if number == 0 else f"earlier sweep {number}"


def _round(sweep: Sweep, number: int) -> dict[str, Any]:
    # the study's own is the latest
    stamp = _STAMP.replace("00:00:00.", f"00:00:{N_SWEEPS - number:02}.")
    space = sweep.config.sweep.space.to_dict()
    row = {"sweep": _key(sweep, number), "round": 0, "first_trial": 0, "searcher": "random", "space": space}
    return {**row, "narrowed": None, "created_at": stamp}


def _trials(sweep: Sweep, number: int, n_trials: int) -> Iterator[dict[str, list[dict[str, Any]]]]:
    plan, name, space = sweep.plan, _key(sweep, number), sweep.config.sweep.space
    numerics = sweep.numerics.to_dict()
    environment = {"device": "cpu", "python": "3.11", "torch": "2.13.0", "muscale": "0.1.0", "cpu": "x" * 60}
    sources = {f"source {i}": 2.0 + i / 10 for i in range(N_SOURCES)}
    for trial in range(n_trials):
        config = space.draw(number, trial)
        given = plan.hyperparameters(config)
        loss = 2.0 + (math.log(given.learning_rate / 0.01)) ** 2 / 20 + math.sin(trial) / 100
        if number == 0 or trial == 0:  # the keys of earlier sweeps are nobody's
            chain = plan.branch(history_of(config), plan.top)
            segment = chain.row()["segment"]
        stem = content_key([name, trial])
        ends = [f"{stem}-{rung}" for rung in range(N_RUNGS)]
        if number == 0 and chain.parent:
            ends[-1] = chain.parent.key
        key, line = (chain.key, chain.line) if number == 0 else (f"{stem}-end", f"{stem}-line")
        common = {
            "numerics": numerics,
            "source_losses": sources,
            "diverged_at_step": None,
            "diverged_because": None,
            "seconds": 1.5,
            "environment": environment,
            "created_at": _STAMP,
        }
        segments = [
            {
                **common,
                "key": ends[rung],
                "line": stem,
                "parent": None,
                "segment": segment,
                "trained_from": plan.rung_tokens[rung - 1] if rung else 0,
                "tokens": plan.rung_tokens[rung],
                "loss": loss + 1 / (rung + 1),
                "averaged_loss": loss + 1 / (rung + 2),
                "state": None if trial % 100 else f"{STATES}/{ends[rung]}.pt",
            }
            for rung in range(N_RUNGS)
        ]
        end = {
            "key": key,
            "line": line,
            "parent": ends[-1],
            "segment": segment,
            "loss": loss,
            "averaged_loss": None,
            "state": None,
        }
        tokens = {"trained_from": plan.rung_tokens[-1], "tokens": chain.last.end}
        rungs = [
            {
                "sweep": name,
                "trial": trial,
                "rung": rung,
                "sequence": (rung + 1) * n_trials + trial + 1,
                "segment": ends[rung],
                "tokens": row["tokens"] - row["trained_from"],
                "seconds": 1.5,
                "loss": row["averaged_loss"],
                "created_at": _STAMP,
            }
            for rung, row in enumerate(segments)
        ]
        begun = {"sweep": name, "number": trial, "sequence": trial + 1}  # all trials begin before the first result
        model = plan.numerics.model
        run = {
            "purpose": "sweep",
            "key": key,
            "stem": stem,
            "d_model": model.d_model,
            "n_layers": model.n_layers,
            "n_params": model.n_params,
            "n_tokens": chain.last.end,
            "seed": 0,
            "learning_rate": given.learning_rate,
            "hyperparameters": given.to_dict(),
            "label": f"trial {trial}, rung {plan.top}",
            "created_at": _STAMP,
        }
        yield {
            "leases": [{"name": stem, "token": 1, "owner": None, "beat": 3}],
            "segments": [*segments, {**common, **end, **tokens}],
            "trials": [{**begun, "config": config, "until": plan.top, "created_at": _STAMP}],
            "rungs": rungs,
            "runs": [run],
        }
