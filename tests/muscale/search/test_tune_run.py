"""EngineSearcher run by a real Ray Tune: what befalls a worker or its training costs as little as it can."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import tune

from muscale.actors.stalls import ended_where_stalled
from muscale.errors import PackageMismatchError, StageError
from muscale.layout import STALLS
from muscale.search.engine import Engine
from muscale.search.jobs import TrialSegment, job_from_json
from muscale.search.record import Record
from muscale.search.schedulers import GoOn, Start
from muscale.search.tune_adapter import LEG, METRIC
from muscale.search.tune_run import run_engine
from muscale.settings.sweep import SweepSettings
from muscale.settings.tables import ResourceSettings
from search_spaces import LogUniform, Space

MakeEngine = Callable[..., Engine]
SPACE = Space({"learning_rate": LogUniform(low=1e-3, high=1e-1)})
ONE = ResourceSettings(workers=1)
RUNGS, TRIALS = 2, 4
SETTINGS = SweepSettings(trials=TRIALS, n_tokens=2000, rungs=RUNGS, space=SPACE, searcher="random", scheduler="none")

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Planted(tune.Trainable):
    """A leg whose losses are its numbers, until something befalls a trial where a test wants it."""

    def setup(self, config: dict[str, Any], *, befalls: str, folder: Path) -> None:  # type: ignore[override]
        self._befalls, self._folder = befalls, folder
        if befalls == "unborn":
            raise PackageMismatchError("this process runs muscale 1, the driver runs 2")
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._begin(new_config)
        if self._befalls == "dies when reset" and self._once():
            os._exit(1)
        return True

    def step(self) -> dict[str, Any]:
        leg, rung = self._leg, self._rung
        if leg.trial == 1 and rung == 1:
            if self._befalls == "raises":
                raise OSError("the tape is torn")
            if self._befalls == "is full":
                raise OSError(errno.ENOSPC, "No space left on device", "states/it.pt")
            if self._befalls == "asks for too much memory":
                torch.empty(2**60, dtype=torch.uint8)
            if self._befalls == "hangs":
                with ended_where_stalled(self._folder / STALLS / "it.txt", 1.0, "segment 1-1"):
                    time.sleep(3600)
        if self._befalls == "waits":
            self._wait_for("*.pid", 2)
            time.sleep(0.5 if leg.trial == 0 else 0.0)
        if self._befalls == "all others die at rest":
            self._wait_for("*.pid", TRIALS)
            if leg.trial == 0:
                self._wait_for("*.ended", TRIALS - 1)
            else:
                threading.Timer(0.3, self._end, [leg.trial]).start()
        if leg.trial == 1 and rung == 1 and self._befalls == "refuses":
            raise PackageMismatchError("this process runs muscale 1, the driver runs 2")
        self._rung += 1
        told = {"trial": leg.trial, "rung": rung, "segment": f"{leg.trial}-{rung}", "tokens": 1000, "seconds": 1.0}
        return {METRIC: float(leg.trial), "diverged": False, "done": rung == leg.until, **told}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing."""

    def _begin(self, config: dict[str, Any]) -> None:
        (self._folder / f"{os.getpid()}.pid").touch()
        leg = job_from_json(config[LEG])
        assert isinstance(leg, TrialSegment)
        self._leg, self._rung = leg, leg.first

    def _wait_for(self, files: str, count: int) -> None:
        while len(list(self._folder.glob(files))) < count:
            time.sleep(0.05)

    def _end(self, trial: int) -> None:
        (self._folder / f"{trial}.ended").touch()
        os._exit(1)

    def _once(self) -> bool:
        """Whether it has not happened yet, in any process."""
        try:
            (self._folder / "happened").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@pytest.fixture
def fly(make_engine: MakeEngine, tmp_path: Path) -> Callable[[str], Engine]:
    def flown(befalls: str) -> Engine:
        engine = make_engine(SETTINGS)
        run_engine(engine, Planted, {"befalls": befalls, "folder": tmp_path}, ONE, tmp_path)
        return engine

    return flown


def test_a_worker_that_dies_between_two_trials_costs_neither(fly: Callable[[str], Engine], tmp_path: Path) -> None:
    engine = fly("dies when reset")
    assert (tmp_path / "happened").exists()
    assert set(engine.record.arrivals) == {(trial, rung) for trial in range(TRIALS) for rung in range(RUNGS)}


@pytest.mark.parametrize(
    ("befalls", "reason"),
    [
        ("raises", r"OSError: the tape is torn"),
        (
            "asks for too much memory",
            r"RuntimeError: .* can't allocate memory: you tried to allocate 1152921504606846976 .*",
        ),
        ("hangs", r"its worker was lost 3 times: .*; it was ended as it took no step, .*/stalls/it\.txt tells where"),
    ],
)
def test_a_trial_that_fails_holds_up_no_other(
    fly: Callable[[str], Engine], make_engine: MakeEngine, befalls: str, reason: str
) -> None:
    with pytest.raises(StageError, match=rf"^sweep: 1 trial failed; trial 1: {reason}$"):
        fly(befalls)
    record = make_engine(SETTINGS).record
    assert set(record.open) == {1}
    assert len(record.arrivals) == TRIALS * RUNGS - 1


OTHER = r"this process runs muscale 1, the driver runs 2"
FULL = r"states/it\.pt: no space left on device; see to the disk and run the same command again to go on"


@pytest.mark.parametrize(
    ("befalls", "begun", "why"), [("unborn", 1, OTHER), ("refuses", 2, OTHER), ("is full", 2, FULL)]
)
def test_workers_that_cannot_train_end_the_sweep_at_once(
    fly: Callable[[str], Engine], make_engine: MakeEngine, befalls: str, begun: int, why: str
) -> None:
    with pytest.raises(StageError, match=f"^sweep: .*{why}$"):
        fly(befalls)
    assert len(make_engine(SETTINGS).record.configs) == begun


def test_workers_that_wait_for_the_last_leg_of_a_generation_stay(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Tune ends all idle workers but one, and asks for new ones that it then ends while they start."""
    settings = SweepSettings(
        trials=2, n_tokens=4000, rungs=4, space=SPACE, searcher="random", scheduler="pbt", rank_by="stable"
    )
    engine = make_engine(settings)
    run_engine(engine, Planted, {"befalls": "waits", "folder": tmp_path}, ResourceSettings(workers=2), tmp_path)
    assert len(engine.record.arrivals) == 2 * 4
    assert len(list(tmp_path.glob("*.pid"))) == 2


class FirstGoesOn:
    """All trials to the first rung, then the first alone."""

    def next(self, record: Record, *, may_start: bool) -> Start | GoOn | None:
        """A new trial, or once all have arrived the first one's next rung."""
        if len(record.configs) < TRIALS:
            return Start(until=0)
        return GoOn(trial=0, until=1) if len(record.arrivals) == TRIALS and not record.open else None


def test_a_leg_is_not_lost_to_one_dead_worker_after_the_other(make_engine: MakeEngine, tmp_path: Path) -> None:
    """As where a node is lost on which workers were at rest: a leg that three of them lose is given up."""
    engine = make_engine(SETTINGS)
    engine._rule = FirstGoesOn()
    resources = ResourceSettings(workers=TRIALS, cpus_per_worker=0.25)
    run_engine(engine, Planted, {"befalls": "all others die at rest", "folder": tmp_path}, resources, tmp_path)
    assert set(engine.record.arrivals) == {(0, 1)} | {(trial, 0) for trial in range(TRIALS)}
