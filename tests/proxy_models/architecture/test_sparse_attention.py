"""Attention within documents and windows: the losses and gradients of each document alone, and of a dense mask, by every kernel."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from proxy_models.architecture import sparse_attention
from proxy_models.architecture.attention import attend, cuda_kernel
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Block, Decoder, alibi_bias, next_token_loss
from proxy_models.architecture.families import family_of
from proxy_models.architecture.memory import Checkpointing
from proxy_models.architecture.sparse_attention import number_documents, visible_blocks
from proxy_models.importable import mend_torchvision

SEPARATOR = 0
MODEL = ModelConfig(d_model=32, n_layers=2, head_dim=8, vocab_size=16, context_length=40, document_separator=SEPARATOR)
VARIANTS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "grouped, qk-norm": {"queries_per_kv": 2, "qk_norm": True},
    "alibi": {"positions": "alibi"},
    "parallel, without positions": {"positions": "none", "parallel": True},
    "window": {"attention_window": 8},
    "window and global blocks, alibi": {"attention_window": 8, "global_attention_every": 2, "positions": "alibi"},
}
CPU = torch.device("cpu")


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


@torch.no_grad()
def test_a_position_depends_on_the_tokens_of_its_window_and_in_a_global_block_on_all() -> None:
    tokens = sequences()[1:, :40]
    for depth, every, reach in ((1, None, 5), (3, None, 13), (2, 2, 40)):  # each block adds 4 tokens to the reach
        change: dict[str, Any] = {
            "n_layers": depth,
            "attention_window": 5,
            "global_attention_every": every,
            "document_separator": None,
        }
        model = decoder(replace(MODEL, **change)).double()
        logits = model(tokens)[0, -1]
        moved = []
        for position in range(40):
            changed = tokens.clone()
            changed[0, position] = tokens[0, position] % 15 + 1
            moved.append(not torch.equal(model(changed)[0, -1], logits))
        assert moved == [False] * (40 - reach) + [True] * reach


@torch.no_grad()
def test_a_window_of_at_least_the_sequence_changes_no_bit() -> None:
    for separator in (None, SEPARATOR):
        plain = decoder(replace(MODEL, document_separator=separator))
        window = decoder(replace(MODEL, document_separator=separator, attention_window=40))
        assert torch.equal(window(sequences()[:, :40]), plain(sequences()[:, :40]))


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_changes_no_number(dtype: torch.dtype, window: int | None) -> None:
    found = []
    for kind in ("none", "selective", "full"):
        model = decoder(replace(MODEL, attention_window=window), kind, dtype)
        loss = next_token_loss(model, sequences())
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for again in found[1:]:
        torch.testing.assert_close(again, found[0], rtol=1e-6, atol=1e-9)


def check_same_table(ours: BlockMask, theirs: BlockMask) -> None:
    for here, there in zip(ours.as_tuple(), theirs.as_tuple(), strict=True):
        if isinstance(here, Tensor):
            assert isinstance(there, Tensor)
            assert torch.equal(here, there)
            assert here.is_contiguous()  # kernels take it for that
            assert here.dtype == there.dtype
        elif here is not ours.mask_mod:
            assert here == there


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
@pytest.mark.parametrize("share", [None, 0.0, 0.003, 0.05, 0.5])
def test_the_table_of_blocks_is_the_one_that_torch_finds_from_the_whole_mask(
    share: float | None, window: int | None
) -> None:
    torch.manual_seed(0)
    for time in (100, 384, 700):
        numbers = None if share is None else number_documents((torch.rand(3, time) < share).long() - 1, SEPARATOR)
        ours = visible_blocks(numbers, window, time, CPU)
        theirs = create_block_mask(ours.mask_mod, None if share is None else 3, None, time, time, device="cpu")
        check_same_table(ours, theirs)


KINDS = list(product((1, 2), (False, True), (None, 7, 150), (False, True)))
"""Queries that share a key, whether ALiBi adds a bias, the window, and whether there are documents."""


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("groups", "biased", "window", "documents"), KINDS[1:])
def test_flex_attention_mixes_what_a_cpu_s_kernel_does_in_parts(
    monkeypatch: pytest.MonkeyPatch, groups: int, biased: bool, window: int | None, documents: bool
) -> None:
    monkeypatch.setattr(sparse_attention, "_compiled_flex", lambda: flex_attention)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 200, heads, 16) for heads in (4, 4 // groups, 4 // groups))
    numbers = number_documents(torch.randint(0, 30, (2, 200)), SEPARATOR) if documents else None
    options: dict[str, Any] = {"bias": alibi_bias(200, 4) if biased else None, "dropout": 0.0, "window": window}
    fused = attend(query, key, value, documents=visible_blocks(numbers, window, 200, CPU), **options)
    torch.testing.assert_close(fused, attend(query, key, value, documents=numbers, **options))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("groups", "biased", "window", "documents"), KINDS)
def test_pieces_of_the_queries_are_mixed_as_in_the_whole_sequence(
    monkeypatch: pytest.MonkeyPatch, groups: int, biased: bool, window: int | None, documents: bool
) -> None:
    monkeypatch.setattr(sparse_attention, "_compiled_flex", lambda: flex_attention)
    torch.manual_seed(0)
    time, begins = 280, (70, 140)
    states = [torch.randn(2, time, heads, 16, requires_grad=True) for heads in (4, 4 // groups, 4 // groups)]
    query, key, value = states
    numbers = number_documents(torch.randint(0, 60, (2, time)), SEPARATOR) if documents else None
    options: dict[str, Any] = {"bias": alibi_bias(time, 4) if biased else None, "dropout": 0.0, "window": window}
    at = torch.cat([torch.arange(begin, begin + 70) for begin in begins])
    whole = attend(query, key, value, documents=numbers, **options)[:, at]
    pieces = attend(query[:, at], key, value, documents=numbers, begins=begins, **options)
    torch.testing.assert_close(pieces, whole)
    direction = torch.randn_like(whole)
    torch.testing.assert_close(
        torch.autograd.grad(pieces, states, direction),
        torch.autograd.grad(whole, states, direction),
        rtol=1e-5,
        atol=3e-5,  # processors sum in different orders
    )
    blocks = visible_blocks(numbers, window, time, CPU, at)
    query, key, value = (x.detach() for x in states)
    torch.testing.assert_close(attend(query[:, at], key, value, documents=blocks, begins=begins, **options), whole)


@pytest.mark.parametrize(("groups", "biased", "window", "documents"), KINDS)
def test_values_and_gradients_are_those_of_a_dense_mask(
    groups: int, biased: bool, window: int | None, documents: bool
) -> None:
    torch.manual_seed(0)
    time = 200
    states = [torch.randn(2, time, heads, 16, requires_grad=True) for heads in (4, 4 // groups, 4 // groups)]
    numbers = number_documents(torch.randint(0, 60, (2, time)), SEPARATOR) if documents else None
    bias = alibi_bias(time, 4) if biased else torch.zeros(4, time, time)
    distance = torch.arange(time)[:, None] - torch.arange(time)
    visible = (distance >= 0) & (distance < (window or time))
    if numbers is not None:
        visible = ((numbers[:, :, None] == numbers[:, None, :]) & visible)[:, None]
    mixed = attend(*states, bias=bias if biased else None, dropout=0.0, documents=numbers, window=window)
    heads_first = [x.repeat_interleave(4 // x.shape[2], 2).transpose(1, 2) for x in states]
    logits = heads_first[0] @ heads_first[1].transpose(2, 3) + bias
    dense = logits.where(visible, -torch.inf).softmax(-1) @ heads_first[2]
    direction = torch.randn(2, time, 4, 16)
    torch.testing.assert_close(mixed, dense.transpose(1, 2))
    torch.testing.assert_close(
        torch.autograd.grad(mixed, states, direction),
        torch.autograd.grad(dense, states, direction.transpose(1, 2)),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("share", [None, 0.01])
def test_the_table_of_queries_in_pieces_has_every_visible_block(share: float | None, window: int | None) -> None:
    torch.manual_seed(0)
    for chunk, ranks in ((128, 2), (70, 3)):
        time = 2 * ranks * chunk
        numbers = None if share is None else number_documents((torch.rand(3, time) < share).long() - 1, SEPARATOR)
        for rank in range(ranks):
            begins = (rank * chunk, (2 * ranks - 1 - rank) * chunk)
            at = torch.cat([torch.arange(begin, begin + chunk) for begin in begins])
            ours = visible_blocks(numbers, window, time, CPU, at)
            batch = None if numbers is None else 3
            theirs = create_block_mask(ours.mask_mod, batch, None, 2 * chunk, time, device="cpu")
            # Where a block has queries of both pieces, the positions between them count too.
            assert (ours.to_dense() >= theirs.to_dense()).all()
            if chunk % 128 == 0:
                assert torch.equal(ours.to_dense(), theirs.to_dense())
                check_same_table(ours, theirs)


def test_a_gpu_takes_flex_attention_for_every_case_but_small_heads() -> None:
    for dtype, biased, grouped in product((torch.float32, torch.bfloat16), (False, True), (False, True)):
        assert cuda_kernel(dtype, 64, biased=biased, grouped=grouped, sparse=True) == "flex"
    assert cuda_kernel(torch.bfloat16, 8, biased=False, grouped=False, sparse=True) == "math"


def test_ranks_that_share_a_sequence_take_flex_attention() -> None:
    model = ModelConfig(d_model=64, n_layers=2, head_dim=16)
    kernels = {
        ranks: family_of(model).attention_kernel(model, torch.bfloat16, context_parallel=ranks) for ranks in (1, 2)
    }
    assert {ranks: found and found.kernel for ranks, found in kernels.items()} == {1: "flash", 2: "flex"}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about torch's own code
@pytest.mark.parametrize(
    ("dtype", "groups", "biased", "window", "documents"),
    [(dtype, *kind) for dtype, kind in product((torch.float32, torch.bfloat16), KINDS) if kind[2] or kind[3]],
)
def test_a_gpu_mixes_what_a_cpu_does(
    dtype: torch.dtype, groups: int, biased: bool, window: int | None, documents: bool
) -> None:
    torch.manual_seed(0)
    states = [
        torch.randn(2, 300, heads, 32, dtype=dtype, requires_grad=True) for heads in (4, 4 // groups, 4 // groups)
    ]
    of_gpu = [x.detach().cuda().requires_grad_() for x in states]
    numbers = number_documents(torch.randint(0, 60, (2, 300)), SEPARATOR) if documents else None
    bias = alibi_bias(300, 4).to(dtype) if biased else None
    here = attend(*states, bias=bias, dropout=0.0, documents=numbers, window=window)
    there = attend(
        *of_gpu,
        bias=None if bias is None else bias.cuda(),
        dropout=0.0,
        documents=visible_blocks(None if numbers is None else numbers.cuda(), window, 300, torch.device("cuda")),
        window=window,
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


@pytest.mark.filterwarnings("ignore")  # dynamo warns about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
def test_flex_attention_is_part_of_a_compiled_model_s_graph() -> None:
    """As on a GPU. Lightning wraps torch.compile, and Dynamo can't trace a call of its wrapper inside a model."""
    mend_torchvision()
    import_module("lightning")
    torch.manual_seed(0)
    states = [torch.randn(1, 200, 2, 16) for _ in range(3)]
    blocks = visible_blocks(None, 50, 200, CPU)

    def attention(*of: Tensor) -> Tensor:
        return attend(*of, bias=None, dropout=0.0, documents=blocks, window=50)

    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*states), attend(*states, bias=None, dropout=0.0, documents=None, window=50))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
