"""A comparison of variants whose driver is killed on the way: the same command ends with the table of an undisturbed one."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from muscale import Study
from muscale.layout import LEDGER
from tests.faults.drivers import Driver
from tests.faults.lean import assert_kept, rows

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(3600)]

SETTINGS = [
    *("sweep.trials=2", "sweep.n_tokens=16384", "transfer.rates=5"),
    "compare.stems=[{width=16, n_tokens=8192}, {width=32, n_tokens=16384}, {width=48, n_tokens=16384}]",
    *("variants.same={}", "variants.damaged={hyperparameters={init_scale=8.0}}"),
]


def _compared(study: Path) -> int:
    """Runs of the comparison on record."""
    return sum("compare" in run for run in rows(study.parent / LEDGER).get("runs", set()))


def _has(study: Path, least: int) -> bool:
    return _compared(study) >= least


def test_a_killed_comparison_ends_with_the_same_table(make_study: Callable[..., Path]) -> None:
    undisturbed, killed = make_study("undisturbed"), make_study("killed")
    assert Driver(undisturbed, *SETTINGS, command="compare").ends() == 0
    for least in (1, 9):  # among the rates, and among the sizes
        driver = Driver(killed, *SETTINGS, command="compare")
        driver.reaches(partial(_has, killed, least), f"{least} runs")
        driver.end(signal.SIGKILL)
        before = rows(killed.parent / LEDGER)
        assert _compared(killed) < _compared(undisturbed)
        assert_kept(before, rows(killed.parent / LEDGER))
    last = Driver(killed, *SETTINGS, command="compare")
    assert last.ends() == 0, last.log.read_text()
    assert_kept(before, rows(killed.parent / LEDGER))
    tables = [Study.open(path, SETTINGS, quiet=True).compare().to_dict() for path in (undisturbed, killed)]
    assert tables[0] == tables[1]
