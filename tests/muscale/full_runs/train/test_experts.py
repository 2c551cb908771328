"""Full runs of mixtures of experts on several ranks have the losses, norms and balance of one process."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from muscale.errors import StageError
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, MANIFEST, CheckpointFolder, write_manifest
from muscale.full_runs.checkpoints.stored_weights import MODEL, RecordReader
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.records.run_records import RunRecords
from muscale.full_runs.train.attempt import train
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.experts import BALANCE_BIAS
from proxy_models.architecture.families import load
from proxy_models.architecture.memory import Checkpointing
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.hashing import file_sha256
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.numerics import Numerics
from tests.muscale.conftest import write_text
from tests.muscale.forked_ranks import BATCH, interrupt, result, rows
from tests.muscale.gloo_ranks import GlooRanks
from tests.proxy_models.families import TRANSFORMERS
from tests.quick import quick_and_soak

STEPS = 6
EXPERTS = {"n_experts": 4, "experts_per_token": 2, "expert_ratio": 1.0, "balance_rate": 0.02}
MakeRun = Callable[..., FullRun]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "text", documents=30, words=200)
    return write_corpus(folder / "tokens", str(folder / "text"))


@pytest.fixture
def make_run(corpus: Corpus, tmp_path: Path) -> MakeRun:
    def make(
        values: dict[str, Any] | None = None, guard: GuardSettings | None = None, *, layers: int = 3, **variant: Any
    ) -> FullRun:
        model, base = (
            ModelConfig(d_model=width, n_layers=layers, head_dim=8, context_length=32, **EXPERTS | variant)
            for width in (32, 16)
        )
        recipe = {"learning_rate": 0.01, "batch_tokens": BATCH, "warmup_fraction": 0.2, "clip_norm": 0.3}
        return FullRun(
            numerics=Numerics(
                model=model, base=base, corpus_key=corpus.key, seed=0, evaluation_tokens=1120, guard=guard
            ),
            segments=chain(Hyperparameters(**recipe | (values or {})), BATCH * STEPS),
            directory=tmp_path / "run",
            corpus=corpus.folder,
            checkpoint_every_tokens=BATCH * 3,
            evaluate_every_tokens=BATCH * 2,
            min_unit_params=0,
        )

    return make


def losses(run: FullRun) -> list[float]:
    """Losses of every step, and the validation losses."""
    return [row[name] for row in rows(run) for name in ("train_loss", "val_loss") if name in row]


def norms(run: FullRun) -> list[float]:
    return [row["grad_norm"] for row in rows(run)]


def biases(run: FullRun) -> dict[str, list[float]]:
    """Balance biases in the last checkpoint by the router's name."""
    _, path = CheckpointFolder(run.directory / CHECKPOINTS).found()[0]
    reader = RecordReader(path)
    found = {
        name: torch.empty_like(shape, device="cpu")
        for name, shape in reader.shapes().items()
        if name.startswith(f"{MODEL}.") and name.endswith(BALANCE_BIAS)
    }
    reader.fill(found)
    return {name: tensor.tolist() for name, tensor in found.items()}


def require_same(run: FullRun, whole: FullRun, *, rtol: float) -> None:
    """Require the same losses, norms and biases."""
    np.testing.assert_allclose(losses(run), losses(whole), rtol=rtol)
    np.testing.assert_allclose(norms(run), norms(whole), rtol=10 * rtol)
    assert biases(run) == biases(whole)
    assert biases(run)
    require_same_figures(run, whole)


def require_same_figures(run: FullRun, whole: FullRun) -> None:
    """Require the same figures of routers, as the step log and the report have them."""
    # Rounding may send a token elsewhere whose experts score alike.
    for name in ("router_entropy", "largest_load", "dead_experts"):
        np.testing.assert_allclose([row[name] for row in rows(run)], [row[name] for row in rows(whole)], rtol=0.02)
    loads = RunRecords(run.directory).expert_loads()
    assert loads
    np.testing.assert_allclose(loads, rows(whole)[-1]["expert_loads"], atol=0.1)
    assert max(max(of_block) for of_block in loads) == pytest.approx(rows(run)[-1]["largest_load"])


