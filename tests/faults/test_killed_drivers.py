"""A driver is killed, terminated with little grace, doubled, or loses its Ray or its database: the same command continues.

`tests/muscale/test_study.py` has the bounded version: a driver killed in three stages and interrupted in one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from muscale.layout import LEDGER
from tests.faults.drivers import Driver, Undisturbed, arrived, check, killed_at_random, times
from tests.faults.lean import Tally, assert_kept, rows

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(7200)]
MakeStudy = Callable[..., Path]
Record = Callable[[str, object], None]


def test_a_driver_killed_at_twenty_random_moments(
    make_study: MakeStudy, undisturbed: Undisturbed, record_property: Record
) -> None:
    with Tally("driver SIGKILLed", whole=undisturbed.tokens).kept_by(record_property) as tally:
        killed_at_random(make_study, undisturbed, tally, times(20), lambda driver: driver.end(signal.SIGKILL))


def test_a_driver_terminated_and_killed_after_a_second(
    make_study: MakeStudy, undisturbed: Undisturbed, record_property: Record
) -> None:
    with Tally("SIGTERM with a grace of 1 s", whole=undisturbed.tokens).kept_by(record_property) as tally:
        killed_at_random(make_study, undisturbed, tally, times(5), lambda driver: driver.end(signal.SIGTERM, grace=1.0))


def test_a_driver_whose_ray_dies_ends_and_a_rerun_continues(
    make_study: MakeStudy, undisturbed: Undisturbed, record_property: Record
) -> None:
    def kill_the_head(driver: Driver) -> None:
        family = driver.family()
        for head in driver.heads():
            head.kill()
        try:
            driver.process.wait(180)
        except Exception:
            driver.end(signal.SIGKILL)
            raise
        finally:
            _, alive = psutil.wait_procs(family, timeout=10)
            for process in alive:
                process.kill()

    with Tally("head killed", whole=undisturbed.tokens).kept_by(record_property) as tally:
        killed_at_random(
            make_study, undisturbed, tally, times(3), kill_the_head, lambda driver: len(driver.heads()) > 0
        )


def test_the_same_command_twice_at_once_is_one_study(
    make_study: MakeStudy, undisturbed: Undisturbed, record_property: Record
) -> None:
    study = make_study()
    first = Driver(study)
    first.reaches(lambda: (study.parent / "corpus" / "manifest.json").exists(), "the corpus")
    second = Driver(study)
    assert [first.ends(), second.ends()] == [0, 0], second.log.read_text()
    in_vain = check(study, undisturbed, rows(study.parent / LEDGER))
    assert in_vain == 0, "neither trains what the other does"
    Tally("two drivers on one study", 1, 1, in_vain, undisturbed.tokens).report(record_property)


def test_of_two_drivers_the_second_continues_where_the_first_was_killed(
    make_study: MakeStudy, undisturbed: Undisturbed, record_property: Record
) -> None:
    study = make_study()
    first = Driver(study)
    first.reaches(lambda: arrived(study) > 0, "a rung")
    second = Driver(study)
    time.sleep(5)
    before = rows(study.parent / LEDGER)
    first.end(signal.SIGKILL)
    assert second.ends() == 0, second.log.read_text()
    assert_kept(before, rows(study.parent / LEDGER))
    in_vain = check(study, undisturbed, rows(study.parent / LEDGER))
    Tally("one of two drivers killed", 1, 1, in_vain, undisturbed.tokens).report(record_property)


def test_a_database_restarted_in_the_middle_of_a_sweep(
    make_study: MakeStudy,
    undisturbed: Undisturbed,
    postgres_server: Any,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
) -> None:
    monkeypatch.setenv("MUSCALE_LEDGER_URL", postgres_server.url)
    study = make_study()
    driver = Driver(study, "storage.ledger=postgresql")
    driver.reaches(lambda: "at rung 0" in driver.log.read_text(), "a rung")
    for _ in range(3):
        postgres_server.stop()
        time.sleep(3)
        postgres_server.start()
        time.sleep(5)
    assert driver.ends() == 0, driver.log.read_text()
    in_vain = check(study, undisturbed, {}, "storage.ledger=postgresql")
    Tally("database server restarted", 3, 3, in_vain, undisturbed.tokens).report(record_property)
