"""A trained decoder in the layout of Hugging Face's Llama, which transformers, lm-eval and inference servers read.

Llama has no forward multipliers, so the weights absorb them (`DecoderFamily.absorbed`), and with the attention's sqrt(head_dim), by
which Llama divides logits. The rest is the same in both: the config has the norm's eps, and positions rotate the pairs
(x_i, x_{i + d/2}).

A model with an attention window is written for Mistral's class, which has Llama's weights and a window in every block, or Ministral's,
where each block has a window or not; a model with qk-norm for Qwen3's, which has Llama's weights and the norms' gains. A mixture of
experts is written for one of three classes (`exported_experts`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.experts import BALANCE_BIAS
from proxy_models.architecture.exported_experts import expert_layout, layout_errors, state_errors, zeros_of
from proxy_models.architecture.families import family_of, weight_shapes
from proxy_models.architecture.parametrization import ForwardMultipliers
from proxy_models.data.hugging_face import write_tokenizer
from proxy_models.data.tokenizer import Tokenizer
from proxy_models.files import atomic_directory
from proxy_models.tensor_files import MAX_FILE_BYTES, write_tensors

WEIGHTS = "model.safetensors"
_NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "readout": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""Llama's name of each of our modules; names in a block are without the block's prefix and number."""
_LLAMA: dict[str, tuple[Any, str]] = {
    "norm": ("rmsnorm", "Llama's norms are RMSNorm"),
    "activation": ("swiglu", "Llama's MLP is gated by SiLU"),
    "positions": ("rotary", "Llama's positions are rotary"),
    "rotary_fraction": (1.0, "Llama rotates whole heads"),
    "parallel": (False, "Llama's blocks have attention and MLP one after the other"),
}
"""Value that each setting must have, and the reason."""


class Place(NamedTuple):
    """Source of a tensor.

    Attributes:
        name: Our name; None for zeros.
        factor: Factor on the values.
        shape: Shape of the tensor, on the meta device.
        expert: Number of the matrix in our tensor, if this is a stack.
    """

    name: str | None
    factor: float
    shape: Tensor
    expert: int | None = None


class NotLlamaError(ValueError):
    """Error for an architecture that Llama's layout cannot hold."""


def llama_errors(config: ModelConfig) -> list[str]:
    """Return the settings that Llama's layout and its relatives can't hold, each with its value and the reason.

    Dropout and the terms of the training loss are allowed, since the trained model does not contain them.
    """
    odd = [
        f"model.{name} must be {wanted!r} ({why}), got {getattr(config, name)!r}"
        for name, (wanted, why) in _LLAMA.items()
        if getattr(config, name) != wanted and (name != "rotary_fraction" or config.positions == "rotary")
    ]
    if config.n_experts is not None:
        odd += layout_errors(config)
        return odd
    if config.biases and (config.attention_window is not None or config.qk_norm):
        odd.append("model.biases must be False (the classes with an attention window or qk-norm have none), got True")
    if config.qk_norm and config.attention_window is not None:
        odd.append(
            f"model.attention_window must be None (the class with qk-norm has none), got {config.attention_window}"
        )
    return odd


def export_errors(config: ModelConfig) -> list[str]:
    """Return `llama_errors`, and the states of routers that move in training where the layout can't hold them."""
    errors = llama_errors(config)
    if not errors and config.n_experts and config.balance_rate and not (layout := expert_layout(config)).has_state:
        errors.append(
            f"model.balance_rate must be 0 ({layout.title} selects by softmax alone, without a bias), got {config.balance_rate:g}"
        )
    return errors


def require_llama(config: ModelConfig) -> None:
    """Require an architecture that Llama's layout can hold.

    Raises:
        NotLlamaError: Naming what `llama_errors` finds.
    """
    if odd := llama_errors(config):
        raise NotLlamaError(f"no export to the Llama layout: {'; '.join(odd)}")


