"""Cross-entropy of a readout that never holds all logits in memory: the backward pass recomputes chunks of positions.

Per position, with logits z, target y, V tokens, smoothing s and the weight c of z-loss, the loss is
lse(z) - (1 - s)·z_y - s/V·sum(z) + c·lse(z)², and its gradient softmax(z)·(1 + 2·c·lse(z)) - s/V - (1 - s)·[y].
Both equal those of `F.cross_entropy` with label smoothing, plus z-loss (Chowdhery et al., arXiv 2204.02311, section 5).
The backward pass costs one more product than with kept logits: 8/6 of the readout's floating-point operations.

The loops over chunks are custom operators, so that torch.compile sees one node instead of one per chunk. If the rows (tokens) of the
weight are sharded, each rank computes its own logits, and ranks exchange two or three numbers per position.

On a GPU, memory traffic determines the time of the loss. Uncompiled, the loss reads and writes the fp32 logits about twenty times: a
sixth of a step of 350M parameters over 50,304 tokens on an H200 (tests/benchmarks/RESULTS.md). Compiled, a chunk's logits are read in
low precision, and their gradient is written in low precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import library as operators
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from proxy_models.architecture import memory
from proxy_models.architecture.products import multiply
from proxy_models.architecture.sharded import first_row, is_sharded, own, within
from proxy_models.data.uncounted import sequence_ids


class LogitsError(ValueError):
    """Error for a model that returns something else than logits of each sequence and position."""


def whole_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the mean over the positions of weight times cross-entropy of (…, vocab_size) logits against (…) targets, nats, in fp32.

    `weights` (…) multiply all terms of a position; the mean divides by the number of positions, whatever their sum. None: all 1.
    """
    rows = logits.float().flatten(0, -2)
    if weights is not None:
        losses = F.cross_entropy(rows, targets.flatten(), label_smoothing=label_smoothing, reduction="none")
        if z_loss:
            losses = losses + z_loss * torch.logsumexp(rows, dim=-1).square()
        return (losses * weights.flatten()).mean()
    loss = F.cross_entropy(rows, targets.flatten(), label_smoothing=label_smoothing)
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(rows, dim=-1).square().mean()
    return loss


