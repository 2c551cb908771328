"""A ladder of several numbers of experts: its runs, the law over sparsity, and what the plan makes of it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from muscale import StudyConfig, StudyFileError
from muscale.actors.jobs import Job
from muscale.pages.sections import Section, templates
from muscale.plans.costs import estimate
from muscale.plans.gate import experts_line
from muscale.plans.next_stems import candidates, choose
from muscale.plans.plan import Plan
from muscale.plans.planning import Planner
from muscale.plans.use_case_card import card_of
from muscale.proxies import ladder
from muscale.proxies.expert_axes import axis_changes
from muscale.settings.plan import Shape, Stem
from proxy_models.architecture.config import as_decoder
from proxy_models.data.corpus import Corpus
from proxy_models.training.numerics import Numerics
from scaling import AxisLaw, ScalingFit, Verdict, simulate
from scaling.fits.support import unsupported
from tests.muscale.conftest import MICRO, write_text
from tests.muscale.planted import planted_fit, planted_horizon
from tests.muscale.proxies.test_ladder import as_run
from tests.muscale.proxies.test_transfer_experts import AXES, MIXTURE, verdict_of

MakeStudy = Callable[..., Path]
STEMS = ", ".join(
    f"{{ width = {width}, n_experts = {n_experts}, n_tokens = {n_tokens}, branches = 3 }}"
    for width, n_experts, n_tokens in product((16, 32, 48), (4, 8, 16), (65536,))
)
WIDTHS, LENGTHS = (16, 32, 48, 64), (65536, 180224, 344064, 557056)
SEVERAL = [*AXES, f"ladder.stems=[{STEMS}]"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> StudyConfig:
    directory = tmp_path_factory.mktemp("several")
    write_text(directory / "text")
    (directory / "study.toml").write_text(MICRO)
    return StudyConfig.read(directory / "study.toml", SEVERAL)


def jobs_of(config: StudyConfig, verdict: Verdict | None = None) -> list[Job]:
    numerics = Numerics(model=config.model, base=config.model, corpus_key="c", seed=0, evaluation_tokens=1)
    laws = verdict.axis_laws if verdict else {}
    return ladder.ladder_jobs(config, numerics, config.hyperparameters, planted_horizon(), laws)


def rows_of(config: StudyConfig, verdict: Verdict | None = None) -> pd.DataFrame:
    """The ladder's runs as the law sees them, with planted losses that fall with parameters, experts and tokens."""
    found = []
    for job in jobs_of(config, verdict):
        model, n_tokens = job.chain.numerics.model, job.chain.last.end
        params = model.n_params * model.sparsity**0.3
        loss = 1.5 + 40 / params**0.4 + 100 / n_tokens**0.4
        found.append({**as_run(job), "n_params": model.n_params, "d_model": model.d_model, "loss": loss})
    base = Numerics(model=config.model, base=config.model, corpus_key="c", seed=0, evaluation_tokens=1)
    return ladder.law_rows(
        pd.DataFrame(found),
        config.hyperparameters,
        config.sweep.space,
        planted_horizon(),
        base,
        ladder.ladder_models(config),
        verdict.axis_laws if verdict else {},
    )


@pytest.fixture(scope="module")
def law(config: StudyConfig) -> ScalingFit:
    return ladder.fit_law(rows_of(config), config.fit.model_copy(update={"n_bootstrap": 20}), config.model)


def planned(config: StudyConfig, law: ScalingFit, corpus: Corpus | None = None) -> Plan:
    return Planner(config, config.hyperparameters, planted_horizon(), law, corpus=corpus).plan()


def with_shapes(config: StudyConfig, *shapes: Shape, **budget: float) -> StudyConfig:
    return config.model_copy(update={"plan": config.plan.model_copy(update={"shapes": shapes, **budget})})


def test_a_stem_has_its_own_number_of_experts_and_the_base_stays(config: StudyConfig) -> None:
    jobs = jobs_of(config)
    shapes = [(as_decoder(job.chain.numerics.model).n_experts, job.chain.numerics.model.d_model) for job in jobs]
    assert sorted({*shapes}) == sorted(product((4, 8, 16), (16, 32, 48)))
    assert {job.chain.numerics.base for job in jobs} == {config.model}
    assert {as_decoder(job.chain.numerics.model).experts_per_token for job in jobs} == {2}
    assert jobs[0].label == "width 16, experts 4, 32768 tokens"
    assert ladder.design(config)["sparsity"].nunique() == 9
    assert estimate(config).set_index("stage").loc["ladder", "runs"] == len(jobs)


