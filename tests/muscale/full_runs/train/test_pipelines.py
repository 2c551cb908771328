"""Every schedule of a pipeline trains to the losses and norms of one process, in every layout of its stages."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.pipelining import PipelineStage

from muscale.full_runs.checkpoints.evaluate import evaluate_checkpoint
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.checkpoints.stored_weights import RecordReader
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.layout import METRICS
from muscale.settings.parallelism import Parallelism
from muscale.settings.promote import SpikePolicy
from muscale.store.spike_handling import read_incidents
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import Sharding
from proxy_models.architecture.stage import Stage
from proxy_models.architecture.stage_layout import SPLIT_BACKWARD, PipelineSchedule
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.evaluation.samples import Samples
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.numerics import Numerics
from proxy_models.training.pipeline import Pipeline
from proxy_models.training.step import Stepper
from tests.muscale.conftest import write_text
from tests.muscale.forked_ranks import BATCH, ended, interrupt, result, rows, small_corpus, small_run, start
from tests.muscale.gloo_ranks import GlooRanks
from tests.proxy_models.families import Stacked
from tests.quick import quick_and_soak

STEPS = 4
MakeRun = Callable[..., FullRun]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "text", documents=30, words=200)
    return write_corpus(folder / "tokens", str(folder / "text"))


@pytest.fixture
def make_run(corpus: Corpus, tmp_path: Path) -> MakeRun:
    def make(values: dict[str, Any] | None = None, numerics: dict[str, Any] | None = None, **variant: Any) -> FullRun:
        model, base = (
            ModelConfig(**{"d_model": width, "n_layers": 5, "head_dim": 8, "context_length": 32} | variant)
            for width in (32, 16)
        )
        recipe = {"learning_rate": 0.01, "batch_tokens": BATCH, "warmup_fraction": 0.2, "clip_norm": 0.3} | (
            values or {}
        )
        of: dict[str, Any] = {
            "model": model,
            "base": base,
            "corpus_key": corpus.key,
            "seed": 0,
            "evaluation_tokens": 32 * 35,
        }
        return FullRun(
            numerics=Numerics(**of | (numerics or {})),
            segments=chain(Hyperparameters(**recipe), BATCH * STEPS),
            directory=tmp_path / "run",
            corpus=corpus.folder,
            checkpoint_every_tokens=BATCH * 2,
            evaluate_every_tokens=BATCH * 2,
            min_unit_params=0,
        )

    return make


def figures(run: FullRun) -> list[float]:
    """Losses and norms of every step, and the validation losses after them."""
    found = rows(run)
    return [row[name] for name in ("train_loss", "grad_norm", "val_loss") for row in found if name in row]


def staged(run: FullRun, parallelism: Parallelism, micro_batch: int = 1) -> FullRun:
    return replace(run, directory=run.directory.with_name("staged"), parallelism=parallelism, micro_batch=micro_batch)


def layout(schedule: PipelineSchedule = "1f1b", sharding: Sharding = "none", **other: Any) -> Parallelism:
    return Parallelism(sharding=sharding, pipeline_parallel=2, pipeline_schedule=schedule, **other)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {}),
    "zero2": (4, {"sharding": "zero2"}),
    "full": (4, {"sharding": "full"}),
    "tensor": (4, {"tensor_parallel": 2}),
    "zero2, tensor": (8, {"sharding": "zero2", "tensor_parallel": 2}),
    "full, tensor": (8, {"sharding": "full", "tensor_parallel": 2}),
}
SCHEDULES = [
    (schedule, spread)
    for schedule in get_args(PipelineSchedule)
    for spread in LAYOUTS
    if schedule not in SPLIT_BACKWARD or "full" not in spread
]


@pytest.mark.parametrize(
    ("schedule", "spread"), quick_and_soak(SCHEDULES, ("interleaved", "full"), ("zero_bubble_v", "plain"))
)
def test_a_schedule_has_the_figures_of_one_process_and_its_checkpoints(
    make_run: MakeRun, gloo_ranks: GlooRanks, schedule: PipelineSchedule, spread: str
) -> None:
    whole = make_run(qk_norm=True, queries_per_kv=2, z_loss=1e-3, label_smoothing=0.1)
    train(whole)
    ranks, other = LAYOUTS[spread]
    run = staged(whole, layout(schedule, **other))
    gloo_ranks.train(run, ranks)
    np.testing.assert_allclose(figures(run), figures(whole), rtol=1e-5)
    interrupt(run, after=2)
    assert train(replace(run, parallelism=Parallelism()))["resumed_from"] == BATCH * 2
    np.testing.assert_allclose(figures(run), figures(whole), rtol=1e-5)


VARIANTS: dict[str, tuple[Parallelism, int, dict[str, Any]]] = {
    "learned positions, documents, recomputed": (
        layout("interleaved", checkpointing="full"),
        2,
        {"positions": "learned", "biases": True, "norm": "layernorm", "document_separator": ord(" ")},
    ),
    "adafactor": (layout(sharding="zero2"), 4, {"values": {"optimizer": "adafactor"}}),
    "muon": (layout(sharding="full"), 4, {"values": {"optimizer": "muon"}, "n_layers": 6}),
    "soap": (layout("interleaved", sharding="full"), 4, {"values": {"optimizer": "soap"}}),
    "lion, hybrid": (layout(sharding="hybrid", shard_ranks=1), 4, {"values": {"optimizer": "lion"}}),
    "lamb": (layout(sharding="zero2"), 4, {"values": {"optimizer": "lamb"}}),
    "bf16": (layout(sharding="zero2"), 4, {"numerics": {"precision": "bf16"}}),
    "sequences shared, documents": (
        layout("interleaved", context_parallel=2),
        4,
        {"document_separator": ord(" "), "attention_window": 9, "queries_per_kv": 2, "z_loss": 0.01},
    ),
    "sequences shared, gradients of weights apart": (layout("zero_bubble_v", context_parallel=2), 4, {"qk_norm": True}),
    "sequences shared, sharded": (layout(sharding="full", context_parallel=2, checkpointing="selective"), 8, {}),
    "sequences and products shared": (
        layout(sharding="zero2", context_parallel=2, tensor_parallel=2),
        8,
        {"biases": True, "label_smoothing": 0.1},
    ),
    "ramp": (layout(), 2, {"values": {"batch_doublings": 1, "batch_ramp_tokens": BATCH}}),
}
ROUNDING = {"bf16": 1.5e-3, "muon": 1e-4, "soap": 5e-3}
"""Tolerances above 5e-6. bf16 rounds sums over micro-batches in another order, by at most 7e-4 of a figure here, and a run in fp32
differs by 2.4e-3. What Muon orthogonalises magnifies rounding, and rounding decides where SOAP's first eigenbasis is undetermined."""
CHANGES_SHAPE = {"ramp": 4}
"""Sequences of a micro-batch, which are two in the ramp's first batches."""


