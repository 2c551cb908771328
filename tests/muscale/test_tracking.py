"""Trackers for real: runs of wandb kept offline, event files, an MLflow store, a server that is not there, a secret."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from muscale.search.sweep import Sweep
from muscale.settings.tables import TrackingSettings
from muscale.tracking.mirror import Mirror
from muscale.tracking.run_sources import trials
from muscale.tracking.tracked import Row, TrackedRun
from muscale.tracking.trackers import make_mirror
from tests.muscale.event_files import scalars
from tests.muscale.planted_sweep import add_result, plant
from tests.muscale.wandb_files import OfflineRun, read_runs

SECRET = "5ecre7" * 6 + "abcd"


@pytest.fixture
def swept(swept: Sweep) -> Sweep:
    plant(swept)
    return swept


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """wandb as somebody without a key has it; its process is ended after the test."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    yield
    import wandb

    wandb.teardown()
    assert list((tmp_path / "elsewhere").iterdir()) == [], "nothing is left in the working directory"
    for name in ("WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        os.environ.pop(name, None)


def by_key(runs: list[OfflineRun]) -> dict[str, list[OfflineRun]]:
    found: dict[str, list[OfflineRun]] = {}
    for run in runs:
        found.setdefault(run.key, []).append(run)
    return found


def test_trials_are_wandb_runs_that_resume(swept: Sweep, offline: None) -> None:
    directory = swept.ledger.directory
    source, wanted = partial(trials, swept), {run.name: run for run in trials(swept)}
    with make_mirror(TrackingSettings(), directory).following(source):
        pass
    runs = read_runs(directory)
    assert sorted(run.name for run in runs) == sorted(wanted)
    best = next(run for run in runs if run.name == "micro trial 0")
    expected = wanted["micro trial 0"]
    assert (best.key, best.group, best.kind, best.project) == (expected.key, expected.group, "trial", "muscale")
    assert best.rows == [dict(row.values) for row in expected.rows["rungs"]]
    assert best.config["learning_rate"] == 0.008
    assert best.config["model"]["d_model"] == 32
    assert (best.summary["status"], best.summary["val_loss"]) == ("completed", 1.8)
    assert next(run for run in runs if run.name == "micro trial 2").exit_code == 1, "a divergence is a failure"

    plant(swept, more=1)
    again = make_mirror(TrackingSettings(), directory)
    with again.following(source):
        pass
    found = by_key(read_runs(directory))
    assert len(found) == len(wanted) + 1
    assert [len(runs) for runs in found.values()] == [1] * len(found), "what is known was not even opened"

    last = swept.plan.rung_tokens[-1]
    swept.record().go_on(1, 1)
    add_result(swept, 1, 1, 2.2)
    with make_mirror(TrackingSettings(), directory).following(source):
        pass
    first, second = by_key(read_runs(directory))[wanted["micro trial 1"].key]
    assert first.rows == [{"tokens": swept.plan.rung_tokens[0], "val_loss": 2.5}]
    assert second.rows == [{"tokens": last, "val_loss": 2.2}], "only what is new, under the same key"


def test_files_are_artifacts_below_the_study(tmp_path: Path, offline: None) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("n_tokens = 1")
    run = TrackedRun(key="k1", name="n", kind="study", group="g", config={}, files={"plan.toml": file})
    mirror = make_mirror(TrackingSettings(), tmp_path / "study")
    for _ in range(2):
        with mirror.following(lambda: [run]):
            pass
    (kept,) = read_runs(tmp_path / "study")
    assert kept.artifacts == ["plan.toml"]


def test_tensorboard_has_the_same_metrics_under_the_same_names(swept: Sweep) -> None:
    pytest.importorskip("tensorboardX")
    directory, settings = swept.ledger.directory, TrackingSettings(wandb="off", tensorboard=True)
    runs = {run.name: run for run in trials(swept)}
    for more in (0, 2):
        plant(swept, more=more)
        with make_mirror(settings, directory).following(partial(trials, swept)):
            pass
    folder = directory / "tracking" / "tensorboard" / "trial"
    assert len(list(folder.iterdir())) == len(runs) + 2
    first, last = swept.plan.rung_tokens
    assert {place: values for place, values in scalars(folder / runs["micro trial 0"].key).items() if place[1]} == {
        ("val_loss", first): [2.0],
        ("val_loss", last): [pytest.approx(1.8)],
    }


# mlflow's about itself and SQLAlchemy
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow, of muscale[mlflow], which is in no lock")
def test_mlflow_has_the_same_in_a_file_of_the_study(swept: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    directory, settings = swept.ledger.directory, TrackingSettings(wandb="off", mlflow=True)
    for more in (0, 1):
        plant(swept, more=more)
        with make_mirror(settings, directory).following(partial(trials, swept)):
            pass
    client = MlflowClient(tracking_uri=f"sqlite:///{directory / 'tracking' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("muscale")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == [f"micro trial {number}" for number in (0, 1, 2, 4)]
    best = runs["micro trial 0"]
    history = client.get_metric_history(best.info.run_id, "val_loss")
    first, last = swept.plan.rung_tokens
    assert [(metric.step, metric.value) for metric in history] == [(first, 2.0), (last, 1.8)]
    assert best.data.params["learning_rate"] == "0.008"
    assert best.data.tags["summary.status"] == "completed"
    assert runs["micro trial 2"].info.status == "FAILED"
    assert abs(history[0].timestamp / 1000 - time.time()) < 3600


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow, of muscale[mlflow], which is in no lock")
def test_mlflow_gets_the_settings_that_a_failed_request_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "abc.toml").write_text("n_tokens = 1")
    run = TrackedRun(
        key="k1", name="n", kind="study", group="g", config={"a": 1}, files={"plan.toml": tmp_path / "abc.toml"}
    )
    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "log_batch", lambda *_args, **_kwargs: 1 / 0)
        failed = make_mirror(TrackingSettings(wandb="off", mlflow=True), tmp_path).send(lambda: [run])
    assert [reason.startswith("mlflow: ZeroDivisionError") for reason in failed.failed.values()] == [True]
    again = make_mirror(TrackingSettings(wandb="off", mlflow=True), tmp_path).send(lambda: [run])
    assert (again.failed, again.updated) == ({}, {"mlflow": 1})
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'tracking' / 'mlflow.db'}")
    (kept,) = client.search_runs([client.get_experiment_by_name("muscale").experiment_id])
    assert kept.data.params == {"a": "1"}
    assert [file.path for file in client.list_artifacts(kept.info.run_id)] == ["plan.toml"]


