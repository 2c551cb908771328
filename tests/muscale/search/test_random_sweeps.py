"""Random conditional, constrained spaces × schedulers × cancels at any moment, through what Tune calls; no Ray and no training."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from ray.tune.schedulers import TrialScheduler

from muscale.actors.tune_adapter import Dispatcher, RungScheduler
from muscale.actors.work import report
from muscale.search.engine import Engine
from muscale.search.sweep_jobs import JOB, AnnealJob, TrialSegment, job_from_json
from muscale.settings.sweep import SweepSettings
from muscale.store.cancels import cancel_trial
from proxy_models.recipes.stages import CHANGEABLE
from search_spaces import (
    Choice,
    Condition,
    Config,
    Constraint,
    Distribution,
    Integer,
    LogUniform,
    OneOf,
    Ordinal,
    Range,
    Space,
    SpaceError,
    Uniform,
)

MakeEngine = Callable[..., Engine]
SCHEDULERS = (
    "pbt",
    "asha",
    "tune:PopulationBasedTraining",
    "tune:PB2",
    "tune:HyperBandScheduler",
    "tune:MedianStoppingRule",
    "tune:ASHAScheduler",
)
FOREVER = 2000  # jobs; a sweep here has at most 8 trials × 4 rungs, and an annealed run each
NUMBERS = (Uniform(low=0.1, high=0.9), LogUniform(low=0.01, high=1.0))
OTHERS = (
    Integer(low=1, high=6),
    Ordinal(values=(0.1, 0.2, 0.5, 0.9)),
    Choice(values=(0.25, 0.5, 1.0)),
)
SWEEPS = itertools.count()
NAMES = ("learning_rate", "clip_norm", "beta1", "beta2", "init_scale", "output_multiplier")


@st.composite
def spaces(draw: st.DrawFn, scheduler: str) -> Space:
    """A space with something to move, where others exist under conditions, and constraints tie the numbers."""
    found: dict[str, Distribution] = {}
    for name in [NAMES[0], *draw(st.lists(st.sampled_from(NAMES[1:]), min_size=1, max_size=5, unique=True))]:
        kinds = NUMBERS if scheduler == "tune:PB2" and name in CHANGEABLE else (*NUMBERS, *OTHERS)
        distribution = draw(st.sampled_from(kinds))
        is_conditional: bool = draw(st.booleans())
        moved_by_tune = scheduler in ("tune:PB2", "tune:PopulationBasedTraining") and name in CHANGEABLE
        if found and is_conditional and not moved_by_tune:
            parent = draw(st.sampled_from(list(found)))
            value: Any = found[parent].decode([draw(st.sampled_from([0.0, 0.4, 0.6, 1.0]))])
            conditions: list[OneOf | Range] = [OneOf(values=(value,)), Range(low=value), Range(high=value)]
            allowed = draw(st.sampled_from(conditions))
            distribution = replace(distribution, when=Condition(parents=((parent, allowed),)))
        found[name] = distribution
    numbers = [name for name, distribution in found.items() if not isinstance(distribution, Choice | Ordinal)]
    constraints = {}
    if len(numbers) > 1:
        pair = tuple(draw(st.permutations(numbers))[:2])
        rule = draw(st.sampled_from(["less", "at_most", "sum_at_most", "product_at_least"]))
        middle = [float(cast(float, found[name].decode([0.5]))) for name in pair]
        bound = {"sum_at_most": sum(middle), "product_at_least": math.prod(middle)}.get(rule)
        constraints["tied"] = Constraint(rule=rule, names=pair, bound=bound)
    return Space(found, constraints)


class Controller:
    """The part of Tune's loop that a scheduler uses: trials that are alive, and pausing and stopping them."""

    def __init__(self, scheduler: RungScheduler) -> None:
        self.scheduler, self.live = scheduler, set[Any]()

    def get_live_trials(self) -> set[Any]:
        return self.live

    def pause_trial(self, trial: Any, should_checkpoint: bool) -> None:
        assert trial.status == "RUNNING"
        trial.status = "PAUSED"

    def stop_trial(self, trial: Any) -> None:
        trial.status = "TERMINATED"
        self.live.discard(trial)
        self.scheduler.on_trial_complete(self, trial, {})


