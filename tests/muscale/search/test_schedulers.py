"""Early stopping as the papers have it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from muscale.search.engine import Engine
from muscale.search.record import Record
from muscale.search.record_view import RecordView
from muscale.search.sweep_jobs import TrialSegment
from muscale.settings.sweep import SweepSettings
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
    for scheduler in ("asha", "tune:HyperBandScheduler", "tune:MedianStoppingRule", "pbt"):
        engine = make_engine(settings(scheduler=scheduler), scheduler)
        drive(engine, lambda segment, rung: None if segment.trial % 3 == 0 else in_order(segment, rung))
        gone = {trial for trial, _ in engine.record.advanced if (trial, _) not in engine.record.donors}
        assert gone
        assert all(trial % 3 for trial in gone)


@pytest.mark.parametrize("scheduler", ["asha", "tune:MedianStoppingRule", "tune:HyperBandScheduler", "pbt"])
def test_what_a_record_keeps_up_is_what_it_works_out_anew(
    make_engine: MakeEngine, drive: Drive, ledger: Ledger, scheduler: str
) -> None:
    engine = make_engine(settings(scheduler=scheduler, trials=40), scheduler)
    record = engine.record

    def kept() -> list[object]:
        return [[record.changes(rung) for rung in range(3)], RecordView(record, 3).observations]

    assert kept() == [[[]] * 3, []], "asked before the first result, so all of them are kept up"
    drive(engine, lambda segment, rung: None if segment.trial % 9 == 5 else shuffled(segment, rung), workers=3)
    found = kept()
    record = Record(ledger, scheduler)
    assert len(record.changes(0)) > 3
    assert kept() == found
