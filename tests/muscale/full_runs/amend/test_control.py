"""The parent's recipe trained beside an amended run: equal without a change, and a difference with its noise after one."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from muscale import Amended, StageError, Study, StudyFileError
from muscale.full_runs.amend import amendment_plan
from muscale.full_runs.amend.amended_runs import amended_runs
from muscale.full_runs.amend.control import Control, compare, control_run
from muscale.full_runs.amend.parent import full_run_of
from muscale.full_runs.amend.train import train_amendment
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.replay import replay
from muscale.full_runs.train.attempt import train
from muscale.layout import CONTROL, CORPUS, FULL_RUNS, METRICS, STUDY_FILE
from muscale.settings.amendment_file import AmendmentFile
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.data.corpus import Corpus
from tests.muscale.forked_ranks import interrupt
from tests.muscale.full_runs.amend.conftest import BATCH, STEPS, Case

HALF = STEPS // 2 * BATCH  # a checkpoint that is kept


def trained(case: Case, **changes: Any) -> Amended:
    stated = {"parent__run": case.plan.key, "parent__tokens": HALF} | changes
    return train_amendment(case.amended(**stated), case.config, case.ledger, launcher=train)


def control_of(done: Amended) -> Control:
    assert done.control is not None
    return done.control


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return {row["tokens"]: row["train_loss"] for row in rows if "train_loss" in row}


def test_without_a_change_the_difference_is_exactly_zero(case: Case) -> None:
    found = control_of(trained(case, control=6))
    assert (found.steps, found.n_tokens, found.n_pairs, found.n_blocks) == (6, 6 * BATCH, 6, 2)
    assert found.child == found.control
    assert (found.difference, found.standard_error, found.low, found.high) == (0.0, 0.0, 0.0, 0.0)
    assert found.exceeds_noise is False


def test_a_change_is_compared_step_by_step_and_the_control_takes_no_part_in_the_key(case: Case) -> None:
    change = {"hyperparameters__learning_rate_factor": 3.0}
    plain = case.amended(parent__run=case.plan.key, parent__tokens=HALF, **change)
    child = case.amended(parent__run=case.plan.key, parent__tokens=HALF, control=6, **change)
    assert (child.key, child.changes) == (plain.key, plain.changes)
    parent = case.directory / FULL_RUNS / case.plan.key
    done = train_amendment(child, case.config, case.ledger, launcher=train)
    found = control_of(done)
    folder = child.folder / f"{CONTROL}={6 * BATCH}"
    assert {HALF + tokens: loss for tokens, loss in losses(folder).items()} == {
        tokens: loss for tokens, loss in losses(parent).items() if tokens > HALF
    }, "it is what the parent had"
    assert not (folder / CHECKPOINTS).exists()
    ours, theirs = losses(child.folder), losses(folder)
    differences = np.array([ours[tokens] - theirs[tokens] for tokens in theirs])
    assert found.difference == pytest.approx(differences.mean())
    blocks = differences.reshape(2, 3).mean(axis=1)
    error = blocks.std(ddof=1) / math.sqrt(2)
    assert found.standard_error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx(
        (differences.mean() - student.ppf(0.975, 1) * error, differences.mean() + student.ppf(0.975, 1) * error)
    )
    assert (found.evaluated_at, found.child) == (6 * BATCH, done.after.own)
    assert found.child != found.control
    assert str(found).splitlines()[0] in str(done)
    assert Amended.from_dict(json.loads(json.dumps(done.to_dict()))) == done
    assert done.to_dict()["control"]["exceeds_noise"] is found.exceeds_noise
    (listed,) = (one for one in amended_runs(case.ledger.read) if one.key == done.key)
    assert listed.control == found
    again = train_amendment(plain, case.config, case.ledger, launcher=lambda run: pytest.fail("trained again"))
    assert again == done
    with pytest.raises(StageError, match="5"):
        train_amendment(replace(child, control=5), case.config, case.ledger, launcher=train)


def test_another_batch_is_compared_over_the_same_tokens(case: Case) -> None:
    done = trained(case, control=6, hyperparameters__batch_tokens=2 * BATCH)
    found = control_of(done)
    folder = case.directory / FULL_RUNS / done.key
    ours, theirs = losses(folder), losses(folder / f"{CONTROL}={6 * BATCH}")
    pairs = [ours[end] - (theirs[end - BATCH] + theirs[end]) / 2 for end in (2 * BATCH, 4 * BATCH, 6 * BATCH)]
    assert (found.n_pairs, found.standard_error) == (3, None)
    assert found.difference == pytest.approx(np.mean(pairs))
    assert found.exceeds_noise is None


@pytest.mark.parametrize(
    "change", [{"model__label_smoothing": 0.2}, {"model__mlp_dropout": 0.2}, {"corpus__source": "code"}]
)
def test_losses_of_another_kind_or_text_are_not_paired_but_held_out_text_is_evaluated(
    case: Case, change: dict[str, Any]
) -> None:
    done = trained(case, control=6, **change)
    found = control_of(done)
    assert (found.n_pairs, found.difference, found.exceeds_noise) == (0, None, None)
    assert found.unpaired
    assert found.evaluated_at == 6 * BATCH
    on_parent = done.after.earlier[f"plan {case.plan.key}"] if "corpus__source" in change else done.after.own
    assert found.child == on_parent != found.control


def test_a_difference_far_above_its_noise_is_told_from_one_within_it(case: Case, tmp_path: Path) -> None:
    child = case.amended(parent__run=case.plan.key, parent__tokens=HALF, control=6, hyperparameters__beta1=0.5)
    run = replace(control_run(child, 6, case.config, ""), directory=tmp_path / "control")
    child = replace(child, directory=tmp_path, corpus=replace(child.corpus, folder=tmp_path))
    generator = np.random.default_rng(0)
    common, noise = generator.normal(0, 0.5, 400), np.zeros(400)
    for step in range(1, 400):  # autocorrelated
        noise[step] = 0.8 * noise[step - 1] + generator.normal(0, 0.01)

    def written(folder: Path, values: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = ({"tokens": BATCH * (step + 1), "train_loss": float(loss)} for step, loss in enumerate(values))
        (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))

    written(run.directory, 3 + common)
    for shift, exceeds in ((0.0, False), (0.02, True), (-0.02, True)):
        written(child.folder, 3 + common + noise - noise.mean() + shift)
        found = compare(child, run, 400)
        assert (found.n_pairs, found.n_blocks, found.exceeds_noise) == (400, 6, exceeds)
        assert found.difference == pytest.approx(shift, abs=1e-6)
        assert found.standard_error is not None
        independent = noise.std() / 20
        assert independent < found.standard_error < 6 * independent, "autocorrelation triples it"


@pytest.mark.parametrize("steps", [7, 100])
def test_a_control_longer_than_the_rest_of_the_parent_is_refused(case: Case, steps: int) -> None:
    with pytest.raises(StageError, match=str(steps)):
        case.amended(parent__run=case.plan.key, parent__tokens=HALF, n_tokens=4 * STEPS * BATCH, control=steps)
    with pytest.raises(StudyFileError, match="control"):
        AmendmentFile.read(None, {"reason": "a test", "control": 0}, vocab_size=256)


def copied(case: Case, directory: Path) -> Case:
    """The same study elsewhere, with its own ledger."""
    shutil.copytree(case.directory, directory)
    corpus = Corpus.open(directory / CORPUS)
    return replace(case, directory=directory, corpus=corpus, ledger=Ledger(directory / "ledger.sqlite"))


class Killed(BaseException):
    """Ends a command as a kill would: nothing handles it."""


def dying(part: str, after: int | None) -> Callable[[FullRun], Any]:
    """Train a run; but in the child, or in its control, leave what a kill soon after so many steps leaves, or right at its end."""

    def launched(run: FullRun) -> Any:
        if run.directory.name.startswith(CONTROL) != (part == CONTROL):
            return train(run)
        if after != 0:
            train(run)
            if after:
                interrupt(run, after=after)
        raise Killed

    return launched


def test_killed_in_every_phase_and_run_again_it_has_the_same_key_and_losses(case: Case, tmp_path: Path) -> None:
    change = {"n_tokens": 2 * STEPS * BATCH, "hyperparameters__learning_rate_factor": 1.5, "control": 6}
    cases = [copied(case, tmp_path / name) for name in ("whole", "killed")]
    whole = trained(cases[0], **change)
    key = cases[1].amended(parent__run=case.plan.key, parent__tokens=HALF, **change).key
    for part, after in ((CONTROL, 0), (CONTROL, 3), (CONTROL, None), ("child", 0), ("child", 9), ("child", None)):
        child = cases[1].amended(parent__run=case.plan.key, parent__tokens=HALF, **change)
        assert child.key == key
        with pytest.raises(Killed):
            train_amendment(child, case.config, cases[1].ledger, launcher=dying(part, after))
        assert cases[1].ledger.result(ResultKind.AMENDMENT, key) is None
    done = trained(cases[1], **change)
    assert (done.key, done.after, done.control) == (whole.key, whole.after, whole.control)
    for folder in (Path(key), Path(key) / f"{CONTROL}={6 * BATCH}"):
        assert losses(cases[0].directory / FULL_RUNS / folder) == losses(cases[1].directory / FULL_RUNS / folder)
    for one in cases:
        one.ledger.close()


def test_a_control_that_diverges_is_recorded_and_the_run_is_trained(case: Case, tmp_path: Path) -> None:
    elsewhere = copied(case, tmp_path / "study")
    child = elsewhere.amended(parent__run=case.plan.key, parent__tokens=HALF, control=6, hyperparameters__beta1=0.8)
    folder, launched = child.folder / f"{CONTROL}={6 * BATCH}", []

    def launch(run: FullRun) -> Any:
        launched.append(run.directory)
        if run.directory == folder:
            wild = (replace(one, recipe=replace(one.recipe, learning_rate=1e12)) for one in run.segments)
            return train(replace(run, segments=tuple(wild)))
        if len(launched) == 2:
            raise Killed
        return train(run)

    with pytest.raises(Killed):
        train_amendment(child, case.config, elsewhere.ledger, launcher=launch)
    done = train_amendment(child, case.config, elsewhere.ledger, launcher=launch)
    assert launched == [folder, child.folder, child.folder], "a control that has diverged is not trained again"
    found = control_of(done)
    assert found.diverged
    assert found.n_pairs == len(losses(folder)) < 6
    assert found.evaluated_at is None
    assert found.diverged in str(done)
    assert done.to_dict()["control"]["diverged"] == found.diverged
    assert Amended.from_dict(json.loads(json.dumps(done.to_dict()))) == done
    assert not (folder / CHECKPOINTS).exists()

    def failing(run: FullRun) -> Any:
        raise StageError("the control's devices")

    other = elsewhere.amended(parent__run=case.plan.key, parent__tokens=HALF, control=6, hyperparameters__beta1=0.7)
    with pytest.raises(StageError, match="devices"):
        train_amendment(other, case.config, elsewhere.ledger, launcher=failing)
    elsewhere.ledger.close()


def test_an_amended_parent_is_replayed_from_its_checkpoints_and_from_the_one_at_which_it_began(case: Case) -> None:
    first = trained(case, n_tokens=2 * STEPS * BATCH, hyperparameters__eps=1e-7, name="replayed")
    child = case.amended(parent__run=first.key, parent__tokens=STEPS * BATCH, hyperparameters__eps=1e-6)
    run = full_run_of(child.parent, case.config, case.ledger)
    for steps, start in ((1, HALF), (STEPS, 0)):
        found = replay(run, steps, train, case.ledger, end=child.parent.tokens)
        assert found is not None
        assert (found.run, found.start, found.end) == (first.key, start, STEPS * BATCH)
        assert found.deviation == 0.0


def test_replay_comes_before_the_start_is_recorded_and_a_deviation_leaves_no_run(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amendment_plan, "launcher_of", lambda *_: train)
    elsewhere = copied(case, tmp_path / "study")
    study = Study.open(elsewhere.directory / STUDY_FILE, quiet=True)
    stated: dict[str, Any] = {"run": case.plan.key, "at": HALF, "changes": {"hyperparameters.eps": 1e-5}}
    earlier = len(study.ledger.results(ResultKind.REPLAY))
    assert study.amend(reason="passes", replay=6, **stated).reason == "passes"
    assert study.amend(reason="passes", replay=6, **stated).reason == "passes", "it has ended"
    assert len(study.ledger.results(ResultKind.REPLAY)) == earlier + 1
    metrics = elsewhere.directory / FULL_RUNS / case.plan.key / METRICS
    metrics.write_text(metrics.read_text().replace('"train_loss": ', '"train_loss": 1'))
    with pytest.raises(StageError, match=case.plan.key):
        study.amend(reason="deviates", replay=6, **stated | {"changes": {"hyperparameters.eps": 1e-4}})
    started = [row["payload"]["reason"] for row in study.ledger.results(ResultKind.AMENDMENT_STARTED)]
    assert "deviates" not in started
    assert len(study.ledger.results(ResultKind.REPLAY)) == earlier + 2
    study.ledger.close()
    elsewhere.ledger.close()
