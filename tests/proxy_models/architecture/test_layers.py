"""Layers that compute in the precision of their input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Block, Decoder, training_loss
from proxy_models.architecture.layers import Embedding

LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", LOW)
def test_a_frequent_token_s_gradient_is_summed_in_fp32(dtype: torch.dtype) -> None:
    table = Embedding(2, 4)
    table(torch.zeros(5000, dtype=torch.int64), dtype=dtype).sum().backward()  # bf16's own sum stops at 256
    assert table.weight.grad is not None
    assert table.weight.grad.dtype == torch.float32
    torch.testing.assert_close(table.weight.grad[0], torch.full((4,), 5000.0), rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", LOW)
def test_the_residual_stream_and_everything_on_it_keeps_its_dtype(variant: dict[str, Any], dtype: torch.dtype) -> None:
    dropped = {"mlp_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1, "stochastic_depth": 0.5}
    model = Decoder(ModelConfig(d_model=64, n_layers=2, context_length=16, **(variant | dropped)))
    model.compute_dtype = dtype
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, Block) or not list(module.children()):
            module.register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out.dtype}))
    loss = training_loss(model, torch.randint(256, (2, 17)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert seen.pop("readout") == loss.dtype == torch.float32
    assert set(seen.values()) == {dtype}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
