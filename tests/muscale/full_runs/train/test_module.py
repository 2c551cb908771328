"""One training semantics: the lean loop, Lightning in one process, and FSDP2 on two give the same losses, and resume exactly."""

import json
import shutil
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from muscale.errors import StageError
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, MANIFEST, PARAMETRIZATION
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.layout import RESULT
from muscale.new_study import FAMILY
from proxy_models.architecture.config import as_decoder
from proxy_models.architecture.families import load
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.data.corpus import Corpus
from proxy_models.data.mixture import Mixture, MixtureStage
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain, stem
from proxy_models.recipes.stages import HyperparameterStage
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.step import Stepper
from proxy_models.training.trainer import Trainer
from tests.muscale.forked_ranks import BATCH, LETTERS, STEPS, interrupt, losses, result, rows, small_mixture, small_run
from tests.muscale.gloo_ranks import GlooRanks
from tests.proxy_models.families import TRANSFORMERS
from tests.quick import quick_and_soak


@pytest.fixture
def run(corpus: Corpus, tmp_path: Path) -> FullRun:
    return small_run(corpus, tmp_path / "run", layers=2)


def lean(run: FullRun, corpus: Corpus) -> tuple[list[float], float]:
    trainer, state, curve, loss = Trainer(corpus, compile=False), None, [], None
    for segment in run.segments:
        trained = trainer.train(run.numerics, segment, state)
        state, loss = trained.state, trained.loss
        curve += trained.curve.train_loss.tolist()
    assert loss is not None
    return curve, loss


def train_twice_as_lean(run: FullRun, corpus: Corpus) -> None:
    """Train to the end, and again from the checkpoint after twelve steps, each time to the losses of the lean loop."""
    curve, loss = lean(run, corpus)
    whole = train(run)
    assert losses(run) == curve
    assert whole["loss"] == pytest.approx(loss, rel=1e-6)
    interrupt(run, after=12)
    assert train(run)["resumed_from"] == BATCH * 12
    assert losses(run) == curve
    assert result(run)["loss"] == whole["loss"]


def test_lean_loop_lightning_and_two_sharded_ranks_have_the_same_losses_and_resume_at_another_world_size(
    run: FullRun, corpus: Corpus, gloo_ranks: GlooRanks
) -> None:
    # With a guard, its snapshot is sharded too; with micro-batches, gradients are gathered part by part.
    guard = GuardSettings(action="rewind", window=8, snapshot_every=4)
    run = replace(run, numerics=replace(run.numerics, guard=guard), micro_batch=3)
    curve, loss = lean(run, corpus)
    assert curve[-1] < curve[0]
    one_unit = replace(run, directory=run.directory.with_name("one_unit"))
    run = replace(run, min_unit_params=0)
    for sharded in (one_unit, run):
        gloo_ranks.train(sharded, 2)
        np.testing.assert_allclose(losses(sharded), curve, rtol=1e-3)
        assert result(sharded)["loss"] == pytest.approx(loss, rel=1e-4)

    interrupt(run, after=12)
    resumed = train(run)
    assert resumed["resumed_from"] == BATCH * 12
    assert resumed["loss"] == pytest.approx(loss, rel=1e-4)
    np.testing.assert_allclose(losses(run), curve, rtol=1e-3)


def train_beside(folder: Path, run: FullRun) -> None:
    """Train on this rank, which finds modules in a folder, too."""
    sys.path.insert(0, str(folder))
    train(run)


