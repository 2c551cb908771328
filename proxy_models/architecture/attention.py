"""Causal attention by a fused kernel. On a GPU, torch's math kernel, which keeps (batch, heads, time, time) weights, is never needed.

torch uses FlashAttention for bf16 and fp16 without a mask, the memory-efficient kernel for fp32 or with a mask, and the math kernel
if neither supports a case (`can_use_flash_attention` and `can_use_mem_efficient_attention` in its cuda/sdp_utils.cpp). Both fused
kernels support dropout. Keys and values are expanded for the memory-efficient kernel, whose grouped heads some releases of torch lack.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from proxy_models.architecture.sparse_attention import attend_within

Kernel = Literal["flash", "efficient", "flex", "math"]
_LARGEST_FLASH_HEAD = 256
_SMALLEST_FLEX_HEAD = 16


def cuda_kernel(dtype: torch.dtype, head_dim: int, *, biased: bool, grouped: bool, sparse: bool = False) -> Kernel:
    """Return the kernel that torch uses on an NVIDIA GPU of compute capability 8 or more.

    Args:
        dtype: Dtype of queries, keys and values.
        head_dim: FlashAttention pads it to a multiple of 8; the memory-efficient kernel requires a multiple of 16 bytes.
        biased: Whether a bias is added to the logits.
        grouped: Whether fewer key and value heads than query heads are passed on.
        sparse: Whether attention stays within documents or a window. FlexAttention does this for every dtype, bias and
            grouping, but only for heads of at least 16 (torch/_inductor/kernel/flex/flex_attention.py of torch 2.13).
    """
    if sparse:
        return "flex" if head_dim >= _SMALLEST_FLEX_HEAD else "math"
    if dtype != torch.float32 and not biased and head_dim <= _LARGEST_FLASH_HEAD:
        return "flash"
    return "math" if grouped or head_dim % (16 // dtype.itemsize) else "efficient"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None,
    dropout: float,
    documents: Tensor | BlockMask | None = None,
    window: int | None = None,
    begins: tuple[int, ...] = (0,),
) -> Tensor:
    """Mix values by causal attention without a scale; queries, keys and values are (batch, time, heads, head_dim).

    Args:
        query: Queries; as many heads as `key` and `value`, or a multiple.
        bias: Bias on the logits, (heads, time, time) with -inf on the future; None: causal attention without a bias.
        dropout: Probability of dropping a weight; 0 within documents or a window.
        documents: Documents as `sparse_attention.attend_within` takes them; None: attention crosses documents.
        window: Tokens that a position attends to at most; None: all tokens so far.
        begins: First positions of the equal pieces that the queries consist of, if they are not those of the keys.
    """
    if window is not None and window >= key.shape[1]:
        window = None
    if documents is not None or window is not None or len(begins) > 1:
        return attend_within(query, key, value, documents, window, bias, begins)
    n_groups = query.shape[2] // key.shape[2]
    kernel = cuda_kernel(query.dtype, query.shape[3], biased=bias is not None, grouped=n_groups > 1)
    if n_groups > 1 and kernel == "math" and _on_gpu(query):
        key, value, n_groups = key.repeat_interleave(n_groups, 2), value.repeat_interleave(n_groups, 2), 1
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=bias,
        is_causal=bias is None,
        dropout_p=dropout,
        scale=1.0,
        enable_gqa=n_groups > 1,
    )
    return mixed.transpose(1, 2)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"
