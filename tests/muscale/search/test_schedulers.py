"""Early stopping as the papers have it."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from muscale.search.engine import Engine
from muscale.search.jobs import TrialSegment
from muscale.search.protocols import Advance, Scheduler, Start
from muscale.search.record import Record
from muscale.search.record_view import RecordView
from muscale.search.schedulers import MIN_PEERS, Hyperband
from muscale.settings.sweep import SweepSettings
from muscale.store.cancels import cancel_trial
from muscale.store.ledger import Ledger
from search_spaces import Space, Uniform

MakeEngine = Callable[..., Engine]
Drive = Callable[..., list[TrialSegment]]
SPACE = Space({"learning_rate": Uniform(low=0.0, high=1.0)})


def settings(**values: Any) -> SweepSettings:
    return SweepSettings(**{"trials": 16, "n_tokens": 8000, "rungs": 4, "space": SPACE, "searcher": "random", **values})


def in_order(segment: TrialSegment, rung: int) -> float:
    """A trial's rank is the same at every rung."""
    return 3 - 0.3 * rung + 0.2 * cast(float, segment.path[-1][1]["learning_rate"])


def shuffled(segment: TrialSegment, rung: int) -> float:
    """Another rank at every rung."""
    return 3 - 0.3 * rung + random.Random(f"{segment.trial}/{rung}").random()


