"""Values that depend on tokens, batch or tokens per parameter block the gate where nothing covers them so far from the proxies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import muscale
from muscale import StudyConfig
from muscale.plans.batch import FAR
from muscale.plans.by_law import COVERAGES, Deviation, deviations
from muscale.plans.gate import by_law_line
from muscale.plans.planning import Planner
from search_spaces import TRANSFERABILITY, TransferClass
from tests.muscale.planted import planted_fit, planted_horizon

Found = Callable[..., dict[str, Deviation]]


@pytest.fixture
def found(make_study: Callable[..., Path]) -> Found:
    path = make_study()

    def of(*overrides: str, **proxies: float) -> dict[str, Deviation]:
        """Of a plan whose proxies had so many `times` fewer tokens than the run."""
        config = StudyConfig.read(path, overrides)
        plan = Planner(config, config.hyperparameters, planted_horizon(), planted_fit()).plan()
        if times := proxies.get("times"):
            plan = replace(plan, n_tokens=round(times * config.sweep.n_tokens))
        if wider := proxies.get("per_parameter"):
            plan = replace(
                plan, n_tokens=round(wider * config.sweep.n_tokens / config.model.n_params * plan.model.n_params)
            )
        return {one.coverage.name: one for one in deviations(plan, config)}

    return of


def blocked(found: dict[str, Deviation]) -> set[str]:
    line = by_law_line([*found.values()])
    names = {name for name in found if not found[name].is_covered}
    assert (line.status == "failed") == bool(names)
    assert all(name in line.advice or name == "batch_tokens" for name in names)
    return names


def test_each_has_advice() -> None:
    for coverage in COVERAGES:
        line = by_law_line([Deviation(coverage=coverage, times=100.0)])
        assert (line.status, bool(line.advice)) == ("failed", True)


def test_all_are_classed_by_law() -> None:
    for coverage in COVERAGES:
        assert TRANSFERABILITY[coverage.name].transfer is TransferClass.BY_LAW
    factors = {coverage.name: round(coverage.factor, 2) for coverage in COVERAGES}
    assert factors == {
        "batch_tokens": 17.96,
        "beta1": 8,
        "beta2": 8,
        "batch_ramp_tokens": 4,
        "warmup_floor_tokens": 4,
        "weight_decay_tau": 16,
    }
    assert 0.383 < 0.48 < 0.571
    assert factors["batch_tokens"] ** 0.48 == pytest.approx(FAR, rel=1e-3)


def test_each_is_held_at_its_own_factor(found: Found) -> None:
    assert blocked(found(times=17, per_parameter=15.9)) == set()
    assert "weight_decay_tau" in blocked(found(per_parameter=16.1))
    assert "weight_decay_tau" in blocked(found(per_parameter=1 / 16.1))
    assert "batch_tokens" in blocked(found(times=18.1))
    assert "batch_tokens" not in blocked(found(times=17.9))


@pytest.mark.parametrize(
    ("batch", "names"), [(8, set()), (16, {"beta1", "beta2"}), (0.125, set()), (0.0625, {"beta1"})]
)
def test_betas_go_with_the_batch(found: Found, batch: float, names: set[str]) -> None:
    """To a smaller batch beta2 has a law: the same half-life."""
    stated = f"plan.explicit.batch_tokens={round(batch * 4096)}"
    assert (
        blocked(found("hyperparameters.batch_tokens=4096", "sweep.n_tokens=65536", stated)) - {"weight_decay_tau"}
        == names
    )


def test_a_ramp_counts_and_a_stated_value_passes(found: Found) -> None:
    ramp = (
        "hyperparameters.batch_tokens=512",
        "plan.explicit.batch_tokens=8192",
        "plan.explicit.batch_doublings=8",
        "plan.explicit.batch_ramp_tokens=65536",
        "promote.workers=1",  # a sequence begins the ramp
    )
    assert "beta1" in blocked(found(*ramp))
    assert "beta1" not in blocked(found(*ramp, "plan.explicit.beta1=0.9"))
    assert "weight_decay_tau" not in blocked(found("plan.explicit.weight_decay_tau=0.5", per_parameter=100))


def test_what_the_optimizer_ignores_blocks_nothing(found: Found) -> None:
    assert set(found("hyperparameters.optimizer=adam")) == {"batch_tokens", "beta1", "beta2"}
    assert set(found("hyperparameters.optimizer=adafactor")) == {"batch_tokens", "weight_decay_tau"}


@pytest.mark.parametrize("width", [64, 80, 96])
def test_the_quickstarts_full_run_is_covered(make_study: Callable[..., Path], width: int) -> None:
    """Its decisions lie between 125,000 and 140,000 parameters, so that width 64 (117,056) or 80 (177,680) is taken."""
    quickstart = StudyConfig.read(Path(muscale.__file__).with_name("quickstart.toml"))
    micro = StudyConfig.read(make_study())
    model = quickstart.family.at(width=width)
    n_tokens = round(quickstart.plan.budget.compute_flops / 6 / model.n_params)
    plan = replace(
        Planner(micro, micro.hyperparameters, planted_horizon(), planted_fit()).plan(), model=model, n_tokens=n_tokens
    )
    assert all(one.is_covered for one in deviations(plan, quickstart))