@pytest.mark.parametrize(
    "name",
    quick_and_soak(
        (
            "tests.proxy_models.families:Recurrent",
            "tests.proxy_models.families:Stacked",
            "my_family:Convolutions",
            "transformers:Qwen3Config",
            "transformers:GPT2Config",
            "transformers:Qwen3MoeConfig",
            "tests.muscale.full_runs.train.test_one_rank:WithSharedLayer",
            "transformers:XGLMConfig",  # its positions are a buffer of the width
            "transformers:LlamaConfig",
            "transformers:MixtralConfig",
        ),
        "my_family:Convolutions",
        "transformers:Qwen3Config",
    ),
)
@pytest.mark.usefixtures("transformers")
def test_a_family_of_one_s_own_trains_alike_in_the_lean_loop_under_lightning_and_on_two_sharded_ranks(
    name: str, run: FullRun, corpus: Corpus, gloo_ranks: GlooRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FAMILY[0]).write_text((resources.files("muscale") / f"{FAMILY[0]}.txt").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_family", raising=False)
    xglm = {"d_model": 32, "attention_heads": 4, "ffn_dim": 96, "dropout": 0.0, "attention_dropout": 0.0}
    arguments = {**TRANSFORMERS, "XGLMConfig": xglm}.get(name.removeprefix("transformers:"), {})
    family = load(name)(vocab_size=256, context_length=32, **arguments)
    model, base = family.member(32, 2), family.member(16, 2)
    run = replace(run, numerics=replace(run.numerics, model=model, base=base), min_unit_params=0)
    curve, loss = lean(run, corpus)
    assert curve[-1] < curve[0]
    alone = replace(run, directory=tmp_path / "alone")
    train(alone)
    gloo_ranks.call(train_beside, tmp_path, run, world_size=2)
    for trained in (alone, run):
        np.testing.assert_allclose(losses(trained), curve, rtol=1e-4)
        assert result(trained)["loss"] == pytest.approx(loss, rel=1e-5)

    interrupt(run, after=12)
    assert train(run)["loss"] == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(losses(run), curve, rtol=1e-4)


@pytest.mark.parametrize(("world_size", "tolerance"), quick_and_soak([(1, 0.0), (2, 1e-3)], (2, 1e-3)))
def test_sharded_ranks_round_to_bf16_where_the_lean_loop_does(
    run: FullRun, corpus: Corpus, gloo_ranks: GlooRanks, world_size: int, tolerance: float
) -> None:
    # Measured on two ranks, whose halves of a batch are summed in another order: 1e-4.
    run = replace(run, numerics=replace(run.numerics, precision="bf16"), min_unit_params=0)
    curve, loss = lean(run, corpus)
    gloo_ranks.train(run, world_size)
    np.testing.assert_allclose(losses(run), curve, rtol=tolerance)
    assert result(run)["loss"] == pytest.approx(loss, rel=tolerance)


def test_a_model_without_a_dtype_of_its_own_computes_in_bf16_alike_on_sharded_ranks(
    run: FullRun, corpus: Corpus, gloo_ranks: GlooRanks
) -> None:
    family = load("tests.proxy_models.families:Recurrent")(vocab_size=256, context_length=32)
    numerics = replace(run.numerics, model=family.member(32, 2), base=family.member(16, 2))
    run = replace(run, numerics=replace(numerics, precision="bf16"), min_unit_params=0)
    curve, loss = lean(run, corpus)
    exact, _ = lean(replace(run, numerics=numerics), corpus)
    assert not np.allclose(curve, exact, rtol=1e-6), "nothing was rounded"
    np.testing.assert_allclose(curve, exact, rtol=1e-2)
    gloo_ranks.train(run, 2)
    np.testing.assert_allclose(losses(run), curve, rtol=1e-3)
    assert result(run)["loss"] == pytest.approx(loss, rel=1e-3)


def varied(run: FullRun, **numerics: Any) -> FullRun:
    """The run with dropout, a loss of its own for training, a batch ramp and cycles."""
    model, base = (
        replace(as_decoder(config), mlp_dropout=0.1, stochastic_depth=0.2, label_smoothing=0.1, z_loss=1e-4)
        for config in (run.numerics.model, run.numerics.base)
    )
    values = Hyperparameters(
        learning_rate=0.01, batch_tokens=BATCH, schedule="cosine_cycles", batch_doublings=2, batch_ramp_tokens=4 * BATCH
    )
    numerics = {"model": model, "base": base, **numerics}
    return replace(run, numerics=replace(run.numerics, **numerics), segments=chain(values, BATCH * STEPS))


@pytest.mark.parametrize("precision", quick_and_soak(("fp32", "bf16", "fp16"), "fp32", "fp16"))
def test_every_option_means_the_same_to_both_loops(run: FullRun, corpus: Corpus, precision: str) -> None:
    run = replace(varied(run, precision=precision), evaluate_every_tokens=BATCH * 3)
    train_twice_as_lean(run, corpus)
    assert len(losses(run)) == 8 + 4 + 12
    assert train(run) == result(run), "a finished run was trained again"


def test_a_guarded_run_rewinds_and_resumes_as_the_lean_loop_does(run: FullRun, corpus: Corpus) -> None:
    # So high a rate, and so touchy a guard, that steps are left out before and after the checkpoint.
    guard = GuardSettings(action="rewind", window=8, threshold=0.01, max_spikes=20, snapshot_every=5)
    values = Hyperparameters(learning_rate=3.0, batch_tokens=BATCH, schedule="linear")
    run = replace(run, numerics=replace(run.numerics, guard=guard), segments=chain(values, BATCH * STEPS))
    train_twice_as_lean(run, corpus)
    left_out = [row["left_out"] for row in rows(run)]
    assert True in left_out[:12]
    assert True in left_out[12:]


@pytest.mark.parametrize(("optimizer", "world_size"), quick_and_soak([("adamw", 2), ("muon", 1)], ("muon", 1)))
def test_the_stages_of_a_schedule_are_the_lean_loop_s_sharded_and_resumed_where_one_begins(
    run: FullRun, corpus: Corpus, gloo_ranks: GlooRanks, optimizer: OptimizerName, world_size: int
) -> None:
    # The first one splits the optimizer's groups, the second one begins where the run is resumed.
    stages = (
        HyperparameterStage(after=6 / 14, learning_rate=0.5, embedding_rate=2.0, beta2=0.8, clip_norm=0.5),
        HyperparameterStage(after=12 / 14, learning_rate=1.5, weight_decay_tau=0.1, embedding_rate=1.0),
    )
    values = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH, optimizer=optimizer, stages=stages)
    guard = GuardSettings(action="rewind", window=8, snapshot_every=4)
    run = replace(run, numerics=replace(run.numerics, guard=guard), segments=chain(values, BATCH * STEPS))
    assert [segment.start // BATCH for segment in run.segments] == [0, 6, 12, 14]
    curve, loss = lean(run, corpus)
    if world_size > 1:
        gloo_ranks.train(run, world_size)
        np.testing.assert_allclose(losses(run), curve, rtol=1e-3)
    else:
        train(run)
        assert losses(run) == curve
    assert result(run)["loss"] == pytest.approx(loss, rel=1e-4)
    interrupt(run, after=12)
    resumed = train(run)
    assert resumed["resumed_from"] == BATCH * 12
    assert resumed["loss"] == pytest.approx(loss, rel=1e-4)
    np.testing.assert_allclose(losses(run), curve, rtol=1e-3)


def swapped(run: FullRun, optimizer: OptimizerName, fraction: float) -> FullRun:
    values = Hyperparameters(
        learning_rate=0.01,
        batch_tokens=BATCH,
        swap_optimizer=optimizer,
        swap_fraction=fraction,
        swap_learning_rate=0.003,
        warmup_fraction=0.1,
    )
    return replace(run, segments=chain(values, BATCH * STEPS))


@pytest.mark.parametrize(
    ("optimizer", "at_step"), quick_and_soak([("muon", 8), ("lion", 12), ("muon", 13)], ("muon", 8), ("muon", 13))
)
def test_a_swap_of_the_optimizer_is_the_lean_loop_s_and_resumes_after_at_and_before_it(
    run: FullRun, corpus: Corpus, optimizer: OptimizerName, at_step: int
) -> None:
    guard = GuardSettings(action="rewind", window=8, threshold=0.01, max_spikes=20, snapshot_every=5)
    run = swapped(replace(run, numerics=replace(run.numerics, guard=guard)), optimizer, at_step / STEPS)
    train_twice_as_lean(run, corpus)
    resumed_from = run.directory / CHECKPOINTS / f"tokens={BATCH * 12}"
    table = json.loads((resumed_from / PARAMETRIZATION).read_text())
    assert table["optimizer"] == (optimizer if at_step < 12 else "adamw")


def test_a_run_whose_validation_loss_breaks_ends_with_its_step_and_reason(run: FullRun) -> None:
    values = Hyperparameters(learning_rate=1e30, batch_tokens=BATCH)
    short = (stem(values.resolve(BATCH * STEPS), BATCH),)
    with pytest.raises(StageError, match="diverged:.*1"):
        train(replace(run, segments=short))
    dead = replace(run, segments=chain(replace(values, learning_rate=1e4), BATCH * STEPS))
    with pytest.raises(StageError, match=r"diverged:.*than (10 )?ln V =.*\d"):
        train(dead)


def test_a_checkpoint_whose_hashes_do_not_hold_is_passed_over(run: FullRun) -> None:
    train(run)
    interrupt(run, after=12)
    checkpoints = Checkpoints(run.directory / CHECKPOINTS)
    newest = checkpoints.latest()
    assert newest is not None
    shard = next(newest[1].glob("*.distcp"))
    torn = bytearray(shard.read_bytes())
    torn[len(torn) // 2] ^= 1
    shard.write_bytes(torn)
    for later in (1, 2):  # of a run that had come further
        shutil.copytree(newest[1], newest[1].with_name(f"tokens={run.n_tokens * later + 1}"))
    assert checkpoints.latest() is None
    assert train(run)["resumed_from"] == 0
    end = checkpoints.latest()
    assert end is not None, "a checkpoint made way for torn ones"
    assert end[0] == run.n_tokens


def test_a_checkpoint_holds_its_table_hashed_and_another_one_is_refused(run: FullRun) -> None:
    train(run)
    interrupt(run, after=12)
    newest = Checkpoints(run.directory / CHECKPOINTS).latest()
    assert newest is not None
    table = json.loads((newest[1] / PARAMETRIZATION).read_text())
    assert table == run.numerics.parametrization("adamw").to_dict()
    assert PARAMETRIZATION in json.loads((newest[1] / MANIFEST).read_text())
    rebased = replace(run, numerics=replace(run.numerics, base=run.numerics.model))
    with pytest.raises(ValueError, match="embedding.weight's width_mult is 2.0 .* 1.0"):
        train(rebased)


def test_a_curriculum_by_fractions_is_followed_by_both_loops_and_resumes(
    run: FullRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = MixtureStage(weights={"near": 1, "far": 0}, until_fraction=0.75)
    mixed = small_mixture(tmp_path, Mixture(stages=(first, MixtureStage(weights={"near": 0, "far": 1}))))
    seen: list[set[str]] = []
    step = Stepper.step

    def seeing(stepper: Stepper, sequences: Tensor, **position: Any) -> tuple[Tensor, Tensor]:
        seen.append(set(bytes(sequences.flatten().tolist()).decode()) - {"\0"})
        return step(stepper, sequences, **position)

    monkeypatch.setattr(Stepper, "step", seeing)
    numerics = replace(run.numerics, corpus_key=mixed.key, stages_by_fraction=True).for_run(BATCH * STEPS)
    run = replace(run, numerics=numerics, corpus=mixed.folder)
    planted = [set(LETTERS["near"])] * 12 + [set(LETTERS["far"])] * 4
    curve, loss = lean(run, mixed)
    assert seen == planted
    seen.clear()
    assert train(run)["loss"] == pytest.approx(loss, rel=1e-6)
    assert seen == planted
    assert losses(run) == curve
    seen.clear()
    interrupt(run, after=12)
    assert train(run)["loss"] == pytest.approx(loss, rel=1e-6)
    assert seen == planted[12:]


def test_a_curriculum_by_fractions_needs_the_run_s_length(run: FullRun, tmp_path: Path) -> None:
    first = MixtureStage(weights={"near": 1, "far": 0}, until_fraction=0.75)
    mixed = small_mixture(tmp_path, Mixture(stages=(first, MixtureStage(weights={"near": 0, "far": 1}))))
    unaware = replace(run, numerics=replace(run.numerics, corpus_key=mixed.key), corpus=mixed.folder)
    with pytest.raises(ValueError, match="run_tokens"):
        train(unaware)
    with pytest.raises(ValueError, match="stages_by_fraction must.*True"):
        Trainer(mixed, compile=False).train(unaware.numerics, run.segments[0])
    aware = replace(unaware.numerics, stages_by_fraction=True)
    for numerics, message in ((aware, "set its length"), (aware.for_run(BATCH), "256 tokens, .* trained to 3")):
        with pytest.raises(ValueError, match=message):
            Trainer(mixed, compile=False).train(numerics, run.segments[0])
        with pytest.raises(ValueError, match=message.replace("to 3", "to 4")):
            replace(run, numerics=numerics)


def test_the_losses_of_a_mixture_s_sources_stand_in_the_metrics_and_in_the_result(run: FullRun, tmp_path: Path) -> None:
    mixed = small_mixture(tmp_path, Mixture.constant({"near": 0.6, "far": 0.4}))
    numerics = replace(run.numerics, corpus_key=mixed.key)
    run = replace(run, numerics=numerics, corpus=mixed.folder, evaluate_every_tokens=BATCH * 4)
    whole = train(run)
    parts = whole["source_losses"]
    assert whole["loss"] == pytest.approx(0.6 * parts["near"] + 0.4 * parts["far"], rel=1e-6)
    state, trainer = None, Trainer(mixed, compile=False)
    for segment in run.segments:
        trained = trainer.train(run.numerics, segment, state)
        state = trained.state
    assert parts == pytest.approx(trained.source_losses, rel=1e-6)
    evaluated = [row for row in rows(run) if "val_loss" in row]
    assert [row["tokens"] for row in evaluated] == [BATCH * n for n in (4, 8, 12, 16)]
    assert all(row["source_losses"].keys() == {"near", "far"} for row in evaluated)
    (run.directory / RESULT).unlink()  # killed between its last checkpoint and its result
    again = train(run)
    assert (again["loss"], again["source_losses"]) == (whole["loss"], parts)
