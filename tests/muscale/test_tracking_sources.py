"""What trackers are shown of a study, and that each of them is given it once."""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pytest

from muscale import Study, StudyFileError
from muscale.cli import entry
from muscale.layout import METRICS
from muscale.settings.tables import TrackingSettings
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import forecasts
from muscale.tracking import mirror as mirroring
from muscale.tracking.mirror import Mirror
from muscale.tracking.run_sources import FullRunSource, _run_rows, ladder_runs, study_key, trials, whole_study
from muscale.tracking.tracked import MOST_OPEN, Row, TrackedRun, Tracker, flat
from muscale.tracking.trackers import Tracking, make_mirror
from muscale.tracking.wandb_tracker import mode_of
from tests.muscale.event_files import scalars
from tests.muscale.planted_evaluations import CHECKPOINTS, PlantedEvaluations
from tests.muscale.planted_ladder import PlantedPlan
from tests.muscale.planted_sweep import open_sweep, plant

MakeStudy = Callable[..., Path]


class Listed(Tracker[str]):
    """A tracker that keeps what it is given, and fails on request."""

    name = "listed"

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[Row]] = {}
        self.summaries: dict[str, list[Mapping[str, object]]] = {}
        self.begun: list[str] = []
        self.ended: list[tuple[str, str | None]] = []
        self.files: list[str] = []
        self.failure: Exception | None = None

    def _begin(self, run: TrackedRun) -> str:
        if self.failure:
            raise self.failure
        self.begun.append(run.key)
        return run.key

    def _log(self, opened: str, rows: Sequence[Row]) -> None:
        self.rows.setdefault(opened, []).extend(rows)

    def _summarize(self, opened: str, run: TrackedRun) -> None:
        self.summaries.setdefault(opened, []).append(run.summary)

    def _attach(self, opened: str, run: TrackedRun, name: str, path: Path) -> None:
        self.files.append(name)

    def _end(self, opened: str, how: Literal["finished", "failed"] | None) -> None:
        self.ended.append((opened, how))


