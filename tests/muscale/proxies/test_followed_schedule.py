"""A schedule that a population's winner followed: the runs of every later stage follow it too, and say where it is from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from muscale import StageError, StudyConfig
from muscale.actors.jobs import Job
from muscale.layout import LEDGER
from muscale.plans.costs import estimate
from muscale.plans.plan import Plan
from muscale.plans.planning import Planner
from muscale.proxies import ladder, transfer
from muscale.search.record import RungResult
from muscale.search.sweep import Sweep
from muscale.search.sweep_conclusion import make_result
from muscale.search.sweep_jobs import ConfigHistory, history_of
from muscale.search.trial import TrialPlan
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain, stems
from muscale.store.outcome import Outcome
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.recipes.stages import HyperparameterStage
from proxy_models.training.numerics import Numerics
from scaling import HorizonLaw, fit
from search_spaces import Config
from tests.muscale.planted import planted_horizon

PATH: ConfigHistory = ((0, {"learning_rate": 0.01}), (1, {"learning_rate": 0.012, "weight_decay_tau": 0.3}))
MakeStudy = Callable[..., Path]


@pytest.fixture
def config(make_study: MakeStudy) -> StudyConfig:
    tau = 'sweep.space.weight_decay_tau={distribution="log_uniform", low=0.1, high=1.0}'
    return StudyConfig.read(make_study(), ["sweep.scheduler=pbt", tau])


@pytest.fixture
def numerics(config: StudyConfig) -> Numerics:
    return Numerics(model=config.model, base=config.model, corpus_key="c", seed=0, evaluation_tokens=1)


@pytest.fixture
def plan(config: StudyConfig, numerics: Numerics) -> TrialPlan:
    rungs = config.rung_tokens()
    return TrialPlan(numerics=numerics, defaults=config.hyperparameters, n_tokens=16384, rung_tokens=rungs)


@pytest.fixture
def best(plan: TrialPlan) -> Hyperparameters:
    return plan.given(PATH, 1)


@pytest.fixture
def horizon() -> HorizonLaw:
    return planted_horizon()


def as_row(job: Job) -> dict[str, object]:
    outcome = Outcome(
        key=job.chain.key,
        tokens=job.chain.last.end,
        loss=2.0,
        averaged_loss=None,
        diverged_because=None,
        seconds=1.0,
    )
    row = {**job.row(outcome.key), "loss": 2.0, "numerics": job.chain.numerics.to_dict()}
    return dict(json.loads(json.dumps({**row, "segment": job.chain.last.to_dict()})))


def test_the_winner_s_annealed_run_is_the_planned_run_of_the_sweep_s_best(
    config: StudyConfig, numerics: Numerics, tmp_path: Path
) -> None:
    sweep = Sweep(config=config, ledger=Ledger(tmp_path / LEDGER), numerics=numerics)
    record = sweep.record()
    record.begin_round("random", config.sweep.space)

    def add_result(trial: int, rung: int, loss: float) -> None:
        record.add_result(RungResult(trial=trial, rung=rung, loss=loss, segment="s", tokens=1, seconds=1.0))

    for trial, loss in enumerate([2.0, 3.0]):
        record.start({"learning_rate": 0.01 * (trial + 1), "weight_decay_tau": 0.5}, until=0)
        add_result(trial, 0, loss)
    changed: Config = {"learning_rate": 0.012, "weight_decay_tau": 0.3}
    record.go_on(0, 1)
    record.go_on(1, 1, (*record.paths[0], (1, changed)), donor=0)
    add_result(0, 1, 1.9)
    add_result(1, 1, 1.8)
    jobs = {(ending.trial, ending.rung): job for ending, job in sweep.branches(record)}
    losses = {(0, 0): 1.9, (1, 0): 2.5, (0, 1): 1.7, (1, 1): 1.6}
    assert jobs.keys() == losses.keys()
    annealed = pd.DataFrame(
        [(*key, job.chain.last.end, losses[key]) for key, job in jobs.items()],
        columns=["trial", "rung", "n_tokens", "loss"],
    )
    result = make_result(config, sweep.plan, record, annealed, pd.DataFrame(columns=["trial", "seed", "loss"]))
    assert result.winner == 1
    assert [str(stage) for stage in result.best.stages] == ["after 50%: learning_rate × 1.2, weight_decay_tau = 0.3"]
    for (trial, rung), job in jobs.items():
        planned = Chain(numerics=numerics, segments=chain(job.hyperparameters, job.chain.last.end))
        assert (planned.key == job.chain.key) == (rung == 1)  # a shorter branch has the warmup and decay of its trial
        assert (job.hyperparameters == result.best) == ((trial, rung) == (1, 1))
    assert jobs[1, 0].hyperparameters.learning_rate == 0.02  # where it was before it copied


def test_every_run_of_the_ladder_follows_it_at_its_own_length(
    config: StudyConfig, numerics: Numerics, best: Hyperparameters, horizon: HorizonLaw
) -> None:
    jobs = ladder.ladder_jobs(config, numerics, best, horizon)
    assert len(stems([job.chain for job in jobs])) == len(jobs)
    for job in jobs:
        first, second, cooldown = job.chain.segments
        assert first.end == best.whole_batches(0.5 * second.end)
        assert cooldown.recipe == second.recipe
        # The horizon law gives the rate, and the schedule a factor on it.
        assert second.recipe.learning_rate == 0.012 / 0.01 * first.recipe.learning_rate
        assert first.recipe.learning_rate == job.hyperparameters.learning_rate != best.learning_rate


def test_only_runs_of_the_same_schedule_enter_the_law(
    config: StudyConfig, plan: TrialPlan, best: Hyperparameters, horizon: HorizonLaw
) -> None:
    members = {"winner": PATH, "another": history_of({"learning_rate": 0.02})}
    jobs = [
        Job(purpose="sweep", label=label, hyperparameters=plan.followed(path, rung), chain=plan.branch(path, rung))
        for label, path in members.items()
        for rung in range(2)
    ]
    jobs += transfer.jobs(transfer.members(config, plan.numerics, best))
    table = ladder.law_rows(
        pd.DataFrame([as_row(job) for job in jobs]), best, config.sweep.space, horizon, plan.numerics
    )
    left_out = dict(zip(table["key"], table["left_out"], strict=True))
    reasons = [left_out[job.chain.key] for job in jobs[:4]]
    assert "its stages" in reasons[0]  # its first generation alone
    assert reasons[2:] == reasons[:1] * 2
    assert "stages" not in reasons[1]
    grid = table[table["purpose"] == "transfer"]
    assert not grid["left_out"].str.contains("stages").any()


def test_a_grid_of_what_the_schedule_sets_is_refused(
    config: StudyConfig, numerics: Numerics, best: Hyperparameters, make_study: MakeStudy
) -> None:
    settings = ["sweep.scheduler=pbt", "transfer.over.weight_decay_tau={points=5}"]
    over = StudyConfig.read(make_study("over"), settings)
    with pytest.raises(StageError, match=r"transfer.over.weight_decay_tau: the winner's schedule .* \(after 50%: "):
        transfer.members(over, numerics, best)
    assert transfer.members(over, numerics, replace(best, stages=()))


def test_the_plan_names_the_source_of_its_schedule_and_trains_it(
    config: StudyConfig, numerics: Numerics, best: Hyperparameters, horizon: HorizonLaw
) -> None:
    sizes = [(n * 1e4, d * 1e5) for n in (1, 2, 4, 8) for d in (1, 2, 4, 8)]
    generator = np.random.default_rng(0)
    rows = pd.DataFrame(sizes, columns=["n_params", "n_tokens"])
    law = 1.5 + 40 / rows["n_params"] ** 0.4 + 100 / rows["n_tokens"] ** 0.4
    rows = rows.assign(loss=law * (1 + 1e-4 * generator.standard_normal(len(rows))), annealed=True, regret=0.0)
    found = fit(rows, n_params_convention="as planted", n_bootstrap=20)
    planned = Planner(config, best, horizon, found, winner=5).plan()
    assert planned.rules["stages"].startswith("schedule followed by trial 5 of the population; ")
    assert "stages = after 50%: learning_rate × 1.2, weight_decay_tau = 0.3  (schedule followed by" in str(planned)
    assert planned.hyperparameters.stages == best.stages
    assert Plan.from_dict(json.loads(json.dumps(planned.to_dict()))) == planned
    run = planned.chain(numerics)
    assert run.segments == chain(planned.hyperparameters, planned.n_tokens)
    assert len(run.segments) == 3
    assert "stages" not in Planner(config, replace(best, stages=()), horizon, found, winner=5).plan().rules


def test_what_runs_share_is_counted_once_and_stages_share_nothing(make_study: MakeStudy) -> None:
    plain = estimate(StudyConfig.read(make_study())).set_index("stage")["n_tokens"]
    config = StudyConfig.read(make_study("staged"), ["hyperparameters.stages=[{after=0.5, learning_rate=0.5}]"])
    staged = estimate(config).set_index("stage")["n_tokens"]
    lengths = [
        config.hyperparameters.whole_batches(n) for stem in config.ladder.stems for n in ladder.stem_lengths(stem)
    ]
    assert staged["ladder"] == sum(lengths) > plain["ladder"]
    assert HyperparameterStage(after=0.5, learning_rate=0.5) in config.hyperparameters.stages
