"""A full run from given weights begins with their loss, and has the losses of the lean loop in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.architecture.families import weight_shapes
from proxy_models.architecture.parametrization import ForwardMultipliers
from proxy_models.data.batches import training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.initial_weights import write_initial_weights
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import set_multipliers
from proxy_models.training.trainer import Trainer
from tests.muscale.conftest import write_text
from tests.muscale.forked_ranks import BATCH, rows
from tests.muscale.gloo_ranks import GlooRanks

STEPS = 4
EXPERTS = {"n_experts": 4, "expert_ratio": 1.0, "balance_rate": 0.02}
BIASES = {"norm": "layernorm", "biases": True, "positions": "learned", "tied": True, "activation": "gelu_tanh"}
LAYOUTS: dict[str, tuple[Parallelism, int, dict[str, Any]]] = {
    "zero2, uneven": (Parallelism(sharding="zero2"), 3, BIASES),
    "full, tensor": (Parallelism(tensor_parallel=2), 4, {"queries_per_kv": 2}),
    "pipeline": (Parallelism(sharding="none", pipeline_parallel=2), 2, {"qk_norm": True}),
    "experts": (Parallelism(expert_parallel=2), 4, EXPERTS),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "text", documents=30, words=200)
    return write_corpus(folder / "tokens", str(folder / "text"))


def given(model: ModelConfig, folder: Path) -> tuple[str, Decoder]:
    """Write random weights of a model without multipliers, and return their key with that model."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    for name, shape in weight_shapes(model).items():
        values = torch.randn(shape.shape, generator=generator) * 0.15
        tensors[name] = values + 1 if "norm" in name and name.endswith("weight") else values
    key = write_initial_weights(folder, tensors, tensors.items())
    decoder = Decoder.with_weights(model, tensors)
    set_multipliers(decoder, ForwardMultipliers(embedding=1.0, branch=1.0, readout=1.0, attention=1.0))
    return key, decoder


def run_of(corpus: Corpus, folder: Path, **variant: Any) -> tuple[FullRun, Decoder]:
    model = ModelConfig(**{"d_model": 32, "n_layers": 4, "head_dim": 8, "context_length": 32} | variant)
    key, decoder = given(model, folder / "weights")
    values = Hyperparameters(
        learning_rate=0.01, batch_tokens=BATCH, clip_norm=0.3, output_multiplier=0.5, attention_multiplier=3.0
    )
    run = FullRun(
        numerics=Numerics(
            model=model, base=model, corpus_key=corpus.key, seed=0, evaluation_tokens=1120, initial_weights=key
        ),
        segments=chain(values, BATCH * STEPS),
        directory=folder / "run",
        corpus=corpus.folder,
        checkpoint_every_tokens=BATCH * 3,
        evaluate_every_tokens=BATCH * STEPS,
        min_unit_params=0,
        initial_weights=folder / "weights",
    )
    return run, decoder


def figures(run: FullRun) -> list[float]:
    return [row[name] for name in ("train_loss", "grad_norm", "val_loss") for row in rows(run) if name in row]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_losses_of_the_lean_loop_and_the_first_is_that_of_the_weights(
    corpus: Corpus, gloo_ranks: GlooRanks, layout: str, tmp_path: Path
) -> None:
    parallelism, ranks, variant = LAYOUTS[layout]
    whole, decoder = run_of(corpus, tmp_path, **variant)
    train(whole)
    first = training_stream(corpus, 32, 0, run_tokens=None).batch(0, BATCH)
    with torch.no_grad():
        assert figures(whole)[0] == pytest.approx(next_token_loss(decoder, first).item(), rel=1e-5)
    trainer, state, curves = Trainer(corpus, initial_weights=whole.initial_weights), None, []
    for segment in whole.segments:
        lean = trainer.train(whole.numerics, segment, state)
        state = lean.state
        curves += lean.curve.train_loss.tolist()
    np.testing.assert_allclose([*curves, lean.loss], [*figures(whole)[:STEPS], figures(whole)[-1]], rtol=1e-5)
    run = replace(whole, directory=tmp_path / "ranks", parallelism=parallelism, micro_batch=1)
    gloo_ranks.train(run, ranks)
    np.testing.assert_allclose(figures(run), figures(whole), rtol=1e-5)


def test_a_run_without_its_weights_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    run, _ = run_of(corpus, tmp_path)
    other, _ = run_of(corpus, tmp_path / "other", tied=True)
    for folder in (None, tmp_path / "nothing", other.initial_weights):
        with pytest.raises(ValueError, match=str(run.numerics.initial_weights)):
            train(replace(run, initial_weights=folder))
        with pytest.raises(ValueError, match=str(run.numerics.initial_weights)):
            Trainer(corpus, initial_weights=folder).train(run.numerics, run.segments[0])
