"""One policy for the ladder and the full run, and a reason for each row that is left out of the law."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from muscale import StudyConfig
from muscale.actors.jobs import Job
from muscale.full_runs.promote.promotion import Promotion
from muscale.plans.costs import estimate
from muscale.proxies import ladder, transfer
from muscale.proxies.ladder_stages import stage_law
from muscale.proxies.measures import Measures
from muscale.search.sweep_jobs import history_of
from muscale.search.trial import TrialPlan
from muscale.settings.corpus import StageSettings
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import segments
from muscale.store.lineage import stems
from proxy_models.architecture.config import as_decoder
from proxy_models.evaluation.held_out_loss import HeldOutLoss
from proxy_models.evaluation.quantised_loss import QuantisedLoss
from proxy_models.training.numerics import Numerics
from scaling import HorizonLaw, ScalingError, fit, fit_horizon_law
from search_spaces import Choice, Distribution, LogUniform, Ordinal, Space, Uniform
from tests.muscale.planted import planted_fit

EXPONENT = 0.3
MEASURES = Measures(always=(HeldOutLoss(),), at_end=(QuantisedLoss(bits=(8,)),))


@pytest.fixture
def config(make_study: Callable[..., Path]) -> StudyConfig:
    return StudyConfig.read(make_study())


@pytest.fixture
def numerics(config: StudyConfig) -> Numerics:
    return Numerics(model=config.model, base=config.model, corpus_key="c", seed=0, evaluation_tokens=1)


@pytest.fixture
def horizon() -> HorizonLaw:
    """A law fitted to planted optima 2^-7 · (D / 16384)^-0.3, with a little noise as the fit wants to know it."""
    generator = np.random.default_rng(0)
    rows = []
    for n_tokens in (8192, 16384, 32768):
        for octave in np.linspace(-2, 2, 7):
            best = -7 - EXPONENT * np.log2(n_tokens / 16384)
            loss = 2 * np.exp(0.02 * (octave - 7 - best) ** 2 + 1e-4 * generator.standard_normal())
            rows.append({"n_tokens": n_tokens, "rate": 2.0 ** (octave - 7), "loss": loss, "width": 32})
    return fit_horizon_law(pd.DataFrame(rows))


def test_runs_of_several_lengths_share_one_stem_and_its_absolute_decay(config: StudyConfig, numerics: Numerics) -> None:
    jobs = ladder.branches(numerics, config.hyperparameters, [8192, 16384], tuned_at=16384, purpose="ladder", label="w")
    assert len(stems([job.chain for job in jobs])) == 1
    assert [job.chain.last.end for job in jobs] == [8192, 16384]
    assert len({job.chain.last.recipe for job in jobs}) == 1
    assert all(job.chain.anneals for job in jobs)


def test_the_ladder_is_tuned_for_the_middle_of_its_branches(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw
) -> None:
    jobs = ladder.ladder_jobs(config, numerics, config.hyperparameters, horizon)
    assert len(jobs) == 2 * len(config.ladder.stems)
    by_length = {job.chain.last.end: job for job in jobs}
    rate = {end: job.hyperparameters.learning_rate for end, job in by_length.items()}
    assert rate[32768] == pytest.approx(rate[16384] * 2**-EXPONENT, rel=0.05)  # the prior draws it towards .1
    off = [
        np.log2(by_length[end].chain.last.recipe.weight_decay_tau(end) / config.hyperparameters.weight_decay_tau)
        for end in (32768, 23296)
    ]
    assert off == pytest.approx([-0.25, 0.25], abs=0.02)


def test_every_stem_is_run_with_each_seed(
    make_study: Callable[..., Path], numerics: Numerics, horizon: HorizonLaw
) -> None:
    config = StudyConfig.read(make_study("seeds"), ["ladder.seeds=[3, 4]"])
    once = StudyConfig.read(make_study("seed"), ["ladder.seeds=[3]"])
    jobs = ladder.ladder_jobs(config, numerics, config.hyperparameters, horizon)
    assert len(jobs) == 2 * len(ladder.ladder_jobs(once, numerics, once.hyperparameters, horizon))
    assert {job.chain.numerics.seed for job in jobs} == {3, 4}
    assert len(stems([job.chain for job in jobs])) == 2 * len(config.ladder.stems)
    assert len({job.label for job in jobs}) == len(jobs)
    assert ladder.design(config)["stem"].nunique() == 2 * len(config.ladder.stems)
    twice, one = (estimate(each).set_index("stage").loc["ladder", "compute_flops"] for each in (config, once))
    assert twice == 2 * one


def test_a_stem_may_have_a_depth_of_its_own(
    make_study: Callable[..., Path], numerics: Numerics, horizon: HorizonLaw
) -> None:
    stems = "ladder.stems=[{width=16, n_tokens=16384}, {width=48, depth=3, n_tokens=16384, branches=1}]"
    config = StudyConfig.read(make_study("deep"), [stems])
    jobs = ladder.ladder_jobs(config, numerics, config.hyperparameters, horizon)
    shapes = [(job.chain.numerics.model.d_model, job.chain.numerics.model.n_layers) for job in jobs]
    assert shapes == [(16, 1), (16, 1), (48, 3)]
    assert jobs[-1].label == "width 48, depth 3, 16384 tokens"
    assert jobs[-1].chain.numerics.base == config.model  # whose depth the parametrization carries from


def test_a_curriculum_by_fractions_gives_each_run_its_own_stem(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw
) -> None:
    best = config.hyperparameters
    curriculum = replace(numerics, stages_by_fraction=True)
    for jobs, shared in (
        (
            transfer.jobs(transfer.members(config, curriculum, best)),
            transfer.jobs(transfer.members(config, numerics, best)),
        ),
        (ladder.ladder_jobs(config, curriculum, best, horizon), ladder.ladder_jobs(config, numerics, best, horizon)),
    ):
        assert all(job.chain.numerics.run_tokens == job.chain.last.end for job in jobs)
        assert [job.chain.segments for job in jobs] == [job.chain.segments for job in shared]
        assert len(stems([job.chain for job in jobs])) == len(jobs) == 2 * len(stems([job.chain for job in shared]))


def with_stages(config: StudyConfig) -> StudyConfig:
    """Two stages, the second from half of each run on, and three further branches of each run of the ladder."""
    stages = (StageSettings(weights={"a": 1}, until_fraction=0.5), StageSettings(weights={"a": 1}))
    return config.model_copy(
        update={
            "corpus": config.corpus.model_copy(update={"stages": stages}),
            "ladder": config.ladder.model_copy(update={"stage_branches": 3}),
        }
    )


def test_the_law_of_stages_is_fitted_to_the_branches_that_have_ended(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw, ledger: Ledger
) -> None:
    staged, known = with_stages(config), planted_fit()
    jobs = ladder.ladder_jobs(staged, replace(numerics, stages_by_fraction=True), config.hyperparameters, horizon)
    values = {"trained_from": 0, "source_losses": {}, "seconds": 1.0, "environment": {}}
    with pytest.raises(ScalingError):
        stage_law(jobs, known, ledger, staged.corpus, 3)
    for job in jobs:
        whole = job.chain.last.end == job.chain.numerics.run_tokens
        at_planned = np.exp(known.ensemble.log_loss(job.chain.numerics.model.n_params, job.chain.last.end))
        loss = float(at_planned) * (1.0 if whole else 1.1)
        for part in (job.chain.parent, job.chain):
            if part and ledger.segment(part.key) is None:
                ledger.insert(segments, **part.row(), loss=loss, state=None, **values)
    law = stage_law(jobs, known, ledger, staged.corpus, 3)
    assert [*law.shares, law.planned] == pytest.approx([0, 1 / 6, 1 / 3, 1 / 2])
    np.testing.assert_allclose(law.ratios["log_ratio"], np.log(1.1))
    assert law.ratios.groupby("share")["stem"].nunique().eq(len(jobs) // 4).all()


def test_branches_of_stages_end_with_equally_spaced_shares_of_the_last_stage_from_their_run_s_stem(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw
) -> None:
    curriculum, best = replace(numerics, stages_by_fraction=True), config.hyperparameters
    staged = with_stages(config)
    plain = ladder.ladder_jobs(config, curriculum, best, horizon)
    jobs = ladder.ladder_jobs(staged, curriculum, best, horizon)
    assert [job for job in jobs if job.chain.last.end == job.chain.numerics.run_tokens] == plain
    assert len(jobs) == 4 * len(plain)
    of_stem = stems([job.chain for job in jobs])
    assert len(of_stem) == len(plain)
    for chains in of_stem.values():
        *branches, run = chains
        shares = [max(0, 1 - run.last.end / 2 / chain.last.end) for chain in chains]
        assert shares == pytest.approx([0, 1 / 6, 1 / 3, 1 / 2], abs=0.02)
        assert {chain.segments[0].recipe for chain in branches} == {run.segments[0].recipe}
        assert all(chain.anneals for chain in branches)
    runs = pd.DataFrame([as_run(job) for job in jobs])
    table = ladder.law_rows(runs, best, config.sweep.space, horizon, curriculum)
    assert (table["left_out"] == "").sum() == len(plain)


def test_a_branch_that_saw_the_data_of_a_longer_run_is_left_out(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw
) -> None:
    h = config.hyperparameters
    plan = TrialPlan(
        numerics=replace(numerics, stages_by_fraction=True),
        defaults=h,
        n_tokens=16384,
        rung_tokens=config.rung_tokens(),
    )
    jobs = [
        Job(purpose="transfer", label="", hyperparameters=h, chain=plan.branch(history_of({}), rung))
        for rung in range(config.sweep.rungs)
    ]
    runs = pd.DataFrame([as_run(job) for job in jobs])
    table = ladder.law_rows(runs, h, config.sweep.space, horizon, plan.numerics)
    assert list(table["left_out"]) == ["its data are those of a run of 16384 tokens", ""]


def test_another_depth_or_batch_of_the_transfer_check_enters_no_law(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw
) -> None:
    members = transfer.members(
        StudyConfig.model_validate(
            {
                **config.__dict__,
                "transfer": config.transfer.model_copy(update={"depths": (2, 4), "batches": (256, 512)}),
            }
        ),
        numerics,
        config.hyperparameters,
    )
    runs = pd.DataFrame([as_run(job) for job in transfer.jobs(m for m in members if m.along != "width")])
    table = ladder.law_rows(runs, config.hyperparameters, config.sweep.space, horizon, numerics)
    assert set(table["left_out"]) == {
        "",
        "its depth is 2, the policy's is 1",
        "its depth is 4, the policy's is 1",
        "its batch_tokens is 512, the study's is 256",
    }


def test_a_row_that_is_not_comparable_is_left_out_with_the_reason(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw
) -> None:
    h = config.hyperparameters
    jobs = ladder.branches(numerics, h, [4096, 16384], tuned_at=16384, purpose="ladder", label="w")
    jobs += ladder.branches(numerics, h, [8192], tuned_at=8192, purpose="sweep", label="trial 0")
    table = ladder.law_rows(pd.DataFrame([as_run(job) for job in jobs]), h, config.sweep.space, horizon, numerics)
    reasons = dict(zip(table["n_tokens"], table["left_out"], strict=True))
    assert reasons[16384] == ""
    assert "warmup_floor_tokens" in reasons[4096]
    assert reasons[8192] == "the regret of its searched hyperparameters is not known"


@pytest.mark.parametrize("floor", [0, 3000])
def test_runs_that_the_law_leaves_out_because_of_their_warmups_are_named_before_they_are_trained(
    make_study: Callable[..., Path], horizon: HorizonLaw, floor: int
) -> None:
    path, floors = make_study(), {"hyperparameters.warmup_floor_tokens": floor}
    config = StudyConfig.read(path, floors)
    h = config.hyperparameters
    numerics = Numerics(model=config.model, base=config.model, corpus_key="c", seed=0, evaluation_tokens=1)
    jobs = ladder.ladder_jobs(config, numerics, h, horizon)
    table = ladder.law_rows(pd.DataFrame([as_run(job) for job in jobs]), h, config.sweep.space, horizon, numerics)
    named = ladder.planned_warmup_warning(config, numerics)
    assert bool(named) == (floor > 0) == bool(table["left_out"].str.contains("warmup_floor_tokens").any())
    space = '[sweep.space]\nwarmup_fraction = { distribution = "uniform", low = 0.02, high = 0.1 }'
    path.write_text(path.read_text().replace("[sweep.space]", space))
    searched = StudyConfig.read(path, floors)
    assert ladder.planned_warmup_warning(searched, numerics) == ""


def test_runs_of_an_earlier_revision_of_the_study_enter_no_law(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw
) -> None:
    h = config.hyperparameters
    settings = [
        (numerics, h, ""),
        (replace(numerics, seed=1), replace(h, learning_rate=0.5), ""),
        (numerics, replace(h, clip_norm=5.0), "its clip_norm is 5.0, the study's is 1.0"),
        (numerics, replace(h, optimizer="lion"), "its optimizer is 'lion', the study's is 'adamw'"),
        (
            replace(numerics, evaluation_tokens=2),
            h,
            "its evaluation_tokens is 2, the study's is 1",
        ),
    ]
    jobs = []
    for trained, tuned, _ in settings:
        jobs += ladder.branches(trained, tuned, [16384], tuned_at=16384, purpose="transfer", label="w")
    table = ladder.law_rows(pd.DataFrame([as_run(job) for job in jobs]), h, config.sweep.space, horizon, numerics)
    assert list(table["left_out"]) == [reason for *_, reason in settings]


def test_runs_of_other_experts_enter_no_law(config: StudyConfig, numerics: Numerics, horizon: HorizonLaw) -> None:
    mixture = replace(as_decoder(config.model), n_experts=4, expert_ratio=1.0)
    jobs = []
    for size in (4, 8):
        trained = replace(numerics, model=mixture.along("experts", size), base=mixture)
        jobs += ladder.branches(
            trained, config.hyperparameters, [16384], tuned_at=16384, purpose="transfer", label="experts"
        )
    runs, ours = pd.DataFrame([as_run(job) for job in jobs]), replace(numerics, model=mixture, base=mixture)
    table = ladder.law_rows(runs, config.hyperparameters, config.sweep.space, horizon, ours)
    assert [reason == "" for reason in table["left_out"]] == [True, False]
    assert "n_experts" in table["left_out"][1]


def test_a_sweep_gives_each_run_s_distance_from_the_policy(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw
) -> None:
    """Losses planted as parabolas in the rate's octaves off the law and in log2 of the init scale."""
    generator = np.random.default_rng(0)
    n_tokens, h = 16384, config.hyperparameters
    runs, planted = [], []
    for off, init in generator.uniform(-1, 1, (24, 2)):
        rate = float(horizon.rate(n_tokens) * 2**off)
        tuned = replace(h, learning_rate=rate, init_scale=2.0**init)
        (job,) = ladder.branches(numerics, tuned, [n_tokens], tuned_at=n_tokens, purpose="sweep", label="trial")
        planted.append(0.02 * off**2 + 0.03 * init**2)
        runs.append(as_run(job) | {"loss": 2.0 * np.exp(planted[-1])})
    table = ladder.law_rows(pd.DataFrame(runs), h, config.sweep.space, horizon, numerics)
    assert set(table["left_out"]) == {""}
    assert table["regret"].to_numpy() == pytest.approx(np.expm1(planted), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("weight_decay_tau", Uniform(low=0.5, high=4.0)),
        ("weight_decay_tau", LogUniform(low=0.5, high=4.0)),
        ("learning_rate", Ordinal(values=(0.002, 0.004, 0.008, 0.016, 0.032))),
        ("learning_rate", Choice(values=(0.002, 0.004, 0.008, 0.016, 0.032))),
    ],
    ids=str,
)
def test_the_ladder_enters_the_law_whatever_the_space_s_distributions(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw, name: str, distribution: Distribution
) -> None:
    """Losses planted as parabolas in octaves of the rate and of the timescale; no rate of the ladder is on the list."""
    generator, n_tokens = np.random.default_rng(0), 16384
    best = replace(config.hyperparameters, weight_decay_tau=2.0)
    runs = []
    for u, off in generator.uniform(0, 1, (24, 2)):
        rate = float(horizon.rate(n_tokens) * 2 ** (2 * off - 1))
        values: dict[str, Any] = {"learning_rate": rate, name: distribution.decode([u])}
        tuned = replace(best, **values)
        (job,) = ladder.branches(numerics, tuned, [n_tokens], tuned_at=n_tokens, purpose="sweep", label="trial")
        octaves = math.log2(tuned.learning_rate / horizon.rate(n_tokens)), math.log2(tuned.weight_decay_tau / 2)
        runs.append(as_run(job) | {"loss": 2 * math.exp(0.02 * octaves[0] ** 2 + 0.03 * octaves[1] ** 2)})
    tuned = ladder.tuned_for(best, horizon, n_tokens)
    (job,) = ladder.branches(numerics, tuned, [n_tokens], tuned_at=n_tokens, purpose="ladder", label="w")
    runs.append(as_run(job))
    space = Space({"learning_rate": config.sweep.space["learning_rate"], name: distribution})
    table = ladder.law_rows(pd.DataFrame(runs), best, space, horizon, numerics)
    assert table["left_out"].iloc[-1] == ""
    assert table["regret"].iloc[-1] < 1e-4


