"""Sweeps on a Ray cluster of several nodes: submitted as jobs with a token, stopped, resumed, and robbed of a node."""

from __future__ import annotations

import json
import shutil
import sqlite3
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from muscale import Study
from muscale.fingerprint import package_fingerprint, write_wheel
from muscale.new_study import FAMILY, write_study
from tests.muscale.ray_nodes import RayNodes

pytestmark = pytest.mark.cluster

MakeStudy = Callable[..., Path]
SETTINGS = ["sweep.trials=3", "sweep.n_tokens=131072", "sweep.n_seeds=0", "sweep.top_k=1", "sweep.rungs=2"]
SWEEP = ["python", "-m", "muscale", "sweep"]
ON_NODES = ["storage.ledger=actor"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    started = RayNodes()
    yield started
    started.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> pd.DataFrame:
    from tests.muscale.conftest import MICRO, write_text

    directory = tmp_path_factory.mktemp("undisturbed")
    write_text(directory / "text")
    (directory / "study.toml").write_text(MICRO)
    return Study.open(directory / "study.toml", SETTINGS, quiet=True).sweep().trials


def submit(nodes: RayNodes, wheel: Path, job: str, path: Path, *settings: str) -> Any:
    """One command, as the README has it."""
    shipped = {"py_modules": [str(wheel)], "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}
    command = ["--", *SWEEP, str(path), *flatten([*SETTINGS, *settings])]
    return nodes.job("submit", "--no-wait", "--submission-id", job, "--runtime-env-json", json.dumps(shipped), *command)


def flatten(settings: list[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def rows(path: Path, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
    """What a study's file of SQLite holds at this moment; nothing before it was begun."""
    if not (path.parent / "ledger.sqlite").exists():
        return []
    with sqlite3.connect(f"file:{path.parent / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        try:
            return ledger.execute(f"SELECT {columns} FROM {table}").fetchall()
        except sqlite3.OperationalError:  # its tables are being made
            return []


def assert_same_table(path: Path, settings: list[str], undisturbed: pd.DataFrame) -> None:
    study = Study.open(path, [*SETTINGS, *settings], quiet=True)
    assert study.ledger.retrained() == []
    columns = ["trial", "status", "learning_rate", "init_scale", "annealed_loss"]
    pd.testing.assert_frame_equal(study.sweep().trials[columns], undisturbed[columns])


def test_a_job_is_submitted_stopped_and_resumed(
    nodes: RayNodes, wheel: Path, make_study: MakeStudy, undisturbed: pd.DataFrame
) -> None:
    path = make_study()
    done = submit(nodes, wheel, "first", path, *ON_NODES)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes.reaches("first", lambda: bool(rows(path, "rungs")), "the first rung")
    nodes.request("/api/jobs/first/stop", method="POST")
    assert nodes.ends("first")["status"] == "STOPPED"
    logs = nodes.logs("first")
    assert "run the same command again to resume" in logs
    before = {table: rows(path, table) for table in ("trials", "rungs", "segments")}
    assert len(before["rungs"]) < 6, "stopped in the middle"
    assert submit(nodes, wheel, "second", path, *ON_NODES).returncode == 0
    ended = nodes.ends("second")
    assert ended["status"] == "SUCCEEDED", ended["message"]
    assert "best annealed loss" in nodes.logs("second")
    for table, known in before.items():
        assert set(known) <= set(rows(path, table)), f"{table}: recorded rows don't change"
    shipped = {json.loads(environment)["muscale"] for (environment,) in rows(path, "segments", "environment")}
    assert shipped == {package_fingerprint()}, "the wheel's, whose version is the fingerprint of its sources"
    assert_same_table(path, ON_NODES, undisturbed)


def test_without_the_token_nothing_starts(nodes: RayNodes, wheel: Path, make_study: MakeStudy, tmp_path: Path) -> None:
    path, known = make_study(), nodes.request("/api/jobs/")
    for token, refusal in (("", "401"), ("wrong" * 8, "403")):
        with pytest.raises(urllib.error.HTTPError, match=refusal):
            nodes.request("/api/jobs/", token=token)
    other = tmp_path / "token"
    other.write_text("wrong" * 8)
    done = nodes.job("submit", "--no-wait", "--", "muscale", "sweep", path, RAY_AUTH_TOKEN_PATH=str(other))
    assert done.returncode != 0
    assert "Invalid authentication token" in done.stderr
    assert nodes.request("/api/jobs/") == known


@pytest.mark.soak
def test_a_family_reaches_the_workers_of_a_job_as_a_py_module(
    nodes: RayNodes, wheel: Path, make_study: MakeStudy, tmp_path: Path
) -> None:
    package, path = tmp_path / "my_package", make_study()
    package.mkdir()
    (package / "__init__.py").touch()
    write_study(tmp_path / "new", family=True)
    shutil.copy(tmp_path / "new" / FAMILY[0], package)
    path.write_text(path.read_text().replace("[model]\n", '[model]\nfamily = "my_package.my_family:Convolutions"\n'))
    shipped = ["--no-wait", "--runtime-env-json", json.dumps({"py_modules": [str(wheel), str(package)]})]
    sweep = [*SWEEP, str(path), *flatten([*SETTINGS, *ON_NODES, "sweep.trials=2"])]
    done = nodes.job("submit", "--submission-id", "family", *shipped, "--", *sweep)
    assert done.returncode == 0, done.stdout + done.stderr
    ended, logs = nodes.ends("family"), nodes.logs("family")
    assert ended["status"] == "SUCCEEDED", logs
    (line,) = {line for line in logs.splitlines() if line.startswith("importing the model family")}
    assert line.startswith("importing the model family my_package.my_family:Convolutions from /")
    assert str(tmp_path) not in line, "Ray's own copy, not the folder that was submitted"
    assert rows(path, "segments")


@pytest.mark.soak
def test_a_job_with_another_package_on_its_workers_or_a_relative_path_is_refused(
    nodes: RayNodes, wheel: Path, make_study: MakeStudy, tmp_path: Path
) -> None:
    path = make_study()
    shutil.unpack_archive(wheel, tmp_path / "other", "zip")
    (tmp_path / "other" / "scaling" / "newer.py").write_text("")
    driver = f"PYTHONPATH={tmp_path / 'other'} python -m muscale sweep"
    shipped = ["--no-wait", "--runtime-env-json", json.dumps({"py_modules": [str(wheel)]})]
    options = " ".join(flatten([*SETTINGS, "sweep.trials=1"]))
    nodes.job("submit", "--submission-id", "other", *shipped, "--", "sh", "-c", f"{driver} {path} {options}")
    nodes.job("submit", "--submission-id", "relative", *shipped, "--", *SWEEP, "study.toml")
    assert nodes.ends("other")["status"] == nodes.ends("relative")["status"] == "FAILED"
    assert "this process runs muscale" in nodes.logs("other")
    assert "study.toml: must be an absolute path" in nodes.logs("relative")


@pytest.mark.soak
def test_a_node_that_dies_costs_its_segments_and_another_takes_its_place(
    nodes: RayNodes, make_study: MakeStudy, undisturbed: pd.DataFrame
) -> None:
    path = make_study()
    victim, _ = nodes.add_node(), nodes.add_node()
    options = flatten([*SETTINGS, *ON_NODES, "resources.workers=3"])
    done = nodes.job("submit", "--no-wait", "--submission-id", "robbed", "--", *SWEEP, path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes.reaches("robbed", lambda: bool(rows(path, "rungs")), "the first rung")
    before = rows(path, "segments")
    nodes.kill(victim)
    nodes.add_node()
    ended = nodes.ends("robbed")
    assert ended["status"] == "SUCCEEDED", ended["message"]
    assert set(before) <= set(rows(path, "segments")), "recorded rows don't change"
    assert_same_table(path, ON_NODES, undisturbed)
