"""A comparison of variants whose driver is killed on the way: the same command ends with the table of an undisturbed one."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from muscale import Study
from muscale.layout import LEDGER
from tests.faults import drivers
from tests.faults.lean import assert_kept, rows

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(3600)]

SETTINGS = [
    *("sweep.trials=2", "sweep.n_tokens=16384", "transfer.rates=5"),
    "compare.stems=[{width=16, n_tokens=8192}, {width=32, n_tokens=16384}, {width=48, n_tokens=16384}]",
    *("variants.same={}", "variants.damaged={hyperparameters={init_scale=8.0}}"),
]


def driver(study: Path) -> drivers.Driver:
    return drivers.Driver(study, *SETTINGS, command="compare")


def compared(study: Path) -> int:
    """Runs of the comparison on record."""
    return sum("compare" in run for run in rows(study.parent / LEDGER).get("runs", set()))


def has(study: Path, least: int) -> bool:
    return compared(study) >= least


def test_a_killed_comparison_ends_with_the_same_table(make_study: Callable[..., Path]) -> None:
    undisturbed, killed = make_study("undisturbed"), make_study("killed")
    assert driver(undisturbed).ends() == 0
    for least in (7, 14):  # the study's own rates are known at once; then the damaged variant's, then the sizes
        stopped = driver(killed)
        stopped.reaches(partial(has, killed, least), f"{least} runs")
        stopped.end(signal.SIGKILL)
        before = rows(killed.parent / LEDGER)
        assert compared(killed) < compared(undisturbed)
    last = driver(killed)
    assert last.ends() == 0, last.log.read_text()
    assert_kept(before, rows(killed.parent / LEDGER))
    settings = [*drivers.SETTINGS, *SETTINGS]
    tables = [Study.open(path, settings, quiet=True).compare().to_dict() for path in (undisturbed, killed)]
    assert tables[0] == tables[1]