class PlantedTrial:
    """A Tune trial without a process."""

    def __init__(self, trial_id: str, config: dict[str, Any]) -> None:
        self.trial_id, self.config, self.status = trial_id, config, "PENDING"
        self.metric_n_steps: dict[str, Any] = {}
        self.metric_analysis: dict[str, Any] = {}

    def set_config(self, config: dict[str, Any]) -> None:
        assert self.config[JOB] != config[JOB] or self.status == "RUNNING"
        self.config = config


class Sweep:
    """A sweep as Tune runs it, with losses from a formula, which somebody cancels trials of."""

    def __init__(self, make_engine: MakeEngine, settings: SweepSettings, seed: int, cancels: float) -> None:
        self.random = random.Random(seed)
        self.cancels, self.settings = cancels, settings
        self.annealed: set[AnnealJob] = set()
        self._make_engine, self._name = make_engine, f"s{next(SWEEPS)}"
        self.asked: set[int] = set()
        self.jobs = itertools.count()
        self.begin()

    def make(self) -> Engine:
        return self._make_engine(self.settings, self._name, anneal_jobs=self.anneal_jobs)

    def begin(self) -> None:
        """Begin, or resume after the driver died."""
        self.engine = self.make()
        self.n_processes = self.random.randint(1, 4)
        self.dispatcher = Dispatcher(self.engine, lambda: self.n_processes)
        self.scheduler = RungScheduler(self.dispatcher)
        self.tune = Controller(self.scheduler)
        self.running: dict[PlantedTrial, tuple[TrialSegment | AnnealJob, int]] = {}

    def anneal_jobs(self) -> list[AnnealJob]:
        record, top = self.engine.record, self.settings.rungs - 1
        live = [trial for loss, trial in record.ranking(top) if math.isfinite(loss) and trial not in record.cancelled]
        jobs = [AnnealJob(trial=trial, path=record.paths[trial], rung=top, seed=None) for trial in live]
        return [job for job in jobs if job not in self.annealed]

    def run(self) -> None:
        """Run it to its end, as Tune does."""
        while not (self.dispatcher.is_over and not self.tune.live):
            self.maybe_cancel()
            if self.random.random() < 0.05:
                self.begin()
            number = next(self.jobs)
            assert number < FOREVER, "it never ends"
            suggestion = None if self.dispatcher.is_over else self.dispatcher.suggest(trial_id := str(number))
            if isinstance(suggestion, dict):
                self.tune.live.add(trial := PlantedTrial(trial_id, suggestion))
                self.scheduler.on_trial_add(None, cast(Any, trial))
            if chosen := self.scheduler.choose_trial_to_run(self.tune):
                chosen.status = "PENDING"
            pending = [trial for trial in self.tune.live if trial.status == "PENDING"]
            held = sum(trial.status == "RUNNING" for trial in self.tune.live)
            for trial in sorted(pending, key=lambda trial: int(trial.trial_id))[: self.n_processes - held]:
                self.start(trial)
            if self.running and self.random.random() < 0.8:
                self.step(self.random.choice(list(self.running)))
            elif pending and not self.running:
                assert held < self.n_processes, "processes rest while a trial waits for one"

    def start(self, trial: PlantedTrial) -> None:
        """A trial gets a process; its job was asked for before any later cancel."""
        trial.status = "RUNNING"
        self.scheduler.started(cast(Any, trial))
        job = job_from_json(trial.config[JOB])
        assert sum(job.trial == other.trial for other, _ in self.running.values()) == 0 or isinstance(job, AnnealJob)
        self.running[trial] = job, job.first if isinstance(job, TrialSegment) else job.rung

    def step(self, trial: PlantedTrial) -> None:
        """A job comes to its next rung, or its annealed end."""
        job, rung = self.running.pop(trial)
        result = report(3.0)
        if isinstance(job, TrialSegment):
            result = report(self.loss(job.path[-1][1], rung), rung=rung, segment="s", tokens=1000, seconds=1.0)
        else:
            self.annealed.add(job)
        self.maybe_cancel()
        if self.scheduler.on_trial_result(self.tune, cast(Any, trial), result) == TrialScheduler.CONTINUE:
            assert job.trial not in self.asked, "it goes on after a cancel"
            self.running[trial] = job, rung + 1

    def loss(self, config: Config, rung: int) -> float | None:
        if self.random.random() < 0.1:
            return None
        return 3.0 - 0.2 * rung + 0.1 * abs(math.log(cast(float, config["learning_rate"])))

    def maybe_cancel(self) -> None:
        started = [trial for trial in self.engine.record.configs if trial not in self.asked]
        if started and self.random.random() < self.cancels:
            trial = self.random.choice(started)
            cancel_trial(self.engine.record._ledger, self.engine.record.sweep, trial, "")
            self.asked.add(trial)


