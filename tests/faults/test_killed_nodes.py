"""On a cluster of three nodes one dies, or the process that writes the ledger: the sweep continues by itself.

`tests/muscale/test_cluster.py` has the bounded version of a node, `test_ledger_actor.py` that of the ledger's writer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from muscale import Study
from muscale.layout import LEDGER
from tests.faults.drivers import COLUMNS, COUNTED, SECONDS, SETTINGS, Undisturbed, arrived, lost, times
from tests.faults.lean import Tally, assert_kept, rows
from tests.muscale.ray_nodes import RayNodes

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(7200)]
MakeStudy = Callable[..., Path]
ON_NODES = ["storage.ledger=actor", "resources.workers=3"]
TIMES = times(10)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    started = RayNodes(COUNTED)
    yield started
    started.close()


def submit(nodes: RayNodes, job: str, study: Path) -> None:
    options = [part for setting in (*SETTINGS, *ON_NODES) for part in ("--set", setting)]
    command = ["python", "-m", "muscale", "sweep", str(study), *options]
    done = nodes.job("submit", "--no-wait", "--submission-id", job, "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr


def robbed(
    nodes: RayNodes, make_study: MakeStudy, undisturbed: Undisturbed, tally: Tally, kill: Callable[[], None]
) -> None:
    """Kill something at a random moment of so many sweeps, each of which must end well without being asked."""
    chance = random.Random(0)
    for number in range(TIMES):
        study, job = make_study(f"robbed-{number}"), f"{tally.kind.replace(' ', '-')}-{number}"
        ledger = study.parent / LEDGER
        submit(nodes, job, study)
        nodes.reaches(job, lambda study=study: arrived(study) > 0, "the first rung")  # type: ignore[misc]
        time.sleep(chance.uniform(0, 5))
        before = rows(ledger)
        kill()
        tally.injected += 1
        ended = nodes.ends(job, SECONDS)
        assert ended["status"] == "SUCCEEDED", ended["message"]
        assert_kept(before, rows(ledger))
        found = Study.open(study, [*SETTINGS, *ON_NODES], quiet=True)
        assert found.ledger.retrained() == []
        pd.testing.assert_frame_equal(found.sweep().trials[COLUMNS], undisturbed.trials[COLUMNS])
        tally.survived += 1
        tally.lost += lost(study, undisturbed)


def test_a_node_of_three_killed_at_ten_random_moments(
    nodes: RayNodes, make_study: MakeStudy, undisturbed: Undisturbed, record_property: Any
) -> None:
    there = [nodes.add_node(), nodes.add_node()]

    def kill() -> None:
        nodes.kill(there.pop(0))
        there.append(nodes.add_node())

    with Tally("node of three killed", whole=undisturbed.tokens).kept_by(record_property) as tally:
        robbed(nodes, make_study, undisturbed, tally, kill)
    for node in there:
        nodes.kill(node)


def test_the_ledger_s_writer_killed_at_ten_random_moments(
    nodes: RayNodes, make_study: MakeStudy, undisturbed: Undisturbed, record_property: Any
) -> None:
    there = [nodes.add_node(), nodes.add_node()]

    def kill() -> None:
        writers = [one for one in psutil.Process().children(recursive=True) if "LedgerActor" in " ".join(one.cmdline())]
        assert writers
        for writer in writers:
            writer.kill()

    with Tally("ledger writer killed", whole=undisturbed.tokens).kept_by(record_property) as tally:
        robbed(nodes, make_study, undisturbed, tally, kill)
    for node in there:
        nodes.kill(node)
