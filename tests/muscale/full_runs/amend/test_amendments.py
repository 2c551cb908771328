"""Amended runs: what changes at a checkpoint and what stays, what is refused, and the second forecast."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muscale import Amended, StageError, Study, StudyFileError
from muscale.bundles.bundle import LINEAGE
from muscale.cli import app
from muscale.full_runs.amend import second_forecast as of_the_forecast
from muscale.full_runs.amend.amendment_plan import AmendmentPlan
from muscale.full_runs.amend.second_forecast import SecondForecast, second_forecast
from muscale.full_runs.amend.train import train_amendment
from muscale.full_runs.checkpoints.folder import CheckpointFolder
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.train.attempt import train
from muscale.layout import CORPORA, CORPUS, FULL_RUNS, METRICS, STUDY_FILE
from muscale.plans.band import Band
from muscale.plans.plan import Plan, register
from muscale.settings.amendment_file import AmendmentFile
from muscale.store.lease import full_run_lease, lease
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.batches import training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_mixture, write_remixed
from proxy_models.data.mixture import Mixture
from proxy_models.data.sources import Source
from scaling import ScalingFit
from scaling.fits.forecast import FLOOR, interval_factor
from tests.muscale.conftest import write_text
from tests.muscale.full_runs.amend.conftest import BATCH, STEPS, Case, last_evaluation
from tests.muscale.full_runs.amend.test_plan_amendment import CODE
from tests.muscale.planted import planted_fit

HALF = STEPS // 2 * BATCH  # a checkpoint that is kept


def trained(case: Case, **changes: Any) -> Amended:
    return train_amendment(case.amended(parent__run=case.plan.key, **changes), case.config, case.ledger, launcher=train)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_rest_of_the_parent_is_trained_to_the_parent_s_loss_and_nothing_of_the_parent_changes(case: Case) -> None:
    of_parent = case.directory / FULL_RUNS / case.plan.key
    before = contents(of_parent)
    done = trained(case, parent__tokens=HALF, name="same")
    assert done.after.own == last_evaluation(of_parent), "to the last bit"
    assert (done.n_tokens, done.tokens_before, done.reason) == (STEPS * BATCH - HALF, HALF, "a test")
    assert contents(of_parent) == before


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"hyperparameters__cooldown_fraction": 0.5}, {}),
        ({"hyperparameters__learning_rate_factor": 0.5}, {"learning_rate": 0.5, "weight_decay": 2.0}),
        ({"hyperparameters__batch_tokens": 2 * BATCH}, {"batch_tokens": 2.0, "weight_decay": 2.0}),
        ({"hyperparameters__clip_norm": 0.25, "hyperparameters__beta2": 0.5}, {"clip_norm": 0.25}),
        ({"hyperparameters__schedule": "linear"}, {}),
        ({"model__label_smoothing": 0.1}, {}),
    ],
)
def test_a_change_is_trained_from_the_checkpoint_on_and_the_rest_is_the_parent_s(
    case: Case, changes: dict[str, Any], seen: dict[str, float]
) -> None:
    same = case.amended(parent__run=case.plan.key, parent__tokens=HALF)
    child = case.amended(parent__run=case.plan.key, parent__tokens=HALF, **changes)
    assert child.key != same.key
    assert child.changes == {name.replace("__", "."): value for name, value in changes.items()}
    assert (child.position, child.corpus.key) == (HALF, case.corpus.key)
    before, after = same.segments[0].recipe, child.segments[0].recipe
    for name, times in seen.items():
        assert getattr(after, name) == pytest.approx(times * getattr(before, name))
    done = train_amendment(child, case.config, case.ledger, launcher=train)
    assert done.before.own != done.after.own != last_evaluation(case.directory / FULL_RUNS / case.plan.key)
    assert Amended.from_dict(json.loads(json.dumps(done.to_dict()))) == done


def test_an_amended_run_is_amended_again_and_its_lineage_has_every_run(case: Case) -> None:
    first = trained(case, parent__tokens=HALF, n_tokens=2 * STEPS * BATCH, name="longer")
    assert first.lineage[-1].tokens == 2 * STEPS * BATCH - HALF
    again = case.amended(parent__run="longer", parent__tokens=STEPS * BATCH, hyperparameters__learning_rate_factor=0.5)
    assert [one.name for one in again.lineage] == ["plan", "longer", f"amended_{STEPS * BATCH}"]
    assert (again.position, again.n_tokens) == (HALF + STEPS * BATCH, STEPS * BATCH - HALF)
    assert sum(one.tokens for one in again.lineage) == 2 * STEPS * BATCH


def test_without_a_named_run_or_checkpoint_the_newest_checkpoint_of_the_run_begun_last_is_amended(case: Case) -> None:
    done = trained(case, parent__tokens=HALF, hyperparameters__clip_norm=0.5, name="newest")
    found = case.amended(n_tokens=3 * STEPS * BATCH, hyperparameters__rewarm_tokens=BATCH)
    assert (found.parent.run, found.parent.tokens) == (done.key, STEPS * BATCH - HALF)


def test_the_same_reason_and_changes_resume_the_run_that_they_started(case: Case) -> None:
    stated = {"reason": "once more", "hyperparameters__eps": 1e-9}
    first = case.amended(**stated, parent__run=case.plan.key, parent__tokens=HALF)

    def killed(_run: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_amendment(first, case.config, case.ledger, launcher=killed)
    for named in ({}, {"parent__run": case.plan.key}, {"parent__tokens": HALF}):
        assert case.amended(**stated, **named).key == first.key
    more = {"reason": "another", "n_tokens": 3 * STEPS * BATCH, "hyperparameters__rewarm_tokens": BATCH}
    assert case.amended(**stated | more, parent__run=case.plan.key).parent.tokens == STEPS * BATCH


def test_a_checkpoint_stays_until_the_run_that_branched_off_has_ended(case: Case, tmp_path: Path) -> None:
    child = case.amended(parent__run=case.plan.key, parent__tokens=HALF, hyperparameters__eps=1e-10)
    folder = CheckpointFolder(child.parent.checkpoint.parent)
    seen = []

    def launched(run: Any) -> Any:
        seen.append(folder.is_held(HALF))
        return train(run)

    others = len(list(folder.folder.glob("held.*")))
    train_amendment(child, case.config, case.ledger, launcher=launched)
    assert seen == [True]
    assert len(list(folder.folder.glob("held.*"))) == others
    parent = Checkpoints(tmp_path, keep_last=1)
    for tokens in (256, 512, 768):
        parent.path(tokens).mkdir()
        if tokens == 512:
            parent.hold(512, "child")
        parent._drop(tokens)
    assert parent.kept() == (768, 512)


def test_a_batch_that_the_workers_can_t_share_is_refused_before_anything_is_recorded(case: Case) -> None:
    config = case.config.model_copy(update={"promote": case.config.promote.model_copy(update={"workers": 64})})
    with pytest.raises(StageError, match="promote.workers"):
        replace(case, config=config).amended(parent__run=case.plan.key, parent__tokens=HALF)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"model__d_model": 64}, ["model", "d_model", "64"]),
        ({"model__vocab_size": 300}, ["model", "vocab_size"]),
        ({"hyperparameters__init_scale": 2.0}, ["hyperparameters.init_scale"]),
        ({"hyperparameters__cooldown_fraction": 1.5}, ["hyperparameters.cooldown_fraction", "1.5"]),
        ({"hyperparameters__optimizer": "lion"}, ["learning_rate", "rewarm_tokens"]),
        ({"reason": ""}, ["reason"]),
        ({"mixture__a": 1.0, "corpus__source": "code"}, ["mixture", "corpus"]),
        ({"seed": 3}, ["seed", "corpus", "3"]),
    ],
)
def test_a_change_that_no_checkpoint_can_take_is_refused_before_anything_is_read(
    changes: dict[str, Any], keys: list[str]
) -> None:
    stated = {"reason": "a test"} | {name.replace("__", "."): value for name, value in changes.items()}
    with pytest.raises(StudyFileError) as refusal:
        AmendmentFile.read(None, stated, vocab_size=256)
    assert all(key in str(refusal.value) for key in keys)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"n_tokens": HALF}, ["n_tokens", str(HALF)]),
        ({"hyperparameters__batch_tokens": BATCH + 16}, ["hyperparameters.batch_tokens", str(BATCH + 16)]),
        ({"model__context_length": 1024}, ["hyperparameters.batch_tokens", "1024", str(BATCH)]),
        ({"mixture__a": 1.0}, ["mixture"]),
        ({"model__balance_rate": 0.5}, ["model", "balance_rate", "0.5"]),
        ({"parent__tokens": 2 * BATCH}, [str(HALF), str(STEPS * BATCH), str(2 * BATCH)]),
        ({"parent__run": "nobody"}, ["parent.run", "nobody"]),
        ({"hyperparameters__rewarm_tokens": STEPS * BATCH, "hyperparameters__schedule": "wsd"}, ["rewarm_tokens"]),
    ],
)
def test_an_impossible_amendment_is_refused_with_its_key_and_value(
    case: Case, changes: dict[str, Any], keys: list[str]
) -> None:
    with pytest.raises(StageError) as refusal:
        case.amended(**{"parent__run": case.plan.key, "parent__tokens": HALF} | changes)
    assert all(key in str(refusal.value) for key in keys)


def test_a_longer_context_keeps_the_weights_and_learned_positions_refuse_it(case: Case) -> None:
    done = trained(case, parent__tokens=HALF, model__context_length=64, name="long")
    assert math.isfinite(done.after.own)
    assert isinstance(case.plan.model, ModelConfig)
    learned = replace(case.plan, key="learned", model=replace(case.plan.model, positions="learned"))
    register(learned, case.ledger)
    base = replace(case.plan.model, positions="learned", d_model=case.config.model.d_model)
    with pytest.raises(StageError, match="model"):
        replace(case, numerics=replace(case.numerics, base=base)).amended(
            parent__run="learned", parent__tokens=HALF, model__context_length=64
        )


def test_a_run_that_is_training_now_is_not_amended(case: Case) -> None:
    study = Study.open(case.directory / STUDY_FILE, quiet=True)
    with lease(case.ledger, full_run_lease(case.plan.key)), pytest.raises(StageError, match=case.plan.key):
        study.amend(run=case.plan.key, at=HALF, reason="now", changes={"hyperparameters.clip_norm": 0.125})
    study.ledger.close()
    assert not any(row["payload"]["reason"] == "now" for row in case.ledger.results(ResultKind.AMENDMENT_STARTED))


def test_the_command_line_states_what_the_file_and_python_state(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    path = case.directory / "amend.toml"
    path.write_text(f'reason = "less time"\n[parent]\ntokens = {HALF}\n[hyperparameters]\ncooldown_fraction = 0.4\n')
    study = str(case.directory / STUDY_FILE)
    shown = []
    for words in (
        [str(path), "--run", case.plan.key],
        [
            "--run",
            case.plan.key,
            "--at",
            str(HALF),
            "--set",
            "hyperparameters.cooldown_fraction=0.4",
            "--reason",
            "less time",
        ],
    ):
        assert app(["amend", study, *words, "--dry-run", "--json"], result_action="return_value") == 0
        shown.append(json.loads(capfd.readouterr().out))
    assert shown[0] == shown[1]
    opened = Study.open(study, quiet=True)
    changes = {"hyperparameters.cooldown_fraction": 0.4}
    planned = opened.plan_amendment(run=case.plan.key, at=HALF, reason="less time", changes=changes)
    assert json.loads(json.dumps(planned.to_dict())) == shown[0]
    assert (shown[0]["forecast"], bool(shown[0]["no_forecast"])) == (None, True)
    opened.ledger.close()


# Mixtures


def test_new_weights_begin_at_the_checkpoint_and_each_source_is_read_on(tmp_path: Path) -> None:
    for name in "ab":
        write_text(tmp_path / name, words=400)
    sources = {name: Source(path=str(tmp_path / name)) for name in "ab"}
    parent = write_mixture(tmp_path / "parent", sources, Mixture.constant({"a": 1.0, "b": 1.0}))
    assert parent.mixture is not None
    reweighted = parent.mixture.reweighted({"a": 1.0, "b": 3.0}, 32 * 10)
    child = write_remixed(parent, tmp_path / "child", reweighted)
    assert child.key != parent.key
    assert {name: files.key for name, files in child.sources.items()} == {
        name: files.key for name, files in parent.sources.items()
    }
    assert Corpus.open(tmp_path / "child").evaluation_weights == {"a": 0.25, "b": 0.75}
    streams = [training_stream(corpus, 32, 0) for corpus in (parent, child)]
    same = [stream.batch(0, 32 * 10) for stream in streams]
    assert same[0].equal(same[1])
    before, after = streams[1].places(0, 32 * 10), streams[1].places(32 * 10, 32 * 40)
    assert np.mean([place.source == "b" for place in after]) == pytest.approx(0.75, abs=0.05)
    seen = [(place.source, place.epoch, place.start) for place in (*before, *after)]
    assert len(set(seen)) == len(seen), "no sequence is read twice in an epoch"
    again = reweighted.reweighted({"a": 1.0, "b": 0.0}, 32 * 20)
    assert [stage.until_tokens for stage in again.stages] == [320, 640, None]
    with pytest.raises(ValueError, match="a, b"):
        parent.mixture.reweighted({"a": 1.0}, 320)


def test_new_weights_of_a_mixture_are_trained_and_bundled(case: Case) -> None:
    code = case.trained(CODE)
    child = case.amended(
        parent__run=code.key,
        n_tokens=(STEPS + 10) * BATCH,
        hyperparameters__rewarm_tokens=BATCH,
        mixture__code=1.0,
        mixture__old=3.0,
    )
    assert (child.position, child.n_tokens) == (6 * BATCH, 4 * BATCH)
    assert child.corpus.evaluation_weights == {"code": 0.25, "old": 0.75}
    assert [line for line in child.notes if line.startswith(("code", "old"))] == []
    done = train_amendment(child, case.config, case.ledger, launcher=train)
    assert done.before.own == pytest.approx(0.25 * code.after.sources["code"] + 0.75 * code.after.sources["old"])
    study = Study.open(case.directory / STUDY_FILE, quiet=True)
    bundle = study.bundle(continuation=done.key)
    assert [one["run"] for one in bundle.read(LINEAGE)["segments"]] == [case.plan.key, code.key, done.key]
    study.ledger.close()


# The second forecast


def of_lineage(case: Case, losses: dict[int, float], **changes: Any) -> tuple[Any, ScalingFit]:
    """An amendment, by default at half of the plan's run, with these held-out losses of the run by tokens, and the planted law."""
    copied = case.directory / "planted"
    (copied / FULL_RUNS / case.plan.key).mkdir(parents=True, exist_ok=True)
    for folder in (CORPUS, CORPORA):
        if (case.directory / folder).exists() and not (copied / folder).exists():
            (copied / folder).symlink_to(case.directory / folder)
    rows = [json.dumps({"tokens": tokens, "train_loss": loss, "val_loss": loss}) for tokens, loss in losses.items()]
    (copied / FULL_RUNS / case.plan.key / METRICS).write_text("\n".join(rows) + "\n")
    amendment = case.amended(**{"parent__run": case.plan.key, "parent__tokens": HALF} | changes)
    corpus = replace(amendment.corpus, folder=copied / amendment.corpus.folder.relative_to(case.directory))
    return replace(amendment, directory=copied, corpus=corpus), planted_fit()


