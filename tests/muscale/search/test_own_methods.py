"""Searchers and schedulers of a user's own: known by their values, asked again after an interruption, refused where they err."""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pandas as pd
import pytest

from muscale import StageError, Study
from muscale.layout import CURVES
from muscale.search import Advance, Known, OptunaSearcher, Record, Start
from muscale.search.engine import Engine
from muscale.search.own_methods import identity_of
from muscale.search.sweep_jobs import TrialSegment
from search_spaces import Config, Space, Uniform
from tests.muscale.search.conftest import SPACE, loss_at, settings

MakeEngine = Callable[..., Engine]
Drive = Callable[..., list[TrialSegment]]
is_broken = False  # while it is, `Draws` fails at its fourth trial, as a driver may at any moment


@dataclass(frozen=True)
class Draws:
    seed: int

    def propose(self, number: int, known: Known) -> Config:
        if is_broken and number == 3:
            raise ConnectionError("the driver lost something")
        return known.space.draw(self.seed, number)


@dataclass(frozen=True)
class AroundTheBest(Draws):
    """Half way between a draw and the best so far."""

    def propose(self, number: int, known: Known) -> Config:
        drawn = super().propose(number, known)
        alive = [(seen.loss, seen.config) for seen in known.observations if seen.loss is not None]
        best = min(alive, key=lambda pair: pair[0])[1] if alive else drawn
        rates = (float(cast(float, config["learning_rate"])) for config in (drawn, best))
        return {**drawn, "learning_rate": math.sqrt(math.prod(rates))}


@dataclass(frozen=True)
class Halving:
    """The best half of a rung goes on, at once."""

    top: int

    def next(self, record: Record, *, may_start: bool) -> Start | Advance | None:
        for rung in reversed(range(self.top)):
            for _, trial in record.waiting(rung)[:1]:
                if record.place(trial, rung) < len(record.ranking(rung)) / 2:
                    return Advance(trial=trial, until=rung + 1)
        return Start(until=0) if may_start else None


@dataclass(frozen=True)
class Moves:
    """The moves that are to be tried, when there are none left nothing."""

    moves: list[Any] = field(default_factory=list)

    def next(self, record: Record, *, may_start: bool) -> Start | Advance | None:
        return self.moves[len(record.results)] if len(record.results) < len(self.moves) else None


@dataclass(frozen=True)
class Outside:
    """A rate above the space's."""

    def propose(self, number: int, known: Known) -> Config:
        return {**known.space.draw(0, number), "learning_rate": 1.0}


@dataclass
class Counting:
    """What changes between calls is lost with the process."""

    calls: int = 0

    def propose(self, number: int, known: Known) -> Config:
        self.calls += 1
        return known.space.draw(self.calls, 0)


def random_sampler(seed: int) -> Any:
    import optuna

    return optuna.samplers.RandomSampler(seed=seed)


@pytest.mark.parametrize(
    "searcher", [Draws(1), AroundTheBest(1), OptunaSearcher(space=SPACE, seed=0, make=random_sampler)]
)
def test_a_sweep_by_own_methods_stopped_anywhere_resumes(make_engine: MakeEngine, drive: Drive, searcher: Any) -> None:
    own = {"searcher": searcher, "scheduler": Halving(3)}
    whole = make_engine(settings(), "whole", **own)
    drive(whole, loss_at, workers=1)
    for n_segments in (1, 4, 9):
        drive(make_engine(settings(), "left", **own), loss_at, workers=1, n_segments=n_segments)
    left = make_engine(settings(), "left", **own)
    before = dict(left.record.results)
    drive(left, loss_at, workers=1)
    assert left.is_finished
    assert len(left.record.configs) == 9
    assert before.items() <= left.record.results.items()
    assert left.record.ranking(3)
    if not isinstance(searcher, AroundTheBest):  # asked with one loss fewer known it suggests something else
        assert left.record.results == whole.record.results


WAITING = [Start(until=0)]


@pytest.mark.parametrize(
    ("moves", "rule"),
    [
        ([Start(until=4)], "rungs go from 0 to 3"),
        (["start"], "Start, an Advance"),
        ([Advance(trial=0, until=1)], "only a trial that waits"),
        ([*WAITING, Advance(trial=0, until=0)], "at rung 0 of 3"),
        ([*WAITING, Advance(trial=0, until=4)], "at rung 0 of 3"),
        ([*WAITING, Advance(trial=0, until=1, path=((0, {}), (1, {})), donor=0)], 'sweep.scheduler = "pbt"'),
    ],
)
def test_a_move_that_the_record_does_not_allow_is_refused(
    make_engine: MakeEngine, drive: Drive, moves: list[Any], rule: str
) -> None:
    with pytest.raises(StageError, match=f"scheduler Moves: .*{rule}.*; got "):
        drive(make_engine(settings(), scheduler=Moves(moves)), loss_at, workers=1)


def test_a_copy_in_a_population_changes_only_what_can_change(make_engine: MakeEngine, drive: Drive) -> None:
    searched = Space({**SPACE, "init_scale": Uniform(low=0.5, high=2.0)})
    chosen = settings(scheduler="pbt", space=searched)
    config = searched.draw(0, 0)
    for name, fits in (("learning_rate", True), ("init_scale", False)):
        copied = {**config, name: searched[name].decode([0.5])}
        moves = [Start(until=0), Advance(trial=0, until=1, path=((0, config), (1, copied)), donor=0)]
        engine = make_engine(chosen, name, searcher=Draws(0), scheduler=Moves(moves))
        if fits:
            drive(engine, loss_at, workers=1)
            assert engine.record.paths[0][-1] == (1, copied)
        else:
            with pytest.raises(StageError, match="scheduler Moves: .*mid-run"):
                drive(engine, loss_at, workers=1)


