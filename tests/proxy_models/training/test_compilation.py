from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
import torch._dynamo.utils

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.families import ModelFamily
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import stem
from proxy_models.training import compilation
from proxy_models.training.compilation import Compile
from proxy_models.training.numerics import Numerics
from proxy_models.training.trainer import Trainer

BATCH = 2 * 32


@pytest.mark.compiler
@pytest.mark.parametrize(("device", "tolerance"), [("cpu", 1e-4), pytest.param("cuda", 1e-3, marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_trains_like_an_eager_one_and_is_compiled_once_for_each_shape(
    corpus: Corpus, device: str, tolerance: float
) -> None:
    family = ModelFamily(base=ModelConfig(d_model=16, n_layers=1, context_length=32))
    numerics = Numerics(model=family.base, base=family.base, corpus_key=corpus.key, seed=0, evaluation_tokens=256)
    values = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH)
    segment = stem(values.resolve(100 * BATCH), 8 * BATCH)
    compiled, eager = (Trainer(corpus, device=device, compile=wanted) for wanted in (True, False))

    def graphs() -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    result = compiled.train(numerics, segment, averaged=True)
    assert result.compiled
    assert graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    expected = eager.train(numerics, segment, averaged=True)
    assert result.loss == pytest.approx(expected.loss, abs=tolerance)
    assert result.averaged_loss == pytest.approx(expected.averaged_loss, abs=tolerance)
    assert result.curve.train_loss == pytest.approx(expected.curve.train_loss, abs=tolerance)

    # All that a search varies at one shape: rates, decay, eps, betas, clipping, scales, multipliers, seed, base width.
    other = replace(
        values,
        learning_rate=0.02,
        weight_decay_tau=0.1,
        eps=1e-8,
        beta1=0.8,
        beta2=0.99,
        clip_norm=0.3,
        init_scale=0.7,
        embedding_multiplier=2.0,
        output_multiplier=0.5,
        attention_multiplier=1.5,
    )
    other_segment = stem(other.resolve(50 * BATCH), 4 * BATCH)
    elsewhere = replace(numerics, seed=7, base=family.at(width=32))
    changed = compiled.train(elsewhere, other_segment)
    assert graphs() == 1
    assert changed.loss == pytest.approx(eager.train(elsewhere, other_segment).loss, abs=tolerance)

    # And back again: the compiled model keeps nothing of the other trial.
    again = compiled.train(numerics, segment, averaged=True)
    assert graphs() == 1
    assert (again.loss, again.averaged_loss) == (result.loss, result.averaged_loss)


def test_without_a_compiler_the_reason_is_logged_and_training_is_eager(
    monkeypatch: pytest.MonkeyPatch, corpus: Corpus
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compilation.missing_compiler.cache_clear()
    try:
        assert compilation.missing_compiler("cpu") == "no C++ compiler (g++ or clang++) was found"
        assert compilation.missing_compiler("cuda") == "no C compiler (gcc or clang) was found"
        assert not any(compilation.decide(True, 10**9, device) for device in ("cpu", "cuda"))
    finally:
        compilation.missing_compiler.cache_clear()


def test_auto_compiles_where_the_tokens_repay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "missing_compiler", lambda _device: None)
    assert [compilation.decide("auto", n_tokens, "cpu") for n_tokens in (10**5, 10**6, 10**7)] == [False, False, True]
    assert [compilation.decide(wanted, 1, "cpu") for wanted in (True, False)] == [True, False]


def test_auto_goes_by_the_tokens_of_the_segment(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def decide(_compile: Compile, n_tokens: int, _device: str) -> bool:
        asked.append(n_tokens)
        return False

    monkeypatch.setattr(compilation, "decide", decide)
    model = ModelConfig(d_model=16, n_layers=1, context_length=32)
    numerics = Numerics(model=model, base=model, corpus_key=corpus.key, seed=0, evaluation_tokens=256)
    segment = stem(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH).resolve(100 * BATCH), 2 * BATCH)
    Trainer(corpus).train(numerics, segment)
    assert asked == [2 * BATCH]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_recompilation_beyond_the_limit_is_an_error_and_not_a_silent_eager() -> None:
    compilation.configure()
    torch._dynamo.config.recompile_limit = 2

    def shape_of(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(shape_of, backend="eager", dynamic=False)
    for size in (2, 3):
        compiled(torch.zeros(size))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        compiled(torch.zeros(4))
