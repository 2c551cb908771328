"""A clock that is set back between two runs: all that is on record seems to come from the future."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from muscale import StudyConfig, json_lines
from muscale.full_runs.promote.promotion import begin
from muscale.full_runs.records import goodput
from muscale.layout import LEDGER, METRICS
from muscale.plans.gate import Gate
from muscale.plans.plan import register
from muscale.plans.planning import Planner
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.retention import prune
from tests.faults import lean
from tests.muscale.planted import planted_fit, planted_horizon

TIMES = ("created_at", "registered_at")


def set_back(ledger: Path, days: float = 1.0) -> None:
    """Move every time on record so far into the future: to the clock of the next run, it was set back by as much."""
    later = timedelta(days=days)
    with closing(sqlite3.connect(ledger)) as connection, connection:
        connection.execute("DROP TRIGGER IF EXISTS forecasts_refuse_update")
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for column in {row[1] for row in connection.execute(f"PRAGMA table_info({table})")} & set(TIMES):
                for rowid, at in connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall():
                    moved = (datetime.fromisoformat(at) + later).isoformat(timespec="microseconds")
                    connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (moved, rowid))


def test_what_is_recorded_last_is_the_latest_and_nothing_recorded_changes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    ledger.record_result(ResultKind.CHECK, "before", {})
    set_back(tmp_path / LEDGER)
    known = lean.rows(tmp_path / LEDGER)
    ledger.record_result(ResultKind.CHECK, "after", {})
    assert (ledger.latest_result(ResultKind.CHECK) or {})["key"] == "after"
    lean.assert_kept(known, lean.rows(tmp_path / LEDGER))


def test_a_plan_registered_before_can_still_be_promoted_and_comes_before_its_start(
    make_study: Callable[..., Path],
) -> None:
    path = make_study()
    config, ledger = StudyConfig.read(path), Ledger(path.parent / LEDGER)
    plan = register(Planner(config, config.hyperparameters, planted_horizon(), planted_fit()).plan(), ledger)
    set_back(path.parent / LEDGER)
    forecast = ledger.forecast(plan.key)
    registered, started = begin(plan, config, ledger, verdict="pass", gate=Gate(plan=plan.key, lines=()))
    assert registered == forecast == ledger.forecast(plan.key)
    assert datetime.fromisoformat(registered["registered_at"]) < datetime.fromisoformat(started["at"])
    other = register(replace(plan, key="other"), ledger)
    assert (ledger.latest_forecast() or {})["plan"] == other.key


def test_the_shares_of_a_run_s_time_stay_shares(tmp_path: Path) -> None:
    goodput.record_attempt(tmp_path, "start", tokens=0, world_size=1)
    attempts = tmp_path / goodput.ATTEMPTS
    (record,) = json_lines.read(attempts)
    later = datetime.now(UTC) + timedelta(days=1)
    attempts.write_text(json.dumps({**record, "at": later.timestamp()}) + "\n")
    json_lines.append(tmp_path / METRICS, {"tokens": 1, "step_seconds": 8.0, "evaluation_seconds": 2.0})
    found = goodput.measure(tmp_path)
    assert found.wall == pytest.approx(10.0)
    assert found.share == pytest.approx(0.8)
    assert found.rest == 0.0


def test_a_study_continues_and_keeps_its_results(study: Path, trained: Path) -> None:
    set_back(study / LEDGER)
    before = lean.rows(study / LEDGER)
    lean.finish(study)
    assert lean.rows(study / LEDGER) == before, "nothing was trained again"
    prune(Ledger(study / LEDGER), dry_run=True)
    assert lean.losses(study / LEDGER) == lean.losses(trained / LEDGER)
