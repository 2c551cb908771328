"""Log-likelihoods of continuations: they are those of the whole text, whatever shares the pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.evaluation.scored_model import LogLikelihood, log_likelihoods

CONFIG = ModelConfig(d_model=32, n_layers=2, context_length=24, vocab_size=97)


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return decoder


def pairs(n: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 12, (n, 2))
    return [(rng.integers(0, 97, a).astype(np.uint32), rng.integers(0, 97, b).astype(np.uint32)) for a, b in sizes]


def test_a_log_likelihood_is_the_sum_over_its_tokens(model: Decoder) -> None:
    given = pairs(150)
    found = log_likelihoods(model, given, context_length=24)
    for (context, continuation), result in zip(given, found, strict=True):
        text = torch.from_numpy(np.concatenate([context, continuation]).astype(np.int64))
        with torch.no_grad():
            logs = torch.log_softmax(model(text[None, :-1])[0], dim=-1)
        at = torch.arange(len(context) - 1, len(text) - 1)
        assert result.nats == pytest.approx(float(logs[at, text[at + 1]].sum()), rel=1e-5)
        assert result.is_greedy == bool((logs[at].argmax(-1) == text[at + 1]).all())
        assert result.n_tokens == len(continuation)


def test_what_is_longer_than_the_context_keeps_its_end(model: Decoder) -> None:
    rng = np.random.default_rng(1)
    text = rng.integers(0, 97, 60).astype(np.uint32)
    whole = log_likelihoods(model, [(text[:50], text[50:])], context_length=24)
    end = log_likelihoods(model, [(text[35:50], text[50:])], context_length=24)
    assert whole == end


def test_each_batch_is_given_to_the_caller_once(model: Decoder) -> None:
    given = pairs(150)
    kept: dict[int, LogLikelihood] = {}
    found = log_likelihoods(
        model,
        given,
        context_length=24,
        on_batch=lambda numbers, results: kept.update(zip(numbers, results, strict=True)),
    )
    assert [kept[number] for number in range(len(given))] == found


@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_part_is_refused(model: Decoder, empty: int) -> None:
    pair = [np.array([1], np.uint32), np.array([2], np.uint32)]
    pair[empty] = pair[empty][:0]
    with pytest.raises(ValueError, match="pair 0"):
        log_likelihoods(model, [(pair[0], pair[1])], context_length=24)


def test_a_continuation_beyond_the_context_is_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match="24"):
        log_likelihoods(model, [(np.array([1]), np.arange(25))], context_length=24)
