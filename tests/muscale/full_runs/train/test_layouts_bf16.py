"""bf16 on four ranks: every layout, checkpointing and grouping of heads, eager and compiled, has the losses of one process.

The process rounds where the ranks do: it takes sequences in their micro-batches, and computes products in as many parts as ranks
share them, each part and each sum rounded to bf16. Without that the losses of one process differ from its own by as much:
tests/benchmarks/RESULTS.md, "bf16 on four ranks".
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, reduce
from itertools import product
from typing import Any, cast, get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor

from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.full_runs.train.sharding import build_model
from muscale.layout import METRICS
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.cross_entropy import whole_cross_entropy
from proxy_models.architecture.decoder import Block, Decoder
from proxy_models.architecture.memory import Checkpointing
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from tests.muscale.forked_ranks import BATCH, interrupt, result, small_corpus
from tests.muscale.gloo_ranks import GlooRanks
from tests.quick import quick_and_soak

RANKS, STEPS, WITHIN = 4, 6, 2e-4
LAYOUTS = {
    "none": Parallelism(sharding="none"),
    "full": Parallelism(),
    "hybrid": Parallelism(sharding="hybrid", shard_ranks=2),
    "tensor 2": Parallelism(tensor_parallel=2),
    "tensor 4": Parallelism(tensor_parallel=4),
}
MakeRun = Callable[..., FullRun]
Losses = Callable[..., "np.ndarray[Any, Any]"]


def columns(weight: Tensor, parts: int, x: Tensor) -> Tensor:
    """A product whose outputs ranks share; the gradient of its input is a sum of theirs."""
    return torch.cat([F.linear(x, part) for part in weight.to(x.dtype).chunk(parts)], -1)


def rows(weight: Tensor, parts: int, x: Tensor) -> Tensor:
    """A product whose inputs ranks share, and that is a sum of theirs."""
    return reduce(operator.add, map(F.linear, x.chunk(parts, -1), weight.to(x.dtype).chunk(parts, 1)))


def in_parts(model: Decoder, parts: int) -> Decoder:
    """A decoder that rounds as one whose products so many ranks share."""
    if parts == 1:
        return model
    for block in map(partial(cast, Block), model.blocks):
        attention, mlp = block.attention, block.mlp
        for layer in (attention.query, attention.key, attention.value, mlp.gate, mlp.up):
            layer.forward = partial(columns, layer.weight, parts)
        for layer in (attention.output, mlp.down):
            layer.forward = partial(rows, layer.weight, parts)
    weight = model.readout.weight
    model.readout.forward = lambda x, *of, **terms: whole_cross_entropy(columns(weight, parts, x), *of, **terms)  # type: ignore[method-assign]
    return model


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    folder = tmp_path_factory.mktemp("bf16")
    corpus = small_corpus(folder)

    def made(name: str, *, grouped: bool = True, compile: bool = False) -> FullRun:
        model, base = (
            ModelConfig(d_model=width, n_layers=2, head_dim=8, context_length=32, queries_per_kv=1 + grouped)
            for width in (64, 32)
        )
        return FullRun(
            numerics=Numerics(
                model=model, base=base, corpus_key=corpus.key, seed=0, evaluation_tokens=1120, precision="bf16"
            ),
            segments=chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH, warmup_fraction=0.2), BATCH * STEPS),
            directory=folder / name,
            corpus=corpus.folder,
            checkpoint_every_tokens=BATCH * STEPS,
            evaluate_every_tokens=BATCH * 2,
            min_unit_params=0,
            compile=compile,
        )

    return made


def recorded(run: FullRun) -> np.ndarray[Any, Any]:
    """The training and validation losses of a run."""
    steps = [json.loads(line) for line in (run.directory / METRICS).read_text().splitlines()]
    found = [step[name] for name in ("train_loss", "val_loss") for step in steps if name in step]
    assert len(found) == STEPS + STEPS // 2
    return np.array(found)


@pytest.fixture(scope="module")
def losses_of(make_run: MakeRun, gloo_ranks: GlooRanks) -> Losses:
    """The losses of a run on four ranks or, with `parts`, in one process."""

    @cache
    def losses(parallelism: Parallelism, grouped: bool, compile: bool, parts: int | None = None) -> Any:
        run = make_run(f"{parallelism}-{grouped}-{compile}-{parts}", grouped=grouped, compile=compile)
        if parts:
            share = replace(run, micro_batch=8 * parts // RANKS)
            with patch(
                "muscale.full_runs.train.module.build_model",
                lambda *given, **named: in_parts(cast(Decoder, build_model(*given, **named)), parts),
            ):
                train(share)
        else:
            gloo_ranks.train(replace(run, parallelism=parallelism), RANKS)
        return recorded(run)

    return losses


def check(losses_of: Losses, layout: str, checkpointing: Checkpointing, *, grouped: bool, compile: bool) -> None:
    """Compare a layout's losses with those of one process."""
    parallelism = replace(LAYOUTS[layout], checkpointing=checkpointing)
    one = losses_of(Parallelism(), grouped, compile, parts=parallelism.tensor_parallel)
    np.testing.assert_allclose(losses_of(parallelism, grouped, compile), one, rtol=WITHIN)


@pytest.mark.parametrize(
    ("layout", "checkpointing", "grouped"),
    quick_and_soak(
        [
            ("full", "selective", False),
            ("hybrid", "none", True),
            ("tensor 2", "selective", True),
            ("tensor 4", "full", False),
        ],
        ("full", "selective", False),
        ("tensor 2", "selective", True),
    ),
)
def test_a_layout_has_the_losses_of_one_process(
    losses_of: Losses, layout: str, checkpointing: Checkpointing, grouped: bool
) -> None:
    check(losses_of, layout, checkpointing, grouped=grouped, compile=False)


@pytest.mark.soak
def test_a_tensor_parallel_run_resumes_to_its_own_losses_and_in_other_layouts_to_within_rounding(
    make_run: MakeRun, gloo_ranks: GlooRanks
) -> None:
    run = replace(make_run("resumed"), parallelism=LAYOUTS["tensor 2"], checkpoint_every_tokens=BATCH * 3)
    gloo_ranks.train(run, RANKS)
    whole = recorded(run)
    for layout, world_size, within in (("tensor 2", RANKS, 0.0), ("tensor 4", RANKS, 5e-4), ("full", 2, 5e-4)):
        interrupt(run, after=3)
        gloo_ranks.train(replace(run, parallelism=LAYOUTS[layout]), world_size)
        assert result(run)["resumed_from"] == BATCH * 3
        np.testing.assert_allclose(recorded(run), whole, rtol=within)


@pytest.mark.soak
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_every_layout_has_the_losses_of_one_process(losses_of: Losses, gloo_ranks: GlooRanks, compile: bool) -> None:
    # Fused kernels leave out roundings of eager ones, others in one process than on ranks, which gather rounded weights.
    # `GlooRanks` sets the same.
    with inductor.patch(emulate_precision_casts=True):
        for layout in LAYOUTS:
            for checkpointing, grouped in product(get_args(Checkpointing), (False, True)):
                check(losses_of, layout, checkpointing, grouped=grouped, compile=compile)
            gloo_ranks.end()  # a rank died once in gloo's own thread, after 22 compiled cases in the same processes; why is not known
