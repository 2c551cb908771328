from __future__ import annotations

from dataclasses import replace

import pytest

from muscale.search.sweep_jobs import ConfigHistory, history_of
from muscale.search.trial import TrialPlan
from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import ScheduleName
from proxy_models.recipes.segments import chain
from proxy_models.recipes.stages import HyperparameterStage
from proxy_models.training.numerics import Numerics
from search_spaces import Config

BATCH = 128
MODEL = ModelConfig(d_model=32, n_layers=1, context_length=32)
NUMERICS = Numerics(model=MODEL, base=MODEL, corpus_key="none", seed=0, evaluation_tokens=512)


@pytest.mark.parametrize("schedule", ["wsd", "wsd_linear"])
def test_the_last_branch_of_a_trial_is_its_whole_run_under_its_schedule(schedule: ScheduleName) -> None:
    defaults = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH, schedule=schedule)
    plan = TrialPlan(numerics=NUMERICS, defaults=defaults, n_tokens=100 * BATCH, rung_tokens=(40 * BATCH, 85 * BATCH))
    path = history_of({"learning_rate": 0.02})
    whole = plan.branch(path, 1)
    assert whole.segments == chain(plan.hyperparameters(path[0][1]), 100 * BATCH)
    assert whole.parent is not None
    assert whole.parent.key == plan.rung(path, 1).key
    assert plan.branch(path, 0).stem == whole.stem


@pytest.mark.parametrize("last_rung", [84, 85, 86])
def test_all_of_a_trial_sees_the_data_of_its_longest_run(last_rung: int) -> None:
    defaults = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH)
    numerics = replace(NUMERICS, stages_by_fraction=True)
    rungs = (40 * BATCH, last_rung * BATCH)
    plan = TrialPlan(numerics=numerics, defaults=defaults, n_tokens=100 * BATCH, rung_tokens=rungs)
    path = history_of({})
    whole = plan.branch(path, 1)
    assert whole.numerics == numerics.for_run(whole.last.end)
    assert plan.branch(path, 0).stem == whole.stem == plan.rung(path, 0).stem


def test_a_step_that_changes_nothing_begins_no_stage() -> None:
    defaults = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH)
    rungs = (20 * BATCH, 40 * BATCH, 60 * BATCH, 85 * BATCH)
    plan = TrialPlan(numerics=NUMERICS, defaults=defaults, n_tokens=100 * BATCH, rung_tokens=rungs)
    low: Config = {"learning_rate": 0.02}
    high: Config = {"learning_rate": 0.03}
    path: ConfigHistory = ((0, low), (1, low), (2, high), (3, low))
    assert plan.followed(path, 1) == plan.hyperparameters(low)
    assert plan.rung(path, 1).key == plan.rung(history_of(low), 1).key
    assert [(stage.after, stage.learning_rate) for stage in plan.followed(path, 3).stages] == [
        (40 / 85, 0.03 / 0.02),
        (60 / 85, 1.0),
    ]
    assert plan.rung(path, 3).segments[:2] == plan.rung(path, 2).segments


def test_stages_lie_at_shares_of_the_trials_and_a_shorter_branch_records_where() -> None:
    stages = (HyperparameterStage(after=0.33, learning_rate=0.5), HyperparameterStage(after=0.8, beta2=0.9))
    defaults = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH, stages=stages)
    rungs = (40 * BATCH, 85 * BATCH)
    plan = TrialPlan(numerics=NUMERICS, defaults=defaults, n_tokens=100 * BATCH, rung_tokens=rungs)
    path = history_of({"learning_rate": 0.02})
    whole = plan.branch(path, 1)
    assert whole.segments == chain(plan.followed(path, 1), 100 * BATCH)
    assert plan.given(path, 0) == plan.given(path, 1) == plan.followed(path, 1)
    assert [s.end // BATCH for s in whole.segments] == [28, 68, 85, 100]
    early = plan.branch(path, 0)
    assert early.segments[0] == whole.segments[0]
    assert [(s.end // BATCH, s.recipe) for s in early.segments[1:]] == [
        (40, whole.segments[1].recipe),
        (47, whole.segments[1].recipe),
    ]
    assert plan.followed(path, 0).stages == (HyperparameterStage(after=28 / 40, learning_rate=0.5),)
