"""Layouts of transformers that hold a mixture of experts; attention, norms and tables are Llama's.

| class     | router                 | shared experts | first dense layers | qk-norm | window in   |
| --------- | ---------------------- | -------------- | ------------------ | ------- | ----------- |
| Mixtral   | softmax, without state | none           | none               | no      | each block  |
| Qwen3-MoE | softmax, without state | none           | any                | yes     | each block  |
| GLM-4-MoE | sigmoid, with state    | any            | any                | any     | no block    |

GLM-4-MoE always has a shared expert; zeros, which add nothing, are written for a model without one. In all of them the gates of a
token's experts sum to 1. The state of a router, `balance_bias`, is GLM's `e_score_correction_bias`, which also acts in the selection
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proxy_models.architecture.config import ModelConfig

_MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_ROUTED = {"mlp.router": "mlp.gate", "mlp.experts": "mlp.experts"}


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Layout of one class.

    Attributes:
        title: Name of the class in messages.
        fields: Fields of `config.json` beyond Llama's.
        names: Name of each of our modules within a block.
        matrices: Name of each matrix of an expert.
        has_state: Whether the layout holds the state of routers.
    """

    title: str
    fields: Mapping[str, Any]
    names: Mapping[str, str]
    matrices: Mapping[str, str]
    has_state: bool = False


def expert_layout(config: ModelConfig) -> ExpertLayout:
    """Return the layout that is nearest to a mixture; `layout_errors` has what does not fit."""
    experts = {"num_experts_per_tok": config.experts_per_token, "output_router_logits": False}
    window = {"sliding_window": config.attention_window}
    norms = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
    if config.router_scores == "softmax" and not config.qk_norm:
        moe = "block_sparse_moe"
        return ExpertLayout(
            title="Mixtral",
            fields={
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "intermediate_size": config.expert_width,
                "num_local_experts": config.n_experts,
                **experts,
                **window,
            },
            names={"mlp.router": f"{moe}.gate", "mlp.experts": f"{moe}.experts"},
            matrices={"gate": "w1", "up": "w3", "down": "w2"},
        )
    experts |= {"moe_intermediate_size": config.expert_width, "norm_topk_prob": True}
    if config.router_scores == "softmax":
        return ExpertLayout(
            title="Qwen3-MoE",
            fields={
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "num_experts": config.n_experts,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [*range(config.first_dense_layers)],
                "use_sliding_window": config.attention_window is not None,
                **experts,
                **window,
            },
            names=_ROUTED | norms,
            matrices=_MATRICES,
        )
    return ExpertLayout(
        title="GLM-4-MoE",
        fields={
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "n_routed_experts": config.n_experts,
            "n_shared_experts": max(1, config.n_shared_experts),
            "first_k_dense_replace": config.first_dense_layers,
            "use_qk_norm": config.qk_norm,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": 1.0,
            },
            **experts,
        },
        names=_ROUTED
        | norms
        | {f"mlp.shared.{our}": f"mlp.shared_experts.{their}" for our, their in _MATRICES.items()},
        matrices=_MATRICES,
        has_state=True,
    )


def zeros_of(config: ModelConfig, layout: ExpertLayout) -> Iterator[tuple[str, Tensor]]:
    """Yield the names, and the shapes on the meta device, of tensors of zeros that a layout has and the model lacks."""
    if layout.fields.get("n_shared_experts", 0) > config.n_shared_experts:
        up = torch.empty(config.expert_width, config.d_model, device="meta")
        for layer in filter(config.is_sparse, range(config.n_layers)):
            for matrix in _MATRICES.values():
                name = f"model.layers.{layer}.mlp.shared_experts.{matrix}.weight"
                yield name, up.T if matrix == "down_proj" else up


def layout_errors(config: ModelConfig) -> Iterator[str]:
    """Yield the settings of a mixture that its nearest layout can't hold, with the reason."""
    title = expert_layout(config).title
    if config.biases:
        yield "model.biases must be False (the classes with experts have none in MLPs), got True"
    if config.expert_scheme == "sqrt_gate":
        yield "model.expert_scheme must not be 'sqrt_gate' (in transformers gates sum to 1, not their squares), got 'sqrt_gate'"
    if config.global_attention_every is not None:
        yield f"model.global_attention_every must be None ({title} has one window), got {config.global_attention_every}"
    if config.router_scores == "sigmoid":
        if config.attention_window is not None:
            yield f"model.attention_window must be None ({title}, for sigmoid routers, has none), got {config.attention_window}"
        return
    if config.n_shared_experts:
        yield (
            f"model.n_shared_experts must be 0 ({title} has none; GLM-4-MoE has, with router_scores = 'sigmoid'), got "
            f"{config.n_shared_experts}"
        )
    if title == "Mixtral" and config.first_dense_layers:
        yield (
            f"model.first_dense_layers must be 0 (Mixtral has experts in each block; Qwen3-MoE, with qk_norm, need not), got "
            f"{config.first_dense_layers}"
        )


def state_errors(config: ModelConfig, weights: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the states of routers that act in the selection, if the layout can't hold them."""
    layout = expert_layout(config)
    for layer in filter(config.is_sparse, range(config.n_layers)):
        name = f"blocks.{layer}.mlp.router.balance_bias"
        if not layout.has_state and (low := weights[name].min()) != (high := weights[name].max()):
            yield (
                f"{name} must be the same for all experts ({layout.title} selects by softmax alone: train with balance_rate = 0 and a "
                f"balance_loss, or with router_scores = 'sigmoid' for GLM-4-MoE), got {low:g} to {high:g}"
            )
