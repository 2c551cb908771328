"""Products by oneDNN: the same numbers as torch's, gradients and counts too."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from proxy_models.architecture import products
from proxy_models.architecture.products import Linear, product


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on a processor that MKL neglects."""
    monkeypatch.setattr(products, "MKL_IS_SLOW", True)


def outcome(
    layer: nn.Linear, input: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int]:
    leaf = input.clone().requires_grad_()
    layer.weight.grad = None
    with FlopCounterMode(display=False) as counter:
        output = layer(leaf)
        output.square().sum().backward()
    return output, layer.weight.grad, leaf.grad, counter.get_total_flops()


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("shape", [(4, 128, 64), (300, 96), (2, 3, 64, 256)])
def test_products_gradients_and_counted_flops_are_torchs(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = Linear(shape[-1], 72, bias=False)
    torchs = nn.Linear(shape[-1], 72, bias=False)
    torchs.load_state_dict(ours.state_dict())
    input = torch.randn(shape)
    for a, b in zip(outcome(ours, input), outcome(torchs, input), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fast")
def test_only_large_fp32_products_are_taken() -> None:
    def is_ours(layer: Linear, input: torch.Tensor) -> bool:
        with FlopCounterMode(display=False) as counter:
            layer(input)
        return torch.ops.muscale.product in counter.get_flop_counts()["Global"]

    wide = Linear(64, 64, bias=False)
    assert is_ours(wide, torch.randn(4, 64, 64))
    assert not is_ours(wide, torch.randn(4, 8, 64)), "few rows"
    assert not is_ours(Linear(32, 64, bias=False), torch.randn(4, 64, 32)), "narrow"
    assert not is_ours(Linear(64, 64), torch.randn(4, 64, 64)), "with a bias"
    assert wide(torch.randn(4, 64, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.usefixtures("fast")
def test_gradients_have_gradients_and_torch_func_s_are_the_same() -> None:
    torch.manual_seed(0)
    ours, torchs, input = Linear(64, 72, bias=False), nn.Linear(64, 72, bias=False), torch.randn(300, 64)
    torchs.load_state_dict(ours.state_dict())
    penalties, gradients = [], []
    for layer in (ours, torchs):
        leaf = input.clone().requires_grad_()
        (first,) = torch.autograd.grad(layer(leaf).pow(3).sum(), leaf, create_graph=True)
        penalties.append(torch.autograd.grad(first.square().sum(), layer.weight)[0])
        gradients.append(torch.func.grad(lambda x, layer=layer: layer(x).pow(3).sum())(input))
    for pair in (penalties, gradients):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-2)


@pytest.mark.compiler
@pytest.mark.usefixtures("fast")
def test_compiled_the_product_is_the_same() -> None:
    torch.manual_seed(0)
    layer, input = Linear(64, 96, bias=False), torch.randn(4, 64, 64)
    compiled = torch.compile(lambda x: torch.relu(layer(x)).square().sum(), fullgraph=True)
    expected = torch.relu(layer(input)).square().sum()
    torch.testing.assert_close(compiled(input), expected)


def test_the_product_takes_transposed_matrices() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(96, 70).t(), torch.randn(128, 96).t()
    torch.testing.assert_close(product(left, right), left @ right)
