"""Checkpoints evaluated as tasks of Ray on resources that training can't take: each newest checkpoint once, also after failures."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muscale import StageError, json_lines
from muscale.full_runs.checkpoints.evaluate import evaluate_checkpoint
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.async_evaluation import _Evaluator, _Reservation, async_evaluation_of
from muscale.full_runs.train.attempt import train
from muscale.layout import EVALUATIONS
from muscale.settings.promote import PromoteSettings
from muscale.settings.tables import ResourceSettings
from proxy_models.data.corpus import Corpus
from proxy_models.evaluation.held_out_loss import HeldOutLoss
from proxy_models.evaluation.samples import Samples
from tests.muscale.forked_ranks import BATCH, small_run

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
SMALL = ResourceSettings(cpus_per_worker=0.25)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muscale.full_runs.promote.async_evaluation._LOOK_SECONDS", 0.1)


@pytest.fixture
def run(corpus: Corpus, tmp_path: Path) -> FullRun:
    """A run with checkpoints at 12, 16 and 18 steps, itself evaluated until 16, that has not ended."""
    run = small_run(corpus, tmp_path / "run")
    train(run)
    go_on(run, 18)
    return run


def longer(run: FullRun) -> FullRun:
    return replace(run, segments=(replace(run.segments[-1], end=BATCH * 1000),))


def settings(**values: Any) -> PromoteSettings:
    return PromoteSettings(**{"evaluation": "async", "workers_min": 1, **values})


def recorded(run: FullRun) -> list[dict[str, Any]]:
    return json_lines.read(run.directory / EVALUATIONS)


def until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


def go_on(run: FullRun, steps: int) -> Path:
    """A newer checkpoint, with the weights of the one after 16 steps."""
    checkpoints = run.directory / CHECKPOINTS
    shutil.copytree(checkpoints / f"tokens={BATCH * 16}", checkpoints / "copy")
    return (checkpoints / "copy").rename(checkpoints / f"tokens={BATCH * steps}")


def free() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]


def all_cpus() -> float:
    import ray

    return float(ray.cluster_resources()["CPU"])  # type: ignore[no-untyped-call]


@contextmanager
def all_free() -> Iterator[None]:
    """Before and after, nothing is taken."""
    until(lambda: free() == all_cpus(), "a cluster at rest")
    yield
    until(lambda: free() == all_cpus(), "what was reserved to be free again")


def test_each_newest_checkpoint_is_evaluated_once_on_what_was_reserved(run: FullRun) -> None:
    given, measures = settings(evaluator_cpus=0.5), (HeldOutLoss(), Samples(prompts=("abcd",), n_tokens=8))
    with all_free(), async_evaluation_of(longer(run), given, SMALL, measures):
        assert all_cpus() - free() == pytest.approx(0.5)
        until(lambda: len(recorded(run)) == 1, "the newest one's evaluation")
    (row,) = recorded(run)
    alone = evaluate_checkpoint(run.directory, measures).to_dict()
    assert row.pop("seconds") > 0
    assert row == {name: value for name, value in alone.items() if name != "seconds"}
    assert row["tokens"] == BATCH * 18

    with async_evaluation_of(longer(run), given, SMALL, measures):
        time.sleep(0.8)
        assert len(recorded(run)) == 1, "a resumed run evaluates nothing twice"
        go_on(run, 20)
        until(lambda: len(recorded(run)) == 2, "a newer one's evaluation")
        go_on(run, 1000)  # its end, which is the run's own to evaluate
        time.sleep(0.8)
    assert [row["tokens"] // BATCH for row in recorded(run)] == [18, 20]
    assert recorded(run)[1]["val_loss"] == row["val_loss"]


def test_a_failure_is_reported_once_and_a_pruned_checkpoint_is_none(
    run: FullRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    reservation = _Reservation(settings(evaluator_cpus=0.5))
    pruned: list[int] = []

    def submit(path: Path) -> Any:
        """Remove the newest checkpoint for a newer one just before its evaluation."""
        if path.name == f"tokens={BATCH * 28}":
            go_on(run, 32)
            Checkpoints(run.directory / CHECKPOINTS, keep_last=1)._drop(BATCH * 32)
            pruned.append(28)
        return reservation.submit(path)

    def torn(steps: int) -> None:
        path = go_on(run, steps)
        shard = next(path.glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1])

    evaluator = _Evaluator(run.directory, BATCH * 1000, submit)
    try:
        until(lambda: len(recorded(run)) == 1, "the evaluation after 18 steps")
        torn(20)
        until(lambda: bool(caplog.records), "a failure to be reported")
        torn(24)
        time.sleep(0.8)
        go_on(run, 28)
        until(lambda: len(recorded(run)) == 2, "the evaluation after 32 steps")
        evaluator.end(patience=60)
    finally:
        evaluator.end(patience=0)
        reservation.give_back()
    assert [row["tokens"] // BATCH for row in recorded(run)] == [18, 32]
    assert pruned == [28]
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{run.directory}/checkpoints/tokens={BATCH * 20}" in line
    assert "StageError" in line


def test_an_interruption_ends_running_evaluations_at_once(run: FullRun) -> None:
    samples = Samples(prompts=("abcd",) * 100_000)  # it would write for an hour
    began = time.monotonic()
    with (
        all_free(),
        pytest.raises(KeyboardInterrupt),
        async_evaluation_of(longer(run), settings(), SMALL, [samples]),
    ):
        began = time.monotonic()
        time.sleep(2)  # it writes by now
        raise KeyboardInterrupt
    assert time.monotonic() - began < 30
    assert recorded(run) == []


def test_a_cluster_without_room_is_reported_before_training(run: FullRun) -> None:
    all_of_them = int(all_cpus())
    whole = ResourceSettings()
    with all_free():
        for given, resources, evaluators, named in (
            (settings(evaluator_cpus=1000), SMALL, 1, "1000 CPU.*promote.evaluator_cpus"),
            (settings(evaluator_gpus=100), SMALL, 1, "1 CPU and 100 GPU.*promote.evaluator_gpus"),
            (settings(), SMALL, all_of_them + 1, f"{all_of_them + 1} × 1 CPU.*{all_of_them}.*scores.workers"),
            (
                settings(workers=all_of_them, workers_min=None),
                whole,
                1,
                f"1 CPU.*{all_of_them - 1} of {all_of_them} workers with 1 CPUs.*promote.workers",
            ),
        ):
            with (
                pytest.raises(StageError, match=named),
                async_evaluation_of(longer(run), given, resources, evaluators=evaluators),
            ):
                pytest.fail("training would begin")
        with async_evaluation_of(longer(run), settings(workers=all_of_them), whole) as fitting:
            assert fitting(settings(workers=all_of_them)).workers == all_of_them - 1, "elastic workers leave it alone"
            assert fitting(settings(workers=1)).workers == 1


def test_within_reserves_nothing(run: FullRun) -> None:
    with all_free(), async_evaluation_of(longer(run), PromoteSettings(), SMALL) as fitting:
        assert free() == all_cpus()
        assert fitting(PromoteSettings()) == PromoteSettings()
