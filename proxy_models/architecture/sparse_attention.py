"""Causal attention that stays within documents or a sliding window, without a mask of time × time.

A sequence holds parts of several documents, one after another. The token that closes a document is the first key of the next document,
since text is generated after this token; so it is the `bos_token_id` of the Llama export. Positions continue over the sequence: rotary
angles and ALiBi depend only on distances, and learned positions stay those of the sequence. Llama 3 masks documents in the same way
(arXiv 2407.21783, section 3.2): little changed in ordinary pre-training, and the mask mattered for very long sequences.

With a window of w tokens, a position attends to itself and the w - 1 tokens before it.

On a GPU, FlexAttention skips blocks of 128 × 128 in which no query may attend to a key (Dong et al., arXiv 2412.05496). FlexAttention
has no backward pass on CPUs, where torch's fused kernel takes one document at a time, or with a window some queries and their keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch import library as operators
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_BLOCK = 128
_QUERIES = 128  # taken at once by the CPU's kernel with a window: as fast as 64, and faster than 256


def number_documents(tokens: Tensor, separator: int) -> Tensor:
    """Number the documents: return the document of each token (batch, time), ascending along a sequence."""
    return (tokens == separator).cumsum(-1)


def visible_blocks(
    documents: Tensor | None, window: int | None, time: int, device: torch.device, at: Tensor | None = None
) -> BlockMask:
    """Return FlexAttention's table of the blocks in which a query may attend to a key.

    Since positions and document numbers ascend, a block's first and last suffice to compare blocks, without waiting for the device.

    Args:
        documents: Document numbers (batch, time); None: a sequence is one document.
        window: Tokens that a position attends to at most; None: all tokens so far.
        time: Number of keys.
        at: Ascending positions of the queries; None: those of the keys.
    """
    positions = torch.arange(time, device=device)
    queries = positions if at is None else at
    whole = torch.arange(-(-len(queries) // _BLOCK), device=device) < len(queries) // _BLOCK
    first, last = (ends[:, None] for ends in _ends(queries))
    first_key, last_key = _ends(positions)
    # torch does not treat a block as full if it ends beyond the sequence.
    full, seen = whole[:, None] & (first > last_key), last >= first_key
    if window is not None:
        full, seen = full & (last - first_key < window), seen & (first - last_key < window)
    full, seen = full[None], seen[None]
    if documents is not None:
        first, last, first_key, last_key = (documents[:, ends.flatten()] for ends in (first, last, first_key, last_key))
        full = full & (last[:, :, None] == first_key[:, None, :])
        seen = seen & (first[:, :, None] <= last_key[:, None, :])

    def visible(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query if at is None else at[query]
        found = query >= key
        if window is not None:
            found = found & (query - key < window)
        if documents is not None:
            found = found & (documents[batch, query] == documents[batch, key])
        return found

    lengths = (len(queries), time)
    return BlockMask.from_kv_blocks(
        *_listed(seen & ~full), *_listed(full), BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=lengths
    )


def _ends(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last position of each block."""
    order = torch.arange(0, len(positions), _BLOCK, device=positions.device)
    return positions[order], positions[(order + _BLOCK - 1).clamp(max=len(positions) - 1)]


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for all heads, the number of key blocks of each block of queries, and the indices with these key blocks first."""
    blocks = blocks[:, None].int()
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()


def attend_within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | BlockMask | None,
    window: int | None,
    bias: Tensor | None,
    begins: tuple[int, ...],
) -> Tensor:
    """Mix values by causal attention within documents and a window, without a scale; shapes are (batch, time, heads, head_dim).

    Args:
        documents: Result of `number_documents` on a CPU, None for whole sequences; on a GPU, result of `visible_blocks`.
        window: Tokens that a position attends to at most; on a GPU, `documents` decides.
        bias: Bias on the logits, (heads, time, time) with -inf on the future; None: no bias.
        begins: First positions of the equal pieces that the queries consist of.
    """
    if not isinstance(documents, BlockMask):
        return cast(Tensor, _InParts.apply(query, key, value, documents, bias, window, begins))  # type: ignore[no-untyped-call]
    of_queries = bias
    if bias is not None and len(begins) > 1:
        piece = query.shape[1] // len(begins)
        of_queries = torch.cat([bias[:, begin : begin + piece] for begin in begins], 1)

    def biased(score: Tensor, _batch: Tensor, head: Tensor, at_query: Tensor, at_key: Tensor) -> Tensor:
        return score + cast(Tensor, of_queries)[head, at_query, at_key]

    mixed = _flex(
        *(states.transpose(1, 2) for states in (query, key, value)),
        score_mod=None if bias is None else biased,
        block_mask=documents,
        scale=1.0,
        enable_gqa=query.shape[2] > key.shape[2],
    )
    return cast(Tensor, mixed.transpose(1, 2))


def _flex(*arguments: Any, **options: Any) -> Any:
    """Run FlexAttention in its fused kernel, since an eager FlexAttention keeps all scores."""
    if torch.compiler.is_compiling():  # fused with the model
        return flex_attention(*arguments, **options)
    with torch.compiler.set_stance("default"):  # compiled models are evaluated with compilation switched off
        return _compiled_flex()(*arguments, **options)


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


_LIBRARY = operators.Library("muscale", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "sparse_attention(Tensor query, Tensor key, Tensor value, Tensor? documents, Tensor? bias, int? window, "
    "int[] begins) -> (Tensor, Tensor)"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "sparse_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? documents, Tensor? bias, "
    "int? window, int[] begins, Tensor mixed, Tensor normaliser) -> (Tensor, Tensor, Tensor)"
)


class _Part(NamedTuple):
    """Queries that the kernel takes at once, and their keys: sequences of the batch, and positions.

    Attributes:
        shift: Difference between the position of a query and its index.
    """

    rows: slice
    queries: slice
    keys: slice
    shift: int

    def of_queries(self, states: Tensor) -> Tensor:
        """Return the part of (batch, queries, heads, …) as (rows, heads, queries, …)."""
        return states[self.rows, self.queries.start - self.shift : self.queries.stop - self.shift].transpose(1, 2)

    def of_keys(self, states: Tensor) -> Tensor:
        """Return the part of (batch, keys, heads, …) as (rows, heads, keys, …)."""
        return states[self.rows, self.keys].transpose(1, 2)

    def masked(self, bias: Tensor | None, window: int | None, dtype: torch.dtype) -> dict[str, Any]:
        """Return the kernel's arguments for the part."""
        (first, end), (first_key, end_key) = ((each.start, each.stop) for each in (self.queries, self.keys))
        if first == first_key and (window is None or end - first <= window):
            mask = None if bias is None else bias[None, :, self.queries, self.keys]
            return {"is_causal": bias is None, "attn_mask": mask, "scale": 1.0}
        distance = torch.arange(first, end)[:, None] - torch.arange(first_key, end_key)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        mask = torch.zeros(1, dtype=dtype) if bias is None else bias[None, :, self.queries, self.keys]
        return {"is_causal": False, "attn_mask": mask.masked_fill(hidden, -torch.inf), "scale": 1.0}


