"""Activation checkpointing changes what is kept, and no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Block, Decoder, training_loss
from proxy_models.architecture.memory import Checkpointing

MODEL = ModelConfig(
    d_model=64, n_layers=3, context_length=64, mlp_dropout=0.2, attention_dropout=0.1, stochastic_depth=0.3
)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.muscale.product.default)
        return func(*args, **(kwargs or {}))


def trained(kind: Checkpointing, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor], int]:
    torch.manual_seed(0)
    model = Decoder(MODEL)
    model.compute_dtype = dtype
    for block in model.blocks:
        assert isinstance(block, Block)
        block.checkpointing = kind
    sequences = torch.randint(256, (4, 65))
    with Products() as products:
        loss = training_loss(model, sequences)
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None], products.count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_the_same_with_everything_random(dtype: torch.dtype) -> None:
    loss, gradients, n_products = trained("none", dtype)
    counts = {}
    for kind in ("selective", "full"):
        again, of_again, counts[kind] = trained(kind, dtype)
        assert torch.equal(again, loss)
        for here, there in zip(of_again, gradients, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-9)
    assert counts["selective"] == n_products
    assert n_products + 3 * 6 <= counts["full"] <= n_products + 3 * 7  # whether the last product of a block is needed
