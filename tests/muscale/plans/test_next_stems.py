"""Further runs of the ladder: those that the study can train and that narrow the plan's forecast most, or none."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from muscale import StudyConfig
from muscale.plans.next_stems import candidates, choose
from muscale.plans.plan import Plan
from muscale.plans.planning import Planner
from muscale.proxies.ladder import stem_lengths
from muscale.settings.plan import Stem
from muscale.settings.tables import LadderSettings
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.segments import chain
from scaling import ScalingFit, fit
from tests.muscale.planted import planted_fit, planted_horizon

MakeStudy = Callable[..., Path]


@pytest.fixture(scope="module")
def law() -> ScalingFit:
    return planted_fit(noise=3e-3)


@pytest.fixture
def config(make_study: MakeStudy) -> StudyConfig:
    return StudyConfig.read(make_study(), ["plan.compute_flops=2e11"])


@pytest.fixture
def plan(config: StudyConfig, law: ScalingFit) -> Plan:
    return Planner(config, config.hyperparameters, planted_horizon(), law).plan()


def test_candidates_are_runs_that_the_study_can_train_and_has_not(
    config: StudyConfig, law: ScalingFit, plan: Plan, corpus: Corpus
) -> None:
    table = candidates(config, law, plan, corpus, affordable_flops=2e10)
    assert len(table) > 20
    assert table["n_tokens"].min() >= law.n_tokens_range[0]
    assert table["n_tokens"].max() <= 4 * corpus.n_tokens
    assert table["cost_flops"].max() <= 2e10
    assert table["n_params"].max() <= plan.n_params
    np.testing.assert_array_equal(table["cost_flops"], 6 * table["n_params"] * table["n_tokens"])
    for row in table.itertuples():
        assert config.family.at(width=row.d_model).n_params == row.n_params
        assert chain(plan.hyperparameters, row.n_tokens)[-1].end == row.n_tokens
    for width, runs in table.groupby("d_model"):
        known = [length for stem in config.ladder.stems if stem.width == width for length in stem_lengths(stem)]
        lengths = np.sort([*runs["n_tokens"], *known])
        new = np.isin(lengths, runs["n_tokens"])
        near = np.diff(np.log(lengths)) < np.log(1.1)
        assert not (near & (new[1:] | new[:-1])).any(), "two runs of a width with the same information"


def test_the_advised_runs_can_be_pasted_and_narrow_the_forecast(
    config: StudyConfig, plan: Plan, corpus: Corpus
) -> None:
    noisy = planted_fit(noise=0.02)
    few = replace(noisy, rows=noisy.rows.iloc[::2])
    found = choose(config, few, plan, corpus, affordable_flops=4e10, width=1e-4)
    assert 1 <= len(found.table) <= 4
    assert found.result.width_then < found.result.width_now
    assert found.table["spent_flops"].iloc[-1] <= 4e10
    pasted = tomllib.loads("stems = [\n" + "\n".join(found.lines) + "\n]")["stems"]
    stems = LadderSettings(stems=tuple(Stem(**stem) for stem in pasted)).stems
    assert [(s.width, s.n_tokens) for s in stems] == [
        *zip(found.table["d_model"], found.table["n_tokens"], strict=True)
    ]
    assert {stem.branches for stem in stems} == {1}
    assert "to train them, add to stems of [ladder]:" in str(found)
    assert all(line in str(found) for line in found.lines)
    assert json.loads(json.dumps(found.to_dict()))["stems"] == [*found.lines]


def test_a_narrow_interval_within_support_needs_no_more(
    config: StudyConfig, law: ScalingFit, plan: Plan, corpus: Corpus
) -> None:
    assert plan.forecast.supported
    found = choose(config, law, plan, corpus, width=0.5)
    assert not found.lines
    assert "none: the interval is at most 50.00% wide and within what was tested" in str(found)
    dear = choose(config, law, plan, corpus, affordable_flops=1e6, width=1e-4)
    assert "none: no affordable candidate is left" in str(dear)


def test_by_default_it_spends_a_tenth_of_the_plan_or_the_largest_run(
    config: StudyConfig, law: ScalingFit, plan: Plan, corpus: Corpus
) -> None:
    found = choose(config, law, plan, corpus, width=1e-4)
    assert found.affordable_flops == max(0.1 * plan.compute_flops, law.compute_range[1])
    assert found.share == pytest.approx(found.affordable_flops / plan.compute_flops)


def test_a_ladder_of_one_size_gets_longer_runs_of_this_size(config: StudyConfig, corpus: Corpus) -> None:
    width = config.ladder.stems[0].width
    size, tokens = config.family.at(width=width).n_params, np.geomspace(2e4, 8e4, 6)
    loss = (1.8 + 60 / (tokens + 3e4) ** 0.4) * np.exp(0.01 * np.random.default_rng(0).standard_normal(6))
    law = fit(
        pd.DataFrame({"n_params": size, "n_tokens": tokens, "loss": loss}), n_params_convention="total", n_bootstrap=2
    )
    config = config.model_copy(update={"plan": config.plan.model_copy(update={"compute_flops": 6 * size * 1.6e5})})
    plan = Planner(config, config.hyperparameters, planted_horizon(), law).plan()
    found = choose(config, law, plan, corpus, affordable_flops=plan.compute_flops, width=1e-4)
    assert set(found.table["d_model"]) == {width}
    assert found.table["n_tokens"].max() <= plan.n_tokens
    assert found.result.width_then < found.result.width_now
