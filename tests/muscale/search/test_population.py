"""Populations: who copies whom, what may change, and that no copy comes from nowhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from muscale.search.engine import Engine
from muscale.search.sweep_jobs import TrialSegment
from muscale.settings.sweep import SweepSettings
from muscale.store.cancels import cancel_trial
from muscale.store.ledger import Ledger
from search_spaces import Choice, LogUniform, Ordinal, Space
from tests.quick import quick_and_soak

MakeEngine = Callable[..., Engine]
Drive = Callable[..., list[TrialSegment]]
SPACE = Space(
    {
        "learning_rate": LogUniform(low=1e-3, high=1e-1),
        "init_scale": LogUniform(low=0.25, high=4.0),
        "zero_readout": Choice(values=(True, False)),
    }
)


def settings(scheduler: str, **values: Any) -> SweepSettings:
    given: dict[str, Any] = {
        "trials": 8,
        "n_tokens": 8000,
        "rungs": 4,
        "space": SPACE,
        "searcher": "random",
        "scheduler": scheduler,
    }
    return SweepSettings(**{**given, **values})


def gain(segment: TrialSegment, rung: int) -> float | None:
    """The loss falls in each generation by what its rate is worth, along the whole path."""
    loss = 4.0
    for generation in range(rung + 1):
        config = next(config for first, config in reversed(segment.path) if first <= generation)
        octaves = math.log2(cast(float, config["learning_rate"]) / 0.01)
        loss -= 0.5 * math.exp(-(octaves**2))
    return loss if math.log2(cast(float, segment.path[-1][1]["learning_rate"]) / 0.01) < 3.2 else None


@pytest.mark.parametrize("scheduler", ["pbt", "tune:PB2"])
def test_the_worst_copy_the_best_and_only_mutable_values_change(
    make_engine: MakeEngine, drive: Drive, scheduler: str
) -> None:
    engine = make_engine(settings(scheduler))
    drive(engine, gain, workers=3)
    record = engine.record
    assert engine.is_finished
    assert record.donors
    for (trial, rung), donor in record.donors.items():
        losses = [loss for loss, _ in record.ranking(rung)]
        assert record.loss(donor, rung) <= losses[1]
        assert len(losses) < 8 or record.loss(trial, rung) >= losses[6]
        assert math.isfinite(record.loss(donor, rung)), "a donor has a state at the rung"
        copied, own = record.path_towards(donor, rung), record.path_towards(trial, rung + 1)
        assert own[:-1] == copied
        assert own[-1][0] == rung + 1
        for name in ("init_scale", "zero_readout"):
            assert own[-1][1][name] == copied[-1][1][name]
        assert SPACE.contains(own[-1][1])


def test_who_copies_whom_does_not_depend_on_the_number_of_workers(make_engine: MakeEngine, drive: Drive) -> None:
    one, many = make_engine(settings("pbt"), "one"), make_engine(settings("pbt"), "many")
    drive(one, gain, workers=1)
    drive(many, gain, workers=5, seed=3)
    assert one.record.paths == many.record.paths
    assert one.record.donors == many.record.donors


def test_an_ordinal_steps_to_a_neighbour_and_a_choice_stays(make_engine: MakeEngine, drive: Drive) -> None:
    clips = (0.1, 0.5, 1.0, 2.0, 4.0)
    clipped, beta2 = Ordinal(values=clips), Choice(values=(0.9, 0.95, 0.99))
    space = SPACE.updated({"clip_norm": clipped, "beta2": beta2})
    engine = make_engine(settings("pbt", space=space, resample=0.0, rungs=8))
    drive(engine, gain)
    record, steps = engine.record, set()
    for (trial, rung), donor in record.donors.items():
        copied, own = record.config_at(donor, rung), record.config_at(trial, rung + 1)
        steps.add(clips.index(cast(float, own["clip_norm"])) - clips.index(cast(float, copied["clip_norm"])))
        assert own["beta2"] == copied["beta2"]
    assert {-1, 1} <= steps <= {-1, 0, 1}


def test_a_cancelled_member_is_copied_by_nobody_and_holds_nobody_up(
    make_engine: MakeEngine, drive: Drive, ledger: Ledger
) -> None:
    segments = drive(engine := make_engine(settings("pbt")), gain, n_segments=8)
    (_, best), on_its_way = engine.record.ranking(0)[0], segments[-1].trial
    for trial in (best, on_its_way):
        cancel_trial(ledger, "s", trial, "")
    drive(again := make_engine(settings("pbt")), gain)
    record = again.record
    assert not {best, on_its_way} & {*record.donors.values()}
    assert (record.last_rung(best), record.last_rung(on_its_way)) == (0, -1)
    assert all(record.last_rung(trial) == 3 for trial in record.configs if trial not in (best, on_its_way))


@pytest.mark.parametrize("scheduler", quick_and_soak(("pbt", "tune:PB2"), "pbt"))
def test_the_second_round_copies_none_of_the_first(make_engine: MakeEngine, drive: Drive, scheduler: str) -> None:
    """Members of the first have configurations outside the narrower space."""
    drive(engine := make_engine(settings(scheduler)), gain)
    narrower = SPACE.updated({"learning_rate": LogUniform(low=0.008, high=0.012)})
    engine.record.begin_round("random", narrower)
    drive(again := make_engine(settings(scheduler, trials=16, space=narrower)), gain)
    record = again.record
    assert again.is_finished
    assert all(record.last_rung(trial) == 3 for trial in range(16))
    assert all(donor >= 8 for (trial, _), donor in record.donors.items() if trial >= 8)
    assert all(narrower.contains(config) for trial in range(8, 16) for _, config in record.paths[trial])


@pytest.mark.parametrize("scheduler", quick_and_soak(("pbt", "tune:PB2"), "pbt"))
@pytest.mark.parametrize("narrower", [True, False])
def test_more_members_in_a_record_that_was_finished_come_to_the_end(
    make_engine: MakeEngine, drive: Drive, scheduler: str, *, narrower: bool
) -> None:
    """The record is the one that was searched, not one read again."""
    drive(engine := make_engine(settings(scheduler)), gain)
    assert engine.is_finished
    if narrower:
        engine.record.begin_round("random", SPACE)
    again = make_engine(settings(scheduler, trials=16), record=engine.record)
    drive(again, gain)
    assert again.is_finished
    assert [again.record.last_rung(trial) for trial in range(16)] == [3] * 16


def test_a_population_of_divergences_ends(make_engine: MakeEngine, drive: Drive) -> None:
    engine = make_engine(settings("pbt"))
    drive(engine, lambda segment, rung: None)
    assert engine.is_finished
    assert not engine.record.donors


def test_a_population_ends_lower_than_random_members_that_never_move(make_engine: MakeEngine, drive: Drive) -> None:
    ends: dict[str, list[float]] = {"pbt": [], "none": []}
    for scheduler, found in ends.items():
        for seed in range(12):
            engine = make_engine(settings(scheduler, seed=seed, rungs=8), f"{scheduler}{seed}")
            drive(engine, gain, workers=2)
            found.append(engine.record.ranking(7)[0][0])
    assert np.mean(ends["pbt"]) < np.mean(ends["none"])
