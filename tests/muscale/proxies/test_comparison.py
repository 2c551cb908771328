"""Variants of a study: what they train, how their rates are found, and two of them from end to end."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from muscale import StageError, Study, StudyConfig, StudyFileError
from muscale.actors.jobs import Job
from muscale.actors.worker import Worker
from muscale.cli import app
from muscale.plans.costs import cost_of, estimate, with_device_hours, with_total
from muscale.proxies import ladder
from muscale.proxies.comparison import Comparison, compare, latest_comparison
from muscale.proxies.variant_rates import first_steps, next_step
from muscale.proxies.variants import policy, stems_of, variants, widths_of
from muscale.store.statements import find
from proxy_models.architecture.member import ModuleConfig
from proxy_models.training.numerics import Numerics
from tests.muscale.planted import planted_horizon
from tests.muscale.planted_ledger import add_run

MakeStudy = Callable[..., Path]
SMALL = {
    "sweep.trials": 2,
    "transfer.rates": 5,
    "compare.stems": [
        {"width": 16, "n_tokens": 8192},
        {"width": 32, "n_tokens": 16384},
        {"width": 48, "n_tokens": 16384},
    ],
    "variants.same": {},
    "variants.damaged": {"hyperparameters": {"init_scale": 8.0}},
    "variants.noise": {"corpus": {"source": "noise.txt"}},
}


def numerics_of(config: StudyConfig) -> Numerics:
    return Numerics(model=config.model, base=config.model, corpus_key="c", seed=0, evaluation_tokens=1)


def test_variants_differ_by_their_table_alone_and_an_empty_one_in_nothing(make_study: MakeStudy) -> None:
    tables = {"same": {}, "wide_mlp": {"model": {"mlp_ratio": 4}}, "lion": {"hyperparameters": {"optimizer": "lion"}}}
    config = StudyConfig.read(make_study(), {f"variants.{name}": table for name, table in tables.items()})
    study, same, wide, lion = variants(config, numerics_of(config), replace(config.hyperparameters, init_scale=0.7))
    assert (same.numerics, same.best) == (study.numerics, study.best)
    assert wide.numerics.model == wide.numerics.base
    assert wide.numerics.model.to_dict() == config.model.to_dict() | {"mlp_ratio": 4.0}
    assert (wide.best, lion.best) == (study.best, replace(study.best, optimizer="lion"))
    stem, rate = stems_of(config)[-1], policy(planted_horizon().rate, 0.0)
    jobs = [variant.size_job(stem, 3, rate).chain for variant in (study, same, wide, lion)]
    assert jobs[0] == jobs[1]
    assert len({job.key for job in jobs}) == 3
    assert {job.numerics.seed for job in jobs} == {3}, "the seeds are paired"


def test_a_variant_of_another_family_is_imported_by_what_trains_alone(make_study: MakeStudy) -> None:
    path, table = make_study(), {"variants.gru.model": {"family": "tests.proxy_models.families:Recurrent"}}
    opened = Study.open(path, table, quiet=True, trains=True)
    config = opened.config
    study, gru = variants(config, config.shared_numerics(opened.corpus, opened.directory), config.hyperparameters)
    assert isinstance(gru.numerics.model, ModuleConfig)
    sizes = ("d_model", "n_layers", "vocab_size", "context_length")
    assert [getattr(gru.numerics.model, key) for key in sizes] == [getattr(study.numerics.model, key) for key in sizes]
    outcome = Worker(opened.ledger, compiled=False).reach(gru.grid_job(config, 16, 0.0).chain)
    assert outcome.loss is not None
    opened.ledger.close()
    with pytest.raises(StageError, match="variants.gru"):
        StudyConfig.read(path, table).variant_model("gru")
    wrong = {"variants.gru.model": {**table["variants.gru.model"], "args": {"n_gates": 3}}}
    with pytest.raises(StudyFileError, match=r"variants\.gru\.model\.args\.n_gates"):
        StudyConfig.read(path, wrong, trains=True)


def test_the_study_s_own_runs_are_those_of_its_grids_and_its_ladder(make_study: MakeStudy) -> None:
    """Nothing of the baseline that transfer check and ladder have trained is trained again."""
    from muscale.proxies import transfer

    config = StudyConfig.read(make_study(), {"variants.same": {}})
    numerics, best, horizon = numerics_of(config), config.hyperparameters, planted_horizon()
    study = variants(config, numerics, best)[0]
    grids = {job.chain.key for job in transfer.jobs(transfer.members(config, numerics, best))}
    wanted = {study.grid_job(config, w, s).chain.key for w in widths_of(config) for s in first_steps(config)}
    assert len(wanted) == 6
    assert wanted <= grids
    known = {job.chain.key for job in ladder.ladder_jobs(config, numerics, best, horizon)}
    assert {study.size_job(s, 0, policy(horizon.rate, 0.0)).chain.key for s in stems_of(config)} <= known


@pytest.mark.parametrize(("optimum", "tried"), [(0.2, 3), (1.4, 4), (-2.4, 5), (9.0, 5)])
def test_a_grid_grows_towards_its_optimum_and_not_for_ever(optimum: float, tried: int) -> None:
    first = steps = [-1.0, 0.0, 1.0]
    while True:
        losses = [[2 + 0.02 * (step - optimum) ** 2, 1.5 + 0.02 * (step - optimum) ** 2] for step in steps]
        if (wanted := next_step(steps, losses, first)) is None:
            break
        steps = sorted([*steps, wanted])
    assert len(steps) == tried
    assert abs(steps[0]) + abs(steps[-1]) == tried - 1, "without gaps"


def test_rates_that_diverge_are_not_the_best_and_lower_ones_are_tried() -> None:
    nan = math.nan
    assert next_step([-1.0, 0.0, 1.0], [[2.0, 1.5], [2.1, nan], [nan, nan]], [-1.0, 0.0, 1.0]) == -2.0
    steps, first = [-3.0, -2.0, -1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]
    assert next_step(steps, [[2.0], [1.9], [1.8], [nan], [nan]], first) is None, "the wall is above the best"
    assert next_step(steps, [[nan]] * 5, first) is None, "widened as far as it may be"


def test_the_cost_is_known_before_anything_is_trained(make_study: MakeStudy) -> None:
    path = make_study()
    config = StudyConfig.read(path, SMALL)
    table = cost_of("compare", config)
    assert table["stage"].tolist()[:2] == ["sweep", "transfer"]
    parts = table["stage"].str.partition(": ")[2].str.split(", ", expand=True)[2:]
    assert set(parts[0]) == {"baseline", "same", "damaged", "noise"}
    assert set(parts[1]) == {"rates", "width 16", "width 32", "width 48"}
    largest = table.set_index("stage").loc["compare: damaged, width 48, 16384 tokens"]
    assert (largest["runs"], largest["n_tokens"]) == (2, 2 * 16384)
    n_params = config.family.at(width=48).n_params
    assert largest["compute_flops"] == 6.0 * n_params * 2 * 16384
    total = with_total(table).iloc[-1]
    assert (total["stage"], total["runs"]) == ("total", table["runs"].sum())
    assert total["compute_flops"] == pytest.approx(table["compute_flops"].sum())
    assert with_total(cost_of("run", config)).iloc[-1].isna()["n_tokens"], "the plan's tokens are not known yet"
    one = cost_of("compare --one-size", config)
    assert [name.split(", ")[1] for name in one["stage"] if "damaged" in name] == ["rates", "width 32"]
    assert estimate(StudyConfig.read(path)).set_index("stage").loc["compare", "runs"] == 0


def test_hours_are_those_of_what_was_trained_so_far(make_study: MakeStudy) -> None:
    path = make_study()
    study = Study.open(path, quiet=True)
    table = cost_of("ladder", study.config)
    assert "device_hours" not in with_device_hours(table, study.config, path)
    add_run(study.ledger, 0, 2.0)  # of one parameter, whose last segment says that it trained 5,120 tokens in a second
    priced = with_device_hours(table, study.config, path)
    assert priced["device_hours"].tolist() == pytest.approx((table["compute_flops"] / (6 * 5120) / 3600).tolist())


TINY = {
    "transfer.n_tokens": 4096,
    "transfer.rates": 5,
    "compare.stems": [{"width": 16, "n_tokens": 4096}, {"width": 32, "n_tokens": 4096}],
    "variants.damaged": {"hyperparameters": {"init_scale": 8.0}},
}


def compared_here(path: Path, interruptions: list[int]) -> tuple[dict[str, Any], dict[str, float]]:
    """A comparison that a worker in this process trains, begun again after each interruption; and the losses of its segments.

    Args:
        path: The study file.
        interruptions: Runs after which it is interrupted.
    """
    study = Study.open(path, TINY, quiet=True)
    corpus, best = study.corpus, study.config.hyperparameters
    worker, reached = Worker(study.ledger, compiled=False), set[str]()

    def train(_what: str, jobs: Sequence[Job]) -> None:
        for job in jobs:
            worker.reach(job.chain)
            reached.add(job.chain.key)
            if interruptions and len(reached) > interruptions[0]:
                interruptions.pop(0)
                raise KeyboardInterrupt

    while True:
        try:
            numerics = study.config.shared_numerics(corpus, corpus.folder.parent)
            found = compare(study.config, numerics, best, planted_horizon(), study.ledger, train, {})
        except KeyboardInterrupt:
            continue
        segments = study.ledger.read(find, "segments")
        study.ledger.close()
        return found.to_dict(), {row["key"]: row["loss"] for row in segments}


def test_an_interrupted_comparison_ends_as_an_undisturbed_one(make_study: MakeStudy) -> None:
    """Interrupted among the rates and among the sizes."""
    torch.set_num_threads(1)
    moments = [3, 15]
    undisturbed, losses = compared_here(make_study("undisturbed"), [])
    interrupted, losses_of_both = compared_here(make_study("interrupted"), moments)
    assert not moments, "it was interrupted twice"
    assert interrupted == undisturbed
    assert losses_of_both == losses, "and nothing else was trained"


def test_one_size_without_a_horizon_law_is_trained_at_the_best_rate_of_the_grids(make_study: MakeStudy) -> None:
    torch.set_num_threads(1)
    study = Study.open(make_study(), {**TINY, "variants": {}, "variants.same": {}}, quiet=True)
    config, corpus, trained = study.config.at_one_size(), study.corpus, dict[str, Job]()
    worker = Worker(study.ledger, compiled=False)

    def train(_what: str, jobs: Sequence[Job]) -> None:
        for job in jobs:
            worker.reach(job.chain)
            trained[job.chain.key] = job

    found = compare(
        config,
        config.shared_numerics(corpus, corpus.folder.parent),
        config.hyperparameters,
        None,
        study.ledger,
        train,
        {},
    )
    study.ledger.close()
    rates, sizes = ([job for job in trained.values() if (", seed" in job.label) == sized] for sized in (False, True))
    assert found.outcome.n_sizes == 1
    assert len({job.chain.last.end for job in trained.values()}) == 1, "what is tuned is as long as what is decided on"
    tried = [job.hyperparameters.learning_rate for job in rates]
    (rate,) = {job.hyperparameters.learning_rate for job in sizes}
    assert min(tried) <= rate <= max(tried)


@pytest.mark.soak
def test_two_variants_from_end_to_end(
    make_study: MakeStudy, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_study()
    (path.parent / "noise.txt").write_text("".join(random.Random(0).choices("abcdefghijklmnop ", k=40_000)))
    study = Study.open(path, SMALL, quiet=True)
    found = study.compare()
    table = found.outcome.table.set_index("variant")
    assert table.loc["damaged", "verdict"] == "reject"
    assert table.loc["damaged", "look"] == 1, "its other size is not trained"
    assert table.loc["noise", "verdict"] == "reject", "it is held against text"
    assert table.loc["same", "verdict"] == "undecided"
    assert table.loc["same", "multiplier"] == pytest.approx(1.0)
    trained = study.runs()
    assert len(trained[trained["label"].str.startswith("damaged, width 48, seed")]) == 0
    again = Study.open(path, SMALL, quiet=True).compare()
    assert len(study.runs()) == len(trained), "nothing is trained twice"
    assert again.to_dict() == found.to_dict()
    assert Comparison.from_dict(json.loads(json.dumps(found.to_dict()))).outcome.table.equals(found.outcome.table)
    assert 'id="variants"' in study.report().read_text()
    settings = [part for key, value in SMALL.items() for part in ("--set", f"{key}={_toml(value)}")]
    assert app(["compare", str(path), "--one-size", "--json", *settings], result_action="return_value") == 0
    one = json.loads(capsys.readouterr().out)["outcome"]
    verdicts = {row["variant"]: row["verdict"] for row in one["table"]}
    assert verdicts == {"same": "undecided", "damaged": "reject", "noise": "reject"}
    assert one["n_sizes"] == 1
    shown = latest_comparison(study.config, study.ledger)
    assert shown is not None
    assert shown.to_dict() == found.to_dict(), "the file's own, though one at another size came later"
    other = latest_comparison(StudyConfig.read(path, {**SMALL, "compare.worth": 0.1}), study.ledger)
    assert other is not None
    assert other.outcome.n_sizes == 1, "the latest, where the file asks for none that was made"


def _toml(value: object) -> str:
    from muscale.settings.toml_file import inline

    return inline(value).as_string()