def test_the_rate_follows_the_law_of_the_axis_and_costs_no_regret(config: StudyConfig) -> None:
    verdict = verdict_of(config, {"sparsity": -0.6})
    law = verdict.axis_laws["sparsity"]
    assert isinstance(law, AxisLaw)
    moved, kept = jobs_of(config, verdict), jobs_of(config)
    for one, other in zip(moved, kept, strict=True):
        sparsity = (as_decoder(one.chain.numerics.model).n_experts or 1) / 2
        ratio = one.hyperparameters.learning_rate / other.hyperparameters.learning_rate
        assert ratio == pytest.approx((sparsity / 4) ** -law.exponent)
    rows = rows_of(config, verdict)
    assert rows["left_out"].eq("").all()
    np.testing.assert_allclose(rows["regret"], rows_of(config)["regret"], atol=1e-12)


def test_the_law_covers_the_ladder_s_experts_and_depths_alone(config: StudyConfig, make_study: MakeStudy) -> None:
    rows = rows_of(config)
    assert len(rows) == 27
    assert rows["left_out"].eq("").all()
    assert rows["sparsity"].nunique() == 9
    deep = StudyConfig.read(make_study("deep"), ["ladder.stems=[{width=16, depth=3, n_tokens=32768}]"])
    found = rows_of(deep)
    assert found["left_out"].eq("").all()
    assert "sparsity" not in found
    other = StudyConfig.read(make_study("other"), [*MIXTURE, "ladder.stems=[{width=16, n_tokens=32768}]"])
    several = rows_of(other.model_copy(update={"ladder": config.ladder}))
    assert several["left_out"].eq("").all()
    numerics = Numerics(model=other.model, base=other.model, corpus_key="c", seed=0, evaluation_tokens=1)
    runs = pd.DataFrame([as_run(job) for job in jobs_of(config)])
    alone = ladder.law_rows(runs, other.hyperparameters, other.sweep.space, planted_horizon(), numerics, [other.model])
    assert sum("n_experts" in reason for reason in alone["left_out"]) == 18


def test_the_plan_decides_the_number_of_experts_among_the_named_shapes(config: StudyConfig, law: ScalingFit) -> None:
    assert law.law.form.name == "experts"
    base = planned(config, law)
    assert as_decoder(base.model).n_experts == 8
    assert base.forecast.sparsity == base.model.sparsity
    shapes = tuple(Shape(width=32, n_experts=n) for n in (4, 8, 16))
    config = config.model_copy(update={"plan": config.plan.model_copy(update={"shapes": shapes})})
    plan = planned(config, law)
    assert as_decoder(plan.model).n_experts == 16
    assert plan.forecast.loss < base.forecast.loss
    assert not any("n_experts" in reason for reason in plan.forecast.reasons)
    assert plan.model.sparsity in {size["sparsity"] for size in plan.decision["near"]}
    assert Plan.from_dict(plan.to_dict()) == plan


def test_repeated_text_is_counted_under_a_law_of_experts(config: StudyConfig, law: ScalingFit, corpus: Corpus) -> None:
    plan = planned(with_shapes(config, Shape(width=16, n_experts=8), compute_flops=1e12), law, corpus)
    assert plan.decision["epochs"] > 2
    assert plan.decision["loss"] > law.best_law.loss(plan.n_params, plan.n_tokens, sparsity=plan.model.sparsity)


def test_a_size_at_a_stated_ratio_has_the_number_of_experts_with_the_least_loss(config: StudyConfig) -> None:
    """Routers give shapes of one width an N that differs by 1 %, by which one of them used to be chosen."""
    shapes = [
        Stem(width=w, n_experts=n, n_tokens=t, branches=1)
        for w, t in zip(WIDTHS, LENGTHS, strict=True)
        for n in (4, 8, 16)
    ]
    one_ratio = config.model_copy(update={"ladder": config.ladder.model_copy(update={"stems": tuple(shapes)})})
    rows = rows_of(one_ratio)
    rows["loss"] *= np.exp(np.random.default_rng(1).normal(0, 0.01, len(rows)))
    found = ladder.fit_law(rows, config.fit.model_copy(update={"n_bootstrap": 20}), config.model)
    assert found.unidentified(2.5e11)
    wanted = with_shapes(one_ratio, *(Shape(width=80, n_experts=n) for n in (4, 8, 16)), compute_flops=2.5e11)
    plan = planned(wanted, found)
    assert as_decoder(plan.model).n_experts == 16


