"""The grids of [transfer]: what is trained, what is shared, what it costs, and a small one from end to end."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from muscale import StageError, Study, StudyConfig, StudyFileError
from muscale.findings import findings
from muscale.layout import REPORT
from muscale.plans.costs import estimate
from muscale.proxies import transfer
from muscale.proxies.transfer import horizon_of
from muscale.store.ledger_tables import ResultKind
from proxy_models.training.numerics import Numerics
from scaling import Verdict, fit_verdict

MakeStudy = Callable[..., Path]
ALL = [
    "transfer.depths=[1, 2]",
    "transfer.seeds=[0, 1]",
    "transfer.over={init_scale=[0.5, 0.75, 1.0, 1.5, 2.0], clip_norm={points=5, octaves=2.0}}",
    "transfer.batches=[128, 256, 512, 1024]",
]


def numerics_of(config: StudyConfig) -> Numerics:
    return Numerics(model=config.model, base=config.model, corpus_key="c", seed=0, evaluation_tokens=1)


def members_of(config: StudyConfig) -> list[transfer.GridRun]:
    return transfer.members(config, numerics_of(config), config.hyperparameters)


def test_every_grid_is_made_and_a_run_in_several_is_trained_once(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), ALL)
    members = members_of(config)
    table = transfer.rows(pd.DataFrame({"purpose": [], "key": [], "loss": []}), members)
    counts = table.groupby(["along", "over"]).size().to_dict()
    assert counts == {
        ("width", "rate"): 3 * 5 * 2 * 2,
        ("depth", "rate"): 2 * 5 * 2 * 2,
        ("width", "init_scale"): 3 * 5 * 2,
        ("width", "clip_norm"): 3 * 5 * 2,
        ("batch", "rate"): 4 * 5 * 2 * 2,
    }
    # Depth 1 is width 32's grid, batch 256 width 16's; the best's init scale and clip are the middle rate at each width.
    shared = 5 * 2 * 2 + 5 * 2 * 2 + 2 * 3 * 2
    jobs = transfer.jobs(members)
    assert len(jobs) == len({job.chain.key for job in jobs}) == len(table) - shared
    costs = estimate(config).set_index("stage").loc["transfer"]
    assert costs["runs"] == len(jobs)
    assert (
        costs["compute_flops"]
        > 2 * estimate(StudyConfig.read(make_study("plain"))).set_index("stage").loc["transfer", "compute_flops"]
    )


def test_further_horizons_are_the_smallest_width_s_alone_and_tuned_for_their_own_length(make_study: MakeStudy) -> None:
    path = make_study()
    config = StudyConfig.read(path, ["transfer.horizons=[0.5, 1.0, 2.0, 4.0]"])
    members, before = members_of(config), members_of(StudyConfig.read(path))
    assert [m for m in members if m.n_tokens <= 16384] == before, "the grids that were are not made anew"
    further = [m for m in members if m.n_tokens > 16384]
    assert {(m.along, m.size, m.over) for m in further} == {("width", 16, "rate")}
    assert len(further) == 2 * 5
    for member in further:
        last = member.job.chain.last
        wanted = config.hyperparameters.weight_decay_tau
        assert last.recipe.weight_decay_tau(last.end) == pytest.approx(wanted, rel=0.02)


def test_a_wide_horizon_is_one_grid_at_its_tokens_a_parameter_and_brings_a_second_size(make_study: MakeStudy) -> None:
    path = make_study()
    config = StudyConfig.read(
        path, ["transfer.horizons=[0.5, 1.0, 2.0]", "transfer.wide_horizon={width=32, tokens_per_param=20}"]
    )
    members, before = members_of(config), members_of(StudyConfig.read(path, ["transfer.horizons=[0.5, 1.0, 2.0]"]))
    added = members[len(before) :]
    assert members[: len(before)] == before
    model = config.family.at(width=32)
    assert [(m.along, m.size, m.over) for m in added] == [("width", 32, "rate")] * config.transfer.rates
    assert {m.n_tokens for m in added} == {20.0 * model.n_params}
    last = added[0].job.chain.last
    assert last.recipe.weight_decay_tau(last.end) == pytest.approx(config.hyperparameters.weight_decay_tau, rel=0.02)

    runs = pd.DataFrame(
        {"purpose": "transfer", "key": m.job.chain.key, "loss": 3 + 0.02 * np.log2(m.value / 0.008) ** 2}
        for m in members
    )
    table = transfer.rows(runs, members)
    law = horizon_of(fit_verdict(table))
    assert law.optima.groupby("group").size().to_dict() == {"width 16": 3, "width 32": 3, "width 64": 2}
    assert law.measured_on == ("width 16", "width 32", "width 64")


@pytest.mark.parametrize(
    ("wide", "message"),
    [
        ("{width=16}", r"wide_horizon.width: must be one of transfer.widths above the smallest, \[32, 64\], got 16"),
        ("{width=32, tokens_per_param=0.01}", "wide_horizon: .* tokens at width 32 must exceed the 16,384"),
    ],
)
def test_a_wide_horizon_that_tells_nothing_is_refused(make_study: MakeStudy, wide: str, message: str) -> None:
    with pytest.raises(StudyFileError, match=message):
        StudyConfig.read(make_study(), [f"transfer.wide_horizon={wide}"])


def test_each_grid_varies_one_thing_around_the_best(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), ALL)
    h = config.hyperparameters
    for member in members_of(config):
        tuned, model = member.job.hyperparameters, member.job.chain.numerics.model
        name = "learning_rate" if member.over == "rate" else member.over
        expected = replace(h, **{name: member.value})  # type: ignore[arg-type]
        if member.along == "batch":
            expected = replace(expected, batch_tokens=int(member.size))
            assert (model.d_model, model.n_layers) == (16, config.model.n_layers)
        else:
            size = {"width": (member.size, config.model.n_layers), "depth": (config.model.d_model, member.size)}
            assert (model.d_model, model.n_layers) == size[member.along]
        assert tuned == expected
        assert abs(member.job.chain.last.end - member.n_tokens) <= tuned.batch_tokens / 2


def test_batches_are_searched_around_a_rate_that_rises_with_them(make_study: MakeStudy) -> None:
    members = [m for m in members_of(StudyConfig.read(make_study(), ALL)) if m.along == "batch"]
    middle = {size: np.median([m.value for m in members if m.size == size]) for size in (128, 256, 512, 1024)}
    assert middle[256] == 0.008
    assert middle[1024] / middle[256] == pytest.approx(4**transfer.RATE_WITH_BATCH, rel=1e-4)


def test_a_grid_widened_as_the_verdict_advises_contains_the_existing_runs(make_study: MakeStudy) -> None:
    """Rates on the same steps, and seeds: the options given are those that a study file takes."""
    config = StudyConfig.read(make_study())
    members = members_of(config)
    keys = [m.job.chain.key for m in members]
    best = np.log2(config.hyperparameters.learning_rate) + 4
    losses = [3 + 0.02 * (np.log2(m.value) - best) ** 2 - 0.1 * np.log2(m.size) for m in members]
    runs = pd.DataFrame({"purpose": "transfer", "key": keys, "loss": losses})
    verdict = fit_verdict(transfer.rows(runs, members))
    assert verdict.verdict == "not enough evidence"
    options = [option.strip("'") for option in verdict.options.removeprefix("--set ").split(" --set ")]
    wider = StudyConfig.read(make_study("wider"), options)
    assert wider.transfer.rates == 9
    assert set(keys) < {m.job.chain.key for m in members_of(wider)}


def test_a_value_that_a_run_can_not_take_around_the_best_names_the_grid(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), ["transfer.over.warmup_fraction={points=5, octaves=12.0}"])
    with pytest.raises(StageError, match=r"transfer: width 16, warmup_fraction 3\.2: warmup_fraction must lie in"):
        members_of(config)


def test_rows_of_a_revised_study_are_its_own(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study())
    now = members_of(config)
    revised = replace(config.hyperparameters, cooldown_fraction=0.3)
    before = transfer.members(config, numerics_of(config), revised)
    runs = pd.DataFrame(
        [
            {"purpose": "transfer", "key": member.job.chain.key, "loss": loss}
            for loss, members in ((2.0, now), (9.0, before))
            for member in members
        ]
    )
    table = transfer.rows(runs, now)
    assert len(table) == len(now)
    assert set(table["loss"]) == {2.0}


def test_the_quickstart_s_grid_is_of_rates_at_three_widths_and_two_further_lengths() -> None:
    config = StudyConfig.read(Path(str(resources.files("muscale") / "quickstart.toml")))
    costs = estimate(config).set_index("stage").loc["transfer"]
    assert (costs["runs"], costs["n_tokens"]) == (5 * 7, 7 * (3 + 2 + 4) * 262_144)


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.soak
def test_a_small_study_is_checked_in_width_and_depth_and_over_a_second_hyperparameter(make_study: MakeStudy) -> None:
    path = make_study()
    sizes = ["transfer.widths=[16, 32]", "transfer.depths=[1, 2]", "transfer.over.init_scale.points=5"]
    small = [
        *sizes,
        "transfer.n_tokens=4096",
        "transfer.horizons=[1.0]",
        "sweep.trials=2",
        "sweep.n_tokens=4096",
        "resources.workers=1",
    ]
    study = Study.open(path, small, quiet=True)
    study.sweep()
    assert findings(study.contents).transfer is None
    verdict = study.transfer()
    assert findings(study.contents).transfer
    assert [(t.along, t.over) for t in verdict.transfers] == [
        ("width", "rate"),
        ("depth", "rate"),
        ("width", "init_scale"),
    ]
    assert [list(t.optima) for t in verdict.transfers] == [[16, 32], [1, 2], [16, 32]]
    assert not verdict.passed, "two depths are no evidence"
    assert verdict.verdict == "fail" or "transfer.depths=[1,2,4]" in verdict.options
    recorded = study.ledger.latest_result(ResultKind.TRANSFER)
    assert recorded is not None
    assert str(Verdict.from_dict(recorded["payload"])) == str(verdict)
    json.dumps(recorded["payload"], allow_nan=False)
    page = (study.report() and (study.directory / REPORT)).read_text()
    for title in ("learning rate, per width", "learning rate, per depth", "init_scale, per width", "Does it transfer?"):
        assert title in page
    with pytest.raises(StageError, match="transfer:"):
        horizon_of(study.transfer())
