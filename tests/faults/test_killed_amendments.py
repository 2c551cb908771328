"""`muscale amend` is killed in every phase and run again: the same child, control and losses as without a kill."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muscale import json_lines
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.layout import CONTROL, FULL_RUNS, METRICS, REPLAY, STUDY_FILE
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from tests.faults.amends import STOPPED
from tests.faults.drivers import Driver
from tests.muscale.full_runs.amend.conftest import BATCH, promoted

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(1800)]
PROGRAM = Path(__file__).with_name("amends.py")
STEPS, EVERY = 800, 100  # of the parent, which has a checkpoint at half; from checkpoint to checkpoint of the child
PHASES = {  # by the files that show it, in the study's full_runs
    "replay": f"*/{REPLAY}/{METRICS}",
    "control": f"*/{CONTROL}=*/{METRICS}",
    "child": f"*/{CHECKPOINTS}/tokens=*/manifest.json",
    "started": None,
    "ended": None,
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = promoted(tmp_path_factory.mktemp("study"), STEPS)
    case.ledger.close()
    path = case.directory / STUDY_FILE
    text = path.read_text()
    path.write_text(
        text.replace(f"checkpoint_every_tokens = {STEPS // 2 * BATCH}", f"checkpoint_every_tokens = {EVERY * BATCH}")
    )
    return case.directory


@pytest.fixture(scope="module", params=["1", "2"])
def ranks(request: pytest.FixtureRequest) -> Iterator[str]:
    """Ranks: one in the driver itself, or two of Ray Train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKS", request.param)
        yield request.param


@pytest.fixture(scope="module")
def whole(
    study: Path, ranks: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Result and losses of the amendment that nothing befalls."""
    directory = tmp_path_factory.mktemp(f"whole{ranks}") / "study"
    shutil.copytree(study, directory)
    with pytest.MonkeyPatch.context() as patch:
        return amended(directory, patch)


def start(directory: Path, patch: pytest.MonkeyPatch) -> Driver:
    patch.setenv("AT", str(STEPS // 2 * BATCH))
    patch.setenv("STEPS", str(STEPS // 2))
    return Driver(directory / STUDY_FILE, program=PROGRAM)


def amended(directory: Path, patch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The result as recorded, and the training losses of the run and its control; each step is there once."""
    driver = start(directory, patch)
    assert driver.ends() in (0, 1), driver.log.read_text()
    ledger = Ledger(directory / "ledger.sqlite")
    (row,) = ledger.results(ResultKind.AMENDMENT)
    assert all(one["payload"]["deviation"] <= one["payload"]["tolerance"] for one in ledger.results(ResultKind.REPLAY))
    ledger.close()
    folder, losses = directory / FULL_RUNS / row["key"], {}
    for part in (folder, next(folder.glob(f"{CONTROL}=*"))):
        steps = [one for one in json_lines.read(part / METRICS) if "train_loss" in one]
        assert [one["tokens"] for one in steps] == list(range(BATCH, STEPS // 2 * BATCH + 1, BATCH))
        losses[part.relative_to(folder).name] = [one["train_loss"] for one in steps]
    assert not list((directory / FULL_RUNS).glob(f"*/{REPLAY}"))
    return row["payload"], losses


@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_a_phase_and_run_again_it_is_the_same_child_with_the_same_losses(
    study: Path, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    directory = tmp_path / "study"
    shutil.copytree(study, directory)
    (parent,) = (path for path in (directory / FULL_RUNS).glob(f"*/{CHECKPOINTS}"))
    pattern = PHASES[phase]

    def reached() -> bool:
        if pattern is None:
            return (directory / STOPPED).exists()
        return any(path.stat().st_size for path in (directory / FULL_RUNS).glob(pattern) if parent not in path.parents)

    with monkeypatch.context() as patch:
        patch.setenv("STOP_AT", phase)
        driver = start(directory, patch)
        driver.reaches(reached, phase)
        driver.end(signal.SIGKILL)
    ledger = Ledger(directory / "ledger.sqlite")
    assert not ledger.results(ResultKind.AMENDMENT)
    assert len(ledger.results(ResultKind.AMENDMENT_STARTED)) == (phase != "replay")
    ledger.close()
    found, losses = amended(directory, monkeypatch)
    expected, expected_losses = whole
    assert losses == expected_losses
    for name in ("key", "after", "control", "forecast"):
        assert json.dumps(found[name]) == json.dumps(expected[name])