def test_the_ladder_is_fitted_as_it_stands_and_from_parquet(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw, tmp_path: Path
) -> None:
    """Runs at three sizes of a planted law, with one that is mostly warmup."""
    h, lengths, runs = config.hyperparameters, [4096, 16384, 32768, 65536], []
    for seed, n_params in enumerate((10_000, 40_000, 160_000)):
        member = replace(numerics, seed=seed)
        tuned = ladder.tuned_for(h, horizon, 32768)
        jobs = ladder.branches(member, tuned, lengths, tuned_at=32768, purpose="ladder", label="w")
        for job in jobs:
            loss = 1.5 + 40 / n_params**0.4 + 100 / job.chain.last.end**0.4
            runs.append(as_run(job) | {"n_params": n_params, "loss": loss})
    table = ladder.law_rows(pd.DataFrame(runs), h, config.sweep.space, horizon, numerics)
    table.to_parquet(tmp_path / "ladder.parquet")
    for given in (table, tmp_path / "ladder.parquet", tmp_path.joinpath("ladder.parquet").as_posix()):
        found = fit(given, n_params_convention="as planted", loss_unit="nats", n_bootstrap=4, max_regret=1.0)
        assert found.law["alpha"] == pytest.approx(0.4, rel=1e-4)
        assert (found.n_rows, found.n_stems, found.assumptions) == (9, 3, ())
        (reason,) = set(found.left_out["reason"])
        assert "warmup_floor_tokens" in reason


