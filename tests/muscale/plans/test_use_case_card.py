"""The use-case card: limits by hand, the cheapest run of a planted law, what binds it, and targets of scores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from muscale import StudyConfig
from muscale.formatting import WIDTH
from muscale.plans.planning import Planner
from muscale.plans.use_case_card import Reaches, UseCaseCard, card_of, loss_target, use_case_card
from muscale.settings.use_case import UseCaseSettings
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member
from scaling import Budget, HorizonLaw, ScalingFit, fit_task

SIZES = [ModelFamily(base=ModelConfig(d_model=64, n_layers=2)).at(width=width) for width in (64, 128, 256, 512, 1024)]
H100 = Budget.of_days(10, "H100 SXM", 8)


def card(reached: Reaches | dict[str, Any], budget: Budget = H100, **settings: Any) -> UseCaseCard:
    targets = reached if isinstance(reached, dict) else {"loss": reached}
    return use_case_card(UseCaseSettings(targets={"loss": 2.0}, **settings), SIZES, budget, targets)


def by_compute(least: float) -> Reaches:
    """A target that is reached with .9 at this compute, at any size."""
    return lambda size, n_tokens: float(expit(math.log(9) + math.log(6 * size.n_params * n_tokens / least)))


def test_memory_and_latency_are_those_by_hand() -> None:
    """Weights of 4 bits: half a byte each; two H100 SXM read 6.7e12 bytes a second."""
    found = card(by_compute(1e10), serving_device="H100 SXM", serving_devices=2, serving_bits=4).sizes
    totals = np.array([size.n_params_total for size in SIZES])
    np.testing.assert_allclose(found["memory_gb"], totals / 2e9)
    np.testing.assert_allclose(found["latency_ms"], 1e3 * np.array([size.n_params for size in SIZES]) / 2 / 6.7e12)
    np.testing.assert_allclose(found["days"], 10)
    np.testing.assert_allclose(6.0 * found["n_params"] * found["n_tokens"], H100.compute_flops)


def test_each_limit_excludes_the_sizes_beyond_it() -> None:
    third = SIZES[2]
    for limit in (
        {"max_params": float(third.n_params_total)},
        {"serving_device": "H100 SXM", "latency_ms_per_token": 1e3 * third.n_params * 2 / 3.35e12 * 1.001},
    ):
        found = card(by_compute(1e10), **limit)
        assert found.sizes["meets_all"].tolist() == [True, True, True, False, False]
        assert set(found.sizes["fails"][3:]) == ({"max_params"} if "max_params" in limit else {"latency"})


def test_the_cheapest_run_is_the_planted_one() -> None:
    """The target is reached at 1e18 FLOPs at the third size, and needs more at sizes further from it."""

    def reached(size: Member, n_tokens: float) -> float:
        away = math.log(size.n_params / SIZES[2].n_params) ** 2
        return by_compute(1e18 * math.exp(away))(size, n_tokens)

    budget = Budget(compute_flops=1e19)
    run = card(reached, budget).cheapest
    assert run is not None
    assert (run["width"], run["depth"]) == (256, 2)
    assert run["compute_flops"] == pytest.approx(1e18, rel=0.01)
    assert run["P(loss)"] >= 0.9
    assert run["meets_all"]
    smaller = card(reached, budget, max_params=SIZES[1].n_params_total + 1.0).cheapest
    assert smaller is not None
    assert smaller["width"] == 128
    sure = card(reached, budget, probability=0.99).cheapest
    assert sure is not None
    assert sure["compute_flops"] == pytest.approx(11e18, rel=0.01), "odds of 99 instead of 9"


def test_what_binds_is_named() -> None:
    both = {"loss": by_compute(1e18), "arithmetic.accuracy": by_compute(5e18)}
    found = card(both, Budget(compute_flops=1e19))
    assert found.cheapest is not None
    assert found.cheapest["compute_flops"] == pytest.approx(5e18, rel=0.01)
    assert found.binding == ("arithmetic.accuracy",)
    far = card(by_compute(1e25), Budget(compute_flops=1e19))
    assert (far.cheapest, far.binding) == (None, ("loss",))
    assert card(by_compute(1e10), max_params=10.0).binding == ("max_params",)
    late = card(by_compute(2 * H100.compute_flops), deadline_days=15.0)
    assert (late.cheapest, late.binding) == (None, ("loss", "deadline"))
    assert card(by_compute(2 * H100.compute_flops), deadline_days=25.0).cheapest is not None
    assert card(by_compute(1e10), deadline_days=9.0).sizes["fails"].tolist() == ["deadline"] * 5


def test_a_target_without_a_forecast_is_not_reached() -> None:
    found = card(lambda size, n_tokens: math.nan)
    assert found.cheapest is None
    assert not found.sizes["meets_all"].any()


def test_targets_of_scores_are_those_of_a_planted_task() -> None:
    """A score of 64 runs, a sigmoid of ln N + ln D: the true run of .7 lies within a factor of two in compute."""
    rng = np.random.default_rng(0)
    n_params = np.geomspace(1e5, 1e7, 16)
    runs = pd.DataFrame([(n, r * n, seed) for n in n_params for r in (10.0, 40.0) for seed in (0, 1)])
    runs.columns = pd.Index(["n_params", "n_tokens", "seed"])
    middle = float(np.median(runs["n_params"] * runs["n_tokens"]))

    def score(product: Any) -> Any:
        return 0.25 + 0.75 * expit(0.5 * np.log(product / middle) - 1)

    runs["accuracy"] = score(runs["n_params"] * runs["n_tokens"]) + 0.005 * rng.standard_normal(len(runs))
    law = fit_task(runs, n_params_convention="without embeddings", chance=0.25)
    found = card(
        {"arithmetic.accuracy": lambda size, d: law.probability(size.n_params, d, 0.7)},
        Budget(compute_flops=6 * middle * 10),
    )
    assert found.cheapest is not None
    truth = 6 * middle * math.exp(2 * (math.log(0.6 / 0.4) + 1))
    assert 0.8 * truth < found.cheapest["compute_flops"] < 2 * truth
    chance = law.probability(found.cheapest["n_params"], found.cheapest["n_tokens"], 0.7)
    assert found.cheapest["P(arithmetic.accuracy)"] == chance >= 0.9


@pytest.fixture
def of_study(make_study: Callable[[], Path], law: ScalingFit, horizon: HorizonLaw) -> Callable[..., UseCaseCard | None]:
    path = make_study()

    def make(*overrides: str) -> UseCaseCard | None:
        config = StudyConfig.read(path, overrides)
        return card_of(config, law, Planner(config, config.hyperparameters, horizon, law).plan())

    return make


def test_a_study_s_card_is_by_its_law(of_study: Callable[..., UseCaseCard | None], law: ScalingFit) -> None:
    assert of_study() is None
    found = of_study("use_case.targets.loss=2.4", 'use_case.serving_device="H100 SXM"')
    assert found is not None
    run = found.cheapest
    assert run is not None
    ahead = law.forecast(run["n_params"], run["n_tokens"])
    assert ahead.probability(2.4) == pytest.approx(run["P(loss)"])
    assert 0.9 <= run["P(loss)"] < 0.92
    assert found.doubts == ahead.reasons
    least = min(
        flops
        for flops in np.geomspace(*found.searched, 40)
        for size in found.sizes["n_params"]
        if law.forecast(size, flops / 6 / size).probability(2.4) >= 0.9
    )
    assert run["compute_flops"] <= least * 1.01
    assert json.loads(json.dumps(found.to_dict()))["cheapest"]["width"] == run["width"]
    assert max(map(len, str(found).splitlines())) <= WIDTH


def test_shapes_of_the_plan_are_the_sizes_of_the_card(of_study: Callable[..., UseCaseCard | None]) -> None:
    found = of_study("use_case.targets.loss=2.4", "plan.shapes=[{width=32}, {width=48, depth=2}]")
    assert found is not None
    assert found.sizes[["width", "depth"]].to_numpy().tolist() == [[32, 1], [48, 2]]


def test_another_batch_counts_by_its_largest_effect(
    make_study: Callable[[], Path], law: ScalingFit, horizon: HorizonLaw
) -> None:
    config = StudyConfig.read(make_study(), ["plan.explicit.batch_tokens=512"])
    plan = Planner(config, config.hyperparameters, horizon, law).plan()
    assert plan.batch is not None
    assert plan.batch.effect > 0
    upper = 0.5 + plan.forecast.level / 2
    assert plan.forecast.probability(plan.forecast.high) == pytest.approx(upper), (
        "the scale is that of the widened bounds"
    )
    assert loss_target(law, plan, plan.forecast.high)(plan.model, plan.n_tokens) == pytest.approx(0.95)
    alone = loss_target(law, replace(plan, batch=None), plan.forecast.high)(plan.model, plan.n_tokens)
    assert alone > 0.95
