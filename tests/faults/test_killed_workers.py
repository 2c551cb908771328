"""A worker is killed at random moments, and inside the save of a state: what it had recorded stays, and the rest is trained once."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from muscale.layout import LEDGER, STATES
from proxy_models.training import state
from tests.faults.lean import PROGRESS, Tally, assert_kept, begin, finish, losses, rows, started, train


@pytest.fixture(scope="module")
def undisturbed(trained: Path) -> tuple[dict[str, float], float]:
    """Losses of a study that nobody disturbed, and the seconds that its trainings took."""
    with closing(sqlite3.connect(trained / LEDGER)) as ledger:
        (seconds,) = ledger.execute("SELECT sum(seconds) FROM segments").fetchone()
    return losses(trained / LEDGER), seconds


def under_way(directory: Path, seen: int) -> int:
    """Tokens of the running training, from its progress lines after the first `seen`."""
    progress = (directory / PROGRESS).read_text().split()[seen:] if (directory / PROGRESS).exists() else []
    if not progress:
        return 0
    with closing(sqlite3.connect(directory / LEDGER)) as ledger:
        ended = {tokens for (tokens,) in ledger.execute("SELECT tokens FROM segments")}
    return 0 if int(progress[-1]) in ended else int(progress[-1])


def kills(folder: Path, undisturbed: tuple[dict[str, float], float], times: int) -> Tally:
    """Kill a worker so many times, on as many studies as that takes, and let each study end."""
    expected, seconds = undisturbed
    chance, tally, study = random.Random(0), Tally("worker killed"), 0
    while tally.injected < times:
        directory, study = begin(folder / str(study)), study + 1
        for _ in range(3):
            before = rows(directory / LEDGER)
            worker = started(directory)
            worker.join(chance.uniform(0.05, 0.7) * seconds)
            if worker.exitcode is None:
                assert worker.pid
                os.kill(worker.pid, signal.SIGKILL)
                worker.join()
                tally.injected += 1
                tally.lost += under_way(directory, 0)
            assert_kept(before, rows(directory / LEDGER))
        before = rows(directory / LEDGER)
        finish(directory)
        assert_kept(before, after := rows(directory / LEDGER))
        assert losses(directory / LEDGER) == expected, "and no other loss than undisturbed"
        assert after["retrained"] == set(), "no finished segment was trained again"
        tally.survived = tally.injected
    return tally


def test_a_worker_killed_at_a_random_moment_costs_what_it_had_under_way(
    tmp_path: Path, undisturbed: tuple[dict[str, float], float]
) -> None:
    assert kills(tmp_path, undisturbed, 3).survived >= 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_worker_killed_at_twenty_random_moments(
    tmp_path: Path,
    undisturbed: tuple[dict[str, float], float],
    record_property: Callable[[str, object], None],
) -> None:
    tally = kills(tmp_path, undisturbed, 20)
    tally.report(record_property)
    assert tally.survived >= 20


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_saving(directory: Path, moment: str, count: int) -> None:
    """Train, and be killed at the `count`-th state: in the middle of its bytes, before it has its name, or before its row."""
    saved = 0
    write, save = state._ErrorKeepingWriter.write, state.TrainState.save

    def torn(file: Any, content: Any) -> int:
        if saved == count and (half := bytes(content)[: len(bytes(content)) // 2]):
            write(file, half)
            file.flush()
            die()
        return write(file, content)

    def counted(of: state.TrainState, path: Path) -> None:
        nonlocal saved
        saved += 1
        save(of, path)
        if saved == count and moment == "before its row":
            die()

    state.TrainState.save = counted  # type: ignore[method-assign,assignment]
    if moment == "in its bytes":
        state._ErrorKeepingWriter.write = torn  # type: ignore[method-assign,assignment]
    if moment == "before its name":
        replace = Path.replace

        def named(path: Path, target: Any) -> Any:
            if saved == count and str(target).endswith(".pt"):
                die()
            return replace(path, target)

        Path.replace = named  # type: ignore[method-assign,assignment]
    train(directory)


@pytest.mark.parametrize("moment", ["in its bytes", "before its name", "before its row"])
def test_a_kill_inside_the_save_of_a_state_leaves_whole_states_only(
    tmp_path: Path, undisturbed: tuple[dict[str, float], float], moment: str
) -> None:
    directory = begin(tmp_path / "study")
    worker = started(directory, dies_saving, moment, 3)
    worker.join(120)
    assert worker.exitcode == -signal.SIGKILL
    before = rows(directory / LEDGER)
    assert 2 <= len(before["segments"]) < len(undisturbed[0])
    for path in (directory / STATES).glob("*.pt"):
        state.TrainState.load(path)
    finish(directory)
    assert_kept(before, rows(directory / LEDGER))
    assert losses(directory / LEDGER) == undisturbed[0]
