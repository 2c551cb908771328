"""A disk becomes full under whole commands, Ray and all: exit code 2, the file is named, and the same command continues later."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
import torch

from muscale import Study
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.layout import LEDGER, REPORT
from muscale.search.record import Record, RungResult
from muscale.store.run_selection import save
from proxy_models.files import atomic_directory
from proxy_models.tensor_files import write_tensors
from tests.faults.conftest import SmallDisk
from tests.faults.drivers import COLUMNS
from tests.faults.lean import Tally, assert_kept, losses, rows
from tests.faults.test_full_disk import leftovers
from tests.muscale.command_lines import muscale
from tests.muscale.conftest import MICRO, write_text

GO_ON = "and run the same command again to resume"


@pytest.fixture
def study(small_disk: SmallDisk) -> Path:
    """A study file on the small disk, its corpus written."""
    small_disk.resize("16m")
    path = small_disk.folder / "study" / "study.toml"
    write_text(path.parent / "text")
    path.write_text(MICRO)
    opened = Study.open(path, quiet=True)
    with closing(opened.ledger):
        assert opened.corpus.n_tokens
    return path


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_sweep_whose_states_do_not_fit_starts_no_more_trials_and_continues_once_there_is_room(
    study: Path, small_disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    small_disk.fill(leave=300_000)  # for the ledger's rows; a state takes 350 kB
    done = muscale(capsys, "sweep", study)
    assert done.code == 2, done.err
    assert f"{study.parent}/" in done.err
    assert GO_ON in done.err
    assert leftovers(study.parent) == []
    before = rows(study.parent / LEDGER)
    assert len(before["trials"]) <= 2, "of four: what is begun later would be trained in vain"
    small_disk.empty()
    assert muscale(capsys, "sweep", study).code == 0
    assert_kept(before, rows(study.parent / LEDGER))
    opened = Study.open(study, quiet=True)
    with closing(opened.ledger):
        assert opened.ledger.retrained() == []
        assert set(opened.sweep().trials["status"]) == {"completed"}


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_ledger_that_gets_full_under_tune_ends_the_sweep_with_that_reason(
    study: Path, small_disk: SmallDisk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive = Record.add_result

    def arriving(record: Record, result: RungResult) -> None:
        small_disk.fill()  # between the worker's row and the driver's
        arrive(record, result)

    with monkeypatch.context() as patched:
        patched.setattr(Record, "add_result", arriving)
        done = muscale(capsys, "sweep", study)
    assert done.code == 2, done.err
    assert f"error: {study.parent / LEDGER}: " in done.err
    small_disk.empty()
    assert muscale(capsys, "sweep", study).code == 0


def test_a_report_that_does_not_fit_leaves_the_one_before(
    study: Path, small_disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    report = study.parent / REPORT
    assert muscale(capsys, "report", study).code == 0
    before = report.read_bytes()
    small_disk.fill(leave=1_000_000)
    done = muscale(capsys, "report", study)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {report}: no space left on device; check the disk {GO_ON}\n"
    assert report.read_bytes() == before
    assert leftovers(study.parent) == []
    small_disk.empty()
    assert muscale(capsys, "report", study).code == 0


def test_a_table_that_does_not_fit_leaves_the_one_before(small_disk: SmallDisk) -> None:
    for path in (small_disk.folder / "runs.csv", small_disk.folder / "runs.parquet"):
        save(pd.DataFrame({"loss": [1.0]}), path)
        before = path.read_bytes()
        small_disk.fill(leave=100_000)
        with pytest.raises(OSError, match="No space left") as full:
            save(pd.DataFrame({"loss": torch.rand(100_000).numpy()}), path)
        assert full.value.filename == str(path)
        assert path.read_bytes() == before
        small_disk.empty()
    assert leftovers(small_disk.folder) == []


def test_tensors_that_do_not_fit_leave_no_folder_and_name_their_file(small_disk: SmallDisk) -> None:
    small_disk.fill(leave=100_000)
    with (
        pytest.raises(OSError, match="No space left") as full,
        atomic_directory(small_disk.folder / "bundle") as folder,
    ):
        tensors = {"a": torch.zeros(100_000)}
        write_tensors(folder / "weights.safetensors", tensors, tensors.items())
    assert full.value.errno == errno.ENOSPC
    assert full.value.filename == str(folder / "weights.safetensors")
    assert not folder.exists()
    assert not (small_disk.folder / "bundle").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_into_a_file_on_a_full_disk_is_no_fault_of_muscale_s(
    make_study: Callable[..., Path], unbuffered: str
) -> None:
    command = [sys.executable, "-m", "muscale", "sweep", str(make_study()), "--dry-run"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 2
    prefix = "" if unbuffered else "the output: "  # else it is a print that fails, whose error has no name
    assert done.stderr == f"error: {prefix}no space left on device; check the disk {GO_ON}\n"


def muscale_run(study: Path, log: Path) -> int:
    """`muscale run` in a process of its own; its exit code."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "muscale", "run", str(study), "--force"]
    with log.open("w") as file:
        return subprocess.run(command, stdout=file, stderr=file, env=environment, check=False, timeout=900).returncode


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.timeout(7200)
def test_every_stage_on_a_disk_that_is_too_small_continues_once_it_is_larger(
    study: Path, small_disk: SmallDisk, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Each time there is a little more room, so that another stage is the one to run out of it."""
    roomy = tmp_path / "roomy" / "study.toml"
    write_text(roomy.parent / "text")
    roomy.write_text(MICRO)
    ended_well = (0, 1)  # 1: outside its forecast
    assert muscale_run(roomy, tmp_path / "log") in ended_well, (tmp_path / "log").read_text()
    small_disk.resize("400m")
    code, before = 2, rows(study.parent / LEDGER)
    with Tally("disk full under `muscale run`").kept_by(record_property) as tally:
        while code not in ended_well:
            small_disk.fill(leave=300_000 * (tally.injected + 1))
            code = muscale_run(study, log := tmp_path / f"log-{tally.injected}")
            small_disk.empty()
            # The next save of as many tokens replaces a checkpoint whose rank Ray ended in its middle.
            assert all(left.parent.name == CHECKPOINTS for left in leftovers(study.parent))
            assert_kept(before, before := rows(study.parent / LEDGER))
            if code not in ended_well:
                tally.injected += 1
                assert code == 2, log.read_text()
                assert GO_ON in log.read_text().splitlines()[-1]
                tally.survived += 1
    assert leftovers(study.parent) == []
    opened, undisturbed = (Study.open(path, quiet=True) for path in (study, roomy))
    with closing(opened.ledger), closing(undisturbed.ledger):
        pd.testing.assert_frame_equal(opened.sweep().trials[COLUMNS], undisturbed.sweep().trials[COLUMNS])
        assert opened.ledger.retrained() == []
    assert losses(study.parent / LEDGER) == losses(roomy.parent / LEDGER)
