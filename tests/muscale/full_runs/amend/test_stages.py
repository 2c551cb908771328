"""Runs whose corpus has stages: amended at a checkpoint, with another start of the last stage, and what that is forecast to change."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from muscale import StageError, Study, StudyFileError
from muscale.bundles.bundle import DATA
from muscale.cli import app, entry
from muscale.full_runs.amend.second_forecast import SecondForecast, second_forecast
from muscale.full_runs.amend.train import train_amendment
from muscale.full_runs.train.attempt import train
from muscale.layout import FULL_RUNS, STUDY_FILE
from proxy_models.data.batches import training_stream
from proxy_models.data.mixture import Mixture, MixtureStage
from scaling import StageLaw
from tests.muscale.full_runs.amend.conftest import BATCH, STEPS, Case, last_evaluation, promoted, stages_of
from tests.muscale.full_runs.amend.test_amendments import of_lineage
from tests.muscale.planted import planted_fit

HALF = STEPS // 2 * BATCH  # a checkpoint that is kept
PLANNED = Mixture(
    stages=(
        MixtureStage(weights={"text": 1.0, "code": 0.0}, until_fraction=0.75),
        MixtureStage(weights={"text": 1.0, "code": 3.0}),
    )
)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = promoted(tmp_path_factory.mktemp("study"), mixture=PLANNED)
    yield made
    made.ledger.close()


def test_the_rest_of_a_run_in_stages_is_trained_to_the_parent_s_loss(case: Case) -> None:
    same = case.amended(parent__tokens=HALF, name="same")
    assert (same.corpus.key, same.position, same.last_stage_share) == (case.corpus.key, HALF, 0.25)
    done = train_amendment(same, case.config, case.ledger, launcher=train)
    assert done.after.own == last_evaluation(case.directory / FULL_RUNS / case.plan.key), "to the last bit"


@pytest.mark.parametrize(("begins", "after"), [(0.5, 6), (0.6, 7), (0.9, 10), (1.0, 12)])
def test_the_last_stage_begins_at_another_share_of_the_run_and_each_source_is_read_on(
    case: Case, begins: float, after: int
) -> None:
    child = case.amended(parent__run=case.plan.key, parent__tokens=HALF, until_fraction=begins)
    assert child.corpus.mixture is not None
    assert child.corpus.mixture.last_stage_begins == pytest.approx(begins * STEPS * BATCH, abs=1)
    assert child.last_stage_share == pytest.approx(1 - begins, abs=1e-3)
    assert (child.position, child.corpus.evaluation_weights) == (HALF, case.corpus.evaluation_weights)
    ours, planned = (
        training_stream(corpus, 32, 0, run_tokens=tokens)
        for corpus, tokens in ((child.corpus, None), (case.corpus, STEPS * BATCH))
    )
    assert ours.batch(0, HALF).equal(planned.batch(0, HALF))
    seen = [place.source for place in ours.places(0, STEPS * BATCH)]
    first = seen.index("code") * 32 if "code" in seen else STEPS * BATCH
    assert abs(first - after * BATCH) <= BATCH


def test_a_longer_run_keeps_the_begin_of_the_last_stage_in_tokens(case: Case) -> None:
    longer = case.amended(parent__run=case.plan.key, parent__tokens=HALF, n_tokens=2 * STEPS * BATCH, name="longer")
    assert longer.last_stage_share == pytest.approx(1 - 0.75 / 2)
    assert longer.earlier == {}, "its held-out loss is the parent's"
    done = train_amendment(longer, case.config, case.ledger, launcher=train)
    study = Study.open(case.directory / STUDY_FILE, quiet=True)
    bundle = study.bundle(continuation=done.key)
    epochs = bundle.read(DATA)["epochs"]
    code = case.corpus.sources["code"].n_tokens
    assert epochs["code"] * code == pytest.approx(0.75 * (2 - 0.75) * STEPS * BATCH, rel=0.01)
    study.ledger.close()
    moved = case.amended(
        parent__run=case.plan.key, parent__tokens=HALF, n_tokens=2 * STEPS * BATCH, until_fraction=0.75
    )
    assert moved.last_stage_share == pytest.approx(0.25, abs=1e-3)


def test_a_run_in_stages_is_continued_behind_its_end(case: Case) -> None:
    further = case.planned(f'name = "more"\nn_tokens = {4 * BATCH}\nrewarm_tokens = {BATCH}\n')
    assert (further.corpus.key, further.position) == (case.corpus.key, STEPS * BATCH)
    done = train_amendment(further, case.config, case.ledger, launcher=train)
    again = case.planned(
        f'name = "again"\nn_tokens = {4 * BATCH}\nrewarm_tokens = {BATCH}\n[parent]\nrun = "{done.key}"\n'
    )
    assert again.position == (STEPS + 4) * BATCH


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"until_fraction": 0.4}, "until_fraction"),
        (
            {
                "parent__tokens": STEPS * BATCH,
                "n_tokens": 2 * STEPS * BATCH,
                "hyperparameters__rewarm_tokens": BATCH,
                "until_fraction": 0.9,
            },
            "until_fraction",
        ),
    ],
)
def test_a_stage_can_t_begin_before_the_checkpoint_nor_begin_again(
    case: Case, changes: dict[str, float], key: str
) -> None:
    with pytest.raises(StageError, match=key):
        case.amended(**{"parent__run": case.plan.key, "parent__tokens": HALF} | changes)


def test_a_stated_corpus_that_a_lineage_has_read_in_stages_is_refused(case: Case) -> None:
    stages = stages_of(PLANNED)
    with pytest.raises(StageError, match="corpus"):
        case.planned(f'name = "restated"\nn_tokens = {4 * BATCH}\n[corpus]\n{stages}')


def test_other_weights_and_another_begin_can_t_be_combined(case: Case) -> None:
    with pytest.raises(StudyFileError, match="until_fraction"):
        case.amended(until_fraction=0.9, mixture__text=1, mixture__code=1)


def test_the_command_line_moves_the_last_stage(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    study = str(case.directory / STUDY_FILE)
    words = ["amend", study, "--run", case.plan.key, "--at", str(HALF), "--reason", "late", "--dry-run", "--json"]
    assert app([*words, "--set", "until_fraction=0.9"], result_action="return_value") == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["changes"] == {"until_fraction": 0.9}
    child = case.amended(parent__run=case.plan.key, parent__tokens=HALF, until_fraction=0.9, reason="late")
    assert shown["key"] == child.key
    for value in ("0.3", "1.5", "late"):
        assert entry.run([*words, "--set", f"until_fraction={value}"]) == 2
        assert "until_fraction" in capfd.readouterr().err


def planted_law(case: Case) -> StageLaw:
    """Three stems near the plan, with .1 more loss without the last stage."""
    rows = [
        {
            "stem": str(n),
            "n_params": n * case.plan.n_params,
            "n_tokens": n * STEPS * BATCH,
            "share": 0.0,
            "log_ratio": 0.1,
        }
        for n in (0.5, 0.8, 1.0)
    ]
    return StageLaw(planned=0.25, ratios=pd.DataFrame(rows))


def test_another_begin_is_forecast_by_the_law_of_stages(case: Case) -> None:
    law, fit = planted_law(case), planted_fit()
    plan = case.amended(parent__run=case.plan.key, parent__tokens=HALF)
    never = case.amended(parent__run=case.plan.key, parent__tokens=HALF, until_fraction=1.0)
    planned, found = (second_forecast(one, fit, case.ledger, level=0.9, stages=lambda: law) for one in (plan, never))
    assert isinstance(planned, SecondForecast)
    assert isinstance(found, SecondForecast)
    assert planned.by_stages == 0.0
    assert found.by_stages == pytest.approx(0.1)
    assert found.loss == pytest.approx(planned.loss * math.exp(0.1))
    assert set(found.reasons) == set(planned.reasons)
    own, whole = (math.log(each.high / each.loss) for each in (planned, found))
    effect = law.effect(case.plan.n_params, STEPS * BATCH, 0.0, level=0.9)
    assert whole == pytest.approx(math.hypot(own, effect.half_width)) != own
    assert SecondForecast.from_dict(found.to_dict()) == found


def test_another_begin_is_named_as_not_covered_without_a_law_and_outside_it(case: Case) -> None:
    fit, law = planted_fit(), planted_law(case)
    later, _ = of_lineage(case, {HALF: 9.0}, until_fraction=0.9)
    earlier, _ = of_lineage(case, {HALF: 9.0}, until_fraction=0.5)
    covered = second_forecast(later, fit, case.ledger, level=0.9, stages=lambda: law)
    assert isinstance(covered, SecondForecast)
    for found in (
        second_forecast(later, fit, case.ledger, level=0.9, stages=lambda: "none"),
        second_forecast(earlier, fit, case.ledger, level=0.9, stages=lambda: law),
    ):
        assert isinstance(found, SecondForecast)
        assert len(found.reasons) == len(covered.reasons) + 1
        assert found.high / found.loss > covered.high / covered.loss
    longer, _ = of_lineage(case, {HALF: 9.0}, n_tokens=2 * STEPS * BATCH)
    found = second_forecast(longer, fit, case.ledger, level=0.9, stages=lambda: "none")
    assert isinstance(found, SecondForecast)
    assert any("none" in reason for reason in found.reasons), "a longer run has another share"


def test_three_stages_have_no_law_so_a_change_is_named_and_none_is_not(tmp_path: Path) -> None:
    first, last = PLANNED.stages
    three = Mixture(stages=(replace(last, until_fraction=0.25), first, last))
    own = promoted(tmp_path, mixture=three)
    at = {"parent__run": own.plan.key, "parent__tokens": HALF}
    same, moved, longer = (
        second_forecast(of_lineage(own, {HALF: 9.0}, **change)[0], planted_fit(), own.ledger, level=0.9)
        for change in ({}, {"until_fraction": 0.9}, {"n_tokens": 2 * STEPS * BATCH})
    )
    assert own.amended(**at).last_stage_share is None
    assert isinstance(same, SecondForecast)
    for found in (moved, longer):
        assert isinstance(found, SecondForecast)
        assert found.widening > 0 == same.widening
    own.ledger.close()


def test_training_losses_of_the_first_stage_do_not_stand_in_for_held_out_ones(case: Case) -> None:
    amendment = case.amended(parent__run=case.plan.key, parent__tokens=HALF, hyperparameters__clip_norm=0.5)
    bare = replace(amendment, directory=case.directory)
    metrics = case.directory / FULL_RUNS / case.plan.key / "metrics.jsonl"
    assert '"train_loss"' in metrics.read_text()
    found = second_forecast(bare, planted_fit(), case.ledger, level=0.9)
    assert isinstance(found, str), "no loss of the parent says what it has still to gain"