@pytest.mark.parametrize(
    "variant",
    quick_and_soak(VARIANTS, "learned positions, documents, recomputed", "sequences shared, documents", "ramp"),
)
def test_what_a_run_may_have_is_the_same_in_stages(make_run: MakeRun, gloo_ranks: GlooRanks, variant: str) -> None:
    parallelism, ranks, settings = VARIANTS[variant]
    whole = make_run(**settings)
    train(whole)
    run = staged(whole, parallelism, CHANGES_SHAPE.get(variant, 1))
    gloo_ranks.train(run, ranks)
    np.testing.assert_allclose(figures(run), figures(whole), rtol=ROUNDING.get(variant, 5e-6))


SPIKE = 9
"""Step whose loss is a hundredfold; the guard then knows eight."""


def train_with_a_spike(run: FullRun) -> None:
    """Train a run whose loss, and so its gradient, is a hundredfold in one step, by stages or in one process."""
    step, forward, now = Stepper.step, Stage.forward, [0]

    def stepped(stepper: Any, sequences: Any, *, number: int, **given: Any) -> Any:
        loss, now[0] = stepper._loss, number
        stepper._loss = (lambda *of: 100 * loss(*of)) if number == SPIKE and stepper._pipeline is None else loss
        try:
            return step(stepper, sequences, number=number, **given)
        finally:
            stepper._loss = loss

    def forwarded(stage: Any, *given: Any, **named: Any) -> Any:
        found = forward(stage, *given, **named)
        return 100 * found if stage.is_last and stage.training and now[0] == SPIKE else found

    with patch.object(Stepper, "step", stepped), patch.object(Stage, "forward", forwarded):
        train(run)


@pytest.mark.parametrize("action", quick_and_soak(["skip", "rollback"], "rollback"))
def test_ranks_of_all_stages_leave_out_the_same_spike_as_one_process(
    make_run: MakeRun, gloo_ranks: GlooRanks, action: Literal["skip", "rollback"]
) -> None:
    made = make_run(numerics={"guard": GuardSettings(window=8, threshold=20.0)})
    goes_back = {"margin_tokens": BATCH, "rewarm_tokens": 3 * BATCH} if action == "rollback" else {}
    whole = replace(
        made,
        segments=chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH), BATCH * 14),
        on_spike=SpikePolicy(action=action, **goes_back),
        checkpoint_every_tokens=BATCH * 6,
        evaluate_every_tokens=BATCH * 7,
    )
    run = staged(whole, layout("interleaved"))
    train_with_a_spike(whole)
    gloo_ranks.call(train_with_a_spike, run, world_size=2)
    assert [incident.step for incident in read_incidents(whole.directory)] == [SPIKE]
    assert [incident.step for incident in read_incidents(run.directory)] == [SPIKE]
    np.testing.assert_allclose(figures(run), figures(whole), rtol=5e-6)


