"""Jobs run by a real Ray Tune on planted workers: a fault of a worker or its training costs as little as it can."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from ray.tune import Callback
from ray.tune.experiment import Trial

from muscale.actors.cluster import Cluster
from muscale.actors.stalls import ended_where_stalled
from muscale.actors.trainable import Training
from muscale.actors.tune_run import run_with_tune
from muscale.errors import PackageMismatchError, StageError
from muscale.layout import STALLS
from muscale.search.engine import Engine
from muscale.search.protocols import Advance, Start
from muscale.search.record import Record
from muscale.search.sweep_jobs import ConfigHistory
from muscale.search.sweep_steps import SweepSteps
from muscale.search.trial import TrialPlan
from muscale.settings.sweep import SweepSettings
from muscale.settings.tables import ResourceSettings
from muscale.store.ledger import Ledger
from muscale.store.outcome import Outcome
from search_spaces import Ordinal, Space
from tests.quick import quick_and_soak

MakeEngine = Callable[..., Engine]
Run = Callable[..., Engine]
RUNGS, TRIALS = 2, 4
SPACE = Space({"seed": Ordinal(values=tuple(range(TRIALS)))})
MANY = Space({"seed": Ordinal(values=tuple(range(2, 10)))})
ONE = ResourceSettings(workers=1, cpus_per_worker=0.25)
GRID = SweepSettings(trials=TRIALS, n_tokens=2000, rungs=RUNGS, space=SPACE, searcher="grid", scheduler="none")
FAULT = "fault"  # the file that names it

pytestmark = pytest.mark.cluster


class PlantedPlan:
    """Makes a trial's number and the rung of what would be a chain."""

    rung_tokens = (1000, 2000, 4000, 8000)
    top = 3

    def rung(self, path: ConfigHistory, rung: int) -> Any:
        return path[0][1]["seed"], rung


class PlantedWorker:
    """Has trials' numbers for losses, until the fault of a test."""

    def __init__(self, ledger: Ledger) -> None:
        self._folder = ledger.directory
        self._fault = (self._folder / FAULT).read_text()
        if self._fault == "can't start":
            raise PackageMismatchError("this process runs muscale 1, the driver runs 2")
        (self._folder / f"{os.getpid()}.pid").touch()

    def reach(self, chain: Any) -> Outcome:
        trial, rung = chain
        if trial == 1 and rung == 1:
            self._fail()
        if trial == 1 and rung == 0 and self._fault == "dies at its next job" and self._once():
            os._exit(1)
        if self._fault == "first is slow":
            pids = self._wait_for("*.pid", 2)
            time.sleep(0.5 if pids[0].stem == str(os.getpid()) else 0.0)
        if self._fault == "all others die at rest":
            self._wait_for("*.pid", TRIALS)
            if trial == 0:
                self._wait_for("*.ended", TRIALS - 1)
            else:
                threading.Timer(0.3, self._end, [trial]).start()
        tokens = PlantedPlan.rung_tokens[rung]
        loss = float(trial)
        return Outcome(
            key=f"{trial}-{rung}", tokens=tokens, loss=loss, averaged_loss=loss, diverged_because=None, seconds=1.0
        )

    def _fail(self) -> None:
        match self._fault:
            case "raises":
                raise OSError("the tape is torn")
            case "is full":
                raise OSError(errno.ENOSPC, "No space left on device", "states/it.pt")
            case "asks for too much memory":
                import torch  # slow, and each of the processes imports this file

                torch.empty(2**60, dtype=torch.uint8)
            case "hangs":
                with ended_where_stalled(self._folder / STALLS / "it.txt", 1.0, "segment 1-1"):
                    time.sleep(3600)
            case "refuses":
                raise PackageMismatchError("this process runs muscale 1, the driver runs 2")

    def _wait_for(self, files: str, count: int) -> list[Path]:
        while len(found := sorted(self._folder.glob(files))) < count:
            time.sleep(0.05)
        return found

    def _end(self, trial: int) -> None:
        (self._folder / f"{trial}.ended").touch()
        os._exit(1)

    def _once(self) -> bool:
        return once(self._folder)


class PlantedTraining(Training):
    """A Tune trial's process with a planted worker."""

    def setup(  # type: ignore[override]
        self, config: dict[str, Any], *, steps: SweepSteps, ledger: Ledger, resources: ResourceSettings, package: str
    ) -> None:
        self._begin, self._n_ranks = steps, resources.ranks_per_trial
        self._worker: Any = PlantedWorker(ledger)
        super().reset_config(config)


class DiesWhenReset(PlantedTraining):
    """A Tune trial's process that dies as it is given another job, once."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        if once(self._worker._folder):
            os._exit(1)
        return super().reset_config(new_config)


class Trials(Callback):
    """The last status of each Tune trial, and the trials that were ever paused, by id, as a user's callback sees them."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.paused: set[str] = set()

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self.seen |= {trial.trial_id: trial.status for trial in trials}
        self.paused |= {trial.trial_id for trial in trials if trial.status == Trial.PAUSED}


def once(folder: Path) -> bool:
    """Whether it has not happened yet, in any process."""
    try:
        (folder / "happened").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@pytest.fixture
def run(make_engine: MakeEngine, ledger: Ledger, ray_cluster: Cluster) -> Run:

    def run(
        fault: str,
        settings: SweepSettings = GRID,
        workers: int = 1,
        scheduler: Any = None,
        trainable: type[Training] = PlantedTraining,
        callbacks: tuple[Callback, ...] = (),
    ) -> Engine:
        (ledger.directory / FAULT).write_text(fault)
        engine = make_engine(settings)
        engine._scheduler = scheduler or engine._scheduler
        steps = SweepSteps(plan=cast(TrialPlan, PlantedPlan()), rank_by="averaged")
        resources = ONE.model_copy(update={"workers": workers})
        run_with_tune(engine, steps, ledger, resources, callbacks, trainable)
        return engine

    return run