class Planted(PlantedPlan):
    """A full run whose metrics a test writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.directory.mkdir(parents=True)

    def source(self, points: int = 20) -> FullRunSource:
        return FullRunSource(self.ledger, self.plan.key, self.config.to_dict(), points)

    def write(self, first: int, last: int, of: int, evaluated: Sequence[int] = ()) -> None:
        """Steps of a run that has so many, its loss falling from 4."""
        n_tokens = self.plan.n_tokens
        with (self.directory / METRICS).open("a") as file:
            for step in range(first, last + 1):
                row: dict[str, float] = {"tokens": round(n_tokens * step / of), "train_loss": 4 - step / of}
                row |= {"grad_norm": 1.0, "rate_factor": 0.5, "seconds": step / 10}
                if step in evaluated:
                    row["val_loss"] = 4.1 - step / of
                file.write(json.dumps(row) + "\n")


@pytest.fixture
def planted(make_study: MakeStudy) -> Iterator[Planted]:
    planted = Planted(make_study())
    yield planted
    planted.ledger.close()


def test_a_long_curve_is_shown_as_means_of_stretches_the_same_at_every_reading(planted: Planted) -> None:
    whole, grown = planted.source(), planted.source()
    seen: list[list[Row]] = []
    for last in (130, 131, 400):
        planted.write(1 if last == 130 else last, last, 400) if last < 400 else planted.write(132, 400, 400)
        (run,) = grown()
        seen.append(list(run.rows["training"]))
    (run,) = whole()
    rows = list(run.rows["training"])
    assert len(rows) == 20
    assert rows == seen[2]
    assert rows[: len(seen[0])] == seen[0] == seen[1], "a mean is shown once its window is complete, and never changes"
    assert len(seen[0]) == 6
    assert rows[-1].at == planted.plan.n_tokens
    assert [row.values["train_loss"] for row in rows] == pytest.approx(
        [4 - (20 * k + 10.5) / 400 for k in range(20)], rel=1e-3
    )
    first = planted.plan.segments[0].recipe.learning_rate
    assert rows[0].values["learning_rate"] == pytest.approx(first / 2)
    assert rows[3].values["tokens_per_second"] == pytest.approx(planted.plan.n_tokens / 40, rel=1e-2)


def test_the_forecast_is_a_line_next_to_the_run(planted: Planted) -> None:
    planted.write(1, 400, 400, evaluated=(100, 200, 400))
    (run,) = planted.source()()
    lines = {f"forecast/{side}": getattr(planted.band, side) for side in ("loss", "low", "high")}
    rows = [row for stream in run.rows.values() for row in stream]
    assert all(row.values.items() >= lines.items() for row in rows)
    evaluations = run.rows["evaluations"]
    assert [row.values["val_loss"] for row in evaluations] == pytest.approx([3.85, 3.6, 3.1])
    assert evaluations[-1].values["band/expected"] == pytest.approx(planted.band.loss)
    assert all(math.isfinite(value) for row in rows for value in row.values.values())
    assert (run.ended, run.summary["val_loss"]) == (None, pytest.approx(3.1))
    assert run.config["plan_of_run"]["key"] == planted.plan.key
    assert run.config["sweep"]["trials"] == planted.config.sweep.trials
    planted.end(3.1)
    (run,) = planted.source()()
    assert run.ended == "finished"
    assert run.summary["residual"] == pytest.approx(3.1 - planted.band.loss)


def test_scores_of_the_ladder_and_of_the_full_run_are_rows_of_their_own(make_study: MakeStudy) -> None:
    planted = PlantedEvaluations(make_study())
    small, large = ladder_runs(planted.config, planted.ledger)
    assert small.config["n_params"] < large.config["n_params"]
    rows = small.rows["scores/tasks"]
    assert [row.at for row in rows] == [
        steps * planted.config.hyperparameters.batch_tokens for steps in (16, 32, 64, 128)
    ]
    assert {"score/copying/accuracy", "score/arithmetic/bits_per_byte"} <= rows[0].metrics.keys()
    assert "score/memorisation/2_3_times/memorised" in small.rows["scores/memorisation"][0].metrics
    assert small.summary["val_loss"] == rows_of_loss(small)[-1]
    source = FullRunSource(planted.ledger, planted.plan.key, planted.config.to_dict(), 20)
    (run,) = source()
    assert len(run.rows["scores/tasks"]) == CHECKPOINTS, "the end is added once the run is promoted"
    planted.end(2.5)
    (run,) = source()
    assert [row.at for row in run.rows["scores/tasks"]][-1] == planted.plan.n_tokens
    assert len(run.rows["scores/tasks"]) == CHECKPOINTS + 1
    assert len(run.rows["scores/ablation"]) == 1
    planted.ledger.close()


def rows_of_loss(run: TrackedRun) -> list[float]:
    return [row.values["score/loss"] for row in run.rows["scores/loss"]]


def test_trials_are_shown_with_what_became_of_them(make_study: MakeStudy) -> None:
    path = make_study()
    ledger = Ledger(path.parent / "ledger.sqlite")
    sweep = open_sweep(path, ledger)
    plant(sweep)
    runs = list(trials(sweep))
    assert [run.summary["status"] for run in runs] == ["completed", "stopped", "diverged"], "one has arrived nowhere"
    first, last = sweep.plan.rung_tokens
    assert [(row.at, row.values["val_loss"]) for row in runs[0].rows["rungs"]] == [(first, 2.0), (last, 1.8)]
    assert runs[2].rows["rungs"] == []
    assert "val_loss" not in runs[2].summary, "a divergence is no number"
    assert runs[2].ended == "failed"
    assert (runs[0].config["learning_rate"], runs[0].config["searched"]) == (0.008, ["init_scale", "learning_rate"])
    assert len({run.key for run in runs}) == 3
    assert len({run.group for run in runs}) == 1
    assert [run.key for run in trials(sweep)] == [run.key for run in runs], "for ever"
    ledger.close()


def test_the_longest_annealed_run_of_a_trial_is_shown_with_its_tokens(
    make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_study()
    ledger = Ledger(path.parent / "ledger.sqlite")
    sweep = open_sweep(path, ledger)
    plant(sweep)
    runs = pd.DataFrame({"trial": [0, 0, 1], "n_tokens": [8192, 4096, 4096], "loss": [1.5, 2.25, 2.5]})
    monkeypatch.setattr(type(sweep), "annealed_runs", lambda _sweep, _record: runs)
    shown = [(run.summary.get("annealed_loss"), run.summary.get("annealed_tokens")) for run in trials(sweep)]
    assert shown == [(1.5, 8192), (2.5, 4096), (None, None)]
    ledger.close()


def test_the_same_study_in_another_directory_is_another_one(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here = study_key(tmp_path / "here")
    assert study_key(tmp_path / "here") == here != study_key(tmp_path / "there")


def test_a_tracker_is_given_everything_once_even_by_another_process(planted: Planted, tmp_path: Path) -> None:
    planted.write(1, 200, 400, evaluated=(100,))
    first, later = Listed(), Listed()
    Mirror([first], tmp_path / "t").bring_up(planted.source())
    mirror = Mirror([later], tmp_path / "t")
    mirror.bring_up(planted.source())
    assert later.begun == [], "a tracker is not even started where it has nothing to do"
    planted.write(201, 400, 400, evaluated=(300, 400))
    planted.end(3.1)
    for _ in range(2):
        mirror.bring_up(planted.source())
    (key,) = first.rows
    assert later.begun == [key], "the same run resumes"
    assert later.ended == [(key, "finished")]
    places = [(row.at, "val_loss" in row.values) for tracker in (first, later) for row in tracker.rows[key]]
    assert len(places) == len(set(places)) == 20 + 3
    assert [len(tracker.summaries[key]) for tracker in (first, later)] == [1, 1]


def test_runs_keep_their_numbers_when_older_ones_are_merged(tmp_path: Path) -> None:
    common = {"purpose": "sweep", "n_params": 10, "n_tokens": 100, "compute_flops": 6e3, "learning_rate": 0.01}
    mine = pd.DataFrame([{**common, "key": "late", "loss": 2.0}])
    theirs = pd.DataFrame(
        [{**common, "key": "early", "loss": 3.0}, {**common, "purpose": "ladder", "key": "late", "loss": 2.0}]
    )
    merged = pd.concat([theirs, mine], ignore_index=True)
    file = tmp_path / "tracking" / "numbers.jsonl"
    assert [row.at for row in _run_rows(mine, file)] == [0]
    rows = list(_run_rows(merged, file))
    assert [(row.at, row.values["runs/loss"]) for row in rows] == [(0, 2.0), (1, 3.0), (2, 2.0)]
    assert list(_run_rows(merged, file)) == rows


def test_what_is_known_is_tracked_afterwards_too(planted: Planted) -> None:
    planted.write(1, 400, 400, evaluated=(200, 400))
    planted.end(3.1)
    path = planted.ledger.directory / "study.toml"
    study = Study.open(path, ["tracking.tensorboard=true"], quiet=True)
    assert Tracking(study.config, study.ledger).sync().updated == {"tensorboard": 2}
    folder = study.directory / "tracking" / "tensorboard"
    (full,), (whole,) = ((folder / kind).iterdir() for kind in ("full", "study"))
    found, n_tokens = scalars(full), planted.plan.n_tokens
    assert found["val_loss", n_tokens] == [pytest.approx(3.1)]
    assert found["forecast/loss", n_tokens] == pytest.approx([planted.band.loss] * 2), (
        "beside the curve and the evaluation"
    )
    assert b"val_loss = 3.1" in b"".join(file.read_bytes() for file in whole.iterdir()), "where the study stands"
    again = Study.open(path, ["tracking.tensorboard=true"], quiet=True)
    assert Tracking(again.config, again.ledger).sync().updated == {"tensorboard": 0}
    study.ledger.close()
    again.ledger.close()


def test_late_evaluations_are_not_lost(planted: Planted, tmp_path: Path) -> None:
    planted.write(1, 400, 400)
    tracker = Listed()
    mirror = Mirror([tracker], tmp_path / "t")
    source = planted.source()
    mirror.bring_up(source)
    evaluation = {"tokens": planted.plan.n_tokens // 2, "val_loss": 3.5}
    (planted.directory / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    mirror.bring_up(source)
    (rows,) = tracker.rows.values()
    assert [row.values["val_loss"] for row in rows if "val_loss" in row.values] == [3.5]


def test_a_failing_tracker_is_reported_once_and_gets_everything_when_it_is_back(
    planted: Planted, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(mirroring, "FIRST_REST_SECONDS", 0.5)
    monkeypatch.setattr(mirroring, "LONGEST_REST_SECONDS", 0.5)
    planted.write(1, 200, 400)
    bad, good = Listed(), Listed()
    bad.failure = ConnectionError(f"no route to {'k' * 40}")
    good.name = "good"  # type: ignore[misc]
    mirror = Mirror([bad, good], tmp_path / "t")
    with caplog.at_level(logging.WARNING):
        for last in (201, 202, 240):
            planted.write(last, last, 400)
            mirror.bring_up(planted.source())
    (message,) = caplog.messages
    assert "listed: ConnectionError: no route to $WANDB_API_KEY" in message
    assert good.rows, "the other one has what there is"
    bad.failure = None
    time.sleep(0.6)
    mirror.bring_up(planted.source())
    assert bad.rows == good.rows


def test_a_tracker_that_hangs_is_not_waited_for(
    planted: Planted, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    class Hanging(Listed):
        def _begin(self, run: TrackedRun) -> str:
            released.wait(60)
            return super()._begin(run)

    monkeypatch.setattr(mirroring, "PATIENCE_SECONDS", 0.2)
    planted.write(1, 200, 400)
    tracker = Hanging()
    mirror = Mirror([tracker], tmp_path / "t")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with mirror.following(planted.source()):
                pass
    assert len(caplog.messages) == 1
    assert "no longer waiting for it" in caplog.messages[0]
    released.set()
    for thread in threading.enumerate():
        if thread.name == "sync":
            thread.join(30)
    assert tracker.begun, "what was under way came to its end"


def test_a_sync_sends_everything_however_long_it_takes(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Listed):
        def _begin(self, run: TrackedRun) -> str:
            time.sleep(0.3)
            return super()._begin(run)

    monkeypatch.setattr(mirroring, "PATIENCE_SECONDS", 0.05)
    planted.write(1, 200, 400)
    tracker, seen = Slow(), []
    mirror = Mirror([tracker], tmp_path / "t")
    done = mirror.send(planted.source(), lambda n, of, note, **_: seen.append((n, of)))
    assert (done.failed, sum(done.updated.values()), seen) == ({}, 1, [(1, 1)])
    assert tracker.rows
    bad = Listed()
    bad.failure = ConnectionError("no route")
    assert list(Mirror([bad], tmp_path / "u").send(planted.source()).failed) == ["listed"]


def test_the_command_fails_if_a_tracker_does(planted: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    planted.write(1, 400, 400, evaluated=(200, 400))
    folder = planted.ledger.directory
    command = ["sync", str(folder / "study.toml"), "--set", 'tracking.wandb="off"', "--json"]
    assert entry.run([*command, "--set", "tracking.tensorboard=true"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == {}
    shutil.rmtree(folder / "tracking")
    (folder / "tracking").mkdir()
    (folder / "tracking" / "tensorboard").write_text("a file where a folder should be")
    assert entry.run([*command, "--set", "tracking.tensorboard=true"]) == 1
    assert list(json.loads(capsys.readouterr().out)["failed"]) == ["tensorboard"]


def test_what_the_block_raises_passes_and_is_tracked_before(planted: Planted, tmp_path: Path) -> None:
    tracker = Listed()
    with pytest.raises(KeyboardInterrupt), Mirror([tracker], tmp_path / "t").following(planted.source()):
        planted.write(1, 200, 400)
        raise KeyboardInterrupt
    assert tracker.rows


def test_only_so_many_runs_are_open_at_once(tmp_path: Path) -> None:
    tracker = Listed()
    runs = [
        TrackedRun(
            key=f"k{n}", name="n", kind="trial", group="g", config={}, rows={"a": [Row(at=n, values={"x": 1.0})]}
        )
        for n in range(MOST_OPEN + 3)
    ]
    Mirror([tracker], tmp_path / "t").bring_up(lambda: runs)
    assert tracker.ended == [("k0", None), ("k1", None), ("k2", None)]


def test_where_wandb_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    auto = TrackingSettings()
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert mode_of(auto) == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret")
    assert mode_of(auto) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example")
    assert mode_of(auto) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert mode_of(auto) == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode_of(auto) == "off"
    assert mode_of(TrackingSettings(wandb="offline")) == "offline", "the study file says so"


def test_a_tracker_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from muscale.tracking import trackers

    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(StudyFileError, match=r"tracking\.mlflow: .*muscale\[mlflow\]"):
        make_mirror(TrackingSettings(wandb="off", mlflow=True), tmp_path)


def test_nested_values_have_dotted_names() -> None:
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None, "e": True}) == {
        "a.b": 1,
        "a.c": "[1, 2]",
        "d": "None",
        "e": True,
    }
    assert np.isfinite(flat({"x": 1.5})["x"])


def test_the_study_shows_the_measured_loss_only_of_the_plan_whose_forecast_it_shows(planted: Planted) -> None:
    planted.end(3.1)
    (run,) = whole_study(planted.config, planted.ledger)
    assert run.summary["val_loss"] == pytest.approx(3.1)
    later = {"loss": 2.0, "low": 1.9, "high": 2.1, "level": 0.9}
    planted.ledger.insert(forecasts, plan="later", payload=planted.plan.to_dict(), **later)
    (run,) = whole_study(planted.config, planted.ledger)
    assert run.summary["forecast/loss"] == 2.0
    assert "val_loss" not in run.summary
