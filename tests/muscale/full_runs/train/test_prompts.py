"""Prompts do not count: the lean loop and a full run in every layout have the mean over the counted tokens of each global batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from muscale.full_runs.checkpoints.held_out import evaluate_unsharded
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.data.batches import evaluation_sets, training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize
from proxy_models.training.trainer import Trainer
from tests.muscale.forked_ranks import BATCH, rows
from tests.muscale.gloo_ranks import GlooRanks
from tests.proxy_models.prompted import prompted_corpus

STEPS = 4
LAYOUTS: dict[str, tuple[Parallelism, int, dict[str, Any]]] = {
    "two shards": (Parallelism(), 2, {"document_separator": 0}),
    "uneven": (Parallelism(sharding="zero2"), 3, {"label_smoothing": 0.1, "z_loss": 0.01}),
    "tensor": (Parallelism(sharding="none", tensor_parallel=2), 2, {"vocab_size": 257, "z_loss": 0.01}),
    "context": (Parallelism(context_parallel=2), 2, {}),
    "pipeline": (Parallelism(sharding="none", pipeline_parallel=2), 2, {"z_loss": 0.01}),
    "experts": (Parallelism(expert_parallel=2), 2, {"n_experts": 4, "expert_ratio": 1.0, "balance_rate": 0.02}),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prompted_corpus(tmp_path_factory.mktemp("corpus"), 600)


def run_of(corpus: Corpus, folder: Path, **variant: Any) -> FullRun:
    model = ModelConfig(**{"d_model": 32, "n_layers": 4, "head_dim": 8, "context_length": 32} | variant)
    # Where hardly anything counts, gradients are so small that Adam would divide their rounding by itself without this eps.
    values = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH, clip_norm=0.3, eps=1e-4)
    return FullRun(
        numerics=Numerics(model=model, base=model, corpus_key=corpus.key, seed=0, evaluation_tokens=1120),
        segments=chain(values, BATCH * STEPS),
        directory=folder / "run",
        corpus=corpus.folder,
        checkpoint_every_tokens=BATCH * 3,
        evaluate_every_tokens=BATCH * STEPS,
        min_unit_params=0,
    )


def figures(run: FullRun) -> list[float]:
    return [row[name] for name in ("train_loss", "grad_norm", "val_loss") for row in rows(run) if name in row]


@torch.no_grad()
def mean_of_counted(model: Decoder, sequences: torch.Tensor) -> float:
    """Cross-entropy over the tokens that count, written out."""
    plain, counts = torch.where(sequences < 0, -1 - sequences, sequences), sequences[:, 1:] >= 0
    return torch.nn.functional.cross_entropy(model(plain[:, :-1])[counts], plain[:, 1:][counts]).item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_steps_of_the_lean_loop(
    corpus: Corpus, gloo_ranks: GlooRanks, layout: str, tmp_path: Path
) -> None:
    parallelism, ranks, variant = LAYOUTS[layout]
    whole = run_of(corpus, tmp_path, **variant)
    train(whole)
    trainer, state, curves = Trainer(corpus, micro_batch=3), None, []
    for segment in whole.segments:
        lean = trainer.train(whole.numerics, segment, state)
        state = lean.state
        curves += lean.curve.train_loss.tolist()
    np.testing.assert_allclose([*curves, lean.loss], [*figures(whole)[:STEPS], figures(whole)[-1]], rtol=1e-5)
    micro_batch = 1 if layout == "pipeline" else 3
    run = replace(whole, directory=tmp_path / "ranks", parallelism=parallelism, micro_batch=micro_batch)
    gloo_ranks.train(run, ranks)
    np.testing.assert_allclose(figures(run), figures(whole), rtol=1e-5)


def test_losses_are_the_means_over_the_tokens_that_count(corpus: Corpus, tmp_path: Path) -> None:
    run = run_of(corpus, tmp_path, n_layers=1)
    numerics, recipe = run.numerics, run.segments[0].recipe
    model = Decoder(numerics.model)  # type: ignore[arg-type]
    initialize(model, numerics.parametrization(recipe.optimizer), recipe, seed=0)
    model.eval()
    first = training_stream(corpus, 32, 0).batch(0, BATCH)
    (held_out,) = evaluation_sets(corpus, 32, 1120).values()
    train(run)
    assert figures(run)[0] == pytest.approx(mean_of_counted(model, first), rel=1e-5)
    expected = mean_of_counted(model, held_out.sequences)
    assert evaluate_unsharded(model, corpus, numerics)["val_loss"] == pytest.approx(expected, rel=1e-5)
    shares = (first[:, 1:] >= 0).float().mean(dim=1)
    of_means = sum(mean_of_counted(model, sequence[None]) for sequence in first[shares > 0]) / int((shares > 0).sum())
    assert not math.isclose(of_means, mean_of_counted(model, first), rel_tol=1e-4)