def check(sweep: Sweep) -> None:
    """Every configuration lies in the space, and whoever may still train has come to the end."""
    engine, top = sweep.engine, sweep.settings.rungs - 1
    record, space = engine.record, sweep.settings.space
    assert engine.is_finished
    assert sweep.make().is_finished, "a later run has something to do"
    for path in record.paths.values():
        for _, config in path:
            space.validate(config)
            for name in {*config, *path[0][1]} - {*CHANGEABLE}:
                assert config.get(name) == path[0][1].get(name), "weights were made with another"
    assert record.cancelled.keys() == sweep.asked
    live = [trial for trial in record.configs if trial not in record.cancelled]
    alive = [trial for trial in live if not record.diverged(trial)]
    at_top = [trial for trial in alive if record.last_rung(trial) == top]
    match sweep.settings.scheduler:
        case "none":
            assert at_top == alive
        case "pbt":
            assert {record.last_rung(trial) for trial in (live if at_top else alive)} <= {top}
        case "asha":
            assert bool(at_top) == bool(alive)


@st.composite
def sweeps(draw: st.DrawFn) -> tuple[SweepSettings, int, float]:
    """Settings, the seed of losses and events, and how often somebody cancels a trial."""
    scheduler = draw(st.sampled_from(SCHEDULERS))
    space, seed = draw(spaces(scheduler)), draw(st.integers(0, 2**32))
    try:
        space.sample(8, seed)
    except SpaceError:  # the constraint can hardly be satisfied
        assume(False)
    settings = SweepSettings(
        trials=draw(st.integers(2, 8)),
        n_tokens=8000,
        rungs=draw(st.integers(2, 4)),
        space=space,
        searcher="random",
        scheduler=scheduler,
        share=draw(st.sampled_from([0.2, 0.5])),
        resample=draw(st.sampled_from([0.0, 0.5])),
        seed=seed,
    )
    return settings, seed, draw(st.sampled_from([0.0, 0.05, 0.3]))


def check_one(make_engine: MakeEngine, settings: SweepSettings, seed: int, cancels: float) -> None:
    sweep = Sweep(make_engine, settings, seed, cancels)
    sweep.run()
    check(sweep)


@examples(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sweeps())
def test_a_sweep_stays_in_its_space_heeds_cancels_and_ends(
    make_engine: MakeEngine, sweep: tuple[SweepSettings, int, float]
) -> None:
    check_one(make_engine, *sweep)


@pytest.mark.soak
@examples(max_examples=1500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sweeps())
def test_many_more_do(make_engine: MakeEngine, sweep: tuple[SweepSettings, int, float]) -> None:
    check_one(make_engine, *sweep)