def _parts(
    query: Tensor, key: Tensor, documents: Tensor | None, window: int | None, begins: list[int]
) -> Iterator[_Part]:
    """Yield the parts: each document of a batch, or the whole batch without documents.

    Of queries that do not attend to just the positions from their first one on, a part has `_QUERIES`, as it needs a mask.
    """
    piece = query.shape[1] // len(begins)
    places = [(slice(None), 0, key.shape[1])] if documents is None else list(_places(documents))
    for (number, begin), (rows, first_key, end) in product(enumerate(begins), places):
        first, end = max(begin, first_key), min(begin + piece, end)
        step = max(1, end - first) if window is None and first == first_key else _QUERIES
        for start in range(first, end, step):
            queries = slice(start, min(start + step, end))
            nearest = first_key if window is None else max(first_key, start - window + 1)
            yield _Part(rows, queries, slice(nearest, queries.stop), begin - number * piece)


def _places(documents: Tensor) -> Iterator[tuple[slice, int, int]]:
    """Yield the sequence, the first position and the end of each document in a batch."""
    for row, numbers in enumerate(documents):
        begins = (numbers.diff().nonzero().flatten() + 1).tolist()
        for begin, end in pairwise([0, *begins, len(numbers)]):
            yield slice(row, row + 1), begin, end


