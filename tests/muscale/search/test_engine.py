"""The engine against every method: budgets, resumes, and how an interrupted record resumes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from muscale.actors.trial_retries import MOST_FAILED
from muscale.search.budget import SweepBudget
from muscale.search.engine import Engine
from muscale.search.methods import make_scheduler
from muscale.search.protocols import Start
from muscale.search.record import Record, RungResult
from muscale.search.searchers import Draws
from muscale.search.sweep_jobs import AnnealJob, TrialSegment
from muscale.store.ledger import Ledger
from proxy_models.recipes.hyperparameters import Hyperparameters
from tests.muscale.search.conftest import SPACE, loss_at, settings
from tests.quick import quick_and_soak

MakeEngine = Callable[..., Engine]
Drive = Callable[..., list[TrialSegment]]
H = Hyperparameters(learning_rate=0.01, batch_tokens=100)
SCHEDULERS = ["none", "asha", "tune:HyperBandScheduler", "tune:MedianStoppingRule", "pbt", "tune:PB2"]
SEARCHERS = ["random", "quasi_random", "grid", "tpe", "gp", "cma_es", "across_scales"]


def possible(searcher: str, scheduler: str) -> bool:
    h = Hyperparameters(learning_rate=0.01, batch_tokens=100)
    return not list(settings(searcher=searcher, scheduler=scheduler).cross_field_errors(h, (2000, 4000, 6000, 8000)))


PAIRS = [(searcher, scheduler) for searcher in SEARCHERS for scheduler in SCHEDULERS if possible(searcher, scheduler)]


@pytest.mark.parametrize(
    ("searcher", "scheduler"),
    quick_and_soak(PAIRS, *(pair for pair in PAIRS if pair != ("quasi_random", "tune:PB2"))),
)
def test_every_pair_ends_within_its_trials_and_brings_one_to_the_end(
    make_engine: MakeEngine, drive: Drive, searcher: str, scheduler: str
) -> None:
    engine = make_engine(settings(searcher=searcher, scheduler=scheduler))
    drive(engine, loss_at)
    record = engine.record
    assert engine.is_finished
    assert len(record.configs) == 9
    assert all(SPACE.contains(config) for config in record.configs.values())
    assert record.ranking(3), "no trial came to the last rung"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("searcher", ["random", "tpe"])
def test_a_sweep_stopped_anywhere_resumes_to_the_same_result(
    make_engine: MakeEngine, drive: Drive, searcher: str, scheduler: str
) -> None:
    chosen = settings(searcher="random" if scheduler in ("pbt", "tune:PB2") else searcher, scheduler=scheduler)
    whole = make_engine(chosen, "whole")
    drive(whole, loss_at, workers=1)
    for n_segments in (1, 4, 9):
        # the last one is begun and never arrives
        drive(make_engine(chosen, "left"), loss_at, workers=1, n_segments=n_segments)
    left = make_engine(chosen, "left")
    before = dict(left.record.results)
    drive(left, loss_at, workers=1)
    assert left.is_finished
    assert before.items() <= left.record.results.items()
    if searcher == "random":  # a model asked with one loss fewer known suggests something else
        assert left.record.configs == whole.record.configs
        assert left.record.paths == whole.record.paths
        assert left.record.results == whole.record.results


def test_a_record_read_again_is_the_record_that_was_written(make_engine: MakeEngine, drive: Drive) -> None:
    for scheduler in SCHEDULERS:
        engine = make_engine(settings(scheduler=scheduler), scheduler)
        drive(engine, loss_at, workers=3, n_segments=14)
        again = make_engine(settings(scheduler=scheduler), scheduler).record
        for name in ("configs", "paths", "results", "donors", "open", "advanced", "n_advanced", "tokens", "seconds"):
            assert getattr(again, name) == getattr(engine.record, name), f"{scheduler}: {name}"
        assert [again.ranking(rung) for rung in range(4)] == [engine.record.ranking(rung) for rung in range(4)]


def test_more_trials_extend_the_same_sweep(make_engine: MakeEngine, drive: Drive) -> None:
    drive(make_engine(settings(scheduler="asha")), loss_at)
    engine = make_engine(settings(scheduler="asha", trials=12))
    first = dict(engine.record.configs)
    drive(engine, loss_at)
    assert len(engine.record.configs) == 12
    assert first.items() <= engine.record.configs.items()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("limit", [{"max_tokens": 40_000}, {"max_flops": 6.0 * 10 * 40_000}])
def test_no_budget_is_exceeded(make_engine: MakeEngine, drive: Drive, scheduler: str, limit: dict[str, Any]) -> None:
    engine = make_engine(settings(scheduler=scheduler, trials=40, **limit))
    drive(engine, loss_at, workers=3)
    spent = engine.budget.spent(engine.record)
    assert engine.is_finished
    assert 20_000 < spent <= 40_000
    assert engine.record.ranking(3), "what is left when no trial may be begun brings one to the end"


@pytest.mark.parametrize("scheduler", ["none", "asha", "tune:HyperBandScheduler", "tune:MedianStoppingRule"])
def test_branches_and_repetitions_are_within_the_budget(make_engine: MakeEngine, drive: Drive, scheduler: str) -> None:
    for limit in range(12_000, 16_000, 200):
        engine = make_engine(settings(scheduler=scheduler, trials=40, top_k=1, max_tokens=limit + 7000), str(limit))
        engine.budget = replace(engine.budget, n_finalists=2, repeat_tokens=2000, repeated_tokens=3000)
        drive(engine, loss_at, workers=1)
        record, owed = engine.record, 0
        for rung in range(4):
            best = {trial for _, trial in record.ranking(rung)[:1]}
            gone = {trial for trial in record.configs if (trial, rung) in record.advanced}
            owed += len(best | gone) * 1000 * 2**rung // 10
        assert 8_000 < record.tokens + owed <= engine.budget.spent(record) <= limit


def test_the_finalists_reserve_is_limited_by_the_number_of_trials(make_engine: MakeEngine, drive: Drive) -> None:
    engine = make_engine(settings(scheduler="none", trials=40, top_k=1, max_tokens=8000 + 5000))
    engine.budget = replace(engine.budget, n_finalists=5, repeat_tokens=5000, branch_tokens=(0, 0, 0, 0))
    drive(engine, loss_at, workers=1)
    assert len(engine.record.configs) == 1, "one trial, and its repetitions"


def test_hours_stop_the_sweep_too(make_engine: MakeEngine, drive: Drive) -> None:
    engine = make_engine(settings(scheduler="none", trials=40, max_device_hours=0.1))
    drive(engine, loss_at, workers=1)
    record = engine.record
    hours = record.seconds / record.tokens * engine.budget.spent(record) / 3600
    assert 0.05 < hours <= 0.1, "what is owed counts, at the speed of what has arrived"


def drive_failing(engine: Engine, fails: Callable[[TrialSegment], bool], done: set[AnnealJob]) -> Counter[object]:
    """Run one job after the other, of which some segments raise; returns how often each (trial, first rung) was tried."""
    tried = Counter[object]()
    while job := engine.next():
        if isinstance(job, AnnealJob):
            done.add(job)
            engine.finished(job)
            continue
        tried[job.trial, job.first] += 1
        if fails(job):
            engine.failed(job, "ValueError: heads")
            continue
        for rung in range(job.first, job.until + 1):
            loss = loss_at(job, rung)
            tokens = 1000 * 2**rung - (1000 * 2 ** (rung - 1) if rung else 0)
            engine.add_result(
                RungResult(trial=job.trial, rung=rung, loss=loss, segment="s", tokens=tokens, seconds=1.0)
            )
            if loss is None:
                break
        engine.finished(job)
    return tried


@pytest.mark.parametrize("scheduler", quick_and_soak(SCHEDULERS, *SCHEDULERS[:-1]))
@pytest.mark.parametrize("failing", [{0}, {1, 5}, {8}])
def test_a_trial_that_fails_at_every_attempt_is_recorded_and_the_sweep_ends(
    make_engine: MakeEngine, scheduler: str, failing: set[int]
) -> None:
    done: set[AnnealJob] = set()

    def wanted() -> list[AnnealJob]:
        record = engine.record
        best = [trial for loss, trial in record.ranking(3)[:1] if math.isfinite(loss)]
        jobs = [AnnealJob(trial=trial, path=record.paths[trial], rung=3, seed=None) for trial in best]
        return [job for job in jobs if job not in done]

    engine = make_engine(settings(scheduler=scheduler), anneal_jobs=wanted)
    tried = drive_failing(engine, lambda segment: segment.trial in failing, done)
    record = engine.record
    assert engine.is_finished
    assert not engine.failures
    assert len(done) == 1, "the annealed branches come"
    assert {trial for trial, _ in record.failed} == failing
    assert all("ValueError: heads" in reason for reason in record.failed.values())
    assert {tried[at] for at in record.failed} == {MOST_FAILED}
    again = make_engine(settings(scheduler=scheduler), anneal_jobs=wanted)
    assert again.is_finished, "nor is it tried again by a later run"
    assert again.record.failed == record.failed
    if scheduler not in ("pbt", "tune:PB2"):  # whose members continue as copies
        assert {again.record.status(trial, 3) for trial in failing} == {"failed"}


def test_where_all_fail_nothing_is_recorded_and_the_next_run_tries_them_again(make_engine: MakeEngine) -> None:
    engine = make_engine(settings(scheduler="asha"))
    drive_failing(engine, lambda segment: True, set())
    assert len(engine.failures) == 9
    assert not engine.record.failed
    again = make_engine(settings(scheduler="asha"))
    assert not again.is_finished
    drive_failing(again, lambda segment: False, set())
    assert again.is_finished
    assert not again.record.failed


def test_the_only_trial_that_is_left_is_recorded_as_failed_too(make_engine: MakeEngine, drive: Drive) -> None:
    engine = make_engine(settings(scheduler="none", trials=4))
    drive(engine, loss_at, workers=1, n_segments=4)  # the last is begun, and the driver dies
    again = make_engine(settings(scheduler="none", trials=4))
    drive_failing(again, lambda segment: True, set())
    assert again.is_finished
    assert again.record.status(3, 3) == "failed"


def test_an_annealed_run_that_fails_at_every_attempt_is_recorded(make_engine: MakeEngine) -> None:
    wanted = [AnnealJob(trial=0, path=((0, {}),), rung=3, seed=seed) for seed in (1, 2)]
    done: set[AnnealJob] = set()
    chosen = settings(scheduler="none", trials=2)
    engine = make_engine(chosen, anneal_jobs=lambda: [job for job in wanted if job not in done])
    tried = Counter[int | None]()
    while job := engine.next():
        if isinstance(job, TrialSegment):
            for rung in range(4):
                engine.add_result(RungResult(trial=job.trial, rung=rung, loss=2.0, segment="s", tokens=1, seconds=1.0))
            engine.finished(job)
            continue
        tried[job.seed] += 1
        if job.seed == 1:
            engine.failed(job, "ValueError: heads")
        else:
            done.add(job)
            engine.finished(job)
    assert tried == {1: MOST_FAILED, 2: 1}
    again = make_engine(chosen, anneal_jobs=lambda: [job for job in wanted if job not in done])
    assert again.is_finished
    assert list(again.record.failed_runs) == [(0, 3, 1)]


def test_a_lost_worker_costs_an_attempt_and_a_result_gives_them_back(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(settings(scheduler="none", trials=1))

    def started(first: int) -> TrialSegment:
        segment = engine.next()
        assert isinstance(segment, TrialSegment)
        assert (segment.trial, segment.first) == (0, first)
        return segment

    for _ in range(2):
        engine.lost(started(0), "it was shot")
    segment = started(0)
    engine.add_result(RungResult(trial=0, rung=0, loss=2.0, segment="s", tokens=1000, seconds=1.0))
    engine.lost(segment, "it was shot")
    for _ in range(2):
        engine.lost(started(1), "it was shot")
    assert engine.next() is None
    assert engine.record.failed == {(0, 1): "its worker was lost 3 times: it was shot"}
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 5, "every loss but the last, which is the trial's failure"
    assert all(warning.startswith("trial 0: ") and "it was shot" in warning for warning in warnings)


def test_nothing_is_begun_once_no_worker_can_train(make_engine: MakeEngine) -> None:
    engine = make_engine(settings())
    first, second = engine.next(), engine.next()
    assert isinstance(first, TrialSegment)
    assert isinstance(second, TrialSegment)
    engine.refuse(first, "another package")
    engine.refuse(second, "no ledger")
    assert engine.is_stopping
    assert engine.next() is None
    assert engine.refusal == "another package"
    assert not engine.failures


def test_once_it_is_stopping_no_segment_is_started(make_engine: MakeEngine) -> None:
    engine = make_engine(settings())
    assert engine.next() is not None
    engine.interrupted = True
    assert engine.next() is None


def test_anneal_jobs_wait_for_a_failed_segment(ledger: Ledger) -> None:
    chosen = settings(scheduler="none", trials=2)
    record = Record(ledger, "s")
    record.begin_round("random", SPACE)
    unlimited = SweepBudget(
        trials=2,
        rung_tokens=(1, 2, 4, 8),
        branch_tokens=(0, 0, 0, 0),
        top_k=1,
        n_finalists=0,
        repeat_tokens=0,
        n_params=1,
        devices=1,
    )
    wanted = [AnnealJob(trial=0, path=((0, {}),), rung=3, seed=None)]
    engine = Engine(
        record,
        make_scheduler(chosen, SPACE),
        Draws(space=SPACE, seed=0),
        unlimited,
        top=3,
        on_result=lambda result: None,
        anneal_jobs=lambda: wanted,
    )
    whole, failed = engine.next(), engine.next()
    assert isinstance(whole, TrialSegment)
    assert isinstance(failed, TrialSegment)
    for rung in range(4):
        engine.add_result(RungResult(trial=whole.trial, rung=rung, loss=2.0, segment="s", tokens=1, seconds=1.0))
    engine.finished(whole)
    engine.failed(failed, "no space left on device")
    assert engine.next() == failed, "half a search has no finalists yet"
    engine.failed(failed, "no space left on device")
    assert engine.next() == wanted[0]


# One full trial of `settings` costs 8,000 tokens and 1,500 of branches, with 100 for the best of the first rung.
@pytest.mark.parametrize("scheduler", ["asha", "tune:HyperBandScheduler", "tune:MedianStoppingRule"])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("limit", [9_500, 12_000, 15_000, 20_000, 25_000])
def test_a_budget_that_pays_for_one_trial_brings_one_to_the_end(
    make_engine: MakeEngine, drive: Drive, scheduler: str, workers: int, limit: int
) -> None:
    engine = make_engine(settings(scheduler=scheduler, trials=40, max_tokens=limit))
    drive(engine, lambda segment, rung: 3 - 0.3 * rung + segment.trial * 0.01, workers=workers)
    assert engine.is_finished
    assert engine.record.ranking(3)
    spent = engine.budget.spent(engine.record)
    # a new trial; of its second bracket, to rung 1
    least = 2_600 if scheduler == "tune:HyperBandScheduler" and limit == 25_000 else 1_600
    assert limit - least < spent <= limit


@dataclass(frozen=True)
class Stops:
    """A user's scheduler that advances no trial."""

    def next(self, record: Record, *, may_start: bool) -> Start | None:
        return Start(until=0) if may_start else None


