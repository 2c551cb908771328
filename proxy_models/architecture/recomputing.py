"""Activation checkpointing: a block keeps some activations for its backward pass and recomputes the rest.

"full" keeps the block's input (Chen et al., arXiv 1604.06174). "selective" also keeps the outputs of matrix products and of fused
attention, so that only cheap operations are recomputed (Korthikanti et al., arXiv 2205.05198, section 5, recompute attention's core,
as fused kernels do anyway). Losses stay the same, since recomputation draws the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from proxy_models.architecture.memory import Checkpointing

Result = TypeVar("Result")
# FSDP2 labels what it does for a unit inside a block; in a recomputation it does something else, and torch would miss the labels.
SAC_IGNORED_OPS.update(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.muscale.product.default,
    torch.ops.muscale.grouped_product.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.muscale.sparse_attention.default,
    torch.ops.higher_order.flex_attention,
}


def _policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = partial(create_selective_checkpoint_contexts, _policy)


def recomputing(kind: Checkpointing, function: Callable[..., Result], *arguments: Any, is_random: bool) -> Result:
    """Call `function`, keeping for its backward pass the activations that `kind` keeps.

    Also keep the state of the random numbers if the function draws any (`is_random`).
    """
    if kind == "none" or not torch.is_grad_enabled():
        return function(*arguments)
    arguments_of_torch: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": is_random}
    if kind == "selective":
        arguments_of_torch["context_fn"] = _selective_contexts
    return cast(Result, checkpoint(function, *arguments, **arguments_of_torch))
