"""Every layout of a full run over its ranks trains to the losses of one process, and resumes from its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from muscale.errors import StageError
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.full_runs.train.sharding import Meshes, build_model, mesh_of
from muscale.settings.parallelism import Parallelism, RankGrid
from proxy_models.architecture.config import ModelConfig, as_decoder
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.families import build
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize
from tests.muscale.conftest import write_text
from tests.muscale.fake_ranks import rank_of
from tests.muscale.forked_ranks import BATCH, interrupt, result, rows
from tests.muscale.gloo_ranks import GlooRanks
from tests.proxy_models.families import Network, Recurrent, Stacked
from tests.quick import quick_and_soak

STEPS = 6
MakeRun = Callable[..., FullRun]


class Decayed(Recurrent):
    """Networks with a tied table and a constant."""

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        network.head.weight = network.symbols.weight
        network.register_buffer("embedding_multiplier", torch.ones(()), persistent=False)
        network.register_buffer("decay", torch.linspace(0, 1, width), persistent=False)
        return network


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "text", documents=30, words=200)
    return write_corpus(folder / "tokens", str(folder / "text"))


@pytest.fixture
def make_run(corpus: Corpus, tmp_path: Path) -> MakeRun:
    def make(
        optimizer: OptimizerName = "adamw",
        guard: GuardSettings | None = None,
        **variant: Any,
    ) -> FullRun:
        model, base = (
            ModelConfig(d_model=width, n_layers=2, head_dim=8, context_length=32, **variant) for width in (32, 16)
        )
        values = Hyperparameters(
            learning_rate=0.01, batch_tokens=BATCH, optimizer=optimizer, warmup_fraction=0.2, clip_norm=0.3
        )
        return FullRun(
            numerics=Numerics(
                model=model,
                base=base,
                corpus_key=corpus.key,
                seed=0,
                evaluation_tokens=1120,
                guard=guard,
            ),
            segments=chain(values, BATCH * STEPS),
            directory=tmp_path / "run",
            corpus=corpus.folder,
            checkpoint_every_tokens=BATCH * 3,
            evaluate_every_tokens=BATCH * 2,
            min_unit_params=0,
        )

    return make


def losses(run: FullRun) -> list[float]:
    """Losses of every step, and the validation losses after them."""
    return [row["train_loss"] for row in rows(run)] + [row["val_loss"] for row in rows(run) if "val_loss" in row]


def norms(run: FullRun) -> list[float]:
    """Return the gradient norm of every step."""
    return [row["grad_norm"] for row in rows(run)]


EVERYTHING = {"biases": True, "norm": "layernorm", "qk_norm": True, "queries_per_kv": 2, "positions": "learned"}
LAYOUTS: dict[str, tuple[Parallelism, int, dict[str, Any]]] = {
    "none": (Parallelism(sharding="none"), 2, {"positions": "alibi"}),
    "zero2": (Parallelism(sharding="zero2"), 2, {"guard": GuardSettings(action="rewind", window=8, snapshot_every=2)}),
    "full, uneven": (  # 3, 3 and 2 of 8
        Parallelism(sharding="full", checkpointing="selective"),
        3,
        {"tied": True, "optimizer": "adafactor", "document_separator": ord(" ")},  # words are the documents
    ),
    "hybrid": (Parallelism(sharding="hybrid", shard_ranks=2), 4, {"optimizer": "muon"}),
    "tensor": (
        Parallelism(tensor_parallel=2, checkpointing="full"),
        4,
        {
            "tied": True,
            "document_separator": ord(" "),
            "attention_window": 5,
            "global_attention_every": 2,
            **EVERYTHING,
        },
    ),
    "tensor, replicas": (
        Parallelism(sharding="none", tensor_parallel=2),
        4,
        {"positions": "alibi", "parallel": True, "activation": "gelu", "optimizer": "muon", "vocab_size": 257},
    ),
}

MASKS = {"queries_per_kv": 2, "document_separator": ord(" "), "attention_window": 5, "global_attention_every": 2}
SHARED_SEQUENCES: dict[str, tuple[Parallelism, int, dict[str, Any]]] = {
    "masks": (Parallelism(context_parallel=2, checkpointing="selective"), 2, {"z_loss": 0.01, **MASKS}),
    "replicas, learned": (
        Parallelism(sharding="none", context_parallel=2, checkpointing="full"),
        2,
        {"positions": "learned", "stochastic_depth": 0.2, "optimizer": "muon"},
    ),
    "two groups": (Parallelism(sharding="zero2", context_parallel=2), 4, {"tied": True, "attention_window": 9}),
    "hybrid": (Parallelism(sharding="hybrid", shard_ranks=2, context_parallel=2), 4, {"positions": "alibi", **MASKS}),
    "four chunks": (Parallelism(context_parallel=4), 4, {"qk_norm": True, "label_smoothing": 0.1, **MASKS}),
    "tensor": (Parallelism(context_parallel=2, tensor_parallel=2), 4, {"tied": True, "biases": True, **MASKS}),
}


@pytest.mark.parametrize("layout", quick_and_soak(SHARED_SEQUENCES, "masks"))
def test_ranks_that_share_a_sequence_have_the_steps_of_one_process_which_continues_them(
    make_run: MakeRun, gloo_ranks: GlooRanks, layout: str
) -> None:
    parallelism, world_size, variant = SHARED_SEQUENCES[layout]
    whole = make_run(**variant)
    train(whole)
    share = 8 // parallelism.data_ranks(world_size)
    run = replace(whole, directory=whole.directory.with_name("shared"), parallelism=parallelism, micro_batch=share // 2)
    gloo_ranks.train(run, world_size)
    rtol = 1e-5 if "optimizer" in variant else 1e-6  # what Muon orthogonalises magnifies rounding
    np.testing.assert_allclose(losses(run), losses(whole), rtol=rtol)
    np.testing.assert_allclose(norms(run), norms(whole), rtol=10 * rtol)
    interrupt(run, after=3)
    alone = replace(run, parallelism=Parallelism())
    train(alone)
    assert result(alone)["resumed_from"] == BATCH * 3
    np.testing.assert_allclose(losses(alone), losses(whole), rtol=rtol)


@pytest.mark.parametrize("layout", quick_and_soak(LAYOUTS, "full, uneven"))
def test_a_layout_has_the_losses_of_one_process_and_resumes(
    make_run: MakeRun, gloo_ranks: GlooRanks, layout: str
) -> None:
    parallelism, world_size, variant = LAYOUTS[layout]
    whole = make_run(**variant)
    train(whole)
    share = math.ceil(8 / parallelism.data_ranks(world_size))
    half = math.ceil(share / 2)  # so that gradients are summed over two parts
    run = replace(whole, directory=whole.directory.with_name("sharded"), parallelism=parallelism, micro_batch=half)
    gloo_ranks.train(run, world_size)
    rtol = 1e-5 if "optimizer" in variant else 1e-6  # what Muon orthogonalises magnifies rounding
    np.testing.assert_allclose(losses(run), losses(whole), rtol=rtol)
    assert losses(run)[STEPS - 1] < losses(run)[0] - 0.1
    recorded = result(run)["environment"]
    assert (recorded["world_size"], recorded["parallelism"]["sharding"]) == (world_size, parallelism.sharding)
    interrupt(run, after=3)
    gloo_ranks.train(run, world_size)
    assert result(run)["resumed_from"] == BATCH * 3
    np.testing.assert_allclose(losses(run), losses(whole), rtol=rtol)


SPREADS: dict[str, tuple[Parallelism, int]] = {
    "none": (Parallelism(sharding="none"), 2),
    "zero2": (Parallelism(sharding="zero2"), 2),
    "full, uneven": (Parallelism(sharding="full"), 3),
    "hybrid": (Parallelism(sharding="hybrid", shard_ranks=2), 4),
    "tensor": (Parallelism(sharding="none", tensor_parallel=2), 2),
    "tensor, full": (Parallelism(sharding="full", tensor_parallel=2), 4),
}
ROUNDING = {"soap": 5e-3}
"""Tolerances above 1e-5. A first gradient of low rank leaves SOAP's eigenbasis undetermined in the null space: rounding decides."""


