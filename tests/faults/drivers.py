"""`python -m muscale …` on a micro-study as a process group of its own, ended in every way, and what that cost."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import psutil

from muscale import Study
from muscale.layout import LEDGER
from tests.faults.counted.sitecustomize import COUNTS
from tests.faults.lean import Rows, Tally, assert_kept, rows

SETTINGS = ["sweep.trials=4", "sweep.n_tokens=262144", "sweep.n_seeds=0", "sweep.top_k=2", "sweep.rungs=2"]
COLUMNS = ["trial", "status", "learning_rate", "init_scale", "annealed_loss"]
SECONDS = 600.0
COUNTED = Path(__file__).parent / "counted"


@dataclass(frozen=True)
class Undisturbed:
    """What comes of a sweep that nothing befalls, and the tokens that were trained for it."""

    trials: pd.DataFrame
    tokens: int


class Driver:
    """A sweep of a study, or a Python program that is given it, in a process group of its own."""

    def __init__(self, study: Path, *settings: str, command: str = "sweep", program: Path | None = None) -> None:
        self.study = study
        self.log = study.parent / f"driver-{time.monotonic_ns()}.log"
        chosen = [part for setting in (*SETTINGS, *settings) for part in ("--set", setting)]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        paths = [str(COUNTED), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *([str(program), str(study)] if program else ["-m", "muscale", command, str(study), *chosen]),
                ],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def family(self) -> list[psutil.Process]:
        try:
            return list(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def heads(self) -> list[psutil.Process]:
        """Of the Ray that it started, while it runs."""
        found = []
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                found += [process] if process.name() == "gcs_server" else []
        return found

    def reaches(self, happened: Callable[[], bool], what: str) -> None:
        """Wait for something to happen while it runs."""
        deadline = time.monotonic() + SECONDS
        while not happened():
            assert not self.process.poll(), f"it failed before {what}:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"waited {SECONDS:.0f} s for {what}:\n{self.log.read_text()}"
            time.sleep(0.05)

    def end(self, how: signal.Signals, grace: float = 60.0) -> int:
        """Send it a signal, kill it after the grace, and end by id what Ray left behind; its exit code."""
        family = self.family()
        self.process.send_signal(how)
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, alive = psutil.wait_procs(family, timeout=5)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=10)
        return self.process.returncode

    def ends(self) -> int:
        """Wait for its end; its exit code."""
        try:
            return self.process.wait(SECONDS)
        finally:
            self.end(signal.SIGKILL)


def arrived(study: Path) -> int:
    """How many results at rungs are on record."""
    known = rows(study.parent / LEDGER)
    return len(known.get("rungs", ()))


def _has_arrived(driver: Driver, wanted: int, is_there: Callable[[Driver], bool]) -> bool:
    begun = (driver.study.parent / LEDGER).exists() and arrived(driver.study) >= wanted
    return (begun and is_there(driver)) or driver.process.poll() == 0


def times(full: int) -> int:
    """How often a fault is injected: the full count, or fewer where MUSCALE_FAULTS says so."""
    return min(full, int(os.environ.get("MUSCALE_FAULTS", full)))


def trained_tokens(study: Path) -> int:
    """Tokens that were trained for a study, in all its processes, whether or not anything came of them."""
    return sum(int.from_bytes(file.read_bytes()[:8]) for file in (study.parent / COUNTS).iterdir())


def finished_again(study: Path) -> int:
    """How often a segment was trained to its end although it had been before.

    That is allowed where its process was killed in the moments between the last step and the record.
    """
    ends = [file.name.split("-")[0] for file in (study.parent / COUNTS).iterdir() if _is_finished(file.read_bytes())]
    return len(ends) - len({*ends})


def _is_finished(count: bytes) -> bool:
    return count[:8] == count[8:]


def recorded(ledger: Path) -> int:
    """Tokens that the ledger's segments were trained over."""
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
        (tokens,) = connection.execute("SELECT sum(tokens - trained_from) FROM segments").fetchone()
    return int(tokens)


def killed_at_random(
    make_study: Callable[..., Path],
    undisturbed: Undisturbed,
    tally: Tally,
    times: int,
    end: Callable[[Driver], object],
    is_there: Callable[[Driver], bool] = lambda driver: True,
) -> None:
    """End drivers at random moments, three on each study, then let the study end, and compare it with an undisturbed one.

    `is_there` tells whether there is what `end` takes away.
    """
    chance, number = random.Random(0), 0
    while tally.injected < times:
        study, number = make_study(f"killed-{number}"), number + 1
        ledger = study.parent / LEDGER
        for _ in range(min(3, times - tally.injected)):
            before = rows(ledger)
            driver, wanted = Driver(study), arrived(study) + chance.choice((0, 0, 1))
            driver.reaches(partial(_has_arrived, driver, wanted, is_there), "a rung")
            time.sleep(chance.uniform(0, 5))
            if driver.process.poll() is not None or not is_there(driver):  # nothing was left to do
                assert driver.ends() == 0, driver.log.read_text()
                break
            end(driver)
            tally.injected += 1
            assert_kept(before, rows(ledger))
        tally.lost += check(study, undisturbed, rows(ledger))
        tally.survived = tally.injected


def check(study: Path, undisturbed: Undisturbed, before: Rows, *settings: str) -> int:
    """The same command again: it ends, changes no row, trains nothing twice, keeps to its budget, and has the same table.

    Returns the tokens that were trained in vain.
    """
    driver = Driver(study, *settings)
    assert driver.ends() == 0, driver.log.read_text()
    found = Study.open(study, [*SETTINGS, *settings], quiet=True)
    with closing(found.ledger):
        if before:
            assert_kept(before, rows(study.parent / LEDGER))
        assert found.ledger.retrained() == []
        table = found.sweep().trials
    assert len(table) == 4
    pd.testing.assert_frame_equal(table[COLUMNS], undisturbed.trials[COLUMNS])
    return lost(study, undisturbed)


def lost(study: Path, undisturbed: Undisturbed) -> int:
    """Tokens that were trained for a study which has ended, beyond what it takes."""
    tokens = trained_tokens(study) - undisturbed.tokens
    assert tokens >= 0, "no less than an undisturbed one"
    assert finished_again(study) <= 1, "finished segments were trained again"
    return tokens
