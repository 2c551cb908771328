"""The chunked loss against the plain one: values, gradients, and what stands in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from proxy_models.architecture import decoder, memory
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.cross_entropy import (
    LogitsError,
    chunked_cross_entropy,
    sequence_loss,
    whole_cross_entropy,
)
from proxy_models.architecture.decoder import Decoder, next_token_loss, training_loss
from proxy_models.architecture.memory import Precision
from proxy_models.training.precision import DTYPES
from tests.proxy_models.peak_memory import peak_bytes
from tests.quick import quick_and_soak

TERMS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "weights": torch.arange(24) % 3.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.1, 1e-2)])
def test_loss_and_gradients_equal_the_unchunked_ones(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, smoothing: float, z_loss: float
) -> None:
    monkeypatch.setattr(memory, "CHUNK_ENTRIES", 7 * 50)  # 24 positions in chunks of 7, 7, 7 and 3
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 6, 16, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(50, (4, 6), generator=generator)
    plain = whole_cross_entropy(hidden @ weight.t(), targets, label_smoothing=smoothing, z_loss=z_loss)
    chunked = chunked_cross_entropy(hidden, weight, targets, label_smoothing=smoothing, z_loss=z_loss)
    torch.testing.assert_close(chunked, plain, rtol=1e-6, atol=1e-6)
    for here, there in zip(
        torch.autograd.grad(3 * chunked, (hidden, weight)),
        torch.autograd.grad(3 * plain, (hidden, weight)),
        strict=True,
    ):
        assert here.dtype == dtype
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-2)])
def test_the_loss_of_tokens_that_count_is_the_mean_over_them(
    monkeypatch: pytest.MonkeyPatch, is_chunked: bool, smoothing: float, z_loss: float
) -> None:
    """Against the terms written out over the positions that count alone."""
    monkeypatch.setattr(memory, "CHUNK_ENTRIES", 7 * 256 if is_chunked else 1 << 20)
    torch.manual_seed(0)
    config = ModelConfig(d_model=16, n_layers=1, context_length=16, label_smoothing=smoothing, z_loss=z_loss)
    model = Decoder(config)
    plain = torch.randint(256, (3, 17))
    counts = torch.rand(3, 17) < torch.tensor([0.1, 0.5, 0.9])[:, None]
    scale = torch.tensor(3 * 16 / counts[:, 1:].sum().item())
    masked = torch.where(counts, plain, ~plain)
    logits = model(plain[:, :-1])[counts[:, 1:]]
    log_normaliser = logits.logsumexp(-1)
    at_target = logits.gather(1, plain[:, 1:][counts[:, 1:]][:, None]).squeeze(1)
    entropy = log_normaliser - at_target
    terms = (1 - smoothing) * entropy + smoothing * (log_normaliser - logits.mean(-1)) + z_loss * log_normaliser**2
    for found, expected in (
        (training_loss(model, masked, scale), terms.mean()),
        (next_token_loss(model, masked, scale), entropy.mean()),
        (sequence_loss(model, masked, scale), entropy.mean()),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        parameters = list(model.parameters())
        for here, there in zip(
            torch.autograd.grad(found, parameters),
            torch.autograd.grad(expected, parameters, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-6)
    assert torch.equal(training_loss(model, plain), training_loss(model, plain, None))
    everything = training_loss(model, plain, torch.ones(()))
    torch.testing.assert_close(everything, training_loss(model, plain), rtol=1e-6, atol=0)


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("dtype", "tolerance", "terms"),
    quick_and_soak(
        [(torch.float32, 1e-6, {}), (torch.bfloat16, 1e-3, TERMS)],
        (torch.bfloat16, 1e-3, TERMS),
    ),
)
def test_compiled_chunks_have_the_same_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, terms: dict[str, Any]
) -> None:
    monkeypatch.setattr(memory, "CHUNK_ENTRIES", 7 * 50)  # 24 positions in chunks of 7, 7, 7 and 3
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(24, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(50, (24,), generator=generator)
    eager, compiled = (
        chunked_cross_entropy(hidden, weight, targets, compiled=wanted, **terms) for wanted in (False, True)
    )
    assert compiled.item() == pytest.approx(eager.item(), rel=1e-6)
    for here, there in zip(
        torch.autograd.grad(compiled, (hidden, weight)), torch.autograd.grad(eager, (hidden, weight)), strict=True
    ):
        assert here.dtype == dtype
        assert torch.dist(here.float(), there.float()) <= tolerance * there.float().norm()


def of_decoder(model: Decoder, sequences: Tensor) -> tuple[float, list[Tensor]]:
    loss = training_loss(model, sequences)
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-2), ("fp16", 1e-3)])
def test_a_decoder_s_loss_is_chunked_where_its_logits_are_too_many(
    monkeypatch: pytest.MonkeyPatch, tied: bool, precision: Precision, tolerance: float
) -> None:
    model = Decoder(ModelConfig(d_model=32, n_layers=1, context_length=16, tied=tied, label_smoothing=0.1, z_loss=1e-3))
    model.compute_dtype = DTYPES[precision]
    sequences = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(memory, "CHUNK_ENTRIES", 8 * 16 * 256)
    asked: list[Tensor] = []

    def seen(logits: Tensor, *rest: Any, **terms: Any) -> Tensor:
        asked.append(logits)
        return whole_cross_entropy(logits, *rest, **terms)

    monkeypatch.setattr(decoder, "whole_cross_entropy", seen)
    whole, gradients = of_decoder(model, sequences)
    evaluated = next_token_loss(model, sequences).item()
    assert len(asked) == 2
    monkeypatch.setattr(memory, "CHUNK_ENTRIES", 8 * 16 * 256 - 1)
    loss, chunked = of_decoder(model, sequences)
    assert loss == pytest.approx(whole, rel=1e-6)
    for here, there in zip(chunked, gradients, strict=True):
        assert float(torch.dist(here, there)) <= tolerance * float(there.norm())
    assert next_token_loss(model, sequences).item() == pytest.approx(evaluated, rel=1e-6)
    assert len(asked) == 2, "all logits were in memory"


def test_logits_never_stand_in_memory_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(d_model=16, n_layers=1, context_length=64, vocab_size=8000)
    model, sequences = Decoder(config), torch.zeros(8, 65, dtype=torch.int64)
    logits = 4 * 8 * 64 * config.vocab_size

    def step() -> None:
        training_loss(model, sequences).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    step()
    whole = peak_bytes(step)
    monkeypatch.setattr(memory, "CHUNK_ENTRIES", 16 * config.vocab_size)
    chunked = peak_bytes(step)
    assert whole > 2 * logits
    assert chunked < logits / 3


@pytest.mark.filterwarnings("ignore")  # dynamo warns about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_graph_has_one_node_for_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(64, 16).requires_grad_(), torch.randn(50, 16).requires_grad_()
    targets = torch.randint(50, (64,))
    nodes: list[int] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nodes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return cast(Callable[..., Any], make_boxed_func(graph.forward))

    for entries in (64 * 50, 50):
        monkeypatch.setattr(memory, "CHUNK_ENTRIES", entries)
        torch.compiler.reset()
        compiled = torch.compile(chunked_cross_entropy, backend=aot_autograd(fw_compiler=count), fullgraph=True)
        gradients = torch.autograd.grad(compiled(hidden, weight, targets), (hidden, weight))
        plain = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets), (hidden, weight))
        torch.testing.assert_close(gradients, plain)
    assert nodes[:2] == nodes[2:], "64 chunks took more nodes than one"


@pytest.mark.parametrize(
    "change", [lambda logits: (logits, 0), lambda logits: logits.mT, lambda logits: logits.transpose(0, 1)]
)
def test_what_is_not_logits_of_each_sequence_and_position_is_refused(change: Callable[[Tensor], Any]) -> None:
    """Logits with the time first would be compared with the targets of other sequences."""
    ids = torch.randint(7, (3, 6))
    table = torch.randn(7, 7)
    assert float(sequence_loss(lambda tokens: table[tokens], ids)) > 0  # type: ignore[arg-type]
    with pytest.raises(LogitsError):
        sequence_loss(lambda tokens: change(table[tokens]), ids)  # type: ignore[arg-type]
