"""Mixtures of experts among transformers' classes: those whose tensors and settings are known here, computed by our grouped product.

Both classes stack the matrices of a block's experts, outputs before inputs, as `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`,
and have a linear router `mlp.gate`. Other classes with experts are refused, since a stack of theirs may have its inputs first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

from proxy_models.architecture.config import ROW_ENTRIES
from proxy_models.architecture.family import FamilyError
from proxy_models.architecture.parametrization import TensorClass

if TYPE_CHECKING:
    from torch import Tensor, nn

EXPERT_WIDTHS = {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}
"""Name of the hidden width of an expert, by the `model_type` of each known class."""
IMPLEMENTATION = "muscale"
"""Name under which transformers finds `grouped_experts`."""
_CLASSES = {
    "mlp.experts.gate_up_proj": TensorClass.HIDDEN_STACK,
    "mlp.experts.down_proj": TensorClass.HIDDEN_STACK,
    "mlp.gate.weight": TensorClass.ROUTER,
}


def has_experts(config: Any) -> bool:
    """Return True for the config of a known mixture."""
    return config.model_type in EXPERT_WIDTHS and config.num_experts > 0


def require_chosen(config: Any) -> None:
    """Require that a token passes some experts, at most all, whose gates depend on the router; raise FamilyError otherwise."""
    per_token, n_experts = config.num_experts_per_tok, config.num_experts
    # Gates that are divided by their sum are constant for a single expert.
    least = 2 if getattr(config, "norm_topk_prob", True) else 1
    if not least <= per_token <= n_experts:
        raise FamilyError(
            f"num_experts_per_tok must lie in {least} to the number of experts, {n_experts}, got {per_token}"
        )


def units_of_rows(config: Any) -> list[Fraction]:
    """Return the sizes of rows of experts over the hidden size, in units that fill 16 bytes in bf16 and so must be whole."""
    sizes = (config.hidden_size, getattr(config, EXPERT_WIDTHS[config.model_type]))
    return [Fraction(size, ROW_ENTRIES * config.hidden_size) for size in sizes]


def expert_classes(names: Iterable[str]) -> dict[str, str]:
    """Return the classes of a mixture's tensors that their shapes do not show, by name."""
    return {
        name: tensor_class.value
        for name in names
        for ending, tensor_class in _CLASSES.items()
        if name.endswith(f".{ending}")
    }


def router_names(network: nn.Module) -> list[str]:
    """Return the names of the routers."""
    return [name for name, _ in network.named_modules() if name.endswith(".mlp.gate")]


def active_shares(config: Any, classes: Mapping[str, str]) -> dict[str, float]:
    """Return the share of each stack that one token uses, by name."""
    share = config.num_experts_per_tok / config.num_experts
    return {name: share for name, tensor_class in classes.items() if tensor_class == TensorClass.HIDDEN_STACK}


def register() -> None:
    """Make `grouped_experts` known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, grouped_experts)


def grouped_experts(experts: nn.Module, tokens: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
    """Return the sum of a token's experts by their gates, in a form that compiles and is traced in every precision.

    Args:
        experts: Module of transformers with the stacks.
        tokens: (tokens, width).
        chosen, gates: Experts of each token and their weights, (tokens, experts per token).
    """
    import torch

    from proxy_models.architecture.experts import load_of, through_experts
    from proxy_models.architecture.grouped import grouped_product

    stacks, kind = cast(Any, experts), tokens.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tokens.dtype
    ends = load_of(chosen, len(stacks.down_proj)).cumsum(0).int()

    def compute(rows: Tensor) -> Tensor:
        hidden = stacks._apply_gate(grouped_product(rows, stacks.gate_up_proj.to(dtype), ends))
        return grouped_product(hidden, stacks.down_proj.to(dtype), ends)

    return through_experts(tokens.to(dtype), chosen, gates, compute).to(tokens.dtype)