def _shapes(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32)
    )


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    bias: Tensor | None,
    window: int | None,
    begins: list[int],
) -> tuple[Tensor, Tensor]:
    found = _shapes(query)
    key, value = _expanded(query, key), _expanded(query, value)
    for part in _parts(query, key, documents, window, begins):
        of_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            part.of_queries(query), part.of_keys(key), part.of_keys(value), **part.masked(bias, window, query.dtype)
        )
        for whole, piece in zip(found, of_part, strict=True):
            part.of_queries(whole).copy_(piece)
    return found


def _shapes_backward(_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    bias: Tensor | None,
    window: int | None,
    begins: list[int],
    mixed: Tensor,
    normaliser: Tensor,
) -> tuple[Tensor, ...]:
    keys, values = _expanded(query, key), _expanded(query, value)
    # In fp32, since with a window a key's gradient is a sum over parts.
    exact: dict[str, Any] = {
        "dtype": torch.promote_types(query.dtype, torch.float32),
        "memory_format": torch.contiguous_format,
    }
    gradients = [torch.zeros_like(x, **exact) for x in (query, keys, values)]
    for part in _parts(query, key, documents, window, begins):
        of_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            part.of_queries(gradient),
            part.of_queries(query),
            part.of_keys(keys),
            part.of_keys(values),
            part.of_queries(mixed),
            part.of_queries(normaliser),
            dropout_p=0.0,
            **part.masked(bias, window, query.dtype),
        )
        for whole, piece, pick in zip(gradients, of_part, (part.of_queries, part.of_keys, part.of_keys), strict=True):
            pick(whole).add_(piece)
    return tuple(
        _summed(x.to(like.dtype), like.shape[2]) for x, like in zip(gradients, (query, key, value), strict=True)
    )


def _expanded(query: Tensor, states: Tensor) -> Tensor:
    """Return keys or values repeated to as many heads as there are queries."""
    n_groups = query.shape[2] // states.shape[2]
    return states.repeat_interleave(n_groups, 2) if n_groups > 1 else states


def _summed(gradient: Tensor, n_heads: int) -> Tensor:
    """Return the reverse of `_expanded`: gradients summed over each group of heads."""
    batch, time, _, head_dim = gradient.shape
    return gradient.reshape(batch, time, n_heads, -1, head_dim).sum(3)


for _name, _on_cpu, _of_shapes in (
    ("sparse_attention", _forward, _shapes),
    ("sparse_attention_backward", _backward, _shapes_backward),
):
    _LIBRARY.impl(_name, _on_cpu, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _of_shapes, "Meta")  # type: ignore[no-untyped-call]


class _InParts(torch.autograd.Function):
    """Attention of one part at a time; keeps the kernel's normaliser for the backward pass, but no weights."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        bias: Tensor | None,
        window: int | None,
        begins: tuple[int, ...],
    ) -> Tensor:
        mixed, normaliser = torch.ops.muscale.sparse_attention.default(
            query, key, value, documents, bias, window, begins
        )
        ctx.save_for_backward(query, key, value, documents, bias, mixed, normaliser)
        ctx.settings = window, begins
        return cast(Tensor, mixed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *states, mixed, normaliser = ctx.saved_tensors
        gradients = torch.ops.muscale.sparse_attention_backward.default(
            gradient, *states, *ctx.settings, mixed, normaliser
        )
        return (*gradients, *(None,) * 4)
