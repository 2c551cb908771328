"""A look at a run: rows as they come, where each evaluation lies, what is left, and how the command line ends."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from muscale import StageError
from muscale.full_runs.promote.promotion import recorded_promotion
from muscale.full_runs.records.alarms import raise_alarms
from muscale.full_runs.records.events import run_events
from muscale.full_runs.records.run_records import MetricsTail
from muscale.layout import EVALUATIONS, FAILURE, METRICS
from muscale.monitoring import follow
from muscale.monitoring.follow import follow_run, guarding, view
from muscale.monitoring.monitor import Monitor
from muscale.monitoring.run_status import RunStatus
from muscale.settings.promote import PromoteSettings
from muscale.store.ledger_tables import ResultKind
from muscale.store.spike_handling import Incident, record_incident
from tests.muscale.monitoring.test_calibration import begin_child
from tests.muscale.planted_ladder import PlantedPlan

MakeStudy = Callable[..., Path]
SETTINGS = PromoteSettings()


class Run(PlantedPlan):
    """A full run of a planted study whose metrics a test writes."""

    def __init__(self, path: Path, *, stems: int = 4) -> None:
        super().__init__(path, stems=stems)
        self.directory.mkdir(parents=True)
        self.metrics = self.directory / METRICS

    def begin(self) -> None:
        self.ledger.record_result(ResultKind.PROMOTION_STARTED, self.plan.key, {"at": "2026-01-01T00:00:00+00:00"})

    def evaluate(self, *shares: float, off: float = 1.0, asynchronous: bool = False) -> None:
        """Write evaluations that are `off` times the expected loss; the run's own, or asynchronous ones."""
        with (self.directory / EVALUATIONS if asynchronous else self.metrics).open("a") as file:
            for share in shares:
                tokens = round(share * self.plan.n_tokens)
                expected = self.band.at([tokens])["expected"].fillna(9.0).iloc[0]
                step = {"tokens": tokens, "train_loss": 2.5, "seconds": tokens / 1000, "mfu": 0.4}
                of_checkpoint = {"tokens": tokens, "source_losses": {}, "samples": [], "seconds": 0.1}
                row = (of_checkpoint if asynchronous else step) | {"val_loss": expected * off}
                file.write(json.dumps(row) + "\n")

    def monitor(self) -> Monitor:
        return Monitor(self.ledger, alarm_after=3)


@pytest.fixture
def run(make_study: MakeStudy) -> Iterator[Run]:
    run = Run(make_study())
    yield run
    run.ledger.close()


def test_without_a_run_there_is_nothing_to_watch(run: Run) -> None:
    with pytest.raises(StageError, match="--losses"):
        run.monitor()
    run.begin()
    with pytest.raises(StageError, match="--plan other"):
        Monitor(run.ledger, plan="other", alarm_after=3)
    status = run.monitor().look()
    assert (status.tokens, status.inside, status.ended, status.alarming) == (0, None, False, False)
    status.plot()


def test_an_amended_run_is_watched_with_its_second_forecast_and_its_parent_says_that_it_was_amended(run: Run) -> None:
    run.begin()
    begin_child(run.ledger, "without", run.plan.key, forecast=None)
    assert run.monitor().look().plan == run.plan.key, "a run without a forecast is watched only if it is named"
    with pytest.raises(StageError, match="without"):
        Monitor(run.ledger, plan="without", alarm_after=3)
    begin_child(run.ledger, "child", run.plan.key)
    status = run.monitor().look()
    assert (status.plan, status.n_tokens, status.band.loss, status.band.high) == ("child", 5, 2.0, 2.1)
    status.plot()
    parent = Monitor(run.ledger, plan=run.plan.key, alarm_after=3).look()
    assert [(one.key, one.tokens, one.reason) for one in parent.amended] == [("without", 4, "why"), ("child", 4, "why")]
    assert json.loads(json.dumps(parent.to_dict()))["amended"][1]["changes"] == {"n_tokens": 9}


def test_each_evaluation_has_its_place(run: Run) -> None:
    run.begin()
    run.evaluate(0.02, off=5)
    run.evaluate(0.2, 0.3)
    run.evaluate(0.4, off=3)
    run.evaluate(0.5, off=0.3)
    status = run.monitor().look()
    assert list(status.evaluations["place"]) == ["before the band", "inside", "inside", "above", "below"]
    assert status.tokens_per_second == pytest.approx(1000)
    assert status.seconds_left == pytest.approx((run.plan.n_tokens - status.tokens) / 1000)
    assert status.mfu == pytest.approx(0.4)
    assert "1,000 tokens/s, MFU 40.0%" in str(status)
    assert status.inside is False
    assert not status.alarming
    assert "BELOW" in str(status)
    assert "before the band begins" in status._repr_html_()
    assert json.dumps(status.to_dict())
    names = {trace.name for trace in status.plot().data}
    assert {"band, held-out", "expected", "held-out loss", "outside the band", "training loss"} <= names


