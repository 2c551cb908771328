"""What Tune is told: recorded suggestions again, recorded decisions as they were, a diverged trial a little worse than the worst."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.search import Searcher

from muscale.config import SweepSettings
from muscale.ledger import Ledger
from muscale.search import RecordedScheduler, RecordedSearcher, finite_loss, optuna_distribution
from search_spaces import Choice, Fixed, Integer, LogUniform, Space, Uniform

SPACE = Space({"learning_rate": LogUniform(low=1e-3, high=1e-1), "init_scale": Uniform(low=0.5, high=2.0)})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def settings(**values: Any) -> SweepSettings:
    return SweepSettings(**{"trials": 5, "n_tokens": 1024, "rungs": 3, "space": SPACE, **values})


def report(trial: int, rung: int, loss: float, *, done: bool = False, diverged: bool = False) -> dict[str, Any]:
    return {"loss": loss, "rung": rung, "tokens": 2**rung, "segment": "s", "diverged": diverged, "done": done}


def decide(scheduler: RecordedScheduler, trial: int, rung: int, loss: float) -> str:
    stub = SimpleNamespace(trial_id=f"t{trial}", config={"trial": trial})
    if rung == 0:
        scheduler.on_trial_add(None, stub)
    return scheduler.on_trial_result(None, stub, report(trial, rung, loss))


@pytest.mark.parametrize("searcher", ["random", "tpe", "grid"])
def test_the_budget_counts_suggestions_ever_made(ledger: Ledger, searcher: str) -> None:
    chosen = settings(searcher=searcher, grid_points=2, trials=4)
    first = RecordedSearcher(ledger, "s", chosen)
    issued = [first.suggest(f"a{n}") for n in range(3)]
    first.on_trial_complete("a1", report(1, 2, 2.0, done=True))
    again = RecordedSearcher(ledger, "s", chosen)
    assert again.remaining == 3
    assert [again.suggest("b0"), again.suggest("b1")] == [issued[0], issued[2]]
    assert isinstance(again.suggest("b2"), dict)
    assert again.suggest("b3") == Searcher.FINISHED
    assert [row["status"] for row in ledger.trials("s")] == ["running", "completed", "running", "running"]


def test_a_trial_that_failed_stays_open(ledger: Ledger) -> None:
    searcher = RecordedSearcher(ledger, "s", settings(searcher="random"))
    searcher.suggest("a")
    searcher.on_trial_complete("a", error=True)
    assert RecordedSearcher(ledger, "s", settings(searcher="random")).remaining == 5


def test_random_suggestions_do_not_depend_on_when_the_sweep_was_interrupted(ledger: Ledger, tmp_path: Path) -> None:
    whole = RecordedSearcher(Ledger(tmp_path / "other.sqlite"), "s", settings(searcher="random"))
    undisturbed = [whole.suggest(f"a{n}") for n in range(5)]
    for n in range(5):
        searcher = RecordedSearcher(ledger, "s", settings(searcher="random"))
        assert searcher.suggest(f"b{n}") == undisturbed[n]
        searcher.on_trial_complete(f"b{n}", report(n, 0, 2.0))


def test_asha_stops_the_worse_half_and_a_rerun_applies_what_was_recorded(ledger: Ledger) -> None:
    asha = settings(scheduler="asha")
    scheduler = RecordedScheduler(ledger, "s", asha)
    assert [decide(scheduler, n, 0, loss) for n, loss in enumerate([2.0, 3.0, 1.0, 2.5])] == [
        "CONTINUE",
        "STOP",
        "CONTINUE",
        "STOP",
    ]
    recorded = ledger.rungs("s")
    rerun = RecordedScheduler(ledger, "s", asha)
    assert decide(rerun, 1, 0, 3.0) == "STOP"
    assert decide(rerun, 3, 0, 0.1) == "STOP", "a recorded decision is applied, not taken anew"
    assert ledger.rungs("s") == recorded
    assert decide(rerun, 4, 0, 2.4) == "STOP", "the rungs of ended trials still count"


def test_without_early_stopping_nothing_is_stopped(ledger: Ledger) -> None:
    scheduler = RecordedScheduler(ledger, "s", settings(scheduler="none"))
    assert {decide(scheduler, n, 0, float(n)) for n in range(6)} == {"CONTINUE"}


def test_a_divergence_has_no_loss_in_the_ledger_and_a_finite_bad_one_for_tune(ledger: Ledger) -> None:
    scheduler = RecordedScheduler(ledger, "s", settings(scheduler="asha"))
    stub = SimpleNamespace(trial_id="t0", config={"trial": 0})
    scheduler.on_trial_add(None, stub)
    scheduler.on_trial_complete(None, stub, report(0, 0, 1e9, done=True, diverged=True))
    assert ledger.rungs("s")[0]["loss"] is None
    assert finite_loss(None, [2.0, 4.0]) == pytest.approx(4.04)
    assert finite_loss(3.0, [2.0, 4.0]) == 3.0


def test_every_distribution_has_its_optuna_twin() -> None:
    assert optuna_distribution(LogUniform(low=1e-3, high=1.0)).log  # type: ignore[attr-defined]
    assert not optuna_distribution(Uniform(low=0.0, high=1.0)).log  # type: ignore[attr-defined]
    assert optuna_distribution(Integer(low=1, high=9)).high == 9  # type: ignore[attr-defined]
    assert optuna_distribution(Choice(values=("a", "b"))).choices == ("a", "b")  # type: ignore[attr-defined]
    assert optuna_distribution(Fixed(value=3)).choices == (3,)  # type: ignore[attr-defined]