def as_run(job: Job) -> dict[str, object]:
    return {
        "purpose": job.purpose,
        "key": job.chain.key,
        "stem": job.chain.stem,
        "d_model": 32,
        "seed": 0,
        "learning_rate": job.hyperparameters.learning_rate,
        "n_params": 1,
        "n_tokens": job.chain.last.end,
        "loss": 2.0,
        "numerics": job.chain.numerics.to_dict(),
        "segment": job.chain.last.to_dict(),
        "hyperparameters": json.loads(json.dumps(job.hyperparameters.to_dict())),
    }


def test_a_promotion_reports_the_loss_of_each_source_where_there_are_several() -> None:
    values = {
        **dict.fromkeys(("plan", "registered_at", "started_at", "finished_at", "verdict"), ""),
        **dict.fromkeys(("loss", "forecast", "low", "high", "level", "seconds"), 1.0),
        "forced": False,
        "world_size": 2,
    }
    one = Promotion.from_dict({**values, "source_losses": {}})
    several = Promotion.from_dict({**values, "source_losses": {"words": 0.5, "code": 1.25}})
    assert str(several) == f"{one}\n  words 0.5000, code 1.2500"
    assert Promotion.from_dict(several.to_dict()) == several


def test_each_run_is_evaluated_at_points_that_the_branches_of_its_stem_share(
    config: StudyConfig, numerics: Numerics, horizon: HorizonLaw
) -> None:
    jobs = ladder.ladder_jobs(config, numerics, config.hyperparameters, horizon)
    found = ladder.evaluated(jobs, MEASURES, 4)
    assert sorted(job.chain.key for job in found) == sorted(job.chain.key for job in jobs)
    for job in found:
        tokens = [point.chain.last.end for point in job.evaluated]
        assert len(tokens) == 4
        assert tokens[-1] == job.chain.last.end
        assert tokens[-2] == job.chain.last.start
        assert [len(point.measures) for point in job.evaluated] == [1, 1, 1, 2]
        ratios = [later / earlier for earlier, later in pairwise(tokens[:-1])]
        assert ratios == pytest.approx([ladder.SPACING] * 2, rel=0.1)
    points = {point.chain.key for job in found for point in job.evaluated}
    n_stems = len(config.ladder.stems)
    assert len(points) == n_stems * (2 + 2 + 2)  # two ends, two starts of cooldowns and two points before them


def test_a_schedule_without_cooldown_is_evaluated_at_shorter_lengths_of_the_same_run(
    config: StudyConfig, numerics: Numerics
) -> None:
    h = replace(config.hyperparameters, schedule="cosine")
    jobs = ladder.branches(numerics, h, [16384], tuned_at=16384, purpose="ladder", label="w")
    (job,) = ladder.evaluated(jobs, MEASURES, 3)
    assert [point.chain.last.end for point in job.evaluated] == [
        h.whole_batches(h.whole_batches(16384 / ladder.SPACING) / ladder.SPACING),
        h.whole_batches(16384 / ladder.SPACING),
        16384,
    ]
    assert [point.chain.anneals for point in job.evaluated] == [False, False, True]
