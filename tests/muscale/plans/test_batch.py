"""The batch of the full run is by a law or as stated, what is tuned is transferred to it, and the gate holds what no law covers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from muscale import StudyConfig
from muscale.plans.batch import FAR, BatchChoice, choose_batch
from muscale.plans.gate import batch_line
from muscale.plans.plan import Plan
from muscale.plans.planning import Planner
from proxy_models.recipes.hyperparameters import Hyperparameters
from scaling import BatchLaw, fit_batch_law
from tests.muscale.planted import planted_fit, planted_horizon
from tests.scaling.optima.test_batch_law import grid

TUNED = Hyperparameters(learning_rate=0.01, batch_tokens=2**17, beta2=0.95, eps=1e-8)


@pytest.fixture(scope="module")
def by_study() -> BatchLaw:
    """Best batch 2^18.5 · (D / 4e9)^.5, best rate ∝ batch^.3."""
    return fit_batch_law(grid(0.5), prior=None)


def chosen(
    n_tokens: float,
    law: BatchLaw | None = None,
    tuned: Hyperparameters = TUNED,
    least_sequences: int = 8,
    **explicit: int,
) -> BatchChoice | None:
    return choose_batch(tuned, law, n_tokens, explicit, sequence_tokens=2048, least_sequences=least_sequences)


def found(choice: BatchChoice | None) -> BatchChoice:
    assert choice is not None
    return choice


def test_the_studys_law_decides_before_the_published_one(by_study: BatchLaw) -> None:
    """At 1.6e10 tokens 2^19.5 is the study's best, and .58 D^.571 = 2^18.6 Step Law's: 19 or 20 is nearest, then 19."""
    mine, published = found(chosen(1.7e10, by_study)), found(chosen(1.7e10))
    assert (mine.tokens, mine.source) == (2**20, "the study's grids")
    assert mine.best_tokens == pytest.approx(2**18.5 * math.sqrt(1.7e10 / 4e9))
    assert (published.tokens, published.source) == (2**19, "Step Law")
    assert published.best_tokens == pytest.approx(0.58 * 1.7e10**0.571)


@pytest.mark.parametrize("n_tokens", [1e7, 3e9, 2e12])
def test_outside_every_law_the_batch_is_the_proxies(n_tokens: float) -> None:
    assert chosen(n_tokens) is None


def test_a_smaller_batch_is_whole_sequences_and_has_as_many_as_the_workers_need(by_study: BatchLaw) -> None:
    tuned = Hyperparameters(learning_rate=0.01, batch_tokens=2**21)
    assert found(chosen(8e8, by_study, tuned)).tokens == 2**17
    assert found(chosen(8e8, by_study, tuned, least_sequences=128)).tokens == 2**18
    odd = Hyperparameters(learning_rate=0.01, batch_tokens=3 * 2**18)
    assert found(chosen(1e9, by_study, odd)).tokens % 2048 == 0


def test_rate_and_eps_transfer_both_ways_and_beta2_to_a_smaller_batch(by_study: BatchLaw) -> None:
    larger = found(chosen(1e7, by_study, batch_tokens=2**20))
    transferred = larger.transfer(TUNED)
    assert transferred.learning_rate == pytest.approx(0.01 * 8 ** by_study.rate_exponent[0])
    assert transferred.eps == pytest.approx(1e-8 / math.sqrt(8))
    assert transferred.beta2 == TUNED.beta2
    smaller = found(
        choose_batch(transferred, by_study, 1e7, {"batch_tokens": 2**17}, sequence_tokens=2048, least_sequences=8)
    ).transfer(transferred)
    assert [smaller.learning_rate, smaller.eps] == pytest.approx([0.01, 1e-8])
    assert smaller.beta2**8 == pytest.approx(transferred.beta2), "the same half-life in tokens"
    none = Hyperparameters(learning_rate=0.01, batch_tokens=2**20, optimizer="adafactor")
    assert found(chosen(1e7, by_study, none, batch_tokens=2**17)).transfer(none).beta2 == none.beta2


def test_the_gate_holds_a_batch_that_no_law_covers(by_study: BatchLaw) -> None:
    cases = {
        "proxies'": chosen(1e7),
        "near": chosen(1e7, batch_tokens=4 * 2**17),
        "by law": chosen(6e10),
        "by own grids": chosen(1e11, by_study, batch_tokens=2**21),
        "far": chosen(1e7, batch_tokens=16 * 2**17),
        "far from the best": chosen(1e11, by_study, batch_tokens=2**25),
        "a ramp from far below": chosen(1e7, batch_tokens=2**18, batch_doublings=4),
    }
    status = {name: batch_line(choice).status for name, choice in cases.items()}
    assert [name for name, passed in status.items() if passed == "failed"] == [
        "far",
        "far from the best",
        "a ramp from far below",
    ]


def test_ramps_are_compared_with_ramps_and_values_are_for_the_batch_after_them(by_study: BatchLaw) -> None:
    ramped = replace(TUNED, batch_doublings=4, batch_ramp_tokens=2**21)
    alike = found(chosen(1e7, tuned=ramped, batch_tokens=2 * 2**17))
    assert (alike.extreme_ratio, alike.is_far, batch_line(alike).status) == (2.0, False, "passed")
    assert alike.transfer(ramped).learning_rate == pytest.approx(0.01 * 2**0.5)
    for tuned, doublings in ((TUNED, 4), (ramped, 0)):
        only = found(chosen(1e7, tuned=tuned, batch_tokens=2**17, batch_doublings=doublings))
        assert max(only.extreme_ratio, 1 / only.extreme_ratio) == 16
        assert batch_line(only).status == "failed"
        assert only.transfer(tuned) == tuned, "the batch after the ramp is the same"
    below = found(chosen(1e11, by_study, batch_doublings=3))
    assert below.best_tokens is not None
    assert below.first_tokens < below.best_tokens / FAR < below.tokens
    assert batch_line(below).status == "passed", "the first of this ramp is near the proxies'"


def test_a_law_that_chooses_the_proxies_batch_changes_nothing(by_study: BatchLaw) -> None:
    same = found(chosen(1e9, by_study, tuned=replace(TUNED, batch_tokens=2**18)))
    assert (same.tokens, same.source, same.effect) == (2**18, "the study's grids", 0.0)
    assert same.transfer(replace(TUNED, batch_tokens=2**18)) == replace(TUNED, batch_tokens=2**18)


MakePlan = Callable[..., Plan]


@pytest.fixture
def planned(make_study: Callable[..., Path]) -> MakePlan:
    path = make_study()

    def make(*overrides: str) -> Plan:
        config = StudyConfig.read(path, overrides)
        return Planner(config, config.hyperparameters, planted_horizon(), planted_fit()).plan()

    return make


def test_a_stated_batch_moves_the_rate_and_widens_the_registered_interval(planned: MakePlan) -> None:
    plain = planned()
    tuned = plain.hyperparameters
    batch = 16 * tuned.batch_tokens
    plan = planned(f"plan.explicit.batch_tokens={batch}")
    assert plan.hyperparameters.batch_tokens == batch
    tokens = plan.n_tokens / plain.n_tokens  # whole batches, so that the horizon moves a little too
    assert plan.hyperparameters.learning_rate == pytest.approx(tuned.learning_rate * 16**0.5 * tokens**-0.3, rel=0.01)
    assert plan.forecast.high / plan.forecast.loss > plain.forecast.high / plain.forecast.loss * 1.04
    assert any(f"batch {batch:,} tokens a step, 16×" in reason for reason in plan.forecast.reasons)
    assert not plan.forecast.supported
    transferred = {one.name: one.rules for one in plan.provenance}
    assert "batch law" in transferred["learning_rate"]
    assert transferred["beta2"] == ("fixed",), "it stays at a larger batch"
    assert "horizon law" in plan.rules["learning_rate"]
    assert "batch^0.50 ± 0.20" in plan.rules["learning_rate"]
    assert transferred["batch_tokens"] == ("explicit",)
    assert Plan.from_dict(plan.to_dict()) == plan
    both = planned(f"plan.explicit.batch_tokens={batch}", "plan.explicit.learning_rate=0.5", "plan.explicit.beta2=0.9")
    assert (both.hyperparameters.learning_rate, both.hyperparameters.beta2) == (0.5, 0.9)
    assert batch_line(plan.batch).status == "failed"
    assert f"{FAR:g}×" in batch_line(plan.batch).compared
