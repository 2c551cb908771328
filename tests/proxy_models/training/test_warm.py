from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch._dynamo

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import next_token_loss
from proxy_models.data.batches import EvaluationSet
from proxy_models.training.warm import WarmModel, WarmModels

MODEL = ModelConfig(d_model=16, n_layers=1, context_length=16)


def test_evaluation_is_without_dropout_and_leaves_the_mode_as_it_was() -> None:
    dropping = WarmModel(replace(MODEL, mlp_dropout=0.5, label_smoothing=0.3), compiled=False)
    sequences = torch.randint(256, (70, 17))
    held_out = EvaluationSet(sequences=sequences, weight=1.0)
    for training in (True, False):
        dropping.module.train(training)
        losses = {dropping.evaluate(held_out, batch) for _, batch in product(range(2), (7, 64))}
        assert max(losses) == pytest.approx(min(losses), rel=1e-6)
        assert dropping.module.training == training
    with torch.no_grad():
        expected = float(next_token_loss(dropping.module, sequences))
    assert losses.pop() == pytest.approx(expected, rel=1e-6)


def test_idle_models_stay_as_far_as_their_weights_fit() -> None:
    larger = replace(MODEL, n_layers=2)
    models = WarmModels(limit=4 * MODEL.n_params_total)
    kept = models.get(MODEL, compiled=False)
    models.get(larger, compiled=False)
    assert models.get(MODEL, compiled=False) is kept, "the one that trains is not counted"
    models.get(MODEL, compiled=False, precision="bf16")
    assert models.get(MODEL, compiled=False) is kept
    for number in (1, 2):
        models.get(replace(MODEL, vocab_size=256 - number), compiled=False)
    assert models.get(MODEL, compiled=False) is not kept, "those that were used later take its place"


def test_no_more_than_a_few_models_stay_and_the_least_used_goes() -> None:
    models = WarmModels()
    first = models.get(MODEL, compiled=False)
    shapes = [replace(MODEL, n_layers=n) for n in range(2, 6)]
    for shape in shapes[:3]:
        models.get(shape, compiled=False)
        assert models.get(MODEL, compiled=False) is first
    kept = models.get(shapes[0], compiled=False)
    models.get(shapes[3], compiled=False)
    assert models.get(shapes[0], compiled=False) is kept
    gone = weakref.ref(first)
    del first
    for number in range(6, 10):
        models.get(replace(MODEL, n_layers=number), compiled=False)
    gc.collect()
    assert gone() is None


@pytest.fixture
def _small_recompile_limit() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_small_recompile_limit")
def test_shapes_that_are_no_longer_warm_do_not_count_towards_dynamo_s_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend="eager", **options))
    models = WarmModels()
    for number in range(4):
        shape = replace(MODEL, d_model=16 * (number + 1))
        model = models.get(shape, compiled=True)
        loss = model.loss(model.module, torch.randint(256, (2, 17)))
        assert torch.isfinite(loss)