LAYOUTS: dict[str, tuple[Parallelism, int, dict[str, Any]]] = {
    "none": (Parallelism(sharding="none"), 2, {"router_scores": "softmax"}),
    "full": (Parallelism(checkpointing="selective"), 2, {"n_shared_experts": 1, "router_z_loss": 1e-3}),
    "full, muon": (Parallelism(checkpointing="full"), 2, {"values": {"optimizer": "muon"}, "first_dense_layers": 1}),
    "zero2": (
        Parallelism(sharding="zero2"),
        2,
        {"guard": GuardSettings(action="rewind", window=8, snapshot_every=2), "expert_scheme": "sqrt_gate"},
    ),
    "uneven": (Parallelism(), 3, {"n_experts": 6}),  # 3, 3 and 2 of 8 sequences, in parts of 2
    "hybrid": (Parallelism(sharding="hybrid", shard_ranks=2), 4, {"values": {"optimizer": "muon"}}),
    "context": (Parallelism(context_parallel=2), 2, {"document_separator": ord(" ")}),
    "context, two groups": (Parallelism(sharding="zero2", context_parallel=2), 4, {"activation": "gelu"}),
    "pipeline": (Parallelism(sharding="none", pipeline_parallel=2), 2, {"layers": 4, "first_dense_layers": 1}),
    "pipeline, recomputed": (
        Parallelism(sharding="none", pipeline_parallel=2, checkpointing="full"),
        2,
        {"layers": 4, "n_shared_experts": 1},
    ),
    "pipeline, zero2": (
        Parallelism(sharding="zero2", pipeline_parallel=2, pipeline_schedule="interleaved"),
        4,
        {"layers": 4, "first_dense_layers": 2, "values": {"optimizer": "muon"}},
    ),
}
LAYOUTS |= {
    "experts": (Parallelism(expert_parallel=2), 4, {"n_shared_experts": 1, "first_dense_layers": 1}),
    "experts alone": (Parallelism(expert_parallel=2, sharding="zero2"), 2, {"router_z_loss": 1e-3}),
    # experts that are not sharded are gathered otherwise when a block is recomputed
    "experts, recomputed": (Parallelism(expert_parallel=2, checkpointing="selective"), 2, {}),
    "experts, none": (Parallelism(expert_parallel=2, sharding="none"), 4, {"values": {"optimizer": "muon"}}),
    "experts, hybrid": (
        Parallelism(expert_parallel=2, sharding="hybrid", shard_ranks=2, checkpointing="full"),
        4,
        {"guard": GuardSettings(action="rewind", window=8, snapshot_every=2)},
    ),
    "experts, four": (Parallelism(expert_parallel=4), 4, {"document_separator": ord(" ")}),
    "experts, uneven": (
        Parallelism(expert_parallel=2, checkpointing="selective"),
        4,
        {"n_experts": 6, "values": {"optimizer": "muon"}},  # each rank of a pair has two of three, or one
    ),
}


@pytest.mark.parametrize("layout", quick_and_soak(LAYOUTS, "experts, recomputed", "uneven", "pipeline"))
def test_a_layout_has_the_steps_and_the_balance_of_one_process_which_continues_them(
    make_run: MakeRun, gloo_ranks: GlooRanks, layout: str
) -> None:
    parallelism, world_size, variant = LAYOUTS[layout]
    whole = make_run(**variant)
    train(whole)
    half = math.ceil(8 / parallelism.data_ranks(world_size) / 2)
    run = replace(whole, directory=whole.directory.with_name("spread"), parallelism=parallelism, micro_batch=half)
    gloo_ranks.train(run, world_size)
    rtol = 1e-5 if "values" in variant else 1e-6  # what Muon orthogonalises magnifies rounding
    require_same(run, whole, rtol=rtol)
    interrupt(run, after=3)
    alone = replace(run, parallelism=Parallelism())
    train(alone)
    assert result(alone)["resumed_from"] == BATCH * 3
    require_same(alone, whole, rtol=rtol)


