"""A user's own Tuner is killed at random moments: run again, it takes what the ledger knows and trains the rest."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from muscale.layout import LEDGER
from tests.faults.drivers import Driver, recorded, times, trained_tokens
from tests.faults.lean import Rows, assert_kept, rows

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(3600)]
SCRIPT = """
import sys

from ray import tune
from ray.tune.schedulers import ASHAScheduler

import muscale.tune
from muscale import Study

study = Study.open(sys.argv[1], ["sweep.n_tokens=131072", "sweep.rungs=4"], quiet=True)
tuner = tune.Tuner(
    muscale.tune.trainable(study),
    param_space={"learning_rate": tune.grid_search([0.004, 0.008, 0.016, 0.03])},
    tune_config=tune.TuneConfig(
        metric="loss", mode="min", reuse_actors=True, max_concurrent_trials=2, scheduler=ASHAScheduler(max_t=4)
    ),
    run_config=tune.RunConfig(storage_path=sys.argv[1] + ".tune", verbose=0),
)
grid = tuner.fit()
assert not grid.errors
"""
IN_FLIGHT, LONGEST = 2, 131072  # trials, and the tokens of one


def has_trained_more(driver: Driver, ledger: Path, before: Rows) -> bool:
    return driver.process.poll() == 0 or len(rows(ledger).get("segments", ())) > len(before.get("segments", ()))


def test_a_killed_tuner_run_again_trains_no_segment_twice(make_study: Callable[..., Path], tmp_path: Path) -> None:
    study, program, chance = make_study(), tmp_path / "tuner.py", random.Random(0)
    program.write_text(SCRIPT)
    ledger, kills = study.parent / LEDGER, 0
    for _ in range(times(3)):
        before = rows(ledger)
        driver = Driver(study, program=program)
        driver.reaches(partial(has_trained_more, driver, ledger, before), "a segment")
        time.sleep(chance.uniform(0, 2))
        kills += driver.process.poll() is None
        driver.end(signal.SIGKILL)
        assert_kept(before, rows(ledger))
    before = rows(ledger)
    driver = Driver(study, program=program)
    assert driver.ends() == 0, driver.log.read_text()
    assert_kept(before, rows(ledger))
    assert kills
    lost = trained_tokens(study) - recorded(ledger)
    assert 0 <= lost <= kills * IN_FLIGHT * LONGEST
    driver = Driver(study, program=program)
    assert driver.ends() == 0, driver.log.read_text()
    # Known results come at once, in another order, and so Tune's ASHA may let another trial go on.
    assert trained_tokens(study) - recorded(ledger) == lost, "nothing known was trained"