def test_an_unwritable_place_is_reported_and_the_work_continues(swept: Sweep, caplog: pytest.LogCaptureFixture) -> None:
    directory = swept.ledger.directory
    (directory / "tracking").mkdir()
    (directory / "tracking" / "tensorboard").write_text("a file where a folder should be")
    settings = TrackingSettings(wandb="off", tensorboard=True)
    done = False
    with caplog.at_level(logging.WARNING), make_mirror(settings, directory).following(partial(trials, swept)):
        done = True
    assert done
    (message,) = [message for message in caplog.messages if message.startswith("tracking:")]
    assert "tensorboard: " in message
    assert "`muscale sync`" in message


UNREACHABLE = """
import logging, sys, time
from pathlib import Path
from muscale.tracking import wandb_tracker
wandb_tracker._LIGHT |= {"init_timeout": 2.0, "finish_timeout": 2.0}
from muscale.tracking.tracked import Row, TrackedRun
from muscale.tracking.trackers import make_mirror
from muscale.settings.tables import TrackingSettings
logging.basicConfig()
row = Row(at=1, values={"tokens": 1, "val_loss": 2.0})
run = TrackedRun(key="k1", name="n", kind="trial", group="g", config={}, rows={"a": [row]})
with make_mirror(TrackingSettings(), Path(sys.argv[1])).following(lambda: [run]):
    print("the work")
print("after it")
"""


def test_an_absent_server_ends_and_blocks_nothing_and_the_key_is_written_nowhere(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"WANDB_API_KEY": SECRET, "WANDB_BASE_URL": f"http://127.0.0.1:{port}", "HOME": str(tmp_path)}
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", UNREACHABLE, str(tmp_path / "study")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["the work", "after it"]
    assert ended.stderr.count("tracking: wandb: ") == 1, ended.stderr
    assert time.monotonic() - began < 90
    assert SECRET not in ended.stdout + ended.stderr
    assert with_secret(tmp_path) == []


STOPPED = """
import sys
from pathlib import Path
import psutil
from muscale.cli import entry
from muscale.settings.tables import TrackingSettings
from muscale.tracking.tracked import TrackedRun
from muscale.tracking.trackers import make_mirror

def stopped(_tokens):
    run = TrackedRun(key="abc", name="n", kind="trial", group="g", config={}, summary={"loss": 1.0}, ended="finished")
    with make_mirror(TrackingSettings(), Path(sys.argv[1])).following(lambda: [run]):
        pass
    children = psutil.Process().children(recursive=True)
    assert children
    for child in children:
        child.terminate()
    psutil.wait_procs(children, timeout=30)
    raise KeyboardInterrupt

entry.app = stopped
sys.exit(entry.run([]))
"""


def test_a_job_that_was_stopped_ends_with_its_own_line_though_wandb_was_stopped_too(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED, str(tmp_path)],
        env=environment | {"WANDB_MODE": "offline"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (130, "")
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


def with_secret(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


def test_a_secret_of_the_environment_is_in_no_file_and_no_message(
    swept: Sweep, offline: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_API_KEY", "MUSCALE_LEDGER_URL", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, SECRET)

    def source() -> Iterator[TrackedRun]:
        yield from trials(swept)
        yield TrackedRun(key="k", name="n", kind="study", group="g", config=swept.config.to_dict())

    settings = TrackingSettings(tensorboard=find_spec("tensorboardX") is not None)
    with caplog.at_level(logging.DEBUG), make_mirror(settings, swept.ledger.directory).following(source):
        pass
    assert len(read_runs(swept.ledger.directory)) == 4, "something was written that could have held it"
    assert with_secret(tmp_path) == []
    assert SECRET not in caplog.text


def test_nothing_is_started_where_every_tracker_is_off(tmp_path: Path) -> None:
    run = TrackedRun(key="k", name="n", kind="full", group="g", config={}, rows={"a": [Row(at=1, values={"x": 1.0})]})
    mirror = make_mirror(TrackingSettings(wandb="off"), tmp_path / "study")
    with mirror.following(lambda: [run]):
        pass
    assert not (tmp_path / "study").exists()
    assert mirror.send(lambda: [run]).to_dict()["updated"] == {}
    assert isinstance(mirror, Mirror)
