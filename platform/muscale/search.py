"""Adapters between Ray Tune and the ledger: what was suggested and decided is recorded, and holds when the sweep is run again.

Nothing depends on Tune's own state files. A searcher is told what completed before; a suggestion without an end is issued
again; a rung's recorded decision is applied, not taken anew. A diverged trial has no loss: only here, towards searcher and
scheduler, it gets a finite one a little worse than the worst.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optuna
import ray.tune.schedulers as tune_schedulers
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from ray.tune import Callback
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from muscale.config import SweepSettings
from muscale.ledger import Ledger
from muscale.tables import trials
from muscale.trial import NUMBER
from search_spaces import Choice, Config, Distribution, Fixed, Integer, LogUniform, Ordinal, Space, Uniform

OnTrial = Callable[[int, float | None], None]  # number, loss or None after a divergence
METRIC, MODE = "loss", "min"
_WORSE = 1.01  # a diverged trial's loss over the worst finite one


def optuna_distribution(distribution: Distribution) -> BaseDistribution:
    """The distribution in Optuna's words."""
    match distribution:
        case Uniform(low=low, high=high):
            return FloatDistribution(low, high)
        case LogUniform(low=low, high=high):
            return FloatDistribution(low, high, log=True)
        case Integer(low=low, high=high, log=log):
            return IntDistribution(low, high, log=log)
        case Choice(values=values) | Ordinal(values=values):
            return CategoricalDistribution(values)
        case Fixed(value=value):
            return CategoricalDistribution((value,))
    raise TypeError(f"no Optuna distribution for {distribution!r}")


def finite_loss(loss: float | None, others: list[float]) -> float:
    """The loss that a search is told: a diverged trial's is a little worse than the worst so far."""
    if loss is not None:
        return loss
    return max(others) * _WORSE if others else math.log(256) * _WORSE


class RecordedSearcher(Searcher):
    """Suggestions for Tune: those recorded without an end first, then new ones up to the budget, each recorded first."""

    def __init__(self, ledger: Ledger, sweep: str, settings: SweepSettings) -> None:
        super().__init__(metric=METRIC, mode=MODE)
        self._ledger, self._sweep, self._budget = ledger, sweep, settings.trials
        self._space = settings.space
        self._settings = settings
        self._issued: dict[str, int] = {}
        recorded = ledger.trials(sweep)
        self._next = len(recorded)
        self._again = [row for row in recorded if row["status"] == "running"]
        self._inner = _tpe(self._space, settings.seed + self._next) if settings.searcher == "tpe" else None
        self._grid = self._space.grid(settings.grid_points) if settings.searcher == "grid" else []
        if self._inner:
            self._tell_known(recorded)

    @property
    def remaining(self) -> int:
        """Trials that are still to be run."""
        end = min(self._budget, len(self._grid)) if self._grid else self._budget
        return len(self._again) + max(0, end - self._next)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        """The next configuration, its number in it."""
        if self._again:
            row = self._again.pop(0)
            number, config = row["number"], row["config"]
        elif self.remaining == 0:
            return str(Searcher.FINISHED)
        else:
            number = self._next
            config = self._new(trial_id, number)
            self._ledger.insert(trials, sweep=self._sweep, number=number, config=config, status="running")
            self._next += 1
        self._issued[trial_id] = number
        return {**config, NUMBER: number}

    def _new(self, trial_id: str, number: int) -> Config:
        if self._grid:
            return self._grid[number]
        if self._inner is None:
            return self._space.sample(number + 1, self._settings.seed)[number]
        return dict(self._inner.suggest(trial_id) or {})

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Nothing: the searcher learns from ends."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Note the end and tell the sampler; a trial that failed stays open, and is issued again next time."""
        number = self._issued.get(trial_id)
        if error or result is None or number is None or "rung" not in result:
            return
        last = result["rung"] == self._settings.rungs - 1
        status = "diverged" if result["diverged"] else "completed" if last else "stopped"
        self._ledger.finish_trial(self._sweep, number, status)
        if self._inner:
            row = next(row for row in self._ledger.trials(self._sweep) if row["number"] == number)
            self._tell_known([row])

    def _tell_known(self, recorded: list[dict[str, Any]]) -> None:
        """Add finished trials to the sampler, each with the loss of its last rung."""
        last = {row["trial"]: row["loss"] for row in self._ledger.rungs(self._sweep)}
        finite = [loss for loss in last.values() if loss is not None]
        for row in recorded:
            if row["status"] != "running" and self._inner:
                self._inner.add_evaluated_point(row["config"], finite_loss(last.get(row["number"]), finite))

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""