def test_alarms_only_after_warmup_and_one_window(run: Run) -> None:
    run.begin()
    run.evaluate(*(number / 100 for number in range(1, 10)), off=5)
    assert run.monitor().look().alarms == ()
    run.evaluate(0.15, 0.2, 0.25, off=5)
    status = run.monitor().look()
    assert [alarm.tokens for alarm in status.alarms] == [round(0.25 * run.plan.n_tokens)]
    assert status.alarming
    run.evaluate(0.3)
    status = run.monitor().look()
    assert status.alarms
    assert not status.alarming, "it came back"


def test_asynchronous_evaluations_are_placed_and_raise_alarms_like_the_run_s_own(run: Run) -> None:
    run.begin()
    run.evaluate(0.2)
    run.evaluate(0.3, 0.5, off=3, asynchronous=True)
    monitor = run.monitor()
    status = monitor.look()
    assert list(status.evaluations["place"]) == ["inside", "above", "above"]
    assert (status.alarms, len(status.curve)) == ((), 1)
    assert status.tokens_per_second is None, "a checkpoint's evaluation is no step"
    run.evaluate(0.4, off=3)  # between them
    status = monitor.look()
    assert list(status.evaluations["share"].round(2)) == [0.2, 0.3, 0.4, 0.5]
    assert [alarm.first_tokens for alarm in status.alarms] == [round(0.3 * run.plan.n_tokens)]
    assert status.alarming
    run.evaluate(1.0)
    assert monitor.look().measured == pytest.approx(run.band.loss)


def test_a_run_without_a_band_is_held_against_its_end(make_study: MakeStudy) -> None:
    run = Run(make_study(), stems=2)
    try:
        run.begin()
        run.evaluate(0.3, 0.6)
        assert set(run.monitor().look().evaluations["place"]) == {"before the band"}
        run.evaluate(1.0, off=0.2)
        status = run.monitor().look()
        assert (status.inside, status.ended, status.alarming) == (False, True, True)
        assert "needs 3 ladder stems" in str(status)
    finally:
        run.ledger.close()


def test_the_end_is_the_recorded_residual_or_why_there_is_none(run: Run) -> None:
    run.begin()
    run.evaluate(0.5, 1.0)
    status = run.monitor().look()
    assert status.ended
    assert status.measured == pytest.approx(run.band.loss)
    (run.directory / FAILURE).write_text("promote: the run diverged")
    assert run.monitor().look().alarming
    run.end(run.band.high * 1.1)
    status = run.monitor().look()
    assert status.alarming
    assert "OUTSIDE" in str(status)


def test_events_of_a_run_are_shown_in_order_of_time(run: Run) -> None:
    run.begin()
    run.evaluate(0.2)
    restart = Incident(step=3, reason="killed", action="restart", back_to=256, at="2026-01-01T00:00:05+00:00")
    record_incident(run.directory, restart)
    run.evaluate(0.3, 0.4, 0.5, off=2)
    status = run.monitor().look()
    assert [event.kind for event in status.run_events] == ["restart", "alarm"], "the ledger does not know of it yet"
    raise_alarms(run.ledger, status.alarms, webhook=None)
    later = Incident(step=9, reason="nan", action="skip", left_out=(2304, 2560), at="2126-01-01T00:00:00+00:00")
    record_incident(run.directory, later)
    seen = run.monitor().look()
    assert [event.kind for event in seen.run_events] == ["restart", "alarm", "skip"]
    places = [str(seen).index(text) for text in ("00:00:05 step 3: restart", "alarm: the loss", "step 9: skip: nan")]
    assert places == sorted(places)
    assert [event["kind"] for event in json.loads(json.dumps(seen.to_dict()))["run_events"]] == [
        "restart",
        "alarm",
        "skip",
    ]
    _, output = followed(run, "alarm")
    assert output.count("step 9: skip: nan") == 1
    out = io.StringIO()
    Console(file=out, width=140).print(view(seen))
    assert "step 3: restart" in out.getvalue()


def test_events_of_a_run_are_shown_with_its_promotion_and_stored_once(run: Run) -> None:
    run.begin()
    run.evaluate(0.2, 0.3, 0.4, 0.5, off=2)
    raise_alarms(run.ledger, run.monitor().look().alarms, webhook=None)
    skip = Incident(step=9, reason="nan", action="skip", left_out=(2304, 2560), at="2126-01-01T00:00:00+00:00")
    record_incident(run.directory, skip)
    run.end(run.band.loss, incidents=(skip,))
    found = recorded_promotion(run.ledger, run.plan.key)
    assert found is not None
    assert [event.kind for event in found.run_events] == ["alarm", "skip"]
    assert str(run.monitor().look()).count("step 9: skip: nan") == 1
    assert (run.ledger.result(ResultKind.PROMOTION, run.plan.key) or {})["run_events"] == []
    (run.directory / "incidents.jsonl").unlink()
    assert run_events(run.ledger, run.plan.key) == found.run_events, "the promotion keeps what lay in the directory"
    assert run_events(run.ledger, "another") == run_events(run.ledger, run.plan.key, asserted=True) == ()