def test_no_more_trials_are_started_than_the_budget_has(make_engine: MakeEngine, drive: Drive) -> None:
    engine = make_engine(settings(trials=2), scheduler=Moves([Start(until=0)] * 3))
    with pytest.raises(StageError, match="scheduler Moves: .*may_start"):
        drive(engine, loss_at, workers=1)
    assert len(engine.record.configs) == 2


def test_a_configuration_outside_of_the_space_is_refused(make_engine: MakeEngine, drive: Drive) -> None:
    engine = make_engine(settings(), searcher=Outside())
    with pytest.raises(StageError, match=r"searcher Outside: trial 0 .*sweep\.space: .*learning_rate"):
        drive(engine, loss_at)
    assert not engine.record.configs


def test_methods_are_known_by_their_classes_and_values() -> None:
    assert identity_of("scheduler", Halving(3)) == identity_of("scheduler", Halving(3))
    found = [Draws(0), Draws(1), AroundTheBest(0), OptunaSearcher(space=SPACE, seed=0, make=random_sampler)]
    identities = [identity_of("searcher", each) for each in found]
    assert all(identities[a] != identities[b] for a in range(4) for b in range(a))
    assert identities[3]["fields"]["make"]["name"].endswith(":random_sampler")
    assert identities[3]["fields"]["space"] == SPACE.to_dict()


CELL = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Same:
    value: float

    def propose(self, number, known):
        return {"learning_rate": self.value * 1}
"""


def test_a_class_of_a_notebook_is_known_by_its_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    def defined(text: str, cell: str) -> Any:
        """An object of a class that a cell defines, whose module has no file."""
        module = ModuleType("a_notebook")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(linecache.cache, cell, (len(text), None, text.splitlines(keepends=True), cell))
        exec(compile(text, cell, "exec"), vars(module))
        return vars(module)["Same"](0.01)

    first, again, edited = (
        identity_of("searcher", defined(text, f"<cell {n}>"))
        for n, text in enumerate((CELL, CELL, CELL.replace("* 1", "* 2")))
    )
    assert first == again
    assert first["source"] != edited["source"]


@pytest.mark.parametrize(
    ("role", "method", "where"),
    [
        ("searcher", Halving(3), "searcher: .*propose"),
        ("scheduler", Draws(0), "scheduler: .*next"),
        ("searcher", Counting(), "searcher: .*frozen.*Counting"),
        ("scheduler", Moves([Counting()]), r"scheduler\.moves\[0\]: .*frozen.*Counting"),
        ("searcher", OptunaSearcher(space=SPACE, seed=0, make=lambda seed: None), r"searcher\.make: .*<lambda>"),
        ("searcher", Draws(cast(int, {1: 2})), r"searcher\.seed: .*dict"),
    ],
)
def test_what_the_ledger_could_not_know_again_is_refused(role: str, method: object, where: str) -> None:
    with pytest.raises(StageError, match=f"^sweep: {where}"):
        identity_of(role, method)


QUICK = ["sweep.n_seeds=0", "sweep.top_k=1", "sweep.rungs=3", "sweep.trials=5", "sweep.n_tokens=4096"]


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_sweep_by_own_methods_that_broke_off_trains_nothing_twice(
    make_study: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_study()

    def opened(*more: str) -> Study:
        return Study.open(path, [*QUICK, *more], quiet=True)

    def curves() -> dict[str, int]:
        """When the curve of each segment was written, which a second training would write again."""
        return {file.name: file.stat().st_mtime_ns for file in (path.parent / CURVES).iterdir()}

    monkeypatch.setattr(f"{__name__}.is_broken", True)
    with pytest.raises(ConnectionError, match="the driver lost something"):
        opened().sweep(searcher=Draws(7), scheduler=Halving(2))
    before = curves()
    monkeypatch.undo()
    with pytest.raises(StageError, match=r"searcher=.*:Draws.*scheduler=.*:Halving"):
        opened().sweep()
    found = opened().sweep(searcher=Draws(7), scheduler=Halving(2))
    trained = curves()
    assert before
    assert before.items() <= trained.items(), "a segment was trained again"
    assert [found.trials.set_index("trial")["learning_rate"][n] for n in range(5)] == [
        found.space.draw(7, n)["learning_rate"] for n in range(5)
    ]
    assert "completed" in set(found.trials["status"])
    assert any(":Halving" in note for note in found.notes)

    # as transfer, ladder and report do, without them
    pd.testing.assert_frame_equal(opened().sweep().trials, found.trials)
    with pytest.raises(StageError, match="Halving"):
        opened("sweep.trials=6").sweep()
    other = opened().sweep(searcher=Draws(7), scheduler=Halving(1))
    assert "completed" not in set(other.trials["status"]), "by other values it is another sweep"
    assert trained.items() <= curves().items(), "which takes what the ledger knows"
    pd.testing.assert_frame_equal(opened().sweep().trials, other.trials)
