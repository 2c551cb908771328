"""The engine against every method: budgets, resumes, and how an interrupted record resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from muscale.search.budget import Budget
from muscale.search.engine import Engine
from muscale.search.jobs import AnnealJob, TrialSegment
from muscale.search.methods import make_scheduler
from muscale.search.record import Record, RungResult
from muscale.search.searchers import Draws
from muscale.store.ledger import Ledger
from proxy_models.recipes.hyperparameters import Hyperparameters
from tests.muscale.search.conftest import SPACE, loss_at, settings

MakeEngine = Callable[..., Engine]
Drive = Callable[..., list[TrialSegment]]
H = Hyperparameters(learning_rate=0.01, batch_tokens=100)
SCHEDULERS = ["none", "asha", "hyperband", "median", "pbt", "pb2"]
SEARCHERS = ["random", "quasi_random", "grid", "tpe", "gp", "cma_es", "across_scales"]


def possible(searcher: str, scheduler: str) -> bool:
    h = Hyperparameters(learning_rate=0.01, batch_tokens=100)
    return not list(settings(searcher=searcher, scheduler=scheduler).cross_field_errors(h, (2000, 4000, 6000, 8000)))


PAIRS = [(searcher, scheduler) for searcher in SEARCHERS for scheduler in SCHEDULERS if possible(searcher, scheduler)]


@pytest.mark.parametrize(("searcher", "scheduler"), PAIRS)
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
    chosen = settings(searcher="random" if scheduler in ("pbt", "pb2") else searcher, scheduler=scheduler)
    whole = make_engine(chosen, "whole")
    drive(whole, loss_at, workers=1)
    for n_segments in (1, 4, 9):
        drive(
            make_engine(chosen, "left"), loss_at, workers=1, n_segments=n_segments
        )  # the last one is begun and never arrives
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


@pytest.mark.parametrize("scheduler", ["none", "asha", "hyperband", "median"])
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


def test_a_failed_segment_is_retried_by_the_next_run_only(make_engine: MakeEngine, drive: Drive) -> None:
    engine = make_engine(settings(scheduler="asha"))
    segment = engine.next()
    assert isinstance(segment, TrialSegment)
    engine.failed(segment, "no space left on device")
    drive(engine, loss_at)
    assert engine.record.last_rung(segment.trial) == -1
    again = make_engine(settings(scheduler="asha"))
    assert not again.is_finished
    assert again.next() == segment


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
    assert engine.failures == {0: "its worker was lost 3 times: it was shot"}
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 4, "every loss but the last, which is the trial's failure"
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
    unlimited = Budget(
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
    assert engine.next() is None, "half a search has no finalists yet"
    engine.add_result(RungResult(trial=failed.trial, rung=0, loss=None, segment="s", tokens=1, seconds=1.0))
    assert engine.next() == wanted[0]