def test_a_scheduler_of_a_users_own_is_asked_for_one_move(make_engine: MakeEngine, drive: Drive) -> None:
    engine = make_engine(settings(trials=5), scheduler=Stops())
    drive(engine, loss_at)
    assert engine.is_finished
    assert [engine.record.last_rung(trial) for trial in range(5)] == [0] * 5


SECONDS = 0.02  # of a token


def drive_timed(engine: Engine, *, workers: int, first: float = 1.0) -> float:
    """Run the segments that an engine gives, the first rung of the first trial `first` times as slow; return the device hours due."""
    tokens, working, record = (1000, 1000, 2000, 4000), list[tuple[TrialSegment, int]](), engine.record
    while True:
        while len(working) < workers and isinstance(segment := engine.next(), TrialSegment):
            working.append((segment, segment.first))
        if not working:
            return record.seconds / record.tokens * engine.budget.spent(record) / 3600
        one, rung = working.pop(0)
        seconds = tokens[rung] * SECONDS * (first if record.tokens == 0 else 1.0)
        engine.add_result(
            RungResult(
                trial=one.trial, rung=rung, loss=3.0 - rung / 9, segment="s", tokens=tokens[rung], seconds=seconds
            )
        )
        if rung == one.until:
            engine.finished(one)
        else:
            working.append((one, rung + 1))


