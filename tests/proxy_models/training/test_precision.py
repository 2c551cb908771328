from __future__ import annotations

import pytest
import torch

from proxy_models.training.precision import LossScaler, unsupported

CPU = torch.device("cpu")


def test_a_device_that_refuses_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("no half precision on this device")

    monkeypatch.setattr(torch, "ones", refuse)
    unsupported.cache_clear()
    assert unsupported("fp16", CPU) == "no half precision on this device"
    unsupported.cache_clear()


def test_the_very_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ones = [], torch.ones

    def recorded(*size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        asked.append((device, dtype))
        return ones(*size, device=device, dtype=dtype)

    monkeypatch.setattr(torch, "ones", recorded)
    assert unsupported("bf16", torch.device("cpu:0")) is None
    assert asked == [(torch.device("cpu:0"), torch.bfloat16)]


def test_an_overflow_leaves_the_step_out_and_halves_the_scale() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = LossScaler(CPU)
    first = scaler.scale
    for gradient, expected in ((0.25, 0.75), (float("inf"), 0.75)):
        scaler.scaled((parameter * gradient).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.unscale(optimizer)
        scaler.step(optimizer)
        optimizer.zero_grad()
        assert float(parameter.detach()) == expected
    assert scaler.scale == first / 2
    other = LossScaler(CPU)
    other.load(scaler.state())
    assert other.scale == scaler.scale
    assert torch.equal(other.state(), scaler.state())


def test_a_step_that_is_not_to_be_taken_is_not() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = LossScaler(CPU)
    scaler.scaled(parameter.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.unscale(optimizer)
    scaler.step(optimizer, take=False)
    assert float(parameter.detach()) == 1
