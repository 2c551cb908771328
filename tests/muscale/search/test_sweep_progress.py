"""What informs a searcher is looked at when a sweep begins, and later only where it was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from muscale import StageError, StudyDirectoryError
from muscale.search.record import RungResult
from muscale.search.sweep import Sweep
from muscale.search.sweep_progress import SweepProgress, describe_sources

RESULTS = "learning_rate,init_scale,loss\n0.01,1.0,2.5\n"


def naming(sweep: Sweep, *files: str) -> Sweep:
    """The sweep of a study file that names these."""
    settings = sweep.config.sweep.model_copy(update={"learn_from": files})
    return replace(sweep, config=sweep.config.model_copy(update={"sweep": settings}))


def begin(sweep: Sweep) -> None:
    sweep.record().begin_round("random", sweep.config.sweep.space)


def test_a_sweep_that_begins_reads_every_source(swept: Sweep, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"gone\.csv"):
        list(describe_sources(naming(swept, "gone.csv")))
    (tmp_path / "notes").write_text("no ledger")
    with pytest.raises(StudyDirectoryError, match="notes"):
        list(describe_sources(naming(swept, str(tmp_path / "notes"))))


def test_a_source_of_prior_runs_may_be_gone_once_the_sweep_has_begun(swept: Sweep) -> None:
    sweep = naming(swept, "results.csv")
    results = swept.ledger.directory / "results.csv"
    results.write_text(RESULTS)
    assert [line[:9] for line in describe_sources(sweep)] == ["1 results"]
    begin(sweep)
    assert [line[:9] for line in describe_sources(sweep)] == ["1 results"], (
        "results that are still there may have grown"
    )
    results.unlink()
    assert list(describe_sources(sweep)) == []


def test_what_is_named_with_the_command_is_always_looked_at(swept: Sweep, tmp_path: Path) -> None:
    begin(swept)
    (tmp_path / "notes").write_text("no ledger")
    with pytest.raises(StudyDirectoryError, match="notes"):
        list(describe_sources(replace(swept, learn_from=(str(tmp_path / "notes"),))))
    with pytest.raises(StageError, match=r"gone\.csv"):
        list(describe_sources(replace(swept, learn_from=(str(tmp_path / "gone.csv"),))))


@pytest.mark.parametrize(("scheduler", "shown"), [("pbt", 12), ("asha", 4)])
def test_every_generation_of_a_population_moves_the_bar(swept: Sweep, scheduler: str, shown: int) -> None:
    values = {"scheduler": scheduler, "trials": 4, "rungs": 3}
    settings = swept.config.sweep.model_copy(update=values)
    sweep = replace(swept, config=swept.config.model_copy(update={"sweep": settings}))
    updates: list[tuple[float, float]] = []
    progress = SweepProgress(sweep, lambda done, total, note: updates.append((done, total)))
    for rung in range(3):
        for trial in range(4):
            progress.on_result(RungResult(trial=trial, rung=rung, loss=2.0, segment="s", tokens=1, seconds=1.0))
    assert {total for _, total in updates} == {shown}
    assert len({done for done, _ in updates}) == shown


def test_the_end_of_the_annealed_runs_is_shown_once_and_that_of_the_repetitions_too(swept: Sweep) -> None:
    shown: list[tuple[float, float, str]] = []
    progress = SweepProgress(swept, lambda done, total, note: shown.append((done, total, note)))
    for done in (0, 2):
        progress.on_run(done, 2, "annealed")
    for done in (0, 3):
        progress.on_run(2, 2, "annealed")
        progress.on_run(done, 3, "finalists repeated")
    assert shown == [(0, 2, "annealed"), (2, 2, "annealed"), (0, 3, "finalists repeated"), (3, 3, "finalists repeated")]
