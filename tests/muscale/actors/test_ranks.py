"""Ranks that train a proxy together have the losses of one, and go on from its states as it does from theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from proxy_models.architecture.config import ModelConfig, as_decoder
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import Segment, branch, stem
from proxy_models.training import compilation, fsdp
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.numerics import Numerics
from proxy_models.training.state import TrainState
from proxy_models.training.trainer import SegmentResult, Trainer
from proxy_models.training.warm import WarmModels
from tests.muscale.conftest import write_text
from tests.muscale.fake_ranks import rank_of
from tests.muscale.gloo_ranks import GlooRanks
from tests.proxy_models.families import Recurrent
from tests.proxy_models.prompted import prompted_corpus
from tests.quick import quick_and_soak

BATCH = 8 * 32


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "text", documents=30, words=200)
    return write_corpus(folder / "tokens", str(folder / "text"))


def numerics_of(corpus: Corpus, guard: GuardSettings | None = None) -> Numerics:
    model = ModelConfig(d_model=32, n_layers=2, head_dim=8, context_length=32)
    return Numerics(model=model, base=model, corpus_key=corpus.key, seed=0, evaluation_tokens=1120, guard=guard)


def segments(optimizer: OptimizerName) -> list[Segment]:
    """A trial of two rungs, and the branch that ends from the first."""
    values = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH, clip_norm=0.3, optimizer=optimizer)
    recipe = values.resolve(24 * BATCH)
    first = stem(recipe, 8 * BATCH)
    return [first, replace(stem(recipe, 12 * BATCH), start=first.end), branch(recipe, first.end, 10 * BATCH)[1]]


def train(
    folder: Path, numerics: Numerics, parts: list[tuple[Segment, TrainState | None]], micro_batch: int | None
) -> list[SegmentResult]:
    """What each rank trains: one part after the other, in the same process."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    trainer = Trainer(Corpus.open(folder), compile=False, mesh=mesh, micro_batch=micro_batch)
    return [trainer.train(numerics, segment, state, averaged=True) for segment, state in parts]