@pytest.mark.parametrize("workers", [1, 4])
def test_asha_sends_one_in_eta_on_and_the_best_trial_to_the_end(
    make_engine: MakeEngine, drive: Drive, workers: int
) -> None:
    engine = make_engine(settings(scheduler="asha"))
    drive(engine, in_order, workers=workers)
    record = engine.record
    best = min(record.configs, key=lambda trial: cast(float, record.configs[trial]["learning_rate"]))
    assert record.ranking(3)[0][1] == best
    for rung in range(3):
        gone = [trial for _, trial in record.ranking(rung) if (trial, rung) in record.advanced]
        at_least = max(1, len(record.ranking(rung)) // 2)
        assert at_least <= len(gone) <= len(record.ranking(rung))
        top = [trial for _, trial in record.ranking(rung)[:at_least]]
        assert set(top) <= set(gone), "whoever is among the best half in the end was sent on"


def test_asha_alone_at_work_advances_a_trial_as_soon_as_it_may(make_engine: MakeEngine, drive: Drive) -> None:
    engine = make_engine(settings(scheduler="asha"))
    segments = drive(engine, in_order, workers=1)
    assert [segment.first for segment in segments[:4]] == [0, 0, 1, 0], (
        "the first trial advances with the second result"
    )


def test_three_trials_still_bring_one_to_the_end(make_engine: MakeEngine, drive: Drive) -> None:
    engine = make_engine(settings(scheduler="asha", trials=3))
    drive(engine, in_order)
    assert len(engine.record.ranking(3)) == 1


def test_a_divergence_is_never_sent_on(make_engine: MakeEngine, drive: Drive) -> None:
    for scheduler in ("asha", "hyperband", "median", "pbt"):
        engine = make_engine(settings(scheduler=scheduler), scheduler)
        drive(engine, lambda segment, rung: None if segment.trial % 3 == 0 else in_order(segment, rung))
        gone = {trial for trial, _ in engine.record.advanced if (trial, _) not in engine.record.donors}
        assert gone
        assert all(trial % 3 for trial in gone)


def test_hyperband_has_the_papers_brackets() -> None:
    # arXiv 1603.06560, table 1: R = 81, eta = 3.
    assert Hyperband(top=4, eta=3).sizes() == [(0, 81), (1, 34), (2, 15), (3, 8), (4, 5)]


def test_hyperband_halves_within_a_bracket_and_waits_for_all_of_it(make_engine: MakeEngine, drive: Drive) -> None:
    sizes = Hyperband(top=2, eta=2).sizes()
    assert sizes == [(0, 4), (1, 3), (2, 3)]
    engine = make_engine(settings(scheduler="hyperband", rungs=3, trials=10))
    drive(engine, shuffled, workers=3)
    record = engine.record
    first = [(record.loss(trial, 0), trial) for trial in range(4)]
    gone = {trial for trial in range(4) if (trial, 0) in record.advanced}
    assert gone == {trial for _, trial in sorted(first)[:2]}
    final = [trial for trial in gone if (trial, 1) in record.advanced]
    assert final == [min(gone, key=lambda trial: record.loss(trial, 1))]
    assert sum((trial, 1) in record.advanced for trial in range(4, 7)) == 1
    assert all((trial, 2) in record.results for trial in range(7, 10))


def test_the_median_rule_leaves_behind_who_is_worse_than_the_median_of_means(
    make_engine: MakeEngine, drive: Drive
) -> None:
    engine = make_engine(settings(scheduler="median"))
    drive(engine, shuffled, workers=1)
    record = engine.record
    left = 0
    for trial in record.configs:
        rung = record.last_rung(trial)
        if rung == 3:
            continue
        left += 1
        others = [other for _, other in record.ranking(rung) if other != trial]
        assert len(others) >= MIN_PEERS
        means = [statistics.fmean(record.losses(other, rung)) for other in others]
        assert min(record.losses(trial, rung)) > statistics.median(means)
    assert left
    assert math.isfinite(record.ranking(3)[0][0])


@dataclass(frozen=True)
class Compared:
    """A rule whose every move is held against what one who looks at all trials would do."""

    rule: Scheduler
    wanted: Callable[[Record, bool], Start | Advance | None]

    def next(self, record: Record, *, may_start: bool) -> Start | Advance | None:
        move = self.rule.next(record, may_start=may_start)
        assert move == self.wanted(record, may_start)
        return move


def by_the_median(record: Record, may_start: bool) -> Start | Advance | None:
    """The median rule word by word, over four rungs."""
    for rung in (2, 1, 0):
        alive = [trial for loss, trial in record.ranking(rung) if math.isfinite(loss)]
        for trial in alive:
            if (trial, rung) in record.advanced or trial in record.cancelled:
                continue
            means = [statistics.fmean(record.losses(other, rung)) for other in alive if other != trial]
            if len(means) < MIN_PEERS or min(record.losses(trial, rung)) <= statistics.median(means):
                return Advance(trial=trial, until=rung + 1)
    return Start(until=0) if may_start else None


@pytest.mark.parametrize("workers", [1, 4])
def test_the_median_rule_finds_whom_a_look_at_all_trials_finds(
    make_engine: MakeEngine, drive: Drive, ledger: Ledger, workers: int
) -> None:
    engine = make_engine(settings(scheduler="median", trials=80))
    engine._scheduler = Compared(engine._scheduler, by_the_median)
    record = engine.record

    def loss_at(segment: TrialSegment, rung: int) -> float | None:
        if len(record.results) == 60:
            cancel_trial(ledger, "s", record.waiting(0)[0][1], "it is in the way")
        return None if segment.trial % 9 == 5 else shuffled(segment, rung)

    assert len(drive(engine, loss_at, workers=workers)) > 100
    assert engine.is_finished
    assert record.cancelled


@pytest.mark.parametrize("workers", [1, 4])
def test_hyperband_finds_in_brackets_that_are_over_what_a_new_look_finds(
    make_engine: MakeEngine, drive: Drive, ledger: Ledger, workers: int
) -> None:
    engine = make_engine(settings(scheduler="hyperband", trials=80))
    rule, record = engine._scheduler, engine.record

    def anew(record: Record, may_start: bool) -> Start | Advance | None:
        known, record.settled = record.settled, set()
        move = rule.next(record, may_start=may_start)
        record.settled = known
        return move

    def loss_at(segment: TrialSegment, rung: int) -> float:
        if len(record.results) == 60:
            assert 0 in record.settled, "the first bracket is over"
            cancel_trial(ledger, "s", record.ranking(0)[0][1], "it is in the way")
        return shuffled(segment, rung)

    engine._scheduler = Compared(rule, anew)
    drive(engine, loss_at, workers=workers)
    assert engine.is_finished
    assert record.settled


@pytest.mark.parametrize("scheduler", ["asha", "median", "hyperband", "pbt"])
def test_what_a_record_keeps_up_is_what_it_works_out_anew(
    make_engine: MakeEngine, drive: Drive, ledger: Ledger, scheduler: str
) -> None:
    engine = make_engine(settings(scheduler=scheduler, trials=40), scheduler)
    record = engine.record

    def kept() -> list[object]:
        of_rungs = [(record.means(rung), record.waiting_by_best(rung), record.changes(rung)) for rung in range(3)]
        return [of_rungs, RecordView(record, 3).observations]

    assert kept() == [[([], [], [])] * 3, []], "asked before the first result, so all of them are kept up"
    drive(engine, lambda segment, rung: None if segment.trial % 9 == 5 else shuffled(segment, rung), workers=3)
    found = kept()
    record = Record(ledger, scheduler)
    assert len(record.means(1)) > 3
    assert kept() == found
