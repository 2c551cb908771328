"""A full run that begins with another's state: the same steps as the run that was not interrupted, sharded or not."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muscale.errors import StageError
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, manifest_hash
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.full_run import FullRun, HeldOut, InitialState
from muscale.full_runs.train.attempt import train
from muscale.layout import METRICS
from muscale.settings.promote import SpikePolicy
from proxy_models.architecture.config import as_decoder
from proxy_models.recipes.continued import continued
from proxy_models.training.guard_settings import GuardSettings
from tests.muscale.forked_ranks import BATCH, interrupt, losses, result, rows, small_corpus, small_run
from tests.muscale.gloo_ranks import GlooRanks

AT = 12


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    """Sixteen steps with dropout, of which the last two cool down, and checkpoints after six and twelve."""
    folder = tmp_path_factory.mktemp("parent")
    run = small_run(small_corpus(folder), folder / "run", layers=2, evaluate_every_tokens=BATCH * AT, keep_last=3)
    model, base = (replace(as_decoder(one), mlp_dropout=0.1) for one in (run.numerics.model, run.numerics.base))
    run = replace(run, numerics=replace(run.numerics, model=model, base=base))
    train(run)
    return run


def onward(parent: FullRun, directory: Path, *, initial_state: dict[str, Any] | None = None, **changes: Any) -> FullRun:
    """The last four steps as a run of their own; `changes` are of its segments."""
    checkpoint = Checkpoints(parent.directory / CHECKPOINTS).path(BATCH * AT)
    digest = manifest_hash(checkpoint)
    assert digest is not None
    recipe = parent.recipe_before(BATCH * AT)
    given = {
        "checkpoint": checkpoint,
        "manifest_hash": digest,
        "recipe": recipe,
        "position": BATCH * AT,
        **(initial_state or {}),
    }
    segments = continued(
        recipe, 4 * BATCH, **{"learning_rate": recipe.learning_rate, "cooldown_fraction": 0.5, **changes}
    )
    return replace(
        parent,
        segments=segments,
        directory=directory,
        checkpoint_every_tokens=BATCH * 2,
        evaluate_every_tokens=BATCH * 100,
        initial_state=InitialState(**given),
    )


def test_with_nothing_changed_it_is_the_uninterrupted_run_resumed_or_not(parent: FullRun, tmp_path: Path) -> None:
    run = onward(parent, tmp_path / "onward")
    whole = train(run)
    assert losses(run) == losses(parent)[AT:]
    assert whole["loss"] == result(parent)["loss"]
    (evaluated,) = [row["val_loss"] for row in rows(parent) if row["tokens"] == BATCH * AT]
    assert (rows(run)[0]["tokens"], rows(run)[0]["val_loss"]) == (0, evaluated)
    for after in (2, 0):
        curve = losses(run)
        interrupt(run, after=after)
        assert train(run)["resumed_from"] == after * BATCH
        assert losses(run) == curve
        assert result(run)["loss"] == whole["loss"]
        assert [row["tokens"] // BATCH for row in rows(run)] == [0, 1, 2, 3, 4]


def test_two_sharded_ranks_continue_as_one_process_does(parent: FullRun, tmp_path: Path, gloo_ranks: GlooRanks) -> None:
    model, base = (replace(as_decoder(one), mlp_dropout=0.0) for one in (parent.numerics.model, parent.numerics.base))
    smooth = replace(parent, numerics=replace(parent.numerics, model=model, base=base))  # as each rank draws its own
    earlier = {"earlier": {"before": HeldOut(corpus=parent.corpus, n_tokens=1120)}}
    one, two = (
        replace(onward(smooth, tmp_path / name, initial_state=earlier), min_unit_params=0) for name in ("one", "two")
    )
    train(one)
    gloo_ranks.train(two, 2)
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-3)
    assert result(two)["loss"] == pytest.approx(result(one)["loss"], rel=1e-4)
    for run in (one, two):
        for row in (rows(run)[0], rows(run)[-1]):
            assert row["earlier_losses"]["before"] == row["val_loss"], "it is the same text"


def test_another_rate_and_corpus_apply_and_the_parent_s_corpus_is_evaluated_too(
    parent: FullRun, tmp_path: Path
) -> None:
    other = small_corpus(tmp_path / "other", "stuvwxyz")
    earlier = {"before": HeldOut(corpus=parent.corpus, n_tokens=1120)}
    run = onward(
        parent,
        tmp_path / "onward",
        initial_state={"position": 0, "earlier": earlier},
        learning_rate=0.02,
        rewarm_tokens=BATCH,
    )
    run = replace(run, corpus=other.folder, numerics=replace(run.numerics, corpus_key=other.key))
    train(run)
    first, last = rows(run)[0], rows(run)[-1]
    (evaluated,) = [row["val_loss"] for row in rows(parent) if row["tokens"] == BATCH * AT]
    assert first["earlier_losses"] == {"before": evaluated}
    assert last["val_loss"] < first["val_loss"]
    assert last["earlier_losses"]["before"] != evaluated
    assert [row["rate_factor"] for row in rows(run)[1:]] == pytest.approx([1.0, 1.0, 1.0, 1 - 0.5**0.5])


@pytest.mark.parametrize("optimizer", ["muon", "lion"])
def test_a_new_optimizer_starts_from_the_weights_alone(parent: FullRun, tmp_path: Path, optimizer: Any) -> None:
    run = onward(
        parent, tmp_path / optimizer, optimizer=optimizer, learning_rate=0.003, rewarm_tokens=BATCH, schedule="constant"
    )
    whole = train(run)
    assert losses(run)[0] == losses(parent)[AT], "the first batch is seen by the same weights"
    assert losses(run)[2] != losses(parent)[AT + 2]
    curve = losses(run)
    interrupt(run, after=2)
    assert train(run)["loss"] == whole["loss"]
    assert losses(run) == curve
    interrupt(run, after=0)
    train(run)
    assert losses(run) == curve


def test_a_spike_before_the_first_checkpoint_rolls_back_to_the_state_it_began_with(
    parent: FullRun, tmp_path: Path
) -> None:
    guard = GuardSettings(window=8, threshold=1e-6, max_spikes=9)
    policy = SpikePolicy(action="rollback", max_interventions=1)
    run = onward(parent, tmp_path / "spiky", schedule="constant")
    stage = continued(run.segments[0].recipe, 8 * BATCH, learning_rate=0.01, schedule="constant")
    run = replace(
        run,
        numerics=replace(run.numerics, guard=guard),
        segments=stage,
        on_spike=policy,
        checkpoint_every_tokens=BATCH * 100,
    )
    with pytest.raises(StageError, match="after 1 interventions"):
        train(run)
    first = rows(run)
    assert first[0]["tokens"] == 0
    assert losses(run)[0] == losses(parent)[AT], "not from initial values"


def test_a_checkpoint_that_changed_or_is_gone_is_refused(parent: FullRun, tmp_path: Path) -> None:
    run = onward(parent, tmp_path / "onward")
    assert run.initial_state is not None
    copied = tmp_path / "copied"
    shutil.copytree(run.initial_state.checkpoint, copied)
    run = replace(run, initial_state=replace(run.initial_state, checkpoint=copied))
    for file in copied.glob("__0_*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))
    with pytest.raises(StageError, match="must be the checkpoint from which the run was started"):
        train(run)
    shutil.rmtree(copied)
    with pytest.raises(StageError, match="must be the checkpoint"):
        train(run)
    assert not (run.directory / METRICS).exists()
