"""Attention within documents: each has the losses and gradients that it has alone, by every kernel."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from proxy_models.architecture import document_attention
from proxy_models.architecture.attention import attend, cuda_kernel
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Block, Decoder, alibi_bias, next_token_loss
from proxy_models.architecture.document_attention import document_blocks, number_documents
from proxy_models.architecture.memory import Checkpointing

SEPARATOR = 0
MODEL = ModelConfig(d_model=32, n_layers=2, head_dim=8, vocab_size=16, context_length=40, document_separator=SEPARATOR)
VARIANTS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "grouped, qk-norm": {"queries_per_kv": 2, "qk_norm": True},
    "alibi": {"positions": "alibi"},
    "parallel, without positions": {"positions": "none", "parallel": True},
}


def sequences() -> Tensor:
    """Two sequences, of three documents and of one."""
    tokens = torch.randint(1, 16, (2, 41), generator=torch.Generator().manual_seed(0))
    tokens[0, [9, 30]] = SEPARATOR
    return tokens


def decoder(config: ModelConfig, checkpointing: Checkpointing = "none", dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config)
    model.compute_dtype = dtype
    for block in model.blocks:
        assert isinstance(block, Block)
        block.checkpointing = checkpointing
    return model


@pytest.mark.parametrize("options", VARIANTS.values(), ids=list(VARIANTS))
def test_losses_and_gradients_are_those_of_each_document_alone(options: dict[str, Any]) -> None:
    config = replace(MODEL, **options)
    model, alone = decoder(config), decoder(replace(config, document_separator=None))
    whole = sequences()
    loss = next_token_loss(model, whole)
    parts = [whole[:1, :10], whole[:1, 9:31], whole[:1, 30:], whole[1:]]  # each from its separator to the next one
    of_parts = sum(next_token_loss(alone, part) * (part.shape[1] - 1) for part in parts) / 80
    assert isinstance(of_parts, Tensor)
    torch.testing.assert_close(loss, of_parts)
    assert not torch.isclose(loss, next_token_loss(alone, whole), rtol=1e-4)
    for here, there in zip(
        torch.autograd.grad(loss, list(model.parameters())),
        torch.autograd.grad(of_parts, list(alone.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_changes_no_number(dtype: torch.dtype) -> None:
    found = []
    for kind in ("none", "selective", "full"):
        model = decoder(MODEL, kind, dtype)
        loss = next_token_loss(model, sequences())
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for again in found[1:]:
        torch.testing.assert_close(again, found[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("share", [0.0, 0.003, 0.05, 0.5])
def test_the_table_of_blocks_is_the_one_that_torch_finds_from_the_whole_mask(share: float) -> None:
    torch.manual_seed(0)
    for time in (100, 384, 700):
        numbers = number_documents((torch.rand(3, time) < share).long() - 1, SEPARATOR)
        ours = document_blocks(numbers)
        theirs = create_block_mask(ours.mask_mod, 3, None, time, time, device="cpu")
        for here, there in zip(ours.as_tuple(), theirs.as_tuple(), strict=True):
            if isinstance(here, Tensor):
                assert isinstance(there, Tensor)
                assert torch.equal(here, there)
                assert here.is_contiguous()  # kernels take it for that
                assert here.dtype == there.dtype
            elif here is not ours.mask_mod:
                assert here == there


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("groups", "biased"), list(product((1, 2), (False, True))))
def test_flex_attention_mixes_what_one_document_at_a_time_does(
    monkeypatch: pytest.MonkeyPatch, groups: int, biased: bool
) -> None:
    monkeypatch.setattr(document_attention, "_compiled_flex", lambda: flex_attention)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 200, heads, 16) for heads in (4, 4 // groups, 4 // groups))
    numbers = number_documents(torch.randint(0, 30, (2, 200)), SEPARATOR)
    options: dict[str, Any] = {"bias": alibi_bias(200, 4) if biased else None, "dropout": 0.0}
    fused = attend(query, key, value, documents=document_blocks(numbers), **options)
    torch.testing.assert_close(fused, attend(query, key, value, documents=numbers, **options))


@pytest.mark.parametrize(("groups", "biased"), list(product((1, 2), (False, True))))
def test_gradients_are_those_of_a_dense_mask(groups: int, biased: bool) -> None:
    torch.manual_seed(0)
    states = [torch.randn(2, 50, heads, 16, requires_grad=True) for heads in (4, 4 // groups, 4 // groups)]
    numbers = number_documents(torch.randint(0, 12, (2, 50)), SEPARATOR)
    bias = alibi_bias(50, 4) if biased else torch.zeros(4, 50, 50)
    visible = (numbers[:, :, None] == numbers[:, None, :]).tril()[:, None]
    mixed = attend(*states, bias=bias if biased else None, dropout=0.0, documents=numbers)
    heads_first = [x.repeat_interleave(4 // x.shape[2], 2).transpose(1, 2) for x in states]
    masked = bias.where(visible, -torch.inf)
    dense = F.scaled_dot_product_attention(  # type: ignore[misc]
        *heads_first,  # type: ignore[arg-type]
        attn_mask=masked,
        scale=1.0,
    )
    direction = torch.randn(2, 50, 4, 16)
    torch.testing.assert_close(mixed, dense.transpose(1, 2))
    torch.testing.assert_close(
        torch.autograd.grad(mixed, states, direction),
        torch.autograd.grad(dense, states, direction.transpose(1, 2)),
    )


def test_a_gpu_takes_flex_attention_for_every_case_but_small_heads() -> None:
    for dtype, biased, grouped in product((torch.float32, torch.bfloat16), (False, True), (False, True)):
        assert cuda_kernel(dtype, 64, biased=biased, grouped=grouped, within_documents=True) == "flex"
    assert cuda_kernel(torch.bfloat16, 8, biased=False, grouped=False, within_documents=True) == "math"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about torch's own code
@pytest.mark.parametrize(
    ("dtype", "groups", "biased"), list(product((torch.float32, torch.bfloat16), (1, 2), (False, True)))
)
def test_a_gpu_mixes_what_a_cpu_does(dtype: torch.dtype, groups: int, biased: bool) -> None:
    torch.manual_seed(0)
    states = [
        torch.randn(2, 300, heads, 32, dtype=dtype, requires_grad=True) for heads in (4, 4 // groups, 4 // groups)
    ]
    of_gpu = [x.detach().cuda().requires_grad_() for x in states]
    numbers = number_documents(torch.randint(0, 60, (2, 300)), SEPARATOR)
    bias = alibi_bias(300, 4).to(dtype) if biased else None
    here = attend(*states, bias=bias, dropout=0.0, documents=numbers)
    there = attend(
        *of_gpu, bias=None if bias is None else bias.cuda(), dropout=0.0, documents=document_blocks(numbers.cuda())
    )
    tolerance: dict[str, Any] = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    torch.testing.assert_close(there.cpu(), here, **tolerance)
    for ours, theirs in zip(
        torch.autograd.grad(here.float().square().sum(), states),
        torch.autograd.grad(there.float().square().sum(), of_gpu),
        strict=True,
    ):
        # By the norm: where a document is one token long, a query's gradient is a difference of equal numbers.
        assert torch.dist(theirs.cpu().float(), ours.float()) <= tolerance["rtol"] * ours.float().norm()


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.soak
def test_a_compiled_model_is_one_graph_with_the_same_losses() -> None:
    eager, compiled = decoder(MODEL, "selective"), decoder(MODEL, "selective")
    for block in compiled.blocks:
        block.compile(dynamic=False, fullgraph=True)
    loss, again = (next_token_loss(model, sequences()) for model in (eager, compiled))
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(
        torch.autograd.grad(again, list(compiled.parameters())), torch.autograd.grad(loss, list(eager.parameters()))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"document_separator": 16}, "document_separator must be an id below vocab_size=16, got 16"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0 with document_separator.*got 0.1"),
    ],
)
def test_what_attention_within_documents_cannot_do_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MODEL, **change)
