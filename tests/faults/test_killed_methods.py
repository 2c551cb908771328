"""A sweep's driver is killed twice, under schedulers and searchers of our own and of Ray Tune: it ends as if undisturbed.

One worker at a time, so that an undisturbed sweep has one order of results; `test_killed_drivers.py` has two workers.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from muscale import Study
from muscale.layout import LEDGER, REPORT
from tests.faults.drivers import SETTINGS, Driver, Undisturbed, killed_at_random, recorded, times, trained_tokens
from tests.faults.lean import Tally

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(3600)]
MakeStudy = Callable[..., Path]
METHODS = [
    ("asha", "random"),
    ("pbt", "random"),
    ("tune:ASHAScheduler", "random"),
    ("tune:PB2", "random"),
    ("tune:HyperBandScheduler", "random"),
    ("asha", "tune:OptunaSearch"),
]


def write_study(make_study: MakeStudy, scheduler: str, searcher: str, name: str) -> Path:
    path = make_study(name)
    text = path.read_text().replace('scheduler = "none"', f'scheduler = "{scheduler}"')
    text = text.replace('searcher = "random"', f'searcher = "{searcher}"')
    text = text.replace("workers = 2", "workers = 1")
    assert text.count(scheduler) == text.count(searcher) == text.count("workers = 1") == 1
    path.write_text(text)
    return path


def table_of(study: Path) -> pd.DataFrame:
    with closing((found := Study.open(study, SETTINGS, quiet=True)).ledger):
        return found.sweep().trials


@pytest.mark.parametrize(("scheduler", "searcher"), METHODS)
def test_a_sweep_killed_twice_ends_as_an_undisturbed_one(
    scheduler: str,
    searcher: str,
    make_study: MakeStudy,
    record_property: Callable[[str, object], None],
) -> None:
    make = partial(write_study, make_study, scheduler, searcher)
    whole = make("undisturbed")
    driver = Driver(whole)
    assert driver.ends() == 0, driver.log.read_text()
    undisturbed = Undisturbed(table_of(whole), trained_tokens(whole))
    assert undisturbed.tokens == recorded(whole.parent / LEDGER)

    with Tally(f"{scheduler} with {searcher}", whole=undisturbed.tokens).kept_by(record_property) as tally:
        killed_at_random(make, undisturbed, tally, times(2), lambda driver: driver.end(signal.SIGKILL))

    killed = whole.parent.parent / "killed-0" / whole.name
    assert recorded(killed.parent / LEDGER) == undisturbed.tokens, "no budget is exceeded, and nothing is trained twice"
    driver = Driver(killed, command="report")
    assert driver.ends() == 0, driver.log.read_text()
    assert scheduler in (killed.parent / REPORT).read_text()