def _tpe(space: Space, seed: int) -> OptunaSearch:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {name: optuna_distribution(distribution) for name, distribution in space.items()}
    return OptunaSearch(space=distributions, metric=METRIC, mode=MODE, sampler=optuna.samplers.TPESampler(seed=seed))


class TrialReport(Callback):
    """Tells the display about each trial that ends; left behind when Tune pickles its own state, which nobody reads."""

    def __init__(self, on_trial: OnTrial) -> None:
        self._on_trial: OnTrial | None = on_trial

    def __getstate__(self) -> dict[str, Any]:
        return {"_on_trial": None}

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Pass on the number and the loss, None after a divergence."""
        result = trial.last_result
        if self._on_trial:
            self._on_trial(trial.config[NUMBER], None if result.get("diverged") else result.get(METRIC))


class _Known:
    """A trial of an earlier process, as far as a scheduler looks at it."""

    def __init__(self, number: int) -> None:
        self.trial_id = f"known-{number}"


class RecordedScheduler(FIFOScheduler):
    """ASHA, or no early stopping, with each decision recorded before it takes effect."""

    def __init__(self, ledger: Ledger, sweep: str, settings: SweepSettings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._sweep, self._settings = ledger, sweep, settings
        recorded = ledger.rungs(sweep)
        self._decisions = {(row["trial"], row["rung"]): row["decision"] for row in recorded}
        self._losses = [row["loss"] for row in recorded if row["loss"] is not None]
        self._asha = _asha(settings) if settings.scheduler == "asha" else None
        open_trials = {row["number"] for row in ledger.trials(sweep) if row["status"] == "running"}
        self._replay([row for row in recorded if row["trial"] not in open_trials])

    def _replay(self, recorded: list[dict[str, Any]]) -> None:
        """Bring the scheduler to where the recorded rungs of ended trials left it."""
        known: dict[int, _Known] = {}
        for row in recorded:
            if self._asha:
                if row["trial"] not in known:
                    known[row["trial"]] = _Known(row["trial"])
                    self._asha.on_trial_add(None, known[row["trial"]])
                self._asha.on_trial_result(None, known[row["trial"]], self._told(row["rung"], row["loss"]))

    def _told(self, rung: int, loss: float | None) -> dict[str, float]:
        return {"milestone": self._settings.reduction_factor**rung, METRIC: finite_loss(loss, self._losses)}

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Accept what the tuner says of metric and mode; they are fixed here."""
        return True

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Put the trial into ASHA's bracket."""
        if self._asha:
            self._asha.on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """The recorded decision at this rung, or a new one, recorded."""
        return str(TrialScheduler.STOP if self._decide(trial, result) == "stop" else TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Record the last rung."""
        self._decide(trial, result)

    def _decide(self, trial: Any, result: dict[str, Any]) -> str:
        number, rung = trial.config[NUMBER], result["rung"]
        loss = None if result["diverged"] else float(result[METRIC])
        decision = "end" if result["done"] else "continue"
        if self._asha:
            told = self._asha.on_trial_result(None, trial, self._told(rung, loss))
            if decision == "continue" and told == TrialScheduler.STOP:
                decision = "stop"
        if (number, rung) in self._decisions:
            return str(self._decisions[number, rung])
        if loss is not None:
            self._losses.append(loss)
        self._decisions[number, rung] = decision
        self._ledger.add_rung(
            sweep=self._sweep,
            trial=number,
            rung=rung,
            tokens=result["tokens"],
            segment=result["segment"],
            loss=loss,
            decision=decision,
        )
        return decision


def _asha(settings: SweepSettings) -> Any:
    """ASHA over milestones 1, r, r², …: one for each rung, whatever its tokens."""
    top = settings.reduction_factor ** (settings.rungs - 1)
    return tune_schedulers.ASHAScheduler(
        time_attr="milestone",
        metric=METRIC,
        mode=MODE,
        grace_period=1,
        max_t=math.ceil(top * 1.001),  # above the last milestone, so that its logarithm can't fall short of it
        reduction_factor=settings.reduction_factor,
    )