def test_a_growing_file_is_read_on_and_one_written_anew_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.table().empty
    with path.open("a") as file:
        file.write('{"tokens": 1, "train_loss": 3.0}\n{"tokens": 2, "tr')
        file.flush()
        assert list(tail.table()["tokens"]) == [1]
        file.write('ain_loss": 2.0, "val_loss": 2.5}\ntorn\n')
    table = tail.table()
    assert list(table["tokens"]) == [1, 2]
    assert list(table["val_loss"].isna()) == [True, False]
    anew = tmp_path / "anew"
    anew.write_text('{"tokens": 1, "train_loss": 1.0}\n' * 9)
    anew.replace(path)
    assert list(tail.table()["train_loss"]) == [1.0] * 9


def test_a_file_that_is_written_anew_as_it_is_opened_is_not_taken_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, anew = tmp_path / "metrics.jsonl", tmp_path / "anew"
    path.write_text('{"tokens": 1, "train_loss": 3.0}\n{"tokens": 2, "train_loss": 3.0}\n')
    anew.write_text('{"tokens": 1, "train_loss": 1.0}\n' * 3)
    tail, opened = MetricsTail(path), Path.open

    def open_and_replace(self: Path, *args: Any) -> Any:
        file = opened(self, *args)
        anew.replace(path)
        return file

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "open", open_and_replace)
        assert list(tail.table()["train_loss"]) == [3.0, 3.0]
    assert list(tail.table()["train_loss"]) == [1.0] * 3


def followed(run: Run, until: Any, **options: Any) -> tuple[Any, str]:
    shown = io.StringIO()
    status = follow_run(
        run.monitor(), until=until, every=0.01, settings=SETTINGS, console=Console(file=shown, **options)
    )
    return status, shown.getvalue()


def test_following_ends_at_the_end_or_at_an_alarm(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.begin()
    run.evaluate(0.2)
    status, _ = followed(run, "now")
    assert not status.ended
    run.evaluate(0.3, 0.4, 0.5, off=2)
    status, output = followed(run, "alarm")
    assert status.alarming
    assert output.count("alarm: the loss of plan") == 1
    assert output.count("ABOVE") == 3
    assert len(run.ledger.results(ResultKind.ALARM)) == 1
    monitor, steps = run.monitor(), iter((0.6, 0.8, 1.0))
    look = monitor.look

    def look_after_a_step() -> RunStatus:
        run.evaluate(next(steps))
        return look()

    monkeypatch.setattr(monitor, "look", look_after_a_step)
    status = follow_run(monitor, until="end", every=0.01, settings=SETTINGS)
    assert status.ended
    assert status.inside


def test_the_terminal_shows_the_run_in_its_band(run: Run) -> None:
    run.begin()
    run.evaluate(0.02, 0.3, 0.5)
    run.evaluate(1.0, off=2)
    _, output = followed(run, "end", force_terminal=True, width=140)
    assert "before the band" in output
    assert f"{run.band.loss * 2:.4f}" in output
    out = io.StringIO()
    Console(file=out, width=140).print(view(run.monitor().look()))
    assert "---x" in out.getvalue()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets the guard look often, and waits until it has looked at what there is now."""
    seen = threading.Condition()
    count = 0
    look = Monitor.look

    def counted(self: Monitor) -> RunStatus:
        nonlocal count
        status = look(self)
        with seen:
            count += 1
            seen.notify_all()
        return status

    def wait() -> None:
        with seen:
            later = count + 3  # the first may have begun before, and what is done about the second is done by the third
            assert seen.wait_for(lambda: count >= later, timeout=60)

    monkeypatch.setattr(follow, "_GUARD_SECONDS", 0.02)
    monkeypatch.setattr(Monitor, "look", counted)
    return wait


def test_an_alarm_stops_the_run_once_where_the_study_asks_for_it(run: Run, looks: Callable[[], None]) -> None:
    settings = PromoteSettings(on_alarm="stop")
    run.begin()
    lines: list[str] = []
    stopped = pytest.raises(StageError, match='stopped by promote.on_alarm = "stop": alarm')
    with stopped, guarding(run.ledger, run.plan.key, settings, lines.append):
        run.evaluate(0.2)
        looks()
        run.evaluate(0.3, 0.4, 0.5, off=2)
        time.sleep(60)
    assert len(lines) == 1
    with guarding(run.ledger, run.plan.key, settings, lines.append):
        looks()
    assert len(lines) == 1, "the same alarm does not stop the run again"


def test_an_alarm_is_only_logged_by_default(run: Run, looks: Callable[[], None]) -> None:
    lines: list[str] = []
    with guarding(run.ledger, run.plan.key, SETTINGS, lines.append):
        time.sleep(0.1)  # it has not begun
        run.begin()
        run.evaluate(0.2)
        looks()
        run.evaluate(0.3, 0.4, 0.5, off=2)
        looks()
    assert [line[:5] for line in lines] == ["alarm"]


def test_idle_time_is_reported(run: Run) -> None:
    run.begin()
    run.evaluate(0.5)
    os.utime(run.metrics, (0, 0))
    assert "no new record for" in str(run.monitor().look())
    frame = run.monitor().look().to_frame()
    assert isinstance(frame, pd.DataFrame)