@pytest.mark.parametrize("scheduler", ["none", "asha", "tune:HyperBandScheduler", "tune:MedianStoppingRule"])
@pytest.mark.parametrize("hours", [0.06, 0.2])
@pytest.mark.parametrize("workers", [1, 8])
def test_device_hours_are_kept_by_however_many_workers_and_bring_one_to_the_end(
    make_engine: MakeEngine, scheduler: str, hours: float, workers: int
) -> None:
    engine = make_engine(settings(scheduler=scheduler, trials=40, max_device_hours=hours))
    assert drive_timed(engine, workers=workers) <= hours
    assert engine.is_finished
    assert engine.record.ranking(3)


@pytest.mark.parametrize("scheduler", ["asha", "tune:HyperBandScheduler", "tune:MedianStoppingRule"])
@pytest.mark.parametrize("workers", [1, 8])
def test_a_slow_start_does_not_end_a_search_in_device_hours(
    make_engine: MakeEngine, scheduler: str, workers: int
) -> None:
    engine = make_engine(settings(scheduler=scheduler, trials=40, max_device_hours=0.1))
    assert drive_timed(engine, workers=workers, first=3.0) <= 0.1
    assert engine.record.ranking(3)


@pytest.mark.parametrize("scheduler", ["asha", "pbt"])
def test_a_first_trial_that_fails_does_not_hold_up_a_search_in_device_hours(
    make_engine: MakeEngine, scheduler: str
) -> None:
    engine, done = make_engine(settings(scheduler=scheduler, max_device_hours=0.5)), set[AnnealJob]()
    drive_failing(engine, lambda segment: segment.trial == 0, done)
    assert engine.is_finished
    assert engine.record.status(0, 3) == "failed"
    assert engine.record.ranking(3)


@pytest.mark.parametrize("scheduler", ["pbt", "tune:PB2"])
@pytest.mark.parametrize("hours", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("workers", [1, 8])
def test_device_hours_leave_a_population_its_last_generation(
    make_engine: MakeEngine, scheduler: str, hours: float, workers: int
) -> None:
    engine = make_engine(settings(scheduler=scheduler, trials=40, max_device_hours=hours))
    due = drive_timed(engine, workers=workers)
    record = engine.record
    members = len(record.configs)
    assert engine.is_finished
    assert [record.last_rung(trial) for trial in range(members)] == [3] * members
    assert members == int(hours * 3600 / SECONDS / 9_500)
    assert due <= hours