@pytest.mark.parametrize(
    ("optimizer", "spread"),
    quick_and_soak(
        product(get_args(OptimizerName), SPREADS),
        ("adafactor", "hybrid"),
        ("lamb", "hybrid"),
        ("soap", "none"),
    ),
)
def test_copies_and_parts_of_parameters_move_as_those_of_one_process(
    make_run: MakeRun, gloo_ranks: GlooRanks, optimizer: OptimizerName, spread: str
) -> None:
    # Measured: at most 3e-7, by Muon 3e-6 (losses) and 2e-5 (norms). Adafactor that counted copies twice was 3e-4 to 3e-3 off.
    whole = make_run(optimizer=optimizer, **EVERYTHING)
    train(whole)
    parallelism, world_size = SPREADS[spread]
    run = replace(whole, directory=whole.directory.with_name("sharded"), parallelism=parallelism)
    gloo_ranks.train(run, world_size)
    rtol = ROUNDING.get(optimizer, 1e-5)
    np.testing.assert_allclose(losses(run), losses(whole), rtol=rtol)
    np.testing.assert_allclose(norms(run), norms(whole), rtol=10 * rtol)


@pytest.mark.parametrize("optimizer", quick_and_soak(get_args(OptimizerName), "muon"))
def test_convolutions_and_stacks_of_matrices_move_on_ranks_as_in_one_process(
    make_run: MakeRun, gloo_ranks: GlooRanks, optimizer: OptimizerName
) -> None:
    family, run = Stacked(vocab_size=256, context_length=32), make_run(optimizer=optimizer)
    whole = replace(run, numerics=replace(run.numerics, model=family.member(32, 2), base=family.member(16, 2)))
    train(whole)
    assert losses(whole)[STEPS - 1] < losses(whole)[0] - 0.05
    rtol = ROUNDING.get(optimizer, 1e-5)
    # Of the five matrices of a stack four ranks have two, two, one and none.
    for sharding, world_size in (("none", 2), ("full", 2), ("full", 4)):
        run = replace(
            whole,
            directory=whole.directory.with_name(f"{sharding} {world_size}"),
            parallelism=Parallelism(sharding=sharding),  # type: ignore[arg-type]
        )
        gloo_ranks.train(run, world_size)
        np.testing.assert_allclose(losses(run), losses(whole), rtol=rtol)
        np.testing.assert_allclose(norms(run), norms(whole), rtol=30 * rtol)
    interrupt(run, after=3)
    assert train(run)["resumed_from"] == BATCH * 3
    np.testing.assert_allclose(losses(run), losses(whole), rtol=rtol)


