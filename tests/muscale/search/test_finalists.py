"""Finalists are different configurations, and trials are cancelled from the command line; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from muscale import StageError, Study, StudyFileError
from muscale.cli.entry import run
from muscale.search.record import RungResult
from muscale.search.sweep import Sweep, distinct
from muscale.search.sweep_conclusion import make_result
from muscale.settings.sweep import SweepSettings

MakeStudy = Callable[..., Path]


@pytest.fixture
def planted(make_study: MakeStudy) -> tuple[Path, Study]:
    """A sweep of six trials at rung 0, of which only three differ; the last is still running."""
    path = make_study()
    study = Study.open(path, quiet=True)
    sweep = Sweep.of(study.config, study.ledger, study.corpus)
    record = sweep.record()
    record.begin_round("random", study.config.sweep.space)
    for trial, rate in enumerate((0.01, 0.01, 0.02, 0.01, 0.03, 0.03)):
        record.start({**study.config.sweep.space.draw(0, 0), "learning_rate": rate}, until=0)
        if trial < 5:
            loss = 2 + rate
            record.add_result(RungResult(trial=trial, rung=0, loss=loss, segment="s", tokens=1, seconds=1.0))
    return path, study


def test_finalists_and_annealed_branches_are_different_configurations(planted: tuple[Path, Study]) -> None:
    _, study = planted
    sweep = Sweep.of(study.config, study.ledger, study.corpus)
    record = sweep.record()
    annealed = pd.DataFrame([(t, 0, 10, 2 + record.configs[t]["learning_rate"]) for t in range(5)])  # type: ignore[operator]
    annealed.columns = pd.Index(["trial", "rung", "n_tokens", "loss"])
    assert sweep.finalists(record, annealed) == [(0, 0), (2, 0), (4, 0)]
    assert distinct(record, [(1, 0), (0, 0), (4, 0)]) == [(1, 0), (4, 0)]
    assert [job.trial for job, _ in sweep.branches(record)][:3] == [0, 2, 4]


def test_trials_are_cancelled_from_the_command_line(planted: tuple[Path, Study]) -> None:
    path, study = planted
    assert run(["sweep", str(path), "--cancel", "5"]) == 0
    record = Sweep.of(study.config, study.ledger, study.corpus).record()
    assert list(record.cancelled) == [5]
    assert run(["sweep", str(path), "--cancel", "17"]) == 2
    assert run(["sweep", str(path), "--cancel", "0", "--dry-run"]) == 2
    assert list(Sweep.of(study.config, study.ledger, study.corpus).record().cancelled) == [5]


def test_one_that_is_over_is_not_cancelled(planted: tuple[Path, Study]) -> None:
    _, study = planted
    record = Sweep.of(study.config, study.ledger, study.corpus).record()
    record.fail(5, "ValueError")
    with pytest.raises(StageError):
        study.cancel_trial(5)


def test_without_a_loss_at_the_end_failures_are_told_from_divergences(planted: tuple[Path, Study]) -> None:
    _, study = planted
    sweep = Sweep.of(study.config, study.ledger, study.corpus)
    record = sweep.record()
    record.fail(5, "KeyError: no shard 7")
    record.fail_run(sweep.branches(record)[0][0], "KeyError: no shard 8")
    record.go_on(4, 1)
    record.add_result(RungResult(trial=4, rung=1, loss=None, segment="s", tokens=1, seconds=1.0))
    annealed = pd.DataFrame(columns=["trial", "rung", "n_tokens", "loss"])
    repeated = pd.DataFrame(columns=["trial", "seed", "loss"])
    with pytest.raises(StageError, match=r"1 of 6 trials diverged, 2 trainings failed.*no shard 7"):
        make_result(study.config, sweep.plan, record, annealed, repeated)


def test_a_negative_seed_is_refused(make_study: MakeStudy) -> None:
    with pytest.raises(StudyFileError):
        Study.open(make_study(), ["sweep.seed=-1"], quiet=True)
    assert SweepSettings(trials=1, n_tokens=1, seed=0).seed == 0
