"""The state of routers in the states of proxies: kept, averaged, evaluated, and required by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Cache, Decoder
from proxy_models.architecture.families import family_of, with_weights
from proxy_models.data.corpus import Corpus
from proxy_models.evaluation.held_out_loss import HeldOutLoss
from proxy_models.evaluation.loaded_model import loaded_model
from proxy_models.evaluation.measure import Subject
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import Constant
from proxy_models.recipes.segments import Segment, stem
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import multipliers_of
from proxy_models.training.running_average import RunningAverage
from proxy_models.training.state import StateError, TrainState
from proxy_models.training.trainer import SegmentResult, Trainer

BATCH = 4 * 32
MODEL = ModelConfig(
    d_model=32, n_layers=2, context_length=32, n_experts=8, expert_ratio=0.5, first_dense_layers=1, balance_rate=0.05
)
STATE = "blocks.1.mlp.router.balance_bias"
SEGMENT = stem(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH).resolve(24 * BATCH), 24 * BATCH)


@pytest.fixture(scope="module")
def numerics(corpus: Corpus) -> Numerics:
    return Numerics(model=MODEL, base=MODEL, corpus_key=corpus.key, seed=0, evaluation_tokens=512)


@pytest.fixture(scope="module")
def trained(corpus: Corpus, numerics: Numerics) -> SegmentResult:
    return Trainer(corpus, compile=False).train(numerics, SEGMENT)


def test_weights_of_a_stored_state_have_the_loss_that_training_measured(
    trained: SegmentResult, corpus: Corpus, numerics: Numerics, tmp_path: Path
) -> None:
    assert trained.state
    trained.state.save(tmp_path / "state")
    weights = TrainState.load(tmp_path / "state").weights
    assert weights[STATE].abs().max() > 0.04
    multipliers = multipliers_of(numerics.parametrization("adamw"), SEGMENT.recipe)

    def loss() -> float:
        model = loaded_model(weights, numerics, multipliers, device=torch.device("cpu"))
        scores = HeldOutLoss().measure(Subject(model=model, numerics=numerics, text=corpus, tokens=SEGMENT.end)).scores
        return next(score.value for score in scores if score.metric == "loss")

    assert loss() == pytest.approx(trained.loss, rel=1e-6)
    weights[STATE] = torch.linspace(-1, 1, 8)
    assert loss() != pytest.approx(trained.loss, rel=1e-6)


def test_a_state_without_it_is_refused_by_name(trained: SegmentResult, corpus: Corpus, numerics: Numerics) -> None:
    assert trained.state
    without = {name: tensor for name, tensor in trained.state.tensors.items() if name != f"buffer/{STATE}"}
    older = replace(trained.state, tensors=without)
    end = SEGMENT.end
    further = Segment(recipe=SEGMENT.recipe, phase=Constant(warmup_tokens=0), start=end, end=end + BATCH)
    with pytest.raises(StateError, match=STATE):
        Trainer(corpus, compile=False).train(numerics, further, older)
    with pytest.raises(ValueError, match=STATE):
        with_weights(MODEL, older.weights)


def test_it_is_averaged_with_the_weights() -> None:
    model = Decoder(MODEL)
    running = RunningAverage(family_of(MODEL).stored(model).values(), begins=0)
    for value in (1.0, 2.0, 6.0):
        model.get_buffer(STATE).fill_(value)
        running.add(0)
    running.write()
    assert model.get_buffer(STATE).tolist() == [3.0] * 8


@torch.no_grad()
def test_a_cache_gives_the_logits_of_whole_passes(trained: SegmentResult) -> None:
    assert trained.state
    model, cache = Decoder.with_weights(MODEL, trained.state.weights).eval(), Cache()
    tokens = torch.arange(97, 113)[None]
    for known in range(4, 17):
        torch.testing.assert_close(model.next_logits(tokens[:, :known], cache), model(tokens[:, :known])[:, -1])