@pytest.mark.parametrize("optimizer", quick_and_soak(("adamw", "soap"), "adamw"))
def test_a_checkpoint_of_one_layout_is_resumed_by_any_other(
    make_run: MakeRun, gloo_ranks: GlooRanks, optimizer: OptimizerName
) -> None:
    whole = make_run(optimizer, tied=True, biases=True)
    rtol = ROUNDING.get(optimizer, 1e-5)
    train(whole)
    run = replace(whole, directory=whole.directory.with_name("sharded"))
    hops = [
        (Parallelism(sharding="hybrid", shard_ranks=2, tensor_parallel=2), 4),
        (Parallelism(sharding="none"), 2),
    ]
    gloo_ranks.train(replace(run, parallelism=Parallelism(sharding="zero2")), 2)
    for parallelism, world_size in hops:
        interrupt(run, after=3)
        gloo_ranks.train(replace(run, parallelism=parallelism), world_size)
        assert result(run)["resumed_from"] == BATCH * 3
        np.testing.assert_allclose(losses(run), losses(whole), rtol=rtol)
    interrupt(run, after=3)
    assert train(run)["resumed_from"] == BATCH * 3
    np.testing.assert_allclose(losses(run), losses(whole), rtol=rtol)


@pytest.mark.parametrize("tensor_parallel", quick_and_soak((1, 2), 2))
def test_logits_in_chunks_are_those_of_one_process_with_a_tied_table(
    make_run: MakeRun, gloo_ranks: GlooRanks, tensor_parallel: int
) -> None:
    # Ranks that share a batch draw the same random numbers, those of one process.
    random = {"stochastic_depth": 0.2} if tensor_parallel == 2 else {}
    whole = make_run(tied=True, label_smoothing=0.1, z_loss=1e-3, **random)
    train(whole)
    parallelism = Parallelism(tensor_parallel=tensor_parallel)
    run = replace(whole, directory=whole.directory.with_name("sharded"), parallelism=parallelism)
    gloo_ranks.train(run, 2, chunk_entries=50 * 256)
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-5)


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
def test_blocks_may_be_compiled_each_by_itself_and_evaluation_stays_eager(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Dynamo and the gradient's graph for real; what inductor generates is another test's, and takes 20 s.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    eager = make_run()
    train(eager)
    run = replace(eager, directory=eager.directory.with_name("compiled"), compile=True)
    counters.clear()
    assert train(run)["environment"]["compiled"]
    assert counters["stats"]["unique_graphs"] == 1  # blocks of one shape share it
    np.testing.assert_allclose(losses(run), losses(eager), rtol=1e-5)


def part_of(whole: Tensor, name: str, grid: RankGrid, rank: int) -> Tensor:
    """Return the part that a rank holds: its rows of its share of a product."""
    shard, tensor = rank // grid.tensor % grid.shards, rank % grid.tensor
    if any(part in name for part in ("query.", "key.", "value.", "gate.", "up.", "embedding.", "readout.")):
        whole = whole.chunk(grid.tensor)[tensor]
    elif "output.weight" in name or "down.weight" in name:
        whole = whole.chunk(grid.tensor, dim=1)[tensor]
    rows = whole.chunk(grid.shards)
    return rows[shard] if shard < len(rows) else whole[:0]


@pytest.mark.parametrize(
    "parallelism",
    [
        Parallelism(),
        Parallelism(sharding="none"),
        Parallelism(sharding="hybrid", shard_ranks=2),
        Parallelism(tensor_parallel=2),
    ],
    ids=["full", "none", "hybrid", "tensor"],
)
def test_every_rank_builds_its_own_part_of_the_same_values(make_run: MakeRun, parallelism: Parallelism) -> None:
    run = make_run(tied=True, biases=True, positions="alibi")
    recipe, device = run.segments[0].recipe, torch.device("cpu")
    whole = Decoder(as_decoder(run.numerics.model))
    initialize(whole, run.numerics.parametrization("adamw"), recipe, seed=0)
    expected = dict(whole.named_parameters())
    grid = parallelism.grid(4)
    for rank in range(4):
        with rank_of(rank, 4):
            meshes = Meshes.of(parallelism, grid, "cpu")
            built = build_model(run.numerics, recipe, parallelism, device=device, meshes=meshes, min_unit_params=0)
            assert isinstance(built, Decoder)
            parts = dict(built.named_parameters())
            assert parts.keys() == expected.keys()
            for name, part in parts.items():
                assert isinstance(part, DTensor)
                assert torch.equal(part.to_local(), part_of(expected[name], name, grid, rank)), name
            assert built.logit_bias is not None
            assert whole.logit_bias is not None
            heads = whole.logit_bias.chunk(grid.tensor)[rank % grid.tensor]
            assert torch.equal(built.logit_bias, heads)
            assert torch.equal(built.branch_multiplier, whole.branch_multiplier)


def test_a_family_s_ties_and_constants_are_those_of_its_own_build(make_run: MakeRun) -> None:
    run, member = make_run(), Decayed(vocab_size=256, context_length=32).member(16, 2)
    numerics, recipe = replace(run.numerics, model=member, base=member), run.segments[0].recipe
    expected = build(member)
    initialize(expected, numerics.parametrization("adamw"), recipe, seed=0)
    with rank_of(1, 2):
        meshes = Meshes(mesh_of(RankGrid(1, 1, 2, 1), "cpu"))
        built = build_model(numerics, recipe, Parallelism(), device=torch.device("cpu"), meshes=meshes)
        assert built.get_parameter("head.weight") is built.get_parameter("symbols.weight")
        assert dict(built.named_parameters()).keys() == dict(expected.named_parameters()).keys()
        for name, buffer in expected.named_buffers():
            assert torch.equal(built.get_buffer(name), buffer), name


def test_a_layout_that_does_not_fit_is_refused_before_anything_is_built(make_run: MakeRun) -> None:
    run = make_run(queries_per_kv=2)
    with pytest.raises(ValueError, match="must.*2.*d_model=32, got 4"):
        replace(run, parallelism=Parallelism(tensor_parallel=4))
    with pytest.raises(ValueError, match=r"the 4 query heads .* got 3; .* the 88 columns of the MLP \(d_ff\) .* got 3"):
        replace(run, parallelism=Parallelism(tensor_parallel=3))
    for name in ("embedding_dropout", "attention_dropout", "mlp_dropout"):
        with pytest.raises(ValueError, match=f"must be 1 with {name}, .* got 2"):
            replace(make_run(**{name: 0.1}), parallelism=Parallelism(tensor_parallel=2))
    odd = ModelConfig(d_model=32, n_layers=1, head_dim=8, context_length=30)
    (reason,) = Parallelism(tensor_parallel=4).layout_errors(odd)
    assert reason == "tensor_parallel must divide the 30 positions of a sequence (context_length) of d_model=32, got 4"
    alone = replace(run, parallelism=Parallelism(tensor_parallel=2))
    with pytest.raises(StageError, match="tensor_parallel"):
        train(alone)


def test_learned_positions_that_ranks_share_are_of_whole_sequences(make_run: MakeRun) -> None:
    run, parallelism = make_run(positions="learned"), Parallelism(sharding="none", tensor_parallel=2)
    with rank_of(1, 2):
        model = build_model(
            run.numerics,
            run.segments[0].recipe,
            parallelism,
            device=torch.device("cpu"),
            meshes=Meshes.of(parallelism, parallelism.grid(2), "cpu"),
        )
        with pytest.raises(ValueError, match="context_length=32, got 16"):
            model(torch.zeros(1, 16, dtype=torch.int64))


def test_ranks_form_a_grid() -> None:
    assert Parallelism(sharding="none").grid(8) == (1, 8, 1, 1)
    assert Parallelism(sharding="zero2").grid(8) == Parallelism().grid(8) == (1, 1, 8, 1)
    assert Parallelism(tensor_parallel=2).grid(8) == (1, 1, 4, 2)
    assert Parallelism(sharding="hybrid").grid(8, node_ranks=4) == (1, 2, 4, 1)
    assert Parallelism(sharding="hybrid", shard_ranks=2, tensor_parallel=2).grid(8, node_ranks=4) == (1, 4, 1, 2)
    with pytest.raises(ValueError, match="tensor_parallel must divide the 3 ranks, got 2"):
        Parallelism(tensor_parallel=2).grid(3)
    with pytest.raises(ValueError, match="must divide the 8 ranks and be a multiple of tensor_parallel = 1, got 3"):
        Parallelism(sharding="hybrid", shard_ranks=3).grid(8)
    with pytest.raises(ValueError, match="shard_ranks"):
        Parallelism(sharding="hybrid").grid(8)
    with pytest.raises(ValueError, match='shard_ranks is for sharding = "hybrid", got 2 with "full"'):
        Parallelism(shard_ranks=2)
