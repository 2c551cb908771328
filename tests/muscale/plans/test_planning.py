"""The plan is the best of the shapes that can be built, counts epochs, and says what it rests on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from muscale import StageError, StudyConfig, StudyFileError
from muscale.formatting import WIDTH
from muscale.plans.plan import Plan, as_registered, register, replaced_by
from muscale.plans.planning import Planner
from muscale.plans.sizing import epochs, most_tokens
from muscale.store.ledger import Ledger
from proxy_models.data.corpus import Corpus
from scaling import HorizonLaw, ScalingFit, StageLaw, fit
from tests.muscale.planted import large_and_small

MakeStudy = Callable[..., Path]
MakePlan = Callable[..., Plan]


@pytest.fixture
def read(make_study: MakeStudy) -> Callable[..., StudyConfig]:
    path = make_study()
    return lambda *overrides: StudyConfig.read(path, overrides)


@pytest.fixture
def planned(read: Callable[..., StudyConfig], law: ScalingFit, horizon: HorizonLaw) -> MakePlan:
    def make(*overrides: str, corpus: Corpus | None = None) -> Plan:
        config = read(*overrides)
        return Planner(config, config.hyperparameters, horizon, law, corpus=corpus).plan()

    return make


def test_other_starts_of_the_last_stage_have_forecasts_or_a_reason(
    read: Callable[..., StudyConfig], law: ScalingFit, horizon: HorizonLaw
) -> None:
    config = read()
    config = config.model_copy(update={"ladder": config.ladder.model_copy(update={"stage_branches": 2})})
    rows = [
        {"stem": str(n), "n_params": n * 1e5, "n_tokens": 1e6, "share": share, "log_ratio": 0.2 - share}
        for n in (1, 2, 4)
        for share in (0.0, 0.1)
    ]
    stages = StageLaw(planned=0.2, ratios=pd.DataFrame(rows))
    plan = Planner(config, config.hyperparameters, horizon, law, stages=stages).plan()
    assert [of.until_fraction for of in plan.stages] == [0.9, 1.0]
    for of, ratio in zip(plan.stages, (0.1, 0.2), strict=True):
        assert of.loss == pytest.approx(plan.forecast.loss * math.exp(ratio))
        assert of.high / of.loss > plan.forecast.high / plan.forecast.loss
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    none = Planner(config, config.hyperparameters, horizon, law, stages="too few").plan()
    assert (none.stages, none.no_stages) == ((), "too few")
    assert none.key == plan.key


def test_no_other_shape_of_the_family_does_better(
    planned: MakePlan, read: Callable[..., StudyConfig], law: ScalingFit
) -> None:
    plan, config = planned("plan.tolerance=0.05"), read()
    assert plan.n_tokens == config.hyperparameters.whole_batches(2.5e10 / (6 * plan.n_params))
    losses = {}
    for width in range(16, 400, 16):
        n_params = config.family.at(width=width).n_params
        losses[width] = float(law.ensemble.law.loss(n_params, 2.5e10 / (6 * n_params)))
    best = min(losses, key=losses.__getitem__)
    assert plan.model == config.family.at(width=best)
    near = {width for width, loss in losses.items() if loss <= losses[best] * 1.05}
    decision = plan.decision
    assert {size["d_model"] for size in decision["near"]} == near
    assert len(near) > 1
    assert plan.wanted_n_params == law.ensemble.law.allocate(2.5e10).n_params


def test_a_budget_that_pays_for_no_batch_is_refused(planned: MakePlan) -> None:
    """Rounded to one batch the run cost 96 times its budget."""
    with pytest.raises(StageError, match="batch of 256 tokens") as refused:
        planned("plan.shapes=[{width = 16384}]")
    assert "2.5e+10" in str(refused.value)


def test_a_batch_by_law_is_whole_sequences_of_the_full_run_s_context(
    read: Callable[..., StudyConfig], law: ScalingFit, horizon: HorizonLaw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muscale.plans.batch.published_batch", lambda _n_tokens: 64.0)
    config = read("plan.explicit.context_length=128", "promote.workers=1")
    batch = Planner(config, config.hyperparameters, horizon, law).batch
    assert batch is not None
    assert (batch.tokens, batch.best_tokens) == (128, 64.0)


def test_no_line_of_a_plan_is_longer_than_a_terminal(planned: MakePlan) -> None:
    text = str(planned("plan.compute_flops=1e13", 'plan.accelerator="H100 SXM"'))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "  forecast " in text


def test_extrapolation_of_the_horizon_law_is_reported_with_the_grid_that_would_shorten_it(planned: MakePlan) -> None:
    near, far = planned(), planned("plan.compute_flops=1e13")
    assert near.n_tokens / 32768 < 8 < far.n_tokens / 32768  # the longest of the planted grids
    assert near.rules["learning_rate"].endswith(f"{near.n_tokens / 32768:.3g}× beyond its grids")
    further = math.ceil(far.n_tokens / 8 / 16384)
    assert far.rules["learning_rate"].endswith(f": {further} among transfer.horizons would bring them within 8×")


def test_shapes_may_be_named_and_a_depth_outside_the_fit_is_reported(
    planned: MakePlan, read: Callable[..., StudyConfig], law: ScalingFit
) -> None:
    family = read().family
    named = [family.at(width=48), family.at(width=32, depth=3), family.at(width=160)]
    shapes = "plan.shapes=[{width=48}, {width=32, depth=3}, {width=160}]"
    plan = planned(shapes)
    losses = [float(law.ensemble.law.loss(one.n_params, 2.5e10 / (6 * one.n_params))) for one in named]
    assert plan.model == named[int(np.argmin(losses))]
    deep = planned("plan.shapes=[{width=32, depth=3}]", "plan.tolerance=0.5")
    assert deep.model == named[1]
    assert deep.compute_flops == pytest.approx(2.5e10, rel=0.01)
    assert "(width 32, depth 3, +0.00%)" in str(deep)
    assert any("depth 3: the runs fitted have 1; add ladder.stems" in reason for reason in deep.forecast.reasons)
    stems = "[{width=16, n_tokens=16384}, {width=32, depth=3, n_tokens=16384}]"
    supported = planned("plan.shapes=[{width=32, depth=3}]", f"ladder.stems={stems}")
    assert not any("depth" in reason for reason in supported.forecast.reasons)
    with pytest.raises(StudyFileError, match=r"plan\.shapes: .*d_model"):
        read("plan.shapes=[{width=15}]")


def test_a_plan_gives_its_reasons_and_is_read_back(planned: MakePlan) -> None:
    plan = planned('plan.accelerator="H100 SXM"', "plan.n_devices=2", "promote.precision=bf16")
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    decision = plan.decision
    assert decision["gpu_hours"] == pytest.approx(2.5e10 / (989.5e12 * 0.4 * 3600))
    assert decision["dollars"] == pytest.approx(2.5 * decision["gpu_hours"])
    assert decision["intervals"]["n_params"]["low"] <= plan.n_params <= decision["intervals"]["n_params"]["high"]
    for text in (
        "device-hours",
        "days on 2 devices",
        "within 0.50% of the best loss",
        "assumed: H100 SXM: 40%",
    ):
        assert text in str(plan)
    assert "bf16 peak" not in str(plan)
    assert "losses in fp32, the full run is in bf16" in str(plan)
    assert "losses in" not in str(planned("numerics.precision=bf16"))
    assert "bf16 peak, the full run is in fp32" in str(planned('plan.accelerator="H200"'))


def test_what_the_space_fixes_is_from_the_study_file_and_was_not_searched(planned: MakePlan) -> None:
    fixed = 'sweep.space.beta1={distribution="fixed", value=0.8}'
    found = {one.name: one for one in planned(fixed, "hyperparameters.beta1=0.8").provenance}
    assert (found["beta1"].source, found["beta1"].searched) == ("the study file", False)
    assert found["learning_rate"].searched


def test_settings_that_only_change_messages_keep_the_key(planned: MakePlan, corpus: Corpus) -> None:
    plan = planned()
    assert planned('plan.accelerator="H200"', "plan.tolerance=0.01").key == plan.key
    assert planned("plan.compute_flops=3.5e10").key != plan.key
    served = planned("plan.served_tokens=1e6")
    assert served.n_params < plan.n_params
    assert served.key != plan.key
    assert served.compute_flops < 2.5e10


def test_serving_alone_may_cost_the_budget(planned: MakePlan) -> None:
    with pytest.raises(StageError, match=r"plan: serving 1e\+12.*2.5e\+10 FLOPs"):
        planned("plan.served_tokens=1e12")


def test_a_corpus_seen_again_counts_for_less(planned: MakePlan, corpus: Corpus, law: ScalingFit) -> None:
    free, plan = planned(), planned(corpus=corpus)
    seen = plan.n_tokens / corpus.n_tokens
    assert free.n_tokens / corpus.n_tokens > 2
    decision = plan.decision
    assert decision["epochs"] == pytest.approx(seen, rel=0.01)
    worth = corpus.n_tokens * (1 + 15.387756 * (1 - np.exp(-(seen - 1) / 15.387756)))
    assert decision["loss"] == pytest.approx(float(law.ensemble.law.loss(plan.n_params, worth)), rel=1e-3)
    assert "appendix A), by which the loss is" in " ".join(str(plan).split())
    assert f"N as in the law: {law.n_params_convention}" in str(plan)
    assert free.decision["epochs"] is None
    assert plan.forecast.loss == law.forecast(plan.n_params, plan.n_tokens).loss


def test_epochs_may_be_limited_and_many_raise_a_warning(planned: MakePlan, corpus: Corpus) -> None:
    plan = planned("plan.max_epochs=1", corpus=corpus)
    assert plan.n_tokens <= corpus.n_tokens + 256 < planned(corpus=corpus).n_tokens
    assert any(limit.startswith("data") for limit in plan.decision["limits"])
    many = planned("plan.compute_flops=1e12", corpus=corpus)
    assert any("epochs over the corpus: tested with new tokens" in reason for reason in many.forecast.reasons)
    assert not any("epochs" in reason for reason in planned("plan.compute_flops=1e12").forecast.reasons)


def test_epochs_of_a_mixture_are_the_mean_over_its_tokens(tmp_path: Path) -> None:
    mixed = large_and_small(tmp_path, large=0.75)
    each = mixed.epochs(100_000)
    assert epochs(mixed, 100_000, 32) == pytest.approx(0.75 * each["large"] + 0.25 * each["small"])
    longest = most_tokens(mixed, 4.0, 32)
    assert epochs(mixed, longest, 32) <= 4 < epochs(mixed, longest + 100, 32)


def test_a_new_plan_replaces_the_newest_of_its_budget(tmp_path: Path, planned: MakePlan) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    try:
        plan = planned()
        assert replaced_by(plan, ledger) is None
        register(plan, ledger)
        later = replace(plan, key="later")
        assert replaced_by(later, ledger) == as_registered(plan, ledger)
        register(later, ledger)
        newest = replaced_by(replace(plan, key="newest"), ledger)
        assert newest is not None
        assert newest.key == "later"
        assert replaced_by(plan, ledger) is None, "it is registered"
        assert replaced_by(replace(plan, key="other", decision=plan.decision | {"budget": "more"}), ledger) is None
    finally:
        ledger.close()


def test_a_registered_plan_keeps_its_forecast_and_shows_today_s_prices(tmp_path: Path, planned: MakePlan) -> None:
    with_price = planned('plan.accelerator="H200"')
    ledger = Ledger(tmp_path / "ledger.sqlite")
    try:
        first = register(planned(), ledger)
        changed = replace(with_price.forecast, loss=9.0)
        again = register(replace(with_price, forecast=changed), ledger)
        assert again.forecast == first.forecast
        assert again.registered_at == first.registered_at
        assert first.decision["dollars"] is None
        assert again.decision["dollars"] > 0
    finally:
        ledger.close()


def test_a_ladder_of_one_ratio_sizes_at_it_and_says_so(read: Callable[..., StudyConfig], horizon: HorizonLaw) -> None:
    n_params = np.geomspace(1e4, 2e5, 16)
    rows = pd.DataFrame({"n_params": n_params, "n_tokens": 20 * n_params})
    rows["loss"] = (1.5 + 40 / n_params**0.4 + 100 / rows["n_tokens"] ** 0.4) * np.exp(
        1e-3 * np.random.default_rng(0).standard_normal(16)
    )
    config = read()
    plan = Planner(
        config, config.hyperparameters, horizon, fit(rows, n_params_convention="total", n_bootstrap=2)
    ).plan()
    wanted = math.sqrt(2.5e10 / 6 / 20)
    nearest = min(range(16, 400, 16), key=lambda width: abs(math.log(config.family.at(width=width).n_params / wanted)))
    assert plan.model == config.family.at(width=nearest)
    assert plan.wanted_n_params == plan.n_params
    assert "do not determine the best one" in str(plan)
    assert any("tokens per parameter" in reason for reason in plan.forecast.reasons), (
        "the family has nothing nearer than 9.6"
    )


def test_a_ladder_of_one_size_keeps_it_and_its_budget_gives_the_tokens(
    read: Callable[..., StudyConfig], horizon: HorizonLaw
) -> None:
    config = read("plan.compute_flops=2.5e10")
    size = config.family.at(width=config.ladder.stems[0].width).n_params
    tokens = 2.5e10 / (6 * size) / np.array([16, 8, 5, 3, 2])
    rows = pd.DataFrame({"n_params": size, "n_tokens": tokens, "loss": 1.8 + 60 / (tokens + 3e4) ** 0.4})
    law = fit(rows, n_params_convention="total", n_bootstrap=2)

    def planned(*overrides: str, corpus: Corpus | None = None) -> Plan:
        config = read("plan.compute_flops=2.5e10", *overrides)
        return Planner(config, config.hyperparameters, horizon, law, corpus=corpus).plan()

    plan = planned()
    assert plan.n_params == plan.wanted_n_params == law.one_size == size
    assert plan.n_tokens == config.hyperparameters.whole_batches(2.5e10 / (6 * size))
    assert plan.forecast == law.forecast(size, plan.n_tokens, level=config.plan.level)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert str(plan)
    with pytest.raises(StageError, match=r"plan\.shapes"):
        planned("plan.shapes=[{width = 128}]")
