"""The runs of a stage as work for Ray Tune, without Ray: attempts, interruptions, and the reports of a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muscale import Study
from muscale.actors.jobs import Job, RunSteps, StageRuns, StemRuns
from muscale.actors.trial_retries import MOST_FAILED, MOST_LOST
from muscale.actors.work import LOSS, Next
from muscale.proxies import transfer
from muscale.store.evaluations import Evaluated
from muscale.store.lineage import Chain
from muscale.store.outcome import Outcome
from muscale.store.statements import find


class Shows:
    """Counts the runs that are shown as done."""

    def __init__(self) -> None:
        self.ended = 0

    def show(self, _note: str) -> None: ...

    def done(self, _job: Job, _loss: float | None) -> None:
        self.ended += 1


@pytest.fixture
def study(make_study: Callable[[], Path]) -> Study:
    return Study.open(make_study(), quiet=True)


@pytest.fixture
def jobs(study: Study) -> list[Job]:
    """Three stems of two runs each, the shorter one first."""
    numerics = study.config.shared_numerics(study.corpus, study.directory)
    return transfer.jobs(transfer.members(study.config, numerics, study.config.hyperparameters))[:6]


@pytest.fixture
def work(study: Study, jobs: list[Job]) -> StageRuns:
    progress: Any = Shows()
    return StageRuns("transfer", {job.chain.key: job for job in jobs}, study.ledger, progress)


def take(work: StageRuns) -> StemRuns:
    stem = work.next()
    assert stem is not None
    return stem


def end_run(work: StageRuns, stem: StemRuns, key: str) -> Next:
    """Report a run that has ended."""
    return work.note(stem, {"run": key, "segment": key, "diverged": False, LOSS: 2.0})


@pytest.mark.parametrize(("fault", "most"), [("lost", MOST_LOST), ("failed", MOST_FAILED)])
def test_a_run_is_tried_so_often_and_the_other_stems_are_still_handed_out(
    work: StageRuns, fault: str, most: int
) -> None:
    first = take(work)
    for _ in range(most - 1):
        getattr(work, fault)(first, "no reason")
        again = take(work)
        assert again.keys == first.keys
        first = again
    assert not work.failure
    getattr(work, fault)(first, "no reason")
    assert "no reason" in work.failure
    others = [take(work), take(work)]
    assert work.next() is None
    assert not {key for other in others for key in other.keys} & set(first.keys)


def test_a_run_that_ended_is_recorded_and_the_attempts_of_the_next_begin_anew(work: StageRuns, study: Study) -> None:
    stem = take(work)
    for _ in range(MOST_LOST - 1):
        work.lost(stem, "no reason")
        stem = take(work)
    assert end_run(work, stem, stem.keys[0]) is Next.CONTINUE
    assert [row["key"] for row in study.ledger.read(find, "runs")] == [stem.keys[0]]
    for _ in range(MOST_LOST - 1):
        work.lost(stem, "no reason")
        stem = take(work)
    assert len(stem.keys) == 1, "what has ended is not trained again"
    assert end_run(work, stem, stem.keys[0]) is Next.END
    assert not work.failure


def test_an_interrupted_stage_ends_at_the_next_report_and_begins_nothing(work: StageRuns, study: Study) -> None:
    evaluated, waiting = take(work), take(work)
    work.interrupted = True
    assert work.note(evaluated, {"run": evaluated.keys[0], "segment": None, "diverged": False, LOSS: 2.0}) is Next.END
    assert study.ledger.read(find, "runs") == [], "its run has not ended"
    assert work.withdraws(waiting)
    assert work.is_idle
    assert work.next() is None


def test_a_fault_of_the_set_up_begins_nothing_more(work: StageRuns) -> None:
    work.refuse(take(work), "no corpus")
    assert work.refusal == "no corpus"
    assert work.next() is None
    assert work.is_idle


class PlantedWorker:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def evaluate(self, point: Evaluated) -> Outcome:
        self.asked.append(("evaluate", point.chain.key))
        return self._at(point.chain)

    def reach(self, chain: Chain, *, goes_on: bool = False) -> Outcome:
        self.asked.append(("reach on" if goes_on else "reach", chain.key))
        return self._at(chain)

    def _at(self, chain: Chain) -> Outcome:
        return Outcome(
            key=chain.key, tokens=chain.last.end, loss=2.0, averaged_loss=None, diverged_because=None, seconds=1.0
        )


def test_a_stage_can_end_before_and_after_each_evaluation(jobs: list[Job]) -> None:
    job = jobs[0]
    half = job.chain.until(job.hyperparameters.whole_batches(job.chain.last.end / 2))
    job = replace(job, evaluated=tuple(Evaluated(chain=chain, measures=()) for chain in (half, job.chain)))
    worker = PlantedWorker()
    steps = RunSteps({job.chain.key: job})({"runs": [job.chain.key]}, worker)
    seen = [(report["segment"], len(worker.asked)) for report in steps]
    assert worker.asked == [
        ("reach on", half.key),
        ("evaluate", half.key),
        ("reach on", job.chain.key),
        ("evaluate", job.chain.key),
        ("reach", job.chain.key),
    ]
    assert seen == [(None, 1), (None, 2), (None, 3), (None, 4), (job.chain.key, 5)]
