"""Two processes that promote one plan at once train it once, whether the first ends, is killed, or hangs and wakes up."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from muscale import json_lines
from muscale.full_runs.records.goodput import ATTEMPTS
from muscale.layout import BUNDLES, METRICS, RESULT
from muscale.store.ledger_tables import ResultKind
from muscale.store.spike_handling import read_incidents
from tests.faults.drivers import Driver
from tests.muscale.planted_ladder import PlantedPlan

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(900)]
PROGRAM = Path(__file__).with_name("promotes.py")
MakeStudy = Callable[..., Path]


def planted(path: Path) -> PlantedPlan:
    text = path.read_text().replace("compute_flops = 2.5e10", "compute_flops = 4e9")
    text = re.sub(r"stems = \[.*?\n\]", "stems = [{ width = 16, n_tokens = 16384 }]", text, flags=re.DOTALL)
    path.write_text(text.replace("checkpoint_every_tokens = 20480", "checkpoint_every_tokens = 5120"))
    return PlantedPlan(path)


def steps(plan: PlantedPlan) -> list[int]:
    return [row["tokens"] for row in json_lines.read(plan.directory / METRICS)]


def check_trained_once(plan: PlantedPlan, *, attempts: int) -> None:
    batch = plan.plan.hyperparameters.batch_tokens
    assert steps(plan) == list(range(batch, plan.plan.n_tokens + 1, batch))
    records = json_lines.read(plan.directory / ATTEMPTS)
    assert [record["event"] for record in records if record["event"] != "back"].count("start") == attempts
    assert len(read_incidents(plan.directory)) == attempts - 1
    assert plan.ledger.result(ResultKind.PROMOTION, plan.plan.key) is not None


def test_two_promotions_at_once_train_one_run(make_study: MakeStudy) -> None:
    plan = planted(make_study())
    drivers = [Driver(plan.study, program=PROGRAM) for _ in range(2)]
    assert [driver.ends() for driver in drivers] == [0, 0], drivers[1].log.read_text()
    check_trained_once(plan, attempts=1)
    assert (plan.study.parent / BUNDLES / plan.plan.key).exists()


def test_a_promotion_that_hung_writes_nothing_once_another_continues(make_study: MakeStudy) -> None:
    plan = planted(make_study())
    first = Driver(plan.study, program=PROGRAM)
    first.reaches(lambda: any(plan.directory.glob("checkpoints/tokens=*/manifest.json")), "a checkpoint")
    hung = [psutil.Process(first.process.pid), *first.family()]
    try:
        for process in hung:
            process.suspend()
        second = Driver(plan.study, program=PROGRAM)
        second.reaches(lambda: len(json_lines.read(plan.directory / ATTEMPTS)) > 1, "the second attempt")
        for process in hung:
            process.resume()
        assert second.ends() == 0, second.log.read_text()
        assert first.process.wait(60) != 0, first.log.read_text()
    finally:
        first.end(signal.SIGKILL)
    check_trained_once(plan, attempts=2)
    assert (plan.directory / RESULT).exists()
