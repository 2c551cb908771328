"""What another ledger's results say is read before any of it is believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from muscale import StudyDirectoryError
from muscale.full_runs.records.alarms import STAGE as ALARM
from muscale.full_runs.records.alarms import Alarm
from muscale.monitoring.band import STAGE as BAND
from muscale.monitoring.band import Band
from muscale.plans.gate import Gate, transfer_line
from muscale.recorded import readers
from muscale.store.cancels import cancel_study, cancel_trial, cancelled_trials
from muscale.store.ledger import Ledger, find
from muscale.store.merge import merge
from muscale.store.tables import forecasts
from tests.muscale.monitoring.test_calibration import RUN
from tests.muscale.planted_ladder import registered_plan
from tests.muscale.planted_report import planted_check
from tests.muscale.store.test_merge import IDENTITY, add_sweep

ALARMED = Alarm(
    plan="p", first_tokens=1, tokens=2, loss=2.5, low=1.9, high=2.1, place="above", evaluations=3, asserted=False
)


@pytest.fixture
def ledgers(tmp_path: Path) -> Iterator[tuple[Ledger, Ledger]]:
    """Ours, which knows nothing yet, and theirs."""
    both = []
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        both.append(Ledger(tmp_path / name / "ledger.sqlite"))
        both[-1].claim(IDENTITY, {})
    yield both[0], both[1]
    for ledger in both:
        ledger.close()


def payloads(make_study: Callable[..., Path], ledger: Ledger) -> dict[str, dict[str, Any]]:
    """What a study writes, by stage."""
    plan = registered_plan(make_study(), ledger)
    band = Band.of_end_alone("no curves", n_tokens=plan.n_tokens, loss=2.0, low=1.9, high=2.1, level=0.9)
    return {
        "check": planted_check().to_dict(),
        "promotion_started": {"at": RUN.started_at, "verdict": "pass", "forced": False},
        "promotion": replace(RUN, plan=plan.key).to_dict(),
        "gate": Gate(plan=plan.key, lines=(transfer_line("pass", ()),)).to_dict(),
        BAND: band.to_dict(),
        ALARM: asdict(ALARMED),
        "cancel_trial": {"sweep": "s", "trial": 0, "reason": "none"},
        "plan_file": {"plan": plan.key, "contents": {"plan": plan.key}},
    }


def test_what_a_study_writes_is_read_and_merged(
    make_study: Callable[..., Path], ledgers: tuple[Ledger, Ledger]
) -> None:
    ours, theirs = ledgers
    written = payloads(make_study, theirs)
    assert set(written) < set(readers())
    for stage, payload in written.items():
        theirs.record_result(stage, "key", json.loads(json.dumps(payload)))
    added = merge(ours, theirs.directory, readers()).added
    assert (added["results"], added["forecasts"]) == (len(written), 1)


@pytest.mark.parametrize(
    "stage", ["check", "promotion_started", "promotion", "gate", BAND, ALARM, "cancel_trial", "plan_file"]
)
def test_a_payload_that_lacks_anything_refuses_the_source_and_ours_stays(
    make_study: Callable[..., Path], ledgers: tuple[Ledger, Ledger], stage: str
) -> None:
    ours, theirs = ledgers
    theirs.record_result(stage, "key", {})
    told = rf"{theirs.directory}.*: results, {stage} key: must be as this version writes it, got (KeyError|TypeError)"
    with pytest.raises(StudyDirectoryError, match=told):
        merge(ours, theirs.directory, readers())
    assert ours.read(find, "results") == []


def test_a_forecast_whose_plan_is_none_refuses_the_source(
    make_study: Callable[..., Path], ledgers: tuple[Ledger, Ledger]
) -> None:
    ours, theirs = ledgers
    plan = registered_plan(make_study(), theirs)
    (row,) = theirs.read(find, "forecasts")
    for name in ("model", "n_params", "n_tokens", "compute_flops", "forecast", "hyperparameters"):
        wrong = {**row["payload"], name: "wrong"}
        (folder := theirs.directory / name).mkdir()
        other = Ledger(folder / "ledger.sqlite")
        other.claim(IDENTITY, {})
        other.insert(forecasts, **{**row, "payload": wrong})
        other.close()
        with pytest.raises(StudyDirectoryError, match=rf"forecasts, forecasts {plan.key}: must be as this version"):
            merge(ours, folder, readers())
    assert ours.read(find, "forecasts") == []


def test_requests_to_end_something_are_for_those_who_were_at_work(ledgers: tuple[Ledger, Ledger]) -> None:
    ours, theirs = ledgers
    for ledger in ledgers:
        add_sweep(ledger, "of both", 2.0)
    add_sweep(theirs, "theirs", 2.0)
    cancel_study(theirs, "enough")
    cancel_trial(theirs, "of both", 0, "is stuck there")
    cancel_trial(theirs, "theirs", 0, "is stuck")
    merge(ours, theirs.directory, readers())
    assert cancelled_trials(ours, "theirs") == {0: "is stuck"}
    assert cancelled_trials(ours, "of both") == {}, "trial 0 is another one here"
    assert ours.latest_result("cancel_study") is None