def train_compiled(run: FullRun) -> int:
    """Train with compiled blocks, without a compiler of machine code; return the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        train(replace(run, compile=True))
    return counters["stats"]["unique_graphs"]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("parallelism", "ranks"),
    [
        (layout(), 2),
        (layout("interleaved"), 2),
        (Parallelism(context_parallel=2), 2),
        (layout(context_parallel=2), 4),
        (layout(sharding="zero2", tensor_parallel=2, checkpointing="selective"), 4),
    ],
    ids=["1f1b", "interleaved", "sequences shared", "1f1b, sequences shared", "1f1b, tensor"],
)
def test_compiled_blocks_have_the_figures_of_one_process(
    make_run: MakeRun, gloo_ranks: GlooRanks, parallelism: Parallelism, ranks: int
) -> None:
    whole = make_run(queries_per_kv=2, attention_window=9, global_attention_every=2)
    train(whole)
    run = staged(whole, parallelism)
    assert min(gloo_ranks.call(train_compiled, run, world_size=ranks)) > 0
    np.testing.assert_allclose(figures(run), figures(whole), rtol=5e-6)


def test_a_checkpoint_of_stages_is_evaluated_as_any_other(make_run: MakeRun, gloo_ranks: GlooRanks) -> None:
    """The asynchronous evaluator and the final task read it so, in one process and without stages."""
    run = staged(make_run(), layout(sharding="zero2"))
    gloo_ranks.train(run, 4)
    found = evaluate_checkpoint(run.directory, [Samples(prompts=("a",), n_tokens=4)])
    assert found.tokens == run.n_tokens
    assert found.val_loss == pytest.approx(rows(run)[-1]["val_loss"], rel=5e-6)
    assert len(found.samples) == 1


def test_a_family_that_knows_no_stages_has_them(make_run: MakeRun, gloo_ranks: GlooRanks) -> None:
    family, decoder = Stacked(vocab_size=256, context_length=32), make_run()
    numerics = replace(decoder.numerics, model=family.member(32, 4), base=family.member(16, 4))
    whole = replace(decoder, numerics=numerics)
    train(whole)
    run = staged(whole, layout("interleaved"))
    gloo_ranks.train(run, 2)
    np.testing.assert_allclose(figures(run), figures(whole), rtol=5e-6)


@pytest.mark.parametrize(
    ("optimizer", "first", "hops"),
    [
        ("adamw", (layout(), 2), [(Parallelism(), 2), (layout("zero_bubble_v"), 2)]),
        ("soap", (layout(), 2), [(Parallelism(), 2), (Parallelism(), 1)]),
        pytest.param(
            "soap",
            (layout(sharding="zero2"), 4),
            [(Parallelism(tensor_parallel=2), 4), (layout(sharding="full", tensor_parallel=2), 8), (Parallelism(), 1)],
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "adamw",
            (layout(sharding="zero2"), 4),
            [(Parallelism(), 4), (Parallelism(), 1), (layout("zero_bubble_v"), 2), (layout(), 2)],
            marks=pytest.mark.soak,
        ),
    ],
    ids=["two ranks", "soap, two ranks", "soap, four ranks", "four ranks"],
)
def test_a_run_goes_from_a_pipeline_to_shards_to_one_process_and_to_another_pipeline(
    make_run: MakeRun,
    gloo_ranks: GlooRanks,
    optimizer: str,
    first: tuple[Parallelism, int],
    hops: list[tuple[Parallelism, int]],
) -> None:
    whole = make_run(values={"optimizer": optimizer}, biases=True)
    train(whole)
    run = staged(whole, first[0])
    gloo_ranks.train(run, first[1])
    for parallelism, ranks in hops:
        interrupt(run, after=2)
        hop = replace(run, parallelism=parallelism)
        if ranks == 1:
            train(hop)
        else:
            gloo_ranks.train(hop, ranks)
        assert result(run)["resumed_from"] == BATCH * 2
        np.testing.assert_allclose(figures(run), figures(whole), rtol=ROUNDING.get(optimizer, 5e-6))
        if optimizer == "soap":
            assert_same_state_of_soap(run, whole)


def assert_same_state_of_soap(run: FullRun, whole: FullRun) -> None:
    """Compare checkpoints: all names and shapes, and the moments and factors at the second step, which eigenbases do not change."""
    for tokens in (BATCH * 2, BATCH * 4):
        ours, theirs = (RecordReader(of.directory / CHECKPOINTS / f"tokens={tokens}") for of in (run, whole))
        shapes = ours.shapes()
        assert {name: of.shape for name, of in shapes.items()} == {
            name: of.shape for name, of in theirs.shapes().items()
        }
        assert sum(name.endswith("left_basis") for name in shapes) == 7 * 5
        compared = {name: of for name, of in shapes.items() if name.endswith((".left", ".right", ".exp_avg", ".step"))}
        steps = {name: value for name, value in ours.stream(compared) if name.endswith(".step")}
        assert {float(step) for step in steps.values()} == {tokens / BATCH}
        for name, one in theirs.stream(compared) if tokens == BATCH * 2 else ():
            ((_, found),) = ours.stream({name: compared[name]})
            assert torch.linalg.vector_norm(found - one) <= 1e-3 * torch.linalg.vector_norm(one), name


def test_stages_drop_different_activations_and_a_resumed_run_the_same(make_run: MakeRun, gloo_ranks: GlooRanks) -> None:
    run = replace(make_run(mlp_dropout=0.2), parallelism=layout(), micro_batch=1)
    gloo_ranks.train(run, 2)
    first = figures(run)
    interrupt(run, after=2)
    gloo_ranks.train(run, 2)
    assert figures(run) == first


def test_a_run_that_no_pipeline_can_train_is_refused_before_a_step(make_run: MakeRun, gloo_ranks: GlooRanks) -> None:
    run = staged(make_run(), layout(sharding="zero2"))
    assert not list(run.unfit(4))
    assert list(run.unfit(6))  # eight sequences over three shares
    with pytest.raises(Exception, match="8 sequences"):
        gloo_ranks.train(run, 6)
    assert not (run.directory / METRICS).exists()


def is_killed(rank: int, phase: str, checkpoints: Path, here: int) -> None:
    """Make a rank end itself by SIGKILL once there is a checkpoint, in one of `PHASES`."""
    if here != rank:
        return
    calls = 0

    def killed(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == PHASES[phase][2]:
            deadline = time.monotonic() + 60
            while phase != "save" and not [*checkpoints.glob("tokens=*/manifest.json")] and time.monotonic() < deadline:
                time.sleep(0.01)  # it is saved meanwhile
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given, **named)

    owner, name, _ = PHASES[phase]
    original = getattr(owner, name)
    setattr(owner, name, lambda *given, **named: killed(original, *given, **named))


PHASES: dict[str, tuple[Any, str, int]] = {  # eight micro-batches of a step
    "forward": (Stage, "forward", 8 * 8 + 3),
    "backward": (PipelineStage, "backward_one_chunk", 8 * 8 + 3),
    "clip": (Pipeline, "clip", 9),
    "optimizer": (torch.optim.AdamW, "step", 9),
    "evaluation": (Pipeline, "held_out_loss", 1),
    "save": (Checkpoints, "_complete", 2),
}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("parallelism", "ranks", "rank", "phase"),
    [
        *(pytest.param(layout(), 2, *of, id=f"1f1b-{of[0]}-{of[1]}") for of in product((0, 1), PHASES)),
        *(pytest.param(layout("interleaved", "full"), 4, 3, phase, id=f"interleaved-3-{phase}") for phase in PHASES),
    ],
)
def test_a_killed_rank_of_any_stage_in_any_phase_leaves_a_run_that_goes_on(
    tmp_path: Path, gloo_ranks: GlooRanks, parallelism: Parallelism, ranks: int, rank: int, phase: str
) -> None:
    corpus = small_corpus(tmp_path / "corpus")
    run = small_run(
        corpus, tmp_path / "run", layers=4, parallelism=parallelism, micro_batch=1, evaluate_every_tokens=BATCH * 8
    )
    undisturbed = replace(run, directory=tmp_path / "undisturbed")
    gloo_ranks.train(undisturbed, ranks)
    codes = ended(start(run, ranks, fault=partial(is_killed, rank, phase, run.directory / CHECKPOINTS)))
    assert codes[rank] == -signal.SIGKILL
    gloo_ranks.train(run, ranks)
    assert result(run)["resumed_from"] in (BATCH * 6, BATCH * 12)
    assert [row.get("train_loss") for row in rows(run)] == [row.get("train_loss") for row in rows(undisturbed)]