def test_runs_of_one_width_say_nothing_of_other_widths(config: StudyConfig) -> None:
    stems = [Stem(width=32, n_experts=n, n_tokens=t) for n in (4, 8, 16) for t in (32768, 65536, 131072, 262144)]
    narrow = config.model_copy(update={"ladder": config.ladder.model_copy(update={"stems": tuple(stems)})})
    rows = rows_of(narrow)
    rows["loss"] *= np.exp(np.random.default_rng(1).normal(0, 0.003, len(rows)))
    assert rows["n_params"].nunique() == 3, "by their routers"
    law = ladder.fit_law(rows, config.fit.model_copy(update={"n_bootstrap": 20}), config.model)
    reasons = {
        width: "sizes" in unsupported(law.rows, law.ensemble, model.n_params, 300_000, sparsity=model.sparsity)
        for width in (32, 96)
        for model in [Stem(width=width, n_experts=8, n_tokens=1).of(config.family)]
    }
    assert reasons == {32: False, 96: True}


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("n_experts", 16, "16"),
        ("experts_per_token", 4, "4"),
        ("context_length", 64, "64"),
        ("z_loss", 1e-4, "0.0001"),
        ("mlp_dropout", 0.1, "0.1"),
    ],
)
def test_a_plan_and_its_page_show_explicit_settings_of_the_model(
    config: StudyConfig, law: ScalingFit, name: str, value: float, shown: str
) -> None:
    stated = config.model_copy(update={"plan": config.plan.model_copy(update={"explicit": {name: value}})})
    plan = planned(stated, law)
    assert f"{name} = {shown}  (explicit)" in str(plan)
    assert f", {as_decoder(plan.model).n_experts} experts, N = " in str(plan)
    template = templates().get_template("plan.html.jinja")
    section = Section(title="The plan", command="plan", about="")
    page = template.render(section=section, plan=plan.to_dict(), gate=None)
    assert f"<td>{name}</td><td>{shown}</td>" in page
    assert f"{as_decoder(plan.model).n_experts} experts" in page


def test_the_ladder_s_sparsity_is_simulated(config: StudyConfig, law: ScalingFit) -> None:
    target = Stem(width=64, n_experts=16, n_tokens=1).of(config.family)
    design = ladder.design(config)
    at: dict[str, Any] = {"n_params": target.n_params, "n_tokens": 300_000}
    found = simulate(design, law.law, **at, noise=0, n_trials=2, sparsity=target.sparsity)
    assert found.rms_error < 0.01
    cases: list[tuple[pd.DataFrame, dict[str, Any]]] = [
        (design.drop(columns="sparsity"), {"sparsity": 2.0}),
        (design, {}),
    ]
    for given, columns in cases:
        with pytest.raises(ValueError, match="sparsity"):
            simulate(given, law.law, **at, **columns)


def test_without_a_law_of_experts_another_number_is_a_doubt(make_study: MakeStudy, config: StudyConfig) -> None:
    one = StudyConfig.read(
        make_study("one"),
        [*MIXTURE, "plan.shapes=[{ width = 48, n_experts = 16 }]"],
    )
    plan = planned(one, planted_fit())
    assert as_decoder(plan.model).n_experts == 16
    assert any("n_experts" in reason for reason in plan.forecast.reasons)


def test_further_runs_state_their_experts(config: StudyConfig, law: ScalingFit, corpus: Corpus) -> None:
    plan = planned(config, law)
    table = candidates(config, law, plan, corpus, affordable_flops=2e10)
    assert {*table["n_experts"]} == {4, 8, 16}
    for row in table.to_dict("records"):
        model = Stem(width=row["d_model"], n_experts=row["n_experts"], n_tokens=1).of(config.family)
        assert (model.n_params, model.sparsity) == (row["n_params"], row["sparsity"])
    found = choose(config, law, plan, corpus, affordable_flops=4e10, width=1e-6)
    pasted = tomllib.loads("stems = [\n" + "\n".join(found.lines) + "\n]")["stems"]
    assert [Stem(**stem).n_experts for stem in pasted] == [*found.table["n_experts"]]


