"""A cancelled trial is trained no further, by any rule and by no later run; a cancelled study ends as at Ctrl-C."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from muscale import StageError
from muscale.search.engine import Engine
from muscale.search.record import Record, RungResult
from muscale.search.sweep_jobs import TrialSegment
from muscale.settings.sweep import SchedulerName, SweepSettings
from muscale.store.cancels import cancel_study, cancel_trial, cancellable
from muscale.store.ledger import Ledger
from search_spaces import Space, Uniform

MakeEngine = Callable[..., Engine]
Drive = Callable[..., list[TrialSegment]]
SPACE = Space({"learning_rate": Uniform(low=0.0, high=1.0)})


def settings(**values: Any) -> SweepSettings:
    return SweepSettings(**{"trials": 12, "n_tokens": 8000, "rungs": 3, "space": SPACE, "searcher": "random", **values})


@pytest.mark.parametrize("scheduler", ["none", "asha", "tune:MedianStoppingRule", "tune:HyperBandScheduler"])
def test_nothing_more_is_trained_of_a_cancelled_trial(
    make_engine: MakeEngine, drive: Drive, ledger: Ledger, scheduler: SchedulerName
) -> None:
    engine = make_engine(settings(scheduler=scheduler))
    worst = 0.0

    def loss_at(segment: TrialSegment, rung: int) -> float:
        """The first trial is the best at every rung, so any rule would send it on."""
        nonlocal worst
        worst += 0.001
        if segment.trial == 0:
            cancel_trial(ledger, "s", 0, "it is in the way")
            assert engine.ends(segment), "wherever it was going, it ends at this rung"
            return 1.0
        return 2.0 + worst

    first = engine.next()
    assert isinstance(first, TrialSegment)
    engine.finished(first)
    drive(engine, loss_at)
    assert engine.is_finished
    assert engine.record.last_rung(0) == 0
    assert (0, 0) not in engine.record.advanced
    again = make_engine(settings(scheduler=scheduler))
    assert again.is_finished, "a later run has nothing to do either"
    assert again.record.cancelled == {0: "it is in the way"}
    assert max(again.record.last_rung(trial) for trial in again.record.configs) == 2, "others came to the end"


def test_one_that_never_arrived_is_cancelled_too(make_engine: MakeEngine, drive: Drive, ledger: Ledger) -> None:
    engine = make_engine(settings(scheduler="asha"))
    segment = engine.next()
    assert isinstance(segment, TrialSegment)
    cancel_trial(ledger, "s", segment.trial, "")
    again = make_engine(settings(scheduler="asha"))
    segments = drive(again, lambda segment, rung: 2.0 + segment.trial)
    assert segment.trial not in {one.trial for one in segments}
    assert again.record.status(segment.trial, 2) == "cancelled"
    assert len(again.record.configs) == 12, "the budget counts suggestions ever made"


def test_a_request_stands_as_it_was_made_first(make_engine: MakeEngine, ledger: Ledger) -> None:
    engine = make_engine(settings())
    engine.next()
    cancel_trial(ledger, "s", 0, "first")
    cancel_trial(ledger, "s", 0, "second")
    assert Record(ledger, "s").cancelled == {0: "first"}
    with pytest.raises(StageError, match="sweep s has no trial 7"):
        cancel_trial(ledger, "s", 7, "")
    with pytest.raises(StageError, match="at most 200 characters, got 201"):
        cancel_trial(ledger, "s", 0, "x" * 201)


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background job"])
def test_a_study_s_request_interrupts_who_is_at_work_and_nobody_later(ledger: Ledger, handler: signal.Handlers) -> None:
    cancel_study(ledger, "an older one")
    asking = threading.Timer(0.2, cancel_study, (ledger, "enough"))
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt), cancellable(ledger):
            asking.start()
            time.sleep(20)
        asking.join()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    with cancellable(ledger), cancellable(ledger):
        time.sleep(1.5)  # longer than between two looks


def test_a_thread_that_can_t_be_interrupted_is_left_alone(ledger: Ledger) -> None:
    ended = []

    def work() -> None:
        with cancellable(ledger):
            cancel_study(ledger, "enough")
            time.sleep(1.5)
        ended.append(True)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert ended == [True]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("scheduler", ["none", "asha", "tune:HyperBandScheduler", "tune:MedianStoppingRule", "pbt"])
def test_with_cancels_and_failures_a_live_record_is_the_record_read_again_and_within_the_budget(
    make_engine: MakeEngine, ledger: Ledger, scheduler: SchedulerName, seed: int
) -> None:
    generator = random.Random(seed)
    limit = None if seed % 2 else 20_000
    name = f"{scheduler}{seed}"
    engine = make_engine(settings(scheduler=scheduler, rungs=4, max_tokens=limit), name)
    record = engine.record
    working: dict[int, tuple[TrialSegment, int]] = {}
    for _ in range(400):
        if len(working) < 3 and isinstance(segment := engine.next(), TrialSegment):
            working[segment.trial] = segment, segment.first
        elif not working:
            break
        if working and generator.random() < 0.15:
            cancel_trial(ledger, name, generator.choice(list(working)), "it is in the way")
        if working and generator.random() < 0.7:
            segment, rung = working.pop(generator.choice(list(working)))
            if generator.random() < 0.1:
                engine.failed(segment, "ValueError")
                continue
            loss = None if generator.random() < 0.1 else 3 - 0.3 * rung + generator.random()
            tokens = 1000 * 2**rung - (1000 * 2 ** (rung - 1) if rung else 0)
            engine.add_result(
                RungResult(trial=segment.trial, rung=rung, loss=loss, segment="s", tokens=tokens, seconds=1.0)
            )
            if loss is None or rung == segment.until or engine.ends(segment):
                engine.finished(segment)
            else:
                working[segment.trial] = segment, rung + 1
        record.read_cancel_requests()
        assert known(record) == known(Record(ledger, name))
    assert engine.is_finished or engine.failures
    assert limit is None or engine.budget.spent(record) <= limit


def known(record: Record) -> dict[str, Any]:
    """Everything that schedulers, searchers and the budget read in a record."""
    names = ("configs", "paths", "donors", "results", "open", "cancelled", "failed", "advanced", "n_advanced", "tokens")
    found = {name: getattr(record, name) for name in names}
    for rung in range(4):
        found |= {f"ranking {rung}": record.ranking(rung), f"waiting {rung}": record.waiting(rung)}
    return found | {"status": [record.status(trial, 3) for trial in record.configs]}
