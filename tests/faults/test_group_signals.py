"""Stages that get SIGTERM as `timeout` and Slurm send it: to the driver and then to its process group."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from muscale import Study
from muscale.layout import LEDGER
from tests.faults.drivers import SETTINGS, Driver, recorded, trained_tokens
from tests.faults.lean import assert_kept, rows

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(1800)]

SMALL = ["sweep.trials=2", "sweep.n_tokens=16384", "transfer.rates=5"]
COMPARED = ["compare.stems=[{width=16, n_tokens=8192}, {width=32, n_tokens=16384}]", "variants.same={}"]


def trained(study: Path, stage: str) -> int:
    """Runs of a stage on record."""
    return sum(stage in run for run in rows(study.parent / LEDGER).get("runs", set()))


def has_trained(study: Path, stage: str, least: int) -> bool:
    return trained(study, stage) >= least


@pytest.mark.parametrize(
    ("stage", "settings", "known"),  # a rate grid shares runs with the sweep, a comparison's with the transfer check
    [("transfer", SMALL, 2), ("ladder", SMALL, 0), ("compare", [*SMALL, *COMPARED], 6)],
)
def test_sigterm_to_the_group_lets_the_running_trainings_finish(
    make_study: Callable[..., Path], stage: str, settings: list[str], known: int
) -> None:
    study = make_study()
    driver = Driver(study, *settings, command=stage)
    driver.reaches(partial(has_trained, study, stage, known + 1), f"runs of {stage}")
    driver.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    os.killpg(driver.process.pid, signal.SIGTERM)
    assert driver.ends() == 130, driver.log.read_text()
    before, n_before = rows(study.parent / LEDGER), trained(study, stage)
    assert trained_tokens(study) == recorded(study.parent / LEDGER), "what was under way is on record"
    again = Driver(study, *settings, command=stage)
    assert again.ends() in (0, 1), again.log.read_text()  # 1: the transfer check does not pass
    assert_kept(before, rows(study.parent / LEDGER))
    assert trained(study, stage) > n_before
    assert Study.open(study, [*SETTINGS, *settings], quiet=True).ledger.retrained() == []
