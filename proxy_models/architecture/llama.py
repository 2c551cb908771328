"""A trained decoder in the layout of Hugging Face's Llama, which transformers, lm-eval and inference servers read.

Llama has no forward multipliers, so they go into the weights, which leaves every activation of the residual stream as it was:

| multiplier       | goes into                                                                     |
| ---------------- | ----------------------------------------------------------------------------- |
| embedding        | the embedding table                                                           |
| attention logits | the query projection, times sqrt(head_dim), by which Llama's attention divides |
| residual branch  | the projections that end a branch: attention's output, the MLP's down         |
| readout          | the readout; of a tied table, over the embedding's, the gain of the final norm |

A tied table is in two products with a multiplier each. It takes the first one, and the gain of the norm before the readout
takes their quotient, so that it stays tied.

Everything else is the same in both: the norm's eps stands in the config, and positions rotate the pairs (x_i, x_{i + d/2}).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import NORM_EPS, ROTARY_BASE, Decoder
from proxy_models.data.hugging_face import write_tokenizer
from proxy_models.data.tokenizer import Tokenizer
from proxy_models.files import atomic_directory, save_tensors

MAX_SHARD_BYTES = 5 * 10**9  # the default of transformers 4; a loader holds one shard in memory
WEIGHTS = "model.safetensors"
_LAYER = "model.layers"
_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""Names of a block's modules, ours to Llama's."""
_LLAMA: dict[str, tuple[Any, str]] = {
    "norm": ("rmsnorm", "Llama's norms are RMSNorm"),
    "activation": ("swiglu", "Llama's MLP is gated by SiLU"),
    "positions": ("rotary", "Llama's positions are rotary"),
    "rotary_fraction": (1.0, "Llama rotates whole heads"),
    "qk_norm": (False, "Llama has no norm over queries and keys"),
    "parallel": (False, "Llama's blocks have attention and MLP one after the other"),
}
"""Value that each setting must have, and the reason."""


class NotLlamaError(ValueError):
    """Error for an architecture that Llama's layout cannot hold."""


def require_llama(config: ModelConfig) -> None:
    """Require an architecture that Llama's layout can hold.

    Dropout and the terms of the training loss do not count: they are not in the trained model.

    Raises:
        NotLlamaError: Naming every setting that it cannot hold, and its value.
    """
    odd = [
        f"model.{name} must be {wanted!r} ({why}), got {getattr(config, name)!r}"
        for name, (wanted, why) in _LLAMA.items()
        if getattr(config, name) != wanted and (name != "rotary_fraction" or config.positions == "rotary")
    ]
    if odd:
        raise NotLlamaError(f"no export to the Llama layout: {'; '.join(odd)}")


def llama_config(config: ModelConfig, *, end_of_document: int | None) -> dict[str, Any]:
    """The content of `config.json`.

    Args:
        config: The shape.
        end_of_document: Id that closes documents, and so stands before the next one, or None where it is not known.

    Raises:
        NotLlamaError: As `require_llama`.
    """
    require_llama(config)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROTARY_BASE,  # where transformers before 5 looks
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
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
    }


@torch.no_grad()
def llama_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Llama's tensors by name, fp32 on the CPU, the multipliers folded in; of a tied table there is one.

    Raises:
        NotLlamaError: As `require_llama`.
    """
    config = decoder.config
    require_llama(config)
    embedding, readout = float(decoder.embedding_multiplier), float(decoder.readout_multiplier)
    branch, attention = float(decoder.branch_multiplier), float(decoder.attention_scale)
    factors = {"attention.query": attention * math.sqrt(config.head_dim)}
    factors |= {"attention.output": branch, "mlp.down": branch}

    def times(tensor: Tensor, factor: float) -> Tensor:
        return (tensor.detach().to("cpu", torch.float32) * factor).contiguous()

    yield "model.embed_tokens.weight", times(decoder.embedding.weight, embedding)
    for layer, block in enumerate(decoder.blocks):
        for name, parameter in block.named_parameters():
            module, _, kind = name.rpartition(".")
            yield f"{_LAYER}.{layer}.{_NAMES[module]}.{kind}", times(parameter, factors.get(module, 1.0))
    gain = decoder.final_norm.weight
    if not isinstance(gain, Tensor):
        raise TypeError(f"the final norm has a gain, got {type(gain).__name__}")
    yield "model.norm.weight", times(gain, readout / embedding if config.tied else 1.0)
    if not config.tied:
        yield "lm_head.weight", times(decoder.readout.weight, readout)


def write_llama(
    decoder: Decoder,
    folder: Path,
    tokenizer: Tokenizer | None,
    *,
    card: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Args:
        decoder: The model with its weights and multipliers.
        folder: Must not exist or be empty; it appears with all files or not at all.
        tokenizer: None where the corpus was given as tokens; then no tokenizer is written.
        card: The text of a README.md beside them.
        max_shard_bytes: Weights of more are split over several files, listed in an index.

    Raises:
        NotLlamaError: As `require_llama`; nothing is written then.
        FileExistsError: If there is something in the folder.
    """
    end = tokenizer.end_of_document if tokenizer else None
    config = llama_config(decoder.config, end_of_document=end)
    generation = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "do_sample": False}
    with atomic_directory(folder) as unfinished:
        _write_weights(decoder, unfinished, max_shard_bytes)
        _write_json(unfinished / "config.json", config)
        _write_json(unfinished / "generation_config.json", generation)
        if tokenizer is not None:
            write_tokenizer(tokenizer, unfinished, context_length=decoder.config.context_length)
        if card is not None:
            (unfinished / "README.md").write_text(card, encoding="utf-8")


def _write_weights(decoder: Decoder, folder: Path, max_shard_bytes: int) -> None:
    """One file, or several with an index; a shard at a time is held in memory."""
    sizes = {name: tensor.nbytes for name, tensor in llama_weights(decoder)}
    shards = _shards(sizes, max_shard_bytes)
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        _write_json(folder / f"{WEIGHTS}.index.json", index)
    tensors = llama_weights(decoder)
    for name, shard in zip(names, shards, strict=True):
        save_tensors({key: next(tensors)[1] for key in shard}, folder / name)


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names in their order, cut wherever the next one would not fit any more."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
