from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from proxy_models.training.device import CPU
from proxy_models.training.metrics import Curve, Recorder, passes


def curve() -> Curve:
    return Curve(
        start=0,
        tokens=np.array([100, 200, 400]),
        train_loss=np.array([5, 4, 3], dtype=np.float32),
        grad_norm=np.ones(3, dtype=np.float32),
        rate_factor=np.ones(3),
        seconds=np.array([1.0, 1.5, 2.5]),
    )


def test_what_follows_from_the_measured_has_its_units() -> None:
    table = curve().table(bytes_per_token=4.0, train_flops_per_token=6.0, peak_flops=2400.0)
    assert table["tokens_per_second"].tolist() == [100, 200, 200]
    assert table["mfu"].tolist() == [0.25, 0.5, 0.5]
    assert table["seconds"].tolist() == [1.0, 1.5, 2.5]
    assert table["train_bits_per_byte"].tolist() == pytest.approx((curve().train_loss / math.log(2) / 4).tolist())
    assert "mfu" not in curve().table()
    assert curve().table(bytes_per_token=None)["train_bits_per_byte"].isna().all()


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


def test_a_recorder_collects_a_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 2.0])
    monkeypatch.setattr("proxy_models.training.metrics.time.perf_counter", lambda: next(now))
    recorder = Recorder(0, CPU)
    recorder.add(10, torch.tensor(5.0), torch.tensor(1.0), 0.5)
    recorder.add(20, torch.tensor(4.0), torch.tensor(2.0), 1.0)
    curve = recorder.curve()
    assert curve.seconds.tolist() == [1, 2]
    assert curve.train_loss.tolist() == [5, 4]
    assert curve.grad_norm.tolist() == [1, 2]
    assert curve.rate_factor.tolist() == [0.5, 1]
