"""The history of forecasts: residuals in their own scale, our runs apart from asserted ones, several ledgers, an exact interval."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muscale import StudyDirectoryError
from muscale.full_runs.amend.second_forecast import SecondForecast
from muscale.monitoring.calibration import calibrate
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind, forecasts
from scaling.fits.forecast import interval_factor
from tests.muscale.planted_ladder import PROMOTION


def ledger_with(path: Path, *losses: float, asserted: bool = False, log_scale: float | None = 0.02) -> Ledger:
    path.mkdir()
    ledger = Ledger(path / "ledger.sqlite")
    for number, loss in enumerate(losses):
        plan = f"{path.name} {number}"
        payload = {"forecast": {"log_scale": log_scale} if log_scale else {}}
        ledger.insert(forecasts, plan=plan, loss=2.0, low=1.9, high=2.1, level=0.9, payload=payload)
        run = replace(
            PROMOTION, plan=plan, loss=loss, asserted=asserted, finished_at=f"2026-01-{10 + number}T00:00:00+00:00"
        )
        ledger.record_result(ResultKind.EXTERNAL_RUN if asserted else ResultKind.PROMOTION, plan, run.to_dict())
    return ledger


def test_residuals_are_in_units_of_the_forecast_s_scale(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path / "a", 2.05, 2.2)
    table = calibrate(ledger).table
    assert list(table["residual"]) == pytest.approx([0.05, 0.2])
    assert list(table["residual_in_s"]) == pytest.approx([math.log(1.025) / 0.02, math.log(1.1) / 0.02])
    assert list(table["inside"]) == [True, False]
    assert table["registered"].iloc[0] == "2026-01-01T00:00:00"
    ledger.close()


def test_a_forecast_registered_without_its_scale_has_it_by_its_interval(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path / "a", 2.05, log_scale=None)
    s = math.log(2.1 / 2.0) / interval_factor(0.9)
    assert calibrate(ledger).table["residual_in_s"].iloc[0] == pytest.approx(math.log(1.025) / s)
    ledger.close()


def test_the_share_inside_has_an_exact_interval_and_asserted_runs_stand_apart(tmp_path: Path) -> None:
    ours = ledger_with(tmp_path / "ours", *[2.0] * 9, 2.5)
    theirs = ledger_with(tmp_path / "theirs", 2.0, 3.0, asserted=True)
    theirs.close()
    found = calibrate(ours, [tmp_path / "theirs"])
    assert len(found.table) == 12
    own, external = found.coverage.to_dict("records")
    assert (own["runs"], own["inside"], own["asserted"], external["runs"], external["inside"]) == (10, 9, False, 2, 1)
    # Clopper and Pearson's limits for 9 of 10 at 90 %, in their closed form
    assert own["high"] == pytest.approx(0.95 ** (1 / 10), abs=0.01)
    assert own["low"] == pytest.approx(0.606, abs=1e-3)
    assert "9 of 10 promoted runs inside, nominal 90%: 90%" in str(found)
    assert json.dumps(found.to_dict())
    ours.close()


def test_a_ledger_that_was_merged_is_not_counted_twice(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path / "a", 2.05, 2.2)
    assert len(calibrate(ledger, [tmp_path / "a" / "study.toml", tmp_path / "a"]).table) == 2
    with pytest.raises(StudyDirectoryError, match="no such ledger"):
        calibrate(ledger, [tmp_path / "nowhere"])
    ledger.close()


def test_without_a_run_calibration_is_empty_and_explained(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path / "a")
    assert "no promoted run has ended" in str(calibrate(ledger))
    assert calibrate(ledger).coverage.empty
    ledger.close()


def begin_child(ledger: Ledger, key: str, parent: str, loss: float | None = None, **started: Any) -> None:
    """An amended run that is recorded as started, with a forecast of 2 within 1.9 to 2.1, and as ended with a loss."""
    values: dict[str, Any] = {"loss": 2.0, "low": 1.9, "high": 2.1, "level": 0.9, "n_tokens": 9, "by_law": 2.0}
    forecast = SecondForecast(**values, correction=0.0, reweighting=0.0, widening=0.0, reasons=())
    facts: dict[str, Any] = {
        "name": "child",
        "reason": "why",
        "changes": {"n_tokens": 9},
        "at": "2026-01-05T00:00:00+00:00",
    }
    facts |= {"lineage": [{"run": parent, "tokens": 4}], "forecast": forecast.to_dict(), "segments": [{"end": 5}]}
    ledger.record_result(ResultKind.AMENDMENT_STARTED, key, facts | started)
    if loss is not None:
        done = {"finished_at": "2026-01-06T00:00:00+00:00", "after": {"own": loss}}
        ledger.record_result(ResultKind.AMENDMENT, key, done)


def test_second_forecasts_are_counted_apart_and_only_once_they_are_measured(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path / "a", 2.05, 2.2)
    begin_child(ledger, "inside", "a 0", 2.0)
    begin_child(ledger, "outside", "a 0", 2.5)
    begin_child(ledger, "training", "a 0")
    begin_child(ledger, "not forecast", "a 0", 2.0, forecast=None)
    found = calibrate(ledger)
    assert len(found.table) == 4
    first, second = found.coverage.to_dict("records")
    assert (first["amended"], first["runs"], first["inside"]) == (False, 2, 1)
    assert (second["amended"], second["runs"], second["inside"]) == (True, 2, 1)
    row = found.table.set_index("plan").loc["outside"]
    assert row["residual_in_s"] == pytest.approx(math.log(1.25) / (math.log(1.05) / interval_factor(0.9)))
    ledger.close()


def test_a_second_forecast_from_anywhere_is_checked(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path / "a")
    begin_child(ledger, "child", "a 0", 2.0, lineage=[])
    with pytest.raises(StudyDirectoryError):
        calibrate(ledger)
    ledger.close()