def shifted(sequences: Tensor, scale: Tensor | float | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split sequences (batch, time + 1) into what a model reads, what it predicts, and the weight of each prediction.

    Args:
        scale: Weight of a token that counts; None: every token counts, and no sequence has to be checked.

    Returns:
        Ids (batch, time); ids (batch, time); and weights (batch, time) in fp32, 0 for tokens that do not count, or None.
    """
    if scale is None:
        return sequences[:, :-1], sequences[:, 1:], None
    tokens, targets = sequence_ids(sequences[:, :-1]), sequences[:, 1:]
    weight = torch.as_tensor(scale, dtype=torch.float32, device=sequences.device)
    return tokens, sequence_ids(targets), torch.where(targets < 0, 0.0, weight)


def sequence_loss(model: nn.Module, sequences: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return any model's mean cross-entropy on (batch, time + 1) tokens, each predicted from those before it, nats per token.

    `scale` is that of `proxy_models.architecture.family.Loss`.

    Raises:
        LogitsError: If the model returns something else than logits (batch, time, vocab_size).
    """
    tokens, targets, weights = shifted(sequences, scale)
    logits = model(tokens)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != targets.shape:
        found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise LogitsError(
            f"{type(model).__name__}: forward must return logits of shape ({len(targets)}, {targets.shape[1]}, vocab_size) for tokens "
            f"of shape {tuple(tokens.shape)}, got {found}"
        )
    return whole_cross_entropy(logits, targets, weights)


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    compiled: bool = False,
) -> Tensor:
    """Return the mean cross-entropy of the logits hidden · weightᵀ, with at most `memory.CHUNK_ENTRIES` logits in memory.

    Args:
        hidden: (…, width), the same on every rank that has a part of the weight; the gradient covers only the rank's own logits.
        weight: (vocab_size, width), whole or sharded by rows, of the same dtype; its gradient is summed over the chunks in fp32.
        targets: (…), token ids.
        weights: (…), as in `whole_cross_entropy`, fp32.
        label_smoothing, z_loss: Terms of the training loss.
        compiled: Whether the computation on a chunk's logits is compiled.
    """
    vocab_size, first, group = len(weight), None, None
    if is_sharded(weight):
        first, group = first_row(weight), weight.device_mesh.get_group()
    rows, of_rows = hidden.flatten(0, -2), None if weights is None else weights.flatten()
    loss = _Chunked.apply(  # type: ignore[no-untyped-call]
        rows, own(weight), targets.flatten(), of_rows, first, vocab_size, group, label_smoothing, z_loss, compiled
    )
    return cast(Tensor, loss)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        first: int | None,
        vocab_size: int,
        group: Any,
        smoothing: float,
        z_loss: float,
        compiled: bool,
    ) -> Tensor:
        statistics = torch.ops.muscale.logit_statistics(hidden, weight, targets, first, bool(smoothing), compiled)
        if group is not None:
            statistics = _over_ranks(statistics, group)
        normalisers = statistics[0].clone()
        losses = normalisers - (1 - smoothing) * statistics[1]
        if smoothing:
            losses = losses - smoothing / vocab_size * statistics[2]
        if z_loss:
            losses = losses + z_loss * normalisers.square()
        if weights is not None:
            losses = losses * weights
        ctx.save_for_backward(hidden, weight, targets, weights, normalisers)
        ctx.settings = (first, smoothing, smoothing / vocab_size, z_loss, compiled)
        return cast(Tensor, torch.ops.muscale.sum_by_chunk(losses, len(weight)) / len(hidden))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, weights, normalisers = ctx.saved_tensors
        scale = gradient / len(hidden)  # includes fp16's loss scale before any value is rounded to fp16
        if weights is not None:
            scale = scale * weights[:, None]
        of_hidden, of_weight = torch.ops.muscale.logit_gradients(
            scale, hidden, weight, targets, normalisers, *ctx.settings
        )
        return of_hidden, of_weight, *(None,) * 8


def _over_ranks(statistics: Tensor, group: Any) -> Tensor:
    """Return the statistics of all logits from the statistics of each rank."""
    from torch.distributed import _functional_collectives as collectives

    gathered = collectives.wait_tensor(collectives.all_gather_single(statistics[None], 0, group))  # type: ignore[no-untyped-call]
    return torch.cat((torch.logsumexp(gathered[:, :1], dim=0), gathered[:, 1:].sum(dim=0)))


_LIBRARY = operators.Library("muscale", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "logit_statistics(Tensor hidden, Tensor weight, Tensor targets, int? first, bool summed, bool compiled) -> Tensor",
    "sum_by_chunk(Tensor losses, int vocab_size) -> Tensor",
    "logit_gradients(Tensor scale, Tensor hidden, Tensor weight, Tensor targets, Tensor normalisers, int? first, "
    "float smoothing, float share, float z_loss, bool compiled) -> (Tensor, Tensor)",
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)


def _statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, first: int | None, summed: bool, compiled: bool
) -> Tensor:
    """Return three fp32 numbers per position: the logits' log-sum-exp, the target's logit (0 on other ranks), the logits' sum."""
    statistics = hidden.new_empty((2 + summed, len(hidden)), dtype=torch.float32)
    of_chunk = _compiled(_statistics_of_chunk) if compiled else _statistics_of_chunk
    for part in _chunks(len(hidden), len(weight)):
        index, absent = within(targets[part, None], first, len(weight))
        statistics[:, part] = of_chunk(multiply(hidden[part], weight.t()), index, absent, summed)
    return statistics