@pytest.mark.parametrize(
    ("name", "n_experts", "parallelism"),
    [
        ("Qwen3MoeConfig", 8, Parallelism(checkpointing="full")),
        ("MixtralConfig", 4, Parallelism(sharding="none", pipeline_parallel=2)),
    ],
)
@pytest.mark.usefixtures("transformers")
def test_mixtures_of_transformers_have_the_figures_of_one_process(
    make_run: MakeRun, gloo_ranks: GlooRanks, name: str, n_experts: int, parallelism: Parallelism
) -> None:
    family = load(f"transformers:{name}")(vocab_size=256, context_length=32, **TRANSFORMERS[name])
    whole = make_run()
    numerics = replace(whole.numerics, model=family.member(32, 2), base=family.member(16, 2))
    whole = replace(whole, numerics=numerics)
    train(whole)
    run = replace(whole, directory=whole.directory.with_name("spread"), parallelism=parallelism, micro_batch=2)
    gloo_ranks.train(run, 2)
    require_same_figures(run, whole)
    assert np.shape(rows(run)[-1]["expert_loads"]) == (2, n_experts)


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.soak), "full"])
def test_blocks_with_experts_may_be_compiled(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, checkpointing: Checkpointing
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    eager = make_run(router_z_loss=1e-3, balance_loss=1e-2, n_shared_experts=1)
    train(eager)
    counters.clear()
    parallelism = Parallelism(checkpointing=checkpointing)
    run = replace(
        eager, directory=eager.directory.with_name("compiled"), compile=True, parallelism=parallelism, micro_batch=4
    )
    eager = replace(eager, directory=eager.directory.with_name("parts"), micro_batch=4)
    train(eager)
    train(run)
    assert counters["stats"]["unique_graphs"] == 1  # blocks of one shape share it
    require_same(run, eager, rtol=1e-5)


def test_a_checkpoint_without_the_balance_of_experts_is_refused_by_name(make_run: MakeRun) -> None:
    run = make_run(layers=1)
    train(run)
    interrupt(run, after=3)
    ((_, path),) = CheckpointFolder(run.directory / CHECKPOINTS).found()
    name = f"blocks.0.mlp.router.{BALANCE_BIAS}"
    index = pickle.loads((path / ".metadata").read_bytes())
    del index.state_dict_metadata[f"{MODEL}.{name}"]
    (path / ".metadata").write_bytes(pickle.dumps(index))
    hashes = json.loads((path / MANIFEST).read_text())
    hashes[".metadata"] = file_sha256(path / ".metadata")
    write_manifest(path, hashes)
    with pytest.raises(StageError, match=re.escape(name)):
        train(run)


def test_terms_of_routers_and_stages_of_a_pipeline_exclude_each_other(make_run: MakeRun) -> None:
    for name in ("balance_loss", "router_z_loss"):
        with pytest.raises(ValueError, match=f"pipeline_parallel must be 1 with {name} = 0.01, .* got 2"):
            replace(make_run(**{name: 0.01}), parallelism=Parallelism(pipeline_parallel=2))
    with pytest.raises(ValueError, match="tensor_parallel must be 1 with n_experts"):
        replace(make_run(), parallelism=Parallelism(tensor_parallel=2))


def test_rules_of_ranks_that_share_out_experts(make_run: MakeRun) -> None:
    run = make_run()
    with pytest.raises(ValueError, match="expert_parallel must divide the 4 experts .*, got 3"):
        replace(run, parallelism=Parallelism(expert_parallel=3))
    dense = ModelConfig(d_model=32, n_layers=1, head_dim=8, context_length=32)
    with pytest.raises(ValueError, match="expert_parallel must be 1 for a model without experts .*, got 2"):
        Parallelism(expert_parallel=2).require(dense)
    for name in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
        with pytest.raises(ValueError, match=f"expert_parallel must be 1 with {name} = 2, got 2"):
            Parallelism(expert_parallel=2, **{name: 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expert_parallel must divide the 3 ranks .*, got 2"):
        Parallelism(expert_parallel=2).grid(3)
    with pytest.raises(ValueError, match="expert_parallel must divide the 2 ranks of a copy .*, got 4"):
        Parallelism(expert_parallel=4, sharding="hybrid", shard_ranks=2).grid(8)
    with pytest.raises(ValueError, match="compile must be false with expert_parallel = 2"):
        replace(run, parallelism=Parallelism(expert_parallel=2), compile=True)
    with pytest.raises(StageError, match="expert_parallel"):
        train(replace(run, parallelism=Parallelism(expert_parallel=2)))