ALL_RESULTS = {(trial, rung) for trial in range(TRIALS) for rung in range(RUNGS)}


def test_a_worker_that_dies_between_two_jobs_costs_neither(run: Run, tmp_path: Path) -> None:
    engine = run("dies at its next job")
    assert (tmp_path / "happened").exists()
    assert set(engine.record.results) == ALL_RESULTS
    assert len(list(tmp_path.glob("*.pid"))) == 2


def test_a_suggestion_is_one_tune_trial_that_pauses_at_rungs_in_fewer_processes_than_trials(
    run: Run, tmp_path: Path
) -> None:
    before, trials = dict(os.environ), Trials()
    settings = SweepSettings(
        trials=8, n_tokens=8000, rungs=4, space=MANY, searcher="grid", scheduler="asha", reduction_factor=2
    )
    engine = run("", settings, workers=2, callbacks=(trials,))
    assert len(engine.record.configs) == 8
    assert len(engine.record.ranking(3)) >= 1
    assert len(trials.seen) == 8
    assert set(trials.seen.values()) == {"TERMINATED"}
    assert trials.paused, "a trial that others overtook at a rung"
    # Two where both workers start at once; Tune starts another for a trial that waits while the second is still starting.
    assert 2 <= len(list(tmp_path.glob("*.pid"))) < 8
    assert dict(os.environ) == before, "a notebook's own Tuner would find these settings"


class Breaks(Callback):
    """Raises at the first result, after what it is given."""

    def __init__(self, first: Callable[[], None]) -> None:
        self.first = first

    def on_trial_result(self, *_: Any, **__: Any) -> None:
        self.first()
        raise RuntimeError("the tape is torn")


@pytest.mark.parametrize(("is_interrupted", "raised"), [(True, KeyboardInterrupt), (False, Exception)])
def test_an_error_after_an_interruption_is_the_interruption(
    make_engine: MakeEngine, ledger: Ledger, ray_cluster: Cluster, is_interrupted: bool, raised: type[BaseException]
) -> None:
    engine = make_engine(GRID)
    (ledger.directory / FAULT).write_text("")
    steps = SweepSteps(plan=cast(TrialPlan, PlantedPlan()), rank_by="averaged")
    breaks = Breaks(lambda: setattr(engine, "interrupted", is_interrupted))
    with pytest.raises(raised):
        run_with_tune(engine, steps, ledger, ONE, (breaks,), PlantedTraining)


@pytest.mark.soak
def test_a_tune_process_that_dies_between_two_jobs_costs_neither(run: Run, tmp_path: Path) -> None:
    engine = run("", trainable=DiesWhenReset)
    assert (tmp_path / "happened").exists()
    assert set(engine.record.results) == ALL_RESULTS


@pytest.mark.parametrize(
    ("fault", "reason"),
    quick_and_soak(
        [
            ("raises", "OSError: the tape is torn"),
            ("asks for too much memory", "1152921504606846976"),
            ("hangs", "its worker was lost 3 times"),
        ],
        ("raises", "OSError: the tape is torn"),
    ),
)
def test_a_trial_that_fails_blocks_no_other(run: Run, make_engine: MakeEngine, fault: str, reason: str) -> None:
    assert not run(fault).failures
    again = make_engine(GRID)
    assert again.is_finished
    assert set(again.record.results) == ALL_RESULTS
    assert list(again.record.failed) == [(1, 1)]
    assert reason in again.record.failed[1, 1]
    assert again.record.status(1, RUNGS - 1) == "failed"


OTHER = r"this process runs muscale 1, the driver runs 2"
FULL = r"states/it\.pt: no space left on device; check the disk and run the same command again to resume"


@pytest.mark.parametrize(
    ("fault", "begun", "why"),
    quick_and_soak([("can't start", 1, OTHER), ("refuses", 2, OTHER), ("is full", 2, FULL)], ("can't start", 1, OTHER)),
)
def test_workers_that_cannot_train_end_the_sweep_at_once(
    run: Run, make_engine: MakeEngine, fault: str, begun: int, why: str
) -> None:
    with pytest.raises(StageError, match=f"^sweep: .*{why}$"):
        run(fault)
    assert len(make_engine(GRID).record.configs) == begun


@pytest.mark.soak
def test_workers_that_wait_for_the_last_job_of_a_generation_stay(run: Run, tmp_path: Path) -> None:
    settings = SweepSettings(
        trials=2, n_tokens=4000, rungs=4, space=SPACE, searcher="random", scheduler="pbt", rank_by="stable"
    )
    engine = run("first is slow", settings, workers=2)
    assert len(engine.record.results) == 2 * 4
    assert len(list(tmp_path.glob("*.pid"))) == 2


class FirstGoesOn:
    """All trials to the first rung, then the first alone."""

    def next(self, record: Record, *, may_start: bool) -> Start | Advance | None:
        """A new trial, or once all have arrived the first one's next rung."""
        if len(record.configs) < TRIALS:
            return Start(until=0)
        return Advance(trial=0, until=1) if len(record.results) == TRIALS and not record.open else None


@pytest.mark.soak
def test_a_job_is_not_lost_to_one_dead_worker_after_the_other(run: Run) -> None:
    """As where a node is lost on which workers were at rest: a job that three of them lose is given up."""
    engine = run("all others die at rest", workers=TRIALS, scheduler=FirstGoesOn())
    assert set(engine.record.results) == {(0, 1)} | {(trial, 0) for trial in range(TRIALS)}