def _statistics_of_chunk(logits: Tensor, index: Tensor, absent: Tensor | None, summed: bool) -> Tensor:
    logits = logits.float()
    at_target = logits.gather(1, index)
    found = [
        torch.logsumexp(logits, dim=-1),
        (at_target if absent is None else at_target.masked_fill(absent, 0.0)).squeeze(1),
    ]
    return torch.stack([*found, logits.sum(dim=-1)] if summed else found)


def _sum_by_chunk(losses: Tensor, vocab_size: int) -> Tensor:
    total = losses.new_zeros(())
    for part in _chunks(len(losses), vocab_size):
        total += losses[part].sum()
    return total


def _gradients(
    scale: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    first: int | None,
    smoothing: float,
    share: float,
    z_loss: float,
    compiled: bool,
) -> tuple[Tensor, Tensor]:
    """Return gradients of `scale` times the summed loss for hidden states and weight; `share` is smoothing / vocab_size.

    `scale` is one number, or one for each position, (positions, 1).
    """
    of_hidden = hidden.new_empty(hidden.shape)
    of_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    of_chunk = _compiled(_gradient_of_chunk) if compiled else _gradient_of_chunk
    for part in _chunks(len(hidden), len(weight)):
        states = hidden[part]
        index, absent = within(targets[part, None], first, len(weight))
        of_part = scale[part] if scale.ndim else scale
        slope = of_chunk(
            multiply(states, weight.t()), of_part, normalisers[part, None], index, absent, smoothing, share, z_loss
        )
        of_hidden[part] = multiply(slope, weight)
        of_weight += multiply(slope.t(), states)
        del slope  # frees memory before the next chunk's slope is computed
    return of_hidden, of_weight.to(weight.dtype)


def _gradient_of_chunk(
    logits: Tensor,
    scale: Tensor,
    normaliser: Tensor,
    index: Tensor,
    absent: Tensor | None,
    smoothing: float,
    share: float,
    z_loss: float,
) -> Tensor:
    """Return the gradient of `scale` times the chunk's summed loss for its logits, in their precision; overwrites fp32 logits."""
    dtype, slope = logits.dtype, logits.float()
    del logits
    slope.sub_(normaliser).exp_()
    if z_loss:
        slope.mul_(1 + 2 * z_loss * normaliser)
    if smoothing:
        slope.sub_(share)
    at_target = slope.gather(1, index)
    lower = at_target + (smoothing - 1)
    at_target = lower if absent is None else torch.where(absent, at_target, lower)
    low = slope.mul_(scale).to(dtype)
    return low.scatter_(1, index, (at_target * scale).to(dtype))


def _shape_of_statistics(
    hidden: Tensor, _weight: Tensor, _targets: Tensor, _first: int | None, summed: bool, _compiled: bool
) -> Tensor:
    return hidden.new_empty((2 + summed, len(hidden)), dtype=torch.float32)


for _name, _kernel, _shapes in (
    ("logit_statistics", _statistics, _shape_of_statistics),
    ("sum_by_chunk", _sum_by_chunk, lambda losses, _: losses.new_empty(())),
    (
        "logit_gradients",
        _gradients,
        lambda _, hidden, weight, *__: (hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)),
    ),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _shapes, "Meta")  # type: ignore[no-untyped-call]


@register_flop_formula(torch.ops.muscale.logit_statistics)
def _forward_flops(hidden: tuple[int, int], weight: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * hidden[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.muscale.logit_gradients)
def _backward_flops(_scale: Any, hidden: tuple[int, int], weight: tuple[int, int], *_: Any, **__: Any) -> int:
    return 3 * 2 * hidden[0] * weight[0] * weight[1]  # recomputes the logits, and one product for each gradient


def _chunks(n_positions: int, vocab_size: int) -> list[slice]:
    """Return slices of consecutive positions, each with at most `memory.CHUNK_ENTRIES` logits or a single position."""
    size = max(1, memory.CHUNK_ENTRIES // vocab_size)
    return [slice(begin, begin + size) for begin in range(0, n_positions, size)]