def test_the_forecast_of_an_unchanged_run_is_the_law_until_its_band_is_known(case: Case) -> None:
    amendment, fit = of_lineage(case, {HALF: 4.0})
    found = second_forecast(amendment, fit, case.ledger, level=0.9)
    law = fit.forecast(case.plan.n_params, STEPS * BATCH, level=0.9)
    assert isinstance(found, SecondForecast)
    assert (found.loss, found.correction, found.widening) == (law.loss, 0.0, 0.0)
    assert (found.low, found.high) == pytest.approx((law.low, law.high))
    assert found.n_tokens == STEPS * BATCH
    assert SecondForecast.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_doubts_of_the_plan_are_those_of_the_second_forecast(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    amendment, fit = of_lineage(case, {HALF: 4.0})
    plan = replace(case.plan, off_policy=("beta2 is stated",))
    monkeypatch.setattr(Plan, "of_row", lambda _row: plan)
    found = second_forecast(amendment, fit, case.ledger, level=0.9)
    assert isinstance(found, SecondForecast)
    assert plan.off_policy[0] in found.reasons


def test_a_run_that_began_without_a_forecast_gets_none_afterwards(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    amendment, fit = of_lineage(case, {HALF: 4.0}, hyperparameters__clip_norm=0.25)

    def planned() -> AmendmentPlan:
        return AmendmentPlan.of(amendment, fit, lambda: "none", lambda: "none", case.config, case.ledger)

    assert planned().forecast is not None
    started = {"no_forecast": "no law was finished"}
    monkeypatch.setattr(
        Ledger, "result", lambda _ledger, kind, _key: started if kind is ResultKind.AMENDMENT_STARTED else None
    )
    assert (planned().forecast, planned().no_forecast) == (None, "no law was finished")


def test_losses_above_the_band_raise_the_forecast_by_their_weight_and_narrow_it(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    law = planted_fit().forecast(case.plan.n_params, STEPS * BATCH, level=0.9)
    own, spread = math.log(law.high / law.loss), 0.5 * law.log_scale
    t = 2.919985580353726  # Student's t at 95 % with 2 degrees of freedom
    band = Band(
        loss=law.loss,
        low=law.low,
        high=law.high,
        level=0.9,
        n_tokens=STEPS * BATCH,
        shares=(0.2, 1.0),
        log_ratio=(0.3, 0.3),
        log_reach=(math.hypot(own, t * spread),) * 2,
        n_runs=6,
        n_stems=3,
    )
    monkeypatch.setattr(of_the_forecast, "registered_band", lambda _plan, _ledger: band)
    observed = 0.02
    loss = law.loss * math.exp(0.3 + observed)
    amendment, fit = of_lineage(case, {HALF // 4: 9.0, HALF: loss})
    found = second_forecast(amendment, fit, case.ledger, level=0.9)
    assert isinstance(found, SecondForecast)
    weight = 1 / (1 + 0.5**2)
    assert found.correction == pytest.approx(weight * observed)
    scale = max(law.log_scale * math.sqrt(1 - weight), FLOOR)
    assert math.log(found.high / found.loss) == pytest.approx(interval_factor(0.9) * scale)
    changed, _ = of_lineage(case, {HALF // 4: 9.0, HALF: loss}, hyperparameters__clip_norm=0.5)
    wider = second_forecast(changed, fit, case.ledger, level=0.9)
    assert isinstance(wider, SecondForecast)
    assert wider.loss == found.loss
    assert wider.widening == pytest.approx(math.log(loss / found.loss))
    assert wider.low < found.low < found.high < wider.high >= loss
    assert len(wider.reasons) == len(found.reasons) + 1


def test_changes_of_earlier_runs_count_and_losses_after_them_do_not_correct_the_law(case: Case) -> None:
    first = trained(
        case, parent__tokens=HALF, n_tokens=2 * STEPS * BATCH, hyperparameters__beta1=0.85, name="other_beta"
    )
    again = case.amended(parent__run=first.key, parent__tokens=STEPS * BATCH, n_tokens=4 * STEPS * BATCH)
    found = second_forecast(again, planted_fit(), case.ledger, level=0.9)
    assert isinstance(found, SecondForecast)
    assert any("beta1" in reason for reason in found.reasons)
    assert found.widening > 0
    unchanged = case.amended(parent__run=case.plan.key, parent__tokens=HALF)
    own = second_forecast(unchanged, planted_fit(), case.ledger, level=0.9)
    assert isinstance(own, SecondForecast)
    assert found.correction == pytest.approx(own.correction, abs=0.05)


def test_a_longer_run_from_a_fallen_rate_is_not_covered(case: Case) -> None:
    changes = {"n_tokens": 2 * STEPS * BATCH, "hyperparameters__rewarm_tokens": BATCH}
    end, fit = of_lineage(case, {HALF: 9.0}, parent__tokens=STEPS * BATCH, **changes)
    found = second_forecast(end, fit, case.ledger, level=0.9)
    assert isinstance(found, SecondForecast)
    assert found.widening == pytest.approx(math.log(9.0 / found.loss))


def test_what_the_parent_would_need_for_a_longer_run_is_not_asked_of_the_amendment(case: Case) -> None:
    changes = {"n_tokens": 2 * STEPS * BATCH, "hyperparameters__rewarm_tokens": BATCH}
    end = case.amended(parent__run=case.plan.key, parent__tokens=STEPS * BATCH, **changes)
    schedules: Any = object()  # the parent's schedule has ended, so no law is asked
    found = second_forecast(end, planted_fit(), case.ledger, level=0.9, schedules=lambda: schedules)
    assert isinstance(found, SecondForecast)
    assert [reason for reason in found.reasons if reason.startswith("the schedule: ")]
    assert not [reason for reason in found.reasons if "rewarm_tokens" in reason]


def test_training_losses_stand_in_for_held_out_ones_that_were_not_measured(case: Case) -> None:
    amendment, fit = of_lineage(case, {}, hyperparameters__clip_norm=0.5)
    rows = [{"tokens": step * BATCH, "train_loss": 12.0 - step} for step in range(1, STEPS)]
    metrics = amendment.directory / FULL_RUNS / case.plan.key / METRICS
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = second_forecast(amendment, fit, case.ledger, level=0.9)
    assert isinstance(found, SecondForecast)
    assert found.widening == pytest.approx(math.log(7.0 / found.loss)), "of step 5 of 6"


def test_another_corpus_and_an_unfinished_law_give_no_forecast_but_a_reason(case: Case) -> None:
    amendment, fit = of_lineage(case, {HALF: 4.0}, corpus__source="code")
    assert isinstance(second_forecast(amendment, fit, case.ledger, level=0.9), str)
    assert isinstance(second_forecast(of_lineage(case, {HALF: 4.0})[0], None, case.ledger, level=0.9), str)


def test_a_forecast_is_registered_at_the_start_and_scored_at_the_end(case: Case) -> None:
    amendment = case.amended(parent__run=case.plan.key, parent__tokens=HALF, hyperparameters__beta2=0.9)
    forecast = SecondForecast(
        loss=4.0,
        low=0.1,
        high=9.0,
        level=0.9,
        n_tokens=1,
        by_law=4.0,
        correction=0.0,
        reweighting=0.0,
        widening=0.0,
        reasons=(),
    )
    done = train_amendment(amendment, case.config, case.ledger, forecast=forecast, launcher=train)
    started = case.ledger.result(ResultKind.AMENDMENT_STARTED, amendment.key)
    assert started is not None
    assert SecondForecast.from_dict(started["forecast"]) == done.forecast == forecast
    assert done.started_at == started["at"] < done.finished_at
    assert done.inside
    assert not replace(done, forecast=replace(forecast, high=1.0)).inside
    without = replace(done, forecast=None, no_forecast="no law was finished")
    assert [one.to_dict()["no_forecast"] for one in (done, without)] == ["", "no law was finished"]
