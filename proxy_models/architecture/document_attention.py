"""Causal attention that stays within documents, without a mask of time × time.

A sequence holds parts of several documents, one after another. The token that closes a document is the first key of the next document,
since text is generated after this token; so it is the `bos_token_id` of the Llama export. Positions continue over the sequence: rotary
angles and ALiBi depend only on distances, and learned positions stay those of the sequence. Llama 3 masks documents in the same way
(arXiv 2407.21783, section 3.2): little changed in ordinary pre-training, and the mask mattered for very long sequences.

On a GPU, FlexAttention skips blocks of 128 × 128 without a common document (Dong et al., arXiv 2412.05496). FlexAttention has no
backward pass on CPUs, where torch's fused kernel takes one document at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch import library as operators
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_BLOCK = 128


def number_documents(tokens: Tensor, separator: int) -> Tensor:
    """Number the documents: return the document of each token (batch, time), ascending along a sequence."""
    return (tokens == separator).cumsum(-1)


def document_blocks(documents: Tensor) -> BlockMask:
    """Return FlexAttention's table of the blocks that share a document, from the document numbers (batch, time).

    Since the numbers ascend, a block's first and last number suffice to compare blocks, without waiting for the device.
    """
    time = documents.shape[1]
    n_blocks = -(-time // _BLOCK)
    order = torch.arange(n_blocks, device=documents.device)
    first, last = documents[:, ::_BLOCK], documents[:, ((order + 1) * _BLOCK - 1).clamp(max=time - 1)]
    queries, keys = order[:, None], order
    whole = queries < time // _BLOCK  # torch does not treat a block as full if it ends beyond the sequence
    full = whole & (queries > keys) & (last[:, :, None] == first[:, None, :])
    shared = (queries >= keys) & (first[:, :, None] <= last[:, None, :]) & ~full

    def visible(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    return BlockMask.from_kv_blocks(
        *_listed(shared), *_listed(full), BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(time, time)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for all heads, the number of key blocks of each block of queries, and the indices with these key blocks first."""
    blocks = blocks[:, None].int()
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()


def attend_within(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | BlockMask, bias: Tensor | None
) -> Tensor:
    """Mix values by causal attention within documents, without a scale; shapes are (batch, time, heads, head_dim).

    Args:
        documents: Result of `number_documents` on a CPU, of `document_blocks` on a GPU.
        bias: Bias on the logits, (heads, time, time) with -inf on the future, equal for equal distances; None: no bias.
    """
    if isinstance(documents, Tensor):
        return cast(Tensor, _OneByOne.apply(query, key, value, documents, bias))  # type: ignore[no-untyped-call]

    def biased(score: Tensor, _batch: Tensor, head: Tensor, at_query: Tensor, at_key: Tensor) -> Tensor:
        return score + cast(Tensor, bias)[head, at_query, at_key]

    mixed = _compiled_flex()(
        *(states.transpose(1, 2) for states in (query, key, value)),
        score_mod=None if bias is None else biased,
        block_mask=documents,
        scale=1.0,
        enable_gqa=query.shape[2] > key.shape[2],
    )
    return cast(Tensor, mixed.transpose(1, 2))


@cache
def _compiled_flex() -> Any:
    """Return the fused kernel of FlexAttention even if the model is not compiled, since an eager FlexAttention keeps all scores."""
    return torch.compile(flex_attention)


_LIBRARY = operators.Library("muscale", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "document_attention(Tensor query, Tensor key, Tensor value, Tensor documents, Tensor? bias) -> (Tensor, Tensor)"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "document_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor documents, Tensor? bias, "
    "Tensor mixed, Tensor normaliser) -> (Tensor, Tensor, Tensor)"
)


def _shapes(
    query: Tensor, _key: Tensor, _value: Tensor, _documents: Tensor, _bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        query.shape[:3], dtype=torch.float32
    )


def _forward(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    mixed, normaliser = _shapes(query, key, value, documents, bias)
    key, value = _expanded(query, key), _expanded(query, value)
    for place in _places(documents):
        states = (x[place].transpose(1, 2) for x in (query, key, value))
        of_place = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*states, **_causal(bias, place))
        mixed[place], normaliser[place] = (x.transpose(1, 2) for x in of_place)
    return mixed, normaliser


def _shapes_backward(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    bias: Tensor | None,
    mixed: Tensor,
    normaliser: Tensor,
) -> tuple[Tensor, ...]:
    whole = (gradient, query, _expanded(query, key), _expanded(query, value), mixed, normaliser)
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in whole[1:4]]
    for place in _places(documents):
        states = (x[place].transpose(1, 2) for x in whole)
        of_place = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *states, dropout_p=0.0, **_causal(bias, place)
        )
        for all_of_it, part in zip(gradients, of_place, strict=True):
            all_of_it[place] = part.transpose(1, 2)
    return tuple(_summed(x, like.shape[2]) for x, like in zip(gradients, (query, key, value), strict=True))


def _places(documents: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the sequence and the positions of each document in a batch."""
    for row, numbers in enumerate(documents):
        begins = (numbers.diff().nonzero().flatten() + 1).tolist()
        for begin, end in pairwise([0, *begins, len(numbers)]):
            yield slice(row, row + 1), slice(begin, end)


def _expanded(query: Tensor, states: Tensor) -> Tensor:
    """Return keys or values repeated to as many heads as there are queries."""
    n_groups = query.shape[2] // states.shape[2]
    return states.repeat_interleave(n_groups, 2) if n_groups > 1 else states


def _summed(gradient: Tensor, n_heads: int) -> Tensor:
    """Return the reverse of `_expanded`: gradients summed over each group of heads."""
    batch, time, _, head_dim = gradient.shape
    return gradient.reshape(batch, time, n_heads, -1, head_dim).sum(3)


def _causal(bias: Tensor | None, place: tuple[slice, slice]) -> dict[str, Any]:
    """Return the kernel's arguments for one document."""
    length = place[1].stop - place[1].start
    mask = None if bias is None else bias[None, :, :length, :length]
    return {"is_causal": bias is None, "attn_mask": mask, "scale": 1.0}


for _name, _on_cpu, _of_shapes in (
    ("document_attention", _forward, _shapes),
    ("document_attention_backward", _backward, _shapes_backward),
):
    _LIBRARY.impl(_name, _on_cpu, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _of_shapes, "Meta")  # type: ignore[no-untyped-call]


class _OneByOne(torch.autograd.Function):
    """Attention of one document at a time; keeps the kernel's normaliser for the backward pass, but no weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Tensor, bias: Tensor | None) -> Tensor:
        mixed, normaliser = torch.ops.muscale.document_attention.default(query, key, value, documents, bias)
        ctx.save_for_backward(query, key, value, documents, bias, mixed, normaliser)
        return cast(Tensor, mixed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.muscale.document_attention_backward.default(gradient, *ctx.saved_tensors)
        return (*gradients, None, None)