def train_in_units(folder: Path, numerics: Numerics, segment: Segment) -> SegmentResult:
    """What each rank trains, where even small units are gathered one at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp.shard, "__kwdefaults__", {**(fsdp.shard.__kwdefaults__ or {}), "min_unit_params": 0})
        return train(folder, numerics, [(segment, None)], None)[0]


def train_compiled(
    folder: Path, parts: list[tuple[Numerics, Segment]], backend: str
) -> list[tuple[SegmentResult, int, int]]:
    """What each rank trains, a unit and a graph for each block: results, graphs and graph breaks so far."""
    dist.init_process_group("gloo")
    compile, found = torch.compile, []
    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(recompile_limit=8):
        patch.setattr(fsdp.shard, "__kwdefaults__", {**(fsdp.shard.__kwdefaults__ or {}), "min_unit_params": 0})
        patch.setattr(torch, "compile", lambda f, **options: compile(f, backend=backend, **options))
        patch.setattr(compilation, "configure", lambda: None)  # which sets the limit
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        trainer = Trainer(Corpus.open(folder), compile=True, mesh=mesh, micro_batch=2)
        for numerics, segment in parts:
            result = trainer.train(numerics, segment, averaged=True)
            found.append((result, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return found


@pytest.mark.parametrize(
    ("ranks", "optimizer", "guard", "tolerance"),
    quick_and_soak(
        [
            (1, "adamw", None, 1e-6),
            (2, "adamw", None, 1e-6),
            (2, "adafactor", None, 1e-5),
            (2, "lamb", None, 1e-5),
            (2, "soap", None, 5e-3),  # whose first eigenbasis is undetermined in the null space of a gradient
            (2, "muon", None, 2e-4),  # which orthogonalises in bf16
            (4, "adamw", GuardSettings(action="rewind", window=8, snapshot_every=2), 1e-6),
        ],
        (2, "adafactor", None, 1e-5),
        (4, "adamw", GuardSettings(action="rewind", window=8, snapshot_every=2), 1e-6),
    ),
)
def test_rungs_and_branches_have_the_losses_of_one_rank_from_states_of_any_number(
    corpus: Corpus,
    gloo_ranks: GlooRanks,
    ranks: int,
    optimizer: OptimizerName,
    guard: GuardSettings | None,
    tolerance: float,
) -> None:
    numerics, (first, second, branch) = numerics_of(corpus, guard), segments(optimizer)
    alone = Trainer(corpus, compile=False)
    rung = alone.train(numerics, first, averaged=True)
    expected = [rung, *(alone.train(numerics, segment, rung.state) for segment in (second, branch))]
    parts = [(first, None), (second, rung.state), (branch, rung.state)]
    by_rank = gloo_ranks.call(train, corpus.folder, numerics, parts, 1, world_size=ranks)
    for together, one in zip(by_rank[0], expected, strict=True):
        assert together.curve.train_loss == pytest.approx(one.curve.train_loss, rel=tolerance)
        assert together.loss == pytest.approx(one.loss, rel=tolerance)
    assert by_rank[0][0].averaged_loss == pytest.approx(rung.averaged_loss, rel=tolerance)
    for others in by_rank[1:]:
        assert [result.loss for result in others] == [result.loss for result in by_rank[0]]
        assert all(result.state is None for result in others)
    kept = by_rank[0][0].state
    assert rung.state is not None
    assert {name: t.shape for name, t in kept.tensors.items()} == {n: t.shape for n, t in rung.state.tensors.items()}
    resumed = alone.train(numerics, second, kept)
    assert resumed.loss == pytest.approx(expected[1].loss, rel=tolerance)


def test_ranks_of_a_trial_share_the_mean_over_the_tokens_that_count(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    prompted = prompted_corpus(tmp_path, 1000)
    numerics, (first, *_) = numerics_of(prompted, None), segments("adamw")
    alone = Trainer(prompted, compile=False).train(numerics, first, averaged=True)
    together, _, _ = gloo_ranks.call(train, prompted.folder, numerics, [(first, None)], 1, world_size=3)
    assert together[0].curve.train_loss == pytest.approx(alone.curve.train_loss, rel=1e-3)
    assert together[0].curve.train_loss[0] == pytest.approx(alone.curve.train_loss[0], rel=1e-6)
    assert together[0].loss == pytest.approx(alone.loss, rel=1e-3)
    assert together[0].averaged_loss == pytest.approx(alone.averaged_loss, rel=1e-3)


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about torch's own code
@pytest.mark.soak
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_ranks_compile_each_block_have_the_losses_of_one_eager_rank_and_compile_a_shape_once(
    corpus: Corpus, gloo_ranks: GlooRanks, backend: str
) -> None:
    numerics, (first, *_) = numerics_of(corpus), segments("adamw")
    wide = replace(numerics, model=replace(as_decoder(numerics.model), d_model=64))
    parts = [(numerics, first), (wide, first), (replace(numerics, seed=1), first)]
    by_rank = gloo_ranks.call(train_compiled, corpus.folder, parts, backend, world_size=2)
    alone = Trainer(corpus, compile=False)
    for found in by_rank:
        assert [(graphs, breaks) for _, graphs, breaks in found] == [(1, 0), (2, 0), (2, 0)]
        for (numerics, segment), (result, *_) in zip(parts, found, strict=True):
            expected = alone.train(numerics, segment, averaged=True)
            assert result.compiled
            assert result.curve.train_loss == pytest.approx(expected.curve.train_loss, rel=1e-5)
            assert result.loss == pytest.approx(expected.loss, rel=1e-5)
            assert result.averaged_loss == pytest.approx(expected.averaged_loss, rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # dynamo warns about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
def test_shapes_that_are_no_longer_warm_do_not_count_towards_dynamo_s_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend="eager", **options))
    limits = torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
    with rank_of(0, 2), limits:
        models = WarmModels(mesh=init_device_mesh("cpu", (2,)))
        for width in (16, 32, 48, 64):
            warm = models.get(ModelConfig(d_model=width, n_layers=2, context_length=16), compiled=True)
            assert torch.isfinite(warm.loss(warm.module, torch.randint(256, (2, 17))))
        assert counters["stats"]["unique_graphs"] == 4


def test_ranks_share_a_family_of_one_s_own_by_its_units(corpus: Corpus, gloo_ranks: GlooRanks) -> None:
    base = Recurrent(vocab_size=256, context_length=32).member(32, 2)
    numerics, (first, *_) = replace(numerics_of(corpus), model=base, base=base), segments("adamw")
    one = Trainer(corpus, compile=False).train(numerics, first)
    together = gloo_ranks.call(train_in_units, corpus.folder, numerics, first, world_size=2)[0]
    assert together.curve.train_loss == pytest.approx(one.curve.train_loss, rel=1e-6)
    assert together.loss == pytest.approx(one.loss, rel=1e-6)
