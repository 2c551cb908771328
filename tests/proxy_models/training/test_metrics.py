from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.training.metrics import Curve, Observation, Recorder, activation_rms, passes, update_rms

MODEL = ModelConfig(d_model=32, n_layers=2, context_length=16, mlp_dropout=0.5)


def curve() -> Curve:
    return Curve(
        start=0,
        tokens=np.array([100, 200, 400]),
        train_loss=np.array([5, 4, 3], dtype=np.float32),
        grad_norm=np.ones(3, dtype=np.float32),
        rate_factor=np.ones(3),
        seconds=np.array([1.0, 1.5, 2.5]),
        val_loss=np.array([np.nan, 4.0, 3.0]),
        layers=pd.DataFrame(),
    )


def test_what_follows_from_the_measured_has_its_units() -> None:
    table = curve().table(bytes_per_token=4.0, train_flops_per_token=6.0, peak_flops=2400.0)
    assert table["tokens_per_second"].tolist() == [100, 200, 200]
    assert table["mfu"].tolist() == [0.25, 0.5, 0.5]
    assert table["seconds"].tolist() == [1.0, 1.5, 2.5]
    assert table["val_perplexity"].iloc[1] == pytest.approx(math.e**4)
    assert table["val_bits_per_byte"].iloc[2] == pytest.approx(3 / math.log(2) / 4)
    assert table["val_bits_per_byte"].isna().tolist() == [True, False, False]
    assert table["train_bits_per_byte"].tolist() == pytest.approx((curve().train_loss / math.log(2) / 4).tolist())
    assert "mfu" not in curve().table()
    assert curve().table(bytes_per_token=None)["val_bits_per_byte"].isna().all()


def test_where_steps_are_launched_ahead_rates_are_those_of_a_window() -> None:
    # Two steps are launched in a tenth of a second each; the second waits for both, which take a second each.
    four = np.ones(4)
    launched = replace(
        curve(),
        tokens=np.array([100, 200, 300, 400]),
        train_loss=four.astype(np.float32),
        grad_norm=four.astype(np.float32),
        rate_factor=four,
        seconds=np.array([0.1, 2, 2.1, 4]),
        val_loss=four,
        window=2,
    )
    rates = launched.table(train_flops_per_token=6.0, peak_flops=1200.0)[["tokens_per_second", "mfu"]]
    assert rates.isna().all(axis=1).tolist() == [True, False, False, False]
    assert rates["tokens_per_second"].tolist()[1:] == pytest.approx([100, 100, 100])
    assert rates["mfu"].tolist()[1:] == pytest.approx([0.5, 0.5, 0.5])
    short = replace(launched, window=32).table()
    assert short["tokens_per_second"].isna().all()


def test_a_multiple_is_passed_once() -> None:
    passed = [tokens for tokens in range(0, 1000, 64) if passes(200, tokens, tokens + 64)]
    assert passed == [192, 384, 576, 768, 960]
    assert not passes(None, 0, 10**9)
    with pytest.raises(ValueError, match="layers_every_tokens must be positive or None, got 0"):
        Observation(layers_every_tokens=0)


def test_a_recorder_does_not_count_the_time_of_observing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 1.0, 6.0, 7.0])
    monkeypatch.setattr("proxy_models.training.metrics.time.perf_counter", lambda: next(now))
    recorder = Recorder(0, torch.nn.Linear(1, 1), Observation(evaluate_every_tokens=10), lambda: 4.5)
    with recorder.observing(0, 10, torch.zeros(0)):
        recorder.add(10, torch.tensor(5.0), torch.tensor(1.0), 0.5)
    recorder.add(20, torch.tensor(4.0), torch.tensor(2.0), 1.0)
    curve = recorder.curve()
    assert curve.seconds.tolist() == [1, 2]
    assert curve.train_loss.tolist() == [5, 4]
    assert curve.grad_norm.tolist() == [1, 2]
    assert curve.rate_factor.tolist() == [0.5, 1]
    np.testing.assert_array_equal(curve.val_loss, [4.5, np.nan])


def test_activations_are_measured_without_a_trace() -> None:
    torch.manual_seed(0)
    model = Decoder(MODEL)
    tokens = torch.randint(256, (4, 17))
    state = torch.get_rng_state()
    sizes = activation_rms(model, tokens)
    assert sizes == activation_rms(model, tokens)  # without dropout
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    embedded = model.embedding(tokens[:, :-1]).square().mean().sqrt()
    assert sizes["embedding"] == pytest.approx(float(embedded.detach()))
    assert {"", "blocks.1", "blocks.0.attention.query", "blocks.0.mlp.down", "final_norm", "readout"} <= sizes.keys()


def test_an_update_is_the_change_of_a_parameter() -> None:
    model = Decoder(MODEL)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model.readout.weight.add_(0.25)
    sizes = update_rms(model, before)
    assert sizes.pop("readout.weight") == pytest.approx(0.25)
    assert set(sizes.values()) == {0.0}