def llama_config(config: ModelConfig, *, end_of_document: int | None) -> dict[str, Any]:
    """Return the content of `config.json`.

    Args:
        end_of_document: Id that closes documents and so comes before the next document, or None if it is unknown.

    Raises:
        NotLlamaError: As `require_llama`.
    """
    require_llama(config)
    return {
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,  # transformers before 5 reads this key
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.context_length,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.biases,
        "mlp_bias": config.biases,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "pad_token_id": None,
        "torch_dtype": "float32",
        **_class_of(config),
    }


def _class_of(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that name the class, its windows and its experts."""
    if config.n_experts is not None:
        return dict(expert_layout(config).fields)
    if config.qk_norm:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if config.attention_window is None:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    window = {"sliding_window": config.attention_window}
    if config.global_attention_every is None:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **window}
    windows = (config.window_of(layer) for layer in range(config.n_layers))
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", **window, "layer_types": kinds}


def llama_places(config: ModelConfig, multipliers: ForwardMultipliers) -> dict[str, Place]:
    """Return the source of each of Llama's tensors by name, a tied table once; raise NotLlamaError like `require_llama`."""
    require_llama(config)
    layout = expert_layout(config) if config.n_experts is not None else None
    names = _NAMES | dict(layout.names if layout else {})
    factors = family_of(config).absorbed(
        config, replace(multipliers, attention=multipliers.attention * math.sqrt(config.head_dim))
    )
    places: dict[str, Place] = {}
    for name, shape in weight_shapes(config).items():
        module, _, kind = name.rpartition(".")
        prefix = ""
        if module.startswith("blocks."):
            _, layer, module = module.split(".", 2)
            prefix = f"model.layers.{layer}."
        if layout and module == "mlp.experts":
            for expert, matrix in enumerate(shape):
                their = f"{prefix}{names[module]}.{expert}.{layout.matrices[kind]}.weight"
                places[their] = Place(name, factors[name], matrix, expert)
        elif layout and kind == BALANCE_BIAS:
            if layout.has_state:
                places[f"{prefix}{names[module]}.e_score_correction_bias"] = Place(name, 1.0, shape)
        else:
            places[f"{prefix}{names[module]}.{kind}"] = Place(name, factors[name], shape)
    if layout:
        places |= {name: Place(None, 1.0, shape) for name, shape in zeros_of(config, layout)}
    return places


def _values(weights: Mapping[str, Tensor], place: Place) -> Tensor:
    if place.name is None:
        return torch.zeros_like(place.shape, device="cpu")
    tensor = weights[place.name] if place.expert is None else weights[place.name][place.expert]
    return tensor.detach().to("cpu", torch.float32) * place.factor


def write_llama(
    config: ModelConfig,
    multipliers: ForwardMultipliers,
    weights: Mapping[str, Tensor],
    folder: Path,
    tokenizer: Tokenizer | None,
    *,
    card: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load, in fp32, with one tensor in memory at a time.

    Args:
        weights: The decoder's parameters and routers' state by name.
        folder: Must not exist or be empty; it appears with all files or not at all.
        tokenizer: None if the corpus was given as tokens; then no tokenizer is written.
        card: Text of a README.md in the folder.
        max_file_bytes: Larger weights are split over several files, listed in an index.

    Raises:
        NotLlamaError: As `require_llama`, or if routers have a state that the layout can't hold; nothing is written then.
        FileExistsError: If there is something in the folder.
    """
    end = tokenizer.end_of_document if tokenizer else None
    described, places = llama_config(config, end_of_document=end), llama_places(config, multipliers)
    if config.n_experts is not None and (odd := [*state_errors(config, weights)]):
        raise NotLlamaError(f"no export to the Llama layout: {'; '.join(odd)}")
    tensors = ((name, _values(weights, place)) for name, place in places.items())
    generation = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "do_sample": False}
    with atomic_directory(folder) as unfinished:
        shapes = {name: place.shape for name, place in places.items()}
        write_tensors(unfinished / WEIGHTS, shapes, tensors, max_file_bytes=max_file_bytes)
        _write_json(unfinished / "config.json", described)
        _write_json(unfinished / "generation_config.json", generation)
        if tokenizer is not None:
            write_tokenizer(tokenizer, unfinished, context_length=config.context_length)
        if card is not None:
            (unfinished / "README.md").write_text(card, encoding="utf-8")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