def test_flex_attention_stays_fused_where_a_compiled_model_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def compiler(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    fused = torch.compile(flex_attention, backend=compiler)
    monkeypatch.setattr(sparse_attention, "_compiled_flex", lambda: fused)
    states = [torch.randn(1, 200, 2, 16) for _ in range(3)]
    with torch.compiler.set_stance("force_eager"):
        attend(*states, bias=None, dropout=0.0, documents=visible_blocks(None, 50, 200, CPU), window=50)
    assert len(graphs) == 1


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.soak
@pytest.mark.parametrize("change", [{}, {"attention_window": 8, "global_attention_every": 2}])
def test_a_compiled_model_is_one_graph_with_the_same_losses(change: dict[str, Any]) -> None:
    config = replace(MODEL, **change)
    eager, compiled = decoder(config, "selective"), decoder(config, "selective")
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
        (
            {"attention_dropout": 0.1, "document_separator": None, "attention_window": 8},
            "attention_dropout must be 0 with attention_window.*got 0.1",
        ),
        ({"attention_window": 0}, "attention_window must be at least 1, .*got 0"),
        ({"global_attention_every": 2}, "global_attention_every needs an attention_window, got 2 without"),
        (
            {"attention_window": 8, "global_attention_every": 1},
            "global_attention_every must lie in 2 to n_layers=2, got 1",
        ),
        (
            {"attention_window": 8, "global_attention_every": 3},
            "global_attention_every must lie in 2 to n_layers=2, got 3",
        ),
    ],
)
def test_what_attention_within_documents_or_windows_cannot_do_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MODEL, **change)
