from __future__ import annotations

from dataclasses import replace

import pytest

from muscale.search.path import path_of
from muscale.trial import TrialPlan
from proxy_models.config import ModelConfig
from proxy_models.hyperparameters import Hyperparameters, chain
from proxy_models.numerics import Numerics
from proxy_models.schedule import ScheduleName

BATCH = 128
MODEL = ModelConfig(d_model=32, n_layers=1, context_length=32)
NUMERICS = Numerics(model=MODEL, base=MODEL, corpus_key="none", seed=0, evaluation_tokens=512)


@pytest.mark.parametrize("schedule", ["wsd", "wsd_linear"])
def test_the_last_branch_of_a_trial_is_its_whole_run_under_its_schedule(schedule: ScheduleName) -> None:
    defaults = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH, schedule=schedule)
    plan = TrialPlan(numerics=NUMERICS, defaults=defaults, n_tokens=100 * BATCH, rung_tokens=(40 * BATCH, 85 * BATCH))
    path = path_of({"learning_rate": 0.02})
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
    path = path_of({})
    whole = plan.branch(path, 1)
    assert whole.numerics == numerics.for_run(whole.last.end)
    assert plan.branch(path, 0).stem == whole.stem == plan.rung(path, 0).stem
