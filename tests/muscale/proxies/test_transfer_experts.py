"""Grids of [transfer] along the axes of a mixture of experts, and the gate of a run at another of their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from muscale import StudyConfig, StudyFileError
from muscale.plans.gate import experts_line
from muscale.plans.plan import Plan
from muscale.plans.planning import Planner
from muscale.proxies import transfer
from muscale.proxies.expert_axes import axis_changes, experts_text
from proxy_models.architecture.config import ModelConfig, as_decoder
from scaling import AxisLaw, Verdict, fit_verdict
from tests.muscale.planted import planted_fit, planted_horizon
from tests.muscale.proxies.test_transfer import members_of, numerics_of

MakeStudy = Callable[..., Path]
MIXTURE = ["model.n_experts=8", "model.experts_per_token=2", "model.expert_ratio=1.0", "model.mlp_ratio=2.0"]
AXES = [
    *MIXTURE,
    "transfer.experts=[8, 16, 32]",
    "transfer.granularities=[2, 4]",
    "transfer.sparsities=[4, 8, 16]",
    "transfer.horizons=[1.0]",
]


def test_each_axis_has_its_grid_and_shares_the_base_s_runs(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), AXES)
    members = members_of(config)
    found = {
        (m.along, m.size): as_decoder(m.job.chain.numerics.model) for m in members if m.along not in ("width", "batch")
    }
    assert {key: (model.n_experts, model.experts_per_token, model.expert_ratio) for key, model in found.items()} == {
        ("experts", 8): (8, 2, 1.0),
        ("experts", 16): (16, 4, 1.0),
        ("experts", 32): (32, 8, 1.0),
        ("granularity", 2): (8, 2, 1.0),
        ("granularity", 4): (16, 4, 0.5),
        ("sparsity", 4): (8, 2, 1.0),
        ("sparsity", 8): (16, 2, 1.0),
        ("sparsity", 16): (32, 2, 1.0),
    }
    assert {m.job.chain.numerics.base for m in members} == {config.model}
    grids = pd.DataFrame({"along": m.along, "size": m.size, "run": m.job.chain.key} for m in members)
    of_base = grids[
        grids.set_index(["along", "size"]).index.isin([("experts", 8), ("granularity", 2), ("sparsity", 4)])
    ]
    rates = config.transfer.rates
    assert len(of_base) == 3 * rates
    assert of_base["run"].nunique() == rates


def test_a_study_without_these_axes_has_the_grids_it_had(make_study: MakeStudy) -> None:
    path = make_study()
    config = StudyConfig.read(path)
    assert {m.along for m in members_of(config)} == {"width"}
    assert [*config.transfer.sizes] == ["width", "depth", "experts", "granularity", "sparsity"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ([*MIXTURE, "transfer.experts=[4, 8]"], "transfer.experts"),  # 4 would pass one, whose gate is constant
        (["transfer.experts=[8, 16]"], "transfer.experts"),
        ([*MIXTURE, "transfer.experts=[8]"], "transfer.experts"),
        ([*MIXTURE, "transfer.experts=[8, 8]"], "transfer.experts"),
        ([*MIXTURE, "transfer.experts=[8, 10]"], "transfer.experts"),
        ([*MIXTURE, "transfer.granularities=[2, 3]"], "transfer.granularities"),
        ([*MIXTURE, "transfer.sparsities=[4, 0.25]"], "transfer.sparsities"),
        (["plan.explicit.n_experts=16"], "plan.explicit"),
    ],
)
def test_sizes_that_no_member_has_are_refused(make_study: MakeStudy, settings: list[str], named: str) -> None:
    with pytest.raises(StudyFileError, match=named):
        StudyConfig.read(make_study(), settings)


def verdict_of(config: StudyConfig, drifts: dict[str, float]) -> Verdict:
    """The verdict of planted runs whose best rate moves by these octaves per doubling of the size."""
    members = members_of(config)
    noises = np.random.default_rng(0).standard_normal(len(members))
    smallest = {along: min(sizes) for along, sizes in config.transfer.sizes.items() if sizes}

    def loss(m: transfer.GridRun) -> float:
        doublings = np.log2(m.size / smallest[m.along])
        best = np.log2(config.hyperparameters.learning_rate) + drifts.get(m.along, 0.0) * doublings
        return float(3 + 0.04 * (np.log2(m.value) - best) ** 2 - 0.05 * doublings)

    table = transfer.rows(pd.DataFrame({"purpose": ["transfer"], "key": [""], "loss": [0.0]}), members)
    table["loss"] = [loss(m) * (1 + 1e-4 * e) for m, e in zip(members, noises, strict=True)]
    return fit_verdict(table.drop(columns="run"))


def planned(config: StudyConfig, verdict: Verdict) -> Plan:
    return Planner(config, config.hyperparameters, planted_horizon(), planted_fit(), axis_laws=verdict.axis_laws).plan()


@pytest.mark.parametrize(
    ("explicit", "drifts", "passes"),
    [
        ({"n_experts": 32, "experts_per_token": 8}, {}, True),
        ({"n_experts": 16}, {}, True),
        # two granularities are no evidence
        (
            {"n_experts": 32, "experts_per_token": 8, "expert_ratio": 0.25},
            {},
            False,
        ),
        ({"n_experts": 16, "experts_per_token": 4}, {"experts": -0.6}, True),  # by its law
        ({"n_experts": 128, "experts_per_token": 32}, {"experts": -0.6}, False),  # beyond its law
        ({"n_experts": 16}, {"experts": -0.6}, True),
        ({"n_experts": 128, "experts_per_token": 32, "learning_rate": 0.01}, {"experts": -0.6}, True),
    ],
)
def test_a_run_with_other_experts_needs_the_verdict_of_each_axis_or_its_law(
    make_study: MakeStudy, explicit: dict[str, float], drifts: dict[str, float], passes: bool
) -> None:
    settings = [f"plan.explicit.{name}={value}" for name, value in explicit.items()]
    config = StudyConfig.read(make_study(), [*AXES, *settings])
    verdict, changes_of = verdict_of(config, drifts), config.model
    assert verdict.of_axes(()).passed
    plan = planned(config, verdict)
    model = as_decoder(plan.model)
    assert all(getattr(model, name) == value for name, value in explicit.items() if hasattr(model, name))
    line = experts_line(
        axis_changes(model, changes_of),
        verdict,
        experts=experts_text(model, changes_of),
        rule=plan.rules["learning_rate"],
    )
    assert (line.status == "passed") == passes
    assert any("n_experts" in reason for reason in plan.forecast.reasons)
    base = plan.chain(numerics_of(config)).numerics.base
    assert isinstance(base, ModelConfig)
    assert (base.n_experts, base.experts_per_token, base.expert_ratio) == (8, 2, 1.0)


def test_the_law_of_an_axis_moves_the_rate_of_a_run_along_it(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), [*AXES, "plan.explicit.n_experts=16", "plan.explicit.experts_per_token=4"])
    verdict = verdict_of(config, {"experts": -0.6})
    law = verdict.axis_laws["experts"]
    assert isinstance(law, AxisLaw)
    assert law.exponent == pytest.approx(0.6, abs=0.03)
    plan, kept = planned(config, verdict), planned(config, replace(verdict, transfers=verdict.transfers[:1]))
    ratio = plan.hyperparameters.learning_rate / kept.hyperparameters.learning_rate
    assert ratio == pytest.approx(2**-law.exponent, rel=1e-9)
    assert str(law) in plan.rules["learning_rate"]


def test_a_plan_whose_rate_other_grids_moved_or_kept_does_not_pass(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), [*AXES, "plan.explicit.experts_per_token=4"])
    flat, drifting, steeper = (verdict_of(config, {"experts": drift}) for drift in (0.0, -0.6, -0.9))
    verdicts = (flat, drifting, steeper)
    for made_from in verdicts:
        plan = planned(config, made_from)
        model, changes = as_decoder(plan.model), axis_changes(plan.model, config.model)
        experts, rule = experts_text(model, config.model), plan.rules["learning_rate"]
        assert "n_experts 8 (8 in proxies), experts_per_token 4 (2 in proxies), expert_ratio 1 " in experts
        for judged in verdicts:
            along_experts = tuple(change for change in changes if change.axis == "experts")
            line = experts_line(along_experts, judged, experts=experts, rule=rule)
            assert (line.status == "passed") == (judged is made_from)


def test_a_run_of_its_proxies_experts_has_no_line_of_experts(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), AXES)
    assert axis_changes(planned(config, verdict_of(config, {"experts": -0.6})).model, config.model) == ()