def test_the_gate_asks_for_the_axis_along_which_the_ladder_differs(config: StudyConfig, law: ScalingFit) -> None:
    plan = planned(config, law)
    of_ladder = {change: None for model in ladder.ladder_models(config) for change in axis_changes(model, config.model)}
    assert {change.axis for change in of_ladder} == {"sparsity"}
    assert axis_changes(plan.model, config.model) == ()
    verdicts = [verdict_of(config, {}), verdict_of(config, {"sparsity": -0.6})]
    verdicts.append(replace(verdicts[0], transfers=verdicts[0].transfers[:1]))
    lines = [
        experts_line((), verdict, experts="", rule=plan.rules["learning_rate"], of_ladder=tuple(of_ladder))
        for verdict in verdicts
    ]
    assert [line.status for line in lines] == ["passed", "failed", "failed"]
    assert "transfer.sparsities" in lines[-1].advice
    by_law = experts_line(
        (),
        verdicts[1],
        experts="",
        rule=plan.rules["learning_rate"],
        of_ladder=tuple(of_ladder),
        ladder_laws=verdicts[1].axis_laws,
    )
    assert by_law.status == "passed", "the ladder's rates follow the law"


def test_the_use_case_card_reads_the_sparsity_of_each_size(make_study: MakeStudy, law: ScalingFit) -> None:
    shapes = "plan.shapes=[{ width = 48, n_experts = 4 }, { width = 48, n_experts = 16 }]"
    config = StudyConfig.read(make_study("card"), [*SEVERAL, shapes, "use_case.targets.loss=2.4"])
    plan = planned(config, law)
    card = card_of(config, law, plan)
    assert card is not None
    for row, n_experts in zip(card.sizes.to_dict("records"), (4, 16), strict=True):
        model = Stem(width=48, n_experts=n_experts, n_tokens=1).of(config.family)
        expected = law.forecast(row["n_params"], plan.compute_flops / 6 / row["n_params"], sparsity=model.sparsity)
        assert row["P(loss)"] == pytest.approx(expected.probability(2.4))
        assert row["n_experts"] == n_experts
    assert card.cheapest is None or f"{card.cheapest['n_experts']} experts" in card.conclusion
    stated = StudyConfig.read(
        make_study("stated"), [*SEVERAL, "plan.explicit.n_experts=16", "use_case.targets.loss=2.4"]
    )
    of_plan = card_of(stated, law, planned(stated, law))
    assert of_plan is not None
    assert {*of_plan.sizes["n_experts"]} == {16}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["ladder.stems=[{ width = 16, n_experts = 4, n_tokens = 32768 }]"], "ladder.stems: n_experts"),
        ([*MIXTURE, "ladder.stems=[{ width = 16, n_experts = 1, n_tokens = 32768 }]"], "ladder.stems: .*n_experts"),
        ([*SEVERAL, "ladder.stage_branches=1"], "ladder.stage_branches: .*n_experts"),
        ([*SEVERAL, "variants.a.hyperparameters.clip_norm=2.0"], "compare.stems: "),
        (
            [*SEVERAL, "plan.shapes=[{ width = 16, n_experts = 4 }]", "plan.explicit.n_experts=8"],
            "plan.explicit.n_experts: ",
        ),
        (
            [*SEVERAL, "plan.shapes=[{ width = 48, n_experts = 4 }]", "plan.explicit.experts_per_token=8"],
            "plan.shapes: experts_per_token",
        ),
    ],
)
def test_experts_where_they_cannot_be_are_refused(make_study: MakeStudy, settings: list[str], named: str) -> None:
    with pytest.raises(StudyFileError, match=named):
        StudyConfig.read(make_study(), settings)


def test_a_ladder_that_states_the_number_of_the_model_is_of_one_mixture(make_study: MakeStudy) -> None:
    stems = "ladder.stems=[{ width = 16, n_experts = 8, n_tokens = 32768 }]"
    config = StudyConfig.read(make_study(), [*MIXTURE, stems, "variants.a.hyperparameters.clip_norm=2.0"])
    assert ladder.mixtures_of(ladder.ladder_models(config)) == {8}
