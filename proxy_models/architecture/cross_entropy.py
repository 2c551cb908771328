"""Cross-entropy of a readout whose logits are never all in memory: chunks of positions, recomputed in the backward pass.

Per position, with logits z, target y, V tokens, smoothing s and the weight c of z-loss, the loss is
lse(z) - (1 - s)·z_y - s/V·sum(z) + c·lse(z)², and its gradient softmax(z)·(1 + 2·c·lse(z)) - s/V - (1 - s)·[y].
Both are those of `F.cross_entropy` with label smoothing, and of z-loss (Chowdhery et al., arXiv 2204.02311, section 5).
Going backward costs one product more than with the logits kept: 8/6 of the readout's floating-point operations.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from proxy_models.architecture import memory
from proxy_models.architecture.products import multiply


def whole_cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Mean over the positions of (…, vocab_size) logits against (…) targets, nats, in fp32."""
    rows = logits.float().flatten(0, -2)
    loss = F.cross_entropy(rows, targets.flatten(), label_smoothing=label_smoothing)
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(rows, dim=-1).square().mean()
    return loss


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Mean cross-entropy of the logits hidden · weightᵀ, of which only `memory.CHUNK_ENTRIES` are in memory at a time.

    Args:
        hidden: (…, width).
        weight: (vocab_size, width), not sharded, of the same dtype; its gradient is summed over the chunks in fp32.
        targets: (…), token ids.
        label_smoothing, z_loss: Terms of the training loss.
    """
    rows = hidden.flatten(0, -2)
    loss = _Chunked.apply(rows, weight, targets.flatten(), label_smoothing, z_loss)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, z_loss: float) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        normalisers = torch.empty(len(hidden), device=hidden.device)
        for part in _chunks(len(hidden), len(weight)):
            logits = multiply(hidden[part], weight.t()).float()
            normaliser = torch.logsumexp(logits, dim=-1)
            normalisers[part] = normaliser
            loss = normaliser - (1 - smoothing) * logits.gather(1, targets[part, None]).squeeze(1)
            if smoothing:
                loss = loss - smoothing / len(weight) * logits.sum(dim=-1)
            if z_loss:
                loss = loss + z_loss * normaliser.square()
            total += loss.sum()
        ctx.save_for_backward(hidden, weight, targets, normalisers)
        ctx.smoothing, ctx.z_loss = smoothing, z_loss
        return total / len(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, normalisers = ctx.saved_tensors
        summed = torch.promote_types(weight.dtype, torch.float32)
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=summed)
        scale = gradient / len(hidden)  # with fp16's loss scale, before anything is rounded to fp16
        for part in _chunks(len(hidden), len(weight)):
            states, normaliser = hidden[part], normalisers[part, None]
            slope = multiply(states, weight.t()).float().sub_(normaliser).exp_()
            if ctx.z_loss:
                slope *= 1 + 2 * ctx.z_loss * normaliser
            if ctx.smoothing:
                slope -= ctx.smoothing / len(weight)
            at_target = torch.full((len(slope), 1), ctx.smoothing - 1, device=slope.device)
            slope.scatter_add_(1, targets[part, None], at_target).mul_(scale)
            low = slope.to(hidden.dtype)
            of_hidden[part] = multiply(low, weight)
            of_weight += multiply(low.t(), states)
        return of_hidden, of_weight.to(weight.dtype), None, None, None


def _chunks(n_positions: int, vocab_size: int) -> list[slice]:
    """Consecutive positions, at most `memory.CHUNK_ENTRIES` logits at a time but at least one position."""
    size = max(1, memory.CHUNK_ENTRIES // vocab_size)
    return [slice(begin, begin + size) for begin in range(0, n_positions, size)]
