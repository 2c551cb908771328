"""The runs of a stage as Ray Tune trials: one failure policy, Ctrl-C, and results in the ledger that asked for them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muscale import Study
from muscale.actors import trainable
from muscale.actors.jobs import Job, finish_stage
from muscale.actors.trainable import Training
from muscale.actors.trial_retries import MOST_FAILED, MOST_LOST
from muscale.errors import StageError
from muscale.progress import Display
from muscale.proxies import transfer
from muscale.store.evaluations import Evaluated
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain
from muscale.store.outcome import Outcome

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

FAULTS, TRAINED = "faults.json", "trained"


class PlantedWorker:
    """Writes down what it is asked for; has the fault that a file names for a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._faults: dict[str, Any] = json.loads((folder / FAULTS).read_text())

    def evaluate(self, point: Evaluated) -> None:
        (self._folder / TRAINED / f"{point.chain.key} evaluated").touch(exist_ok=False)

    def reach(self, chain: Chain, *, goes_on: bool = False) -> Outcome:
        attempts = self._folder / TRAINED / chain.key
        with attempts.open("a") as file:
            file.write(".")
        n_before = attempts.stat().st_size - 1
        match self._faults.get(chain.key):
            case "raises":
                raise RuntimeError("the tape is torn")
            case "dies":
                os._exit(1)
            case "dies once" if not n_before:
                os._exit(1)
            case "refuses":
                raise StageError("no corpus")
            case int(driver):
                os.kill(driver, signal.SIGINT)
        return Outcome(
            key=chain.key, tokens=chain.last.end, loss=2.0, averaged_loss=None, diverged_because=None, seconds=1.0
        )


class PlantedTraining(Training):
    """A Tune trial's process with a planted worker."""

    def setup(self, config: dict[str, Any], *, steps: Any, ledger: Ledger, resources: Any, package: str) -> None:  # type: ignore[override]
        self._begin, self._n_ranks = steps, resources.ranks_per_trial
        self._worker: Any = PlantedWorker(ledger.directory)
        self.reset_config(config)


@pytest.fixture
def study(make_study: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> Study:
    """A study whose trainings are planted."""
    study = Study.open(make_study(), ["resources.workers=1", "resources.cpus_per_worker=0.5"], quiet=True)
    assert study.corpus.n_tokens
    (study.directory / TRAINED).mkdir()
    monkeypatch.setattr(trainable, "Training", PlantedTraining)
    return study


def grid(study: Study) -> list[Job]:
    """Three stems of two runs each, the shorter one first."""
    numerics = study.config.shared_numerics(study.corpus, study.directory)
    return transfer.jobs(transfer.members(study.config, numerics, study.config.hyperparameters))[:6]


def finish(study: Study, jobs: list[Job], faults: dict[str, Any]) -> None:
    (study.directory / FAULTS).write_text(json.dumps(faults))
    finish_stage("transfer", jobs, study.ledger, study.config.resources, Display(quiet=True))


def attempts(study: Study, jobs: list[Job]) -> list[int]:
    """How often each run was asked for."""
    paths = [study.directory / TRAINED / job.chain.key for job in jobs]
    return [path.stat().st_size if path.exists() else 0 for path in paths]


@pytest.mark.soak
@pytest.mark.parametrize(("fault", "most"), [("raises", MOST_FAILED), ("dies", MOST_LOST)])
def test_a_run_that_fails_each_time_ends_the_stage_once_the_others_are_trained(
    study: Study, fault: str, most: int
) -> None:
    jobs = grid(study)
    with pytest.raises(StageError, match="^transfer: "):
        finish(study, jobs, {jobs[2].chain.key: fault})
    assert attempts(study, jobs) == [1, 1, most, 0, 1, 1], "its longer run would begin at its end"


def test_a_process_that_dies_is_replaced_and_its_stem_continues(study: Study) -> None:
    jobs = grid(study)
    finish(study, jobs, {jobs[3].chain.key: "dies once"})
    assert attempts(study, jobs) == [1, 1, 1, 2, 1, 1]


def test_a_fault_of_the_set_up_ends_the_stage_at_once(study: Study) -> None:
    jobs = grid(study)
    with pytest.raises(StageError, match="^transfer: no corpus$"):
        finish(study, jobs, {job.chain.key: "refuses" for job in jobs})
    assert sum(attempts(study, jobs)) == 1


def test_ctrl_c_lets_the_run_under_way_finish(study: Study) -> None:
    jobs = grid(study)
    with pytest.raises(KeyboardInterrupt):
        finish(study, jobs, {job.chain.key: os.getpid() for job in jobs})
    assert sum(attempts(study, jobs)) == 1


@pytest.mark.soak
def test_ctrl_c_begins_no_further_evaluation_and_a_resumed_stage_takes_it(study: Study) -> None:
    job, *_ = grid(study)
    half = job.chain.until(job.hyperparameters.whole_batches(job.chain.last.end / 2))
    job = replace(job, evaluated=tuple(Evaluated(chain=chain, measures=()) for chain in (half, job.chain)))
    evaluations = [study.directory / TRAINED / f"{chain.key} evaluated" for chain in (half, job.chain)]
    with pytest.raises(KeyboardInterrupt):
        finish(study, [job], {half.key: os.getpid()})
    assert [path.exists() for path in evaluations] == [False, False]
    with pytest.raises(KeyboardInterrupt):
        finish(study, [job], {job.chain.key: os.getpid()})
    assert [path.exists() for path in evaluations] == [True, False]
    assert study.runs().empty
    evaluations[0].unlink()
    finish(study, [job], {})
    assert [path.exists() for path in evaluations] == [True, True]


@pytest.mark.soak
def test_results_are_entered_in_the_ledger_of_their_study(make_study: Callable[[str], Path]) -> None:
    for name in ("one", "another"):
        study = Study.open(make_study(name), quiet=True)
        job, *_ = grid(study)
        assert study.ledger.outcome(job.chain) is None
        finish_stage("transfer", [job], study.ledger, study.config.resources, Display(quiet=True))
        assert study.ledger.outcome(job.chain) is not None
        assert len(study.runs()) == 1
