"""A sweep as an Optuna study for optuna-dashboard: every trial with its values, its losses at rungs and its outcome."""

from __future__ import annotations

import math
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from muscale.errors import StageError
from muscale.search.optuna_space import optuna_params_of
from muscale.search.record import Record
from muscale.search.sweep import Sweep
from proxy_models.files import atomic_write

_STATES = {
    "completed": TrialState.COMPLETE,
    "stopped": TrialState.PRUNED,
    "cancelled": TrialState.PRUNED,
    "diverged": TrialState.FAIL,
    "failed": TrialState.FAIL,
    "running": TrialState.RUNNING,
}


def export_optuna(sweep: Sweep, path: Path) -> str:
    """Write a sweep into a new SQLite file, and say how to look at it.

    Intermediate values are the losses at rungs by tokens, which trials were ranked by; a trial's value is the last of them. An
    ordinal's parameter is its rank, with the value as an attribute of the trial.

    Args:
        path: Must not be there yet.

    Raises:
        StageError: If it is, or the sweep has no trials.
    """
    record = sweep.record()
    if not record.configs:
        raise StageError("export-optuna: the sweep has no trials yet; run `muscale sweep` first")
    if path.exists():
        raise StageError(f"export-optuna: {path} already exists; give another file, or remove it")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished:
        _write(sweep, record, unfinished)
    return f"wrote {len(record.configs)} trials to {path}; look at them with: optuna-dashboard sqlite:///{path}"


def _write(sweep: Sweep, record: Record, path: Path) -> None:
    # Not by its URL, in which a question mark or a brace of the path would mean something.
    opened = {"creator": lambda: sqlite3.connect(path, check_same_thread=False)}
    storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs=opened)
    try:
        study = optuna.create_study(storage=storage, study_name=sweep.config.name, direction="minimize")
        study.set_user_attr("muscale.sweep", sweep.key)
        study.set_user_attr("loss", f"{sweep.numerics.model.loss_unit}, held out; what trials were ranked by")
        times = {row["number"]: row["created_at"] for row in sweep.ledger.trials(sweep.key)}
        annealed = sweep.annealed_figures(record)
        ends = {row["trial"]: row["created_at"] for row in sweep.ledger.rungs(sweep.key)}
        for number in record.configs:
            begun = _time(times[number])
            trial = _trial(sweep, record, number, annealed.get(number, {}), begun, _time(ends.get(number)) or begun)
            study.add_trial(trial)
    finally:
        storage.engine.dispose()


def _trial(
    sweep: Sweep, record: Record, number: int, annealed: dict[str, Any], begun: datetime | None, ended: datetime | None
) -> FrozenTrial:
    rung = record.last_rung(number)
    config = record.config_at(number, rung) if rung >= 0 else record.configs[number]
    space = record.rounds[0].space  # Optuna keeps one space per study; later rounds are narrower
    if not space.contains(config):  # a population may have left its bounds on the way
        config = record.configs[number]
    params, distributions = optuna_params_of(space, config)
    state = _STATES[record.status(number, sweep.plan.top)]
    values = {
        sweep.plan.rung_tokens[r]: loss
        for r in range(rung + 1)
        if (number, r) in record.results and math.isfinite(loss := record.loss(number, r))
    }
    tokens, seconds = record.cost(number)
    attributes = {"trained_tokens": tokens, "trained_seconds": seconds, "rung": rung, "values": config} | annealed
    last = values[max(values)] if values else None
    return FrozenTrial(
        number=number,
        trial_id=-1,  # the storage gives it one
        state=state,
        value=last if state in (TrialState.COMPLETE, TrialState.PRUNED) else None,
        values=None,
        datetime_start=begun,
        datetime_complete=ended if state.is_finished() else None,
        params=params,
        distributions=distributions,
        user_attrs=attributes,
        system_attrs={},
        intermediate_values=values,
    )


def _time(text: str | None) -> datetime | None:
    """Time of the ledger as Optuna keeps it: local and without a zone."""
    return None if text is None else datetime.fromisoformat(text).astimezone(UTC).astimezone().replace(tzinfo=None)
