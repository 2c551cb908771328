"""Weights of a folder: of a class of transformers as it saves them, or in a layout that the built-in decoder can take over.

The decoder takes over the layouts of Llama, its relatives (the classes that `llama` writes) and GPT-2, whose matrices are
(inputs, outputs), with queries, keys and values in one (transformers, `GPT2Attention`). All parameters are those of a model whose
forward multipliers are 1: what a layout computes beyond its weights, the division of attention logits by sqrt(head_dim), goes into the
queries.

A class of transformers reads its own files, with its names of older files and its stacking of experts.

Only safetensors files are read, never a pickle. Tensors in fp16 and bf16 become fp32; quantized ones are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.config_family import ConfigFamily
from proxy_models.architecture.experts import BALANCE_BIAS
from proxy_models.architecture.families import family_of, weight_shapes, with_weights
from proxy_models.architecture.llama import WEIGHTS, llama_config, llama_errors, llama_places
from proxy_models.architecture.member import Member
from proxy_models.architecture.parametrization import ForwardMultipliers
from proxy_models.tensor_files import TensorFiles, index_of

CONFIG = "config.json"
NO_MULTIPLIERS = ForwardMultipliers(embedding=1.0, branch=1.0, readout=1.0, attention=1.0)
_NETWORK = "network."  # before the names of `CausalLM`'s parameters
_OF_TRAINING = re.compile(
    r"drop|token_id|initializer|^summary_|^router_(.*_loss_coef|jitter_noise)$|"
    r"^(architectures|transformers_version|(torch_)?dtype|use_cache|_name_or_path|max_position_embeddings|gradient_checkpointing|"
    r"output_.*|return_dict|problem_type|id2label|label2id|task_specific_params|n_ctx|pretraining_tp|model_type)$"
)
"""Keys of config.json that do not change what weights compute at a position that is trained, or are compared by `_read_same`."""
_TOLERANCE = 1e-4  # relative to the largest logit; products of other factors round otherwise by about 1e-6
_LISTED = 3  # names of tensors that an error lists
_BUFFERS = (*(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),)
"""Endings of constants that older versions of transformers stored among the weights, as of GPT-2 and Pythia."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types of tensors whose values are the weights; those of integers and 8 bits have scales."""
_KEYS = {
    "hidden_size": "d_model",
    "n_embd": "d_model",
    "intermediate_size": "mlp_ratio",
    "moe_intermediate_size": "expert_ratio",
    "n_inner": "mlp_ratio",
    "num_hidden_layers": "n_layers",
    "n_layer": "n_layers",
    "num_attention_heads": "head_dim",
    "n_head": "head_dim",
    "num_key_value_heads": "queries_per_kv",
    "hidden_act": "activation",
    "activation_function": "activation",
    "rms_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tied",
    "attention_bias": "biases",
    "mlp_bias": "biases",
    "sliding_window": "attention_window",
    "layer_types": "global_attention_every",
    "num_experts_per_tok": "experts_per_token",
    "num_local_experts": "n_experts",
    "num_experts": "n_experts",
    "n_routed_experts": "n_experts",
    "first_k_dense_replace": "first_dense_layers",
    "use_qk_norm": "qk_norm",
}
"""Setting of [model] behind a key of config.json, if its name is another."""
_NOT_COMPARED = {
    *("architectures", "max_position_embeddings", "attention_dropout", "torch_dtype", "output_router_logits"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters", "model_type"),
}
"""Keys of Llama's config.json that do not change what the model computes, or are compared by `_read_llama`."""
_LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
}
"""Values that transformers assumes where config.json has none."""
_GPT2_ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
    **{name: name for name in ("gelu", "relu")},
}
_GPT2: dict[str, Any] = {
    "norm": "layernorm",
    "positions": "learned",
    "biases": True,
    "qk_norm": False,
    "queries_per_kv": 1,
    "parallel": False,
    "attention_window": None,
    "n_experts": None,
}
"""Settings of [model] that GPT-2's layout needs."""


class GivenWeightsError(ValueError):
    """Error for a folder whose weights are not those of the model; the message names the file, key or tensor, and both values."""


class TensorPart(NamedTuple):
    """Part of one of our tensors: the name and shape of theirs, and what is taken of it."""

    name: str
    shape: tuple[int, ...]
    take: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class GivenWeights:
    """Tensors by name, as parameters of a model without multipliers; each is read when it is asked for, in fp32.

    Attributes:
        shapes: Shape of each tensor, on the meta device.
        read: Reads a tensor by name.
        layout: Name of the layout that the folder has.
    """

    shapes: Mapping[str, Tensor]
    read: Callable[[str], Tensor]
    layout: str

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, one tensor in memory at a time."""
        for name, shape in self.shapes.items():
            yield name, self.read(name).to(shape.dtype).contiguous()


def read_weights(folder: Path, model: Member) -> GivenWeights:
    """Check the weights of a folder against a decoder, or a model of transformers, and return them.

    Raises:
        GivenWeightsError: If the folder has no such weights, or its config.json or tensors contradict the model.
    """
    config = _read_config(folder)
    if not isinstance(model, ModelConfig):
        given = _read_same(folder, config, model)
        _require_absorbing(folder, model, dict(given))
        return given
    kind = config.get("model_type")
    try:
        pieces, zeros, prefix = _layout_of(folder, config, model)
    except GivenWeightsError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # the file may hold anything
        raise GivenWeightsError(
            f"{folder / CONFIG}: not a file that transformers writes for {kind!r} ({type(error).__name__}: {error})"
        ) from error
    files = _open(folder)
    names = {name.removeprefix(prefix): name for name in files if not name.endswith(_BUFFERS)}
    is_tied = family_of(model).is_tied(model)
    _require_shapes(folder, pieces, zeros, {name: files.shapes[names[name]] for name in names}, tied=is_tied)
    for name, _ in zeros:
        if files[names[name]].any():
            raise GivenWeightsError(f"{folder}: {name} must be zeros for [model], which has no such part")

    def read(name: str) -> Tensor:
        if name.endswith(BALANCE_BIAS) and not pieces[name]:
            return torch.zeros_like(shapes[name], device="cpu")
        parts = [piece.take(files[names[piece.name]].to(torch.float32)) for piece in pieces[name]]
        return parts[0] if len(parts) == 1 and parts[0].shape == shapes[name].shape else torch.stack(parts)

    shapes = weight_shapes(model)
    return GivenWeights(shapes=shapes, read=read, layout=str(kind))


def _open(folder: Path) -> TensorFiles:
    """Open the files of the weights; raise GivenWeightsError if there are none, or one is missing, damaged or quantized."""
    path = folder / WEIGHTS
    try:
        files = TensorFiles(path)
    except FileNotFoundError as error:
        pickles = sorted(found.name for found in folder.glob("*.bin"))
        advice = f"; pickles such as {pickles[0]} are not read" if pickles else ""
        raise GivenWeightsError(
            f"{path}: no such file, and no {index_of(path).name} of several files{advice}"
        ) from error
    except OSError as error:
        raise GivenWeightsError(f"{path}: can't be read ({error})") from error
    except ValueError as error:
        raise GivenWeightsError(str(error)) from error
    if odd := [
        f"{name} ({of})" for name, of in files.dtypes.items() if of not in _FLOATS and not name.endswith(_BUFFERS)
    ]:
        raise GivenWeightsError(
            f"{folder}: the tensors must be {', '.join(sorted(_FLOATS))}, since scales of quantized ones are not read; "
            f"got {_first(odd)}"
        )
    return files


def _layout_of(
    folder: Path, config: Mapping[str, Any], model: ModelConfig
) -> tuple[dict[str, list[TensorPart]], Sequence[tuple[str, tuple[int, ...]]], str]:
    """Return the pieces of each of our tensors, the tensors that must be zeros, and a prefix that names may have."""
    if config.get("model_type") == "gpt2":
        return _read_gpt2(folder, config, model), (), "transformer."
    return *_read_llama(folder, config, model), ""


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise GivenWeightsError(
            f"{path}: can't be read ({error}); the folder must be a bundle, or have config.json and {WEIGHTS} in the layout of Llama, "
            "Qwen3 or GPT-2"
        ) from error
    if not isinstance(config, dict):
        raise GivenWeightsError(f"{path}: must be an object, got {str(config)[:40]}")
    return config


def _read_llama(
    folder: Path, config: Mapping[str, Any], model: ModelConfig
) -> tuple[dict[str, list[TensorPart]], Sequence[tuple[str, tuple[int, ...]]]]:
    """Return the pieces of each of our tensors, and the tensors that must be zeros, of Llama's layout and its relatives."""
    if errors := llama_errors(model):
        raise GivenWeightsError(f"{folder / CONFIG}: weights of {config.get('model_type')!r}: {'; '.join(errors)}")
    described = llama_config(model, end_of_document=None)
    theirs = _LLAMA_DEFAULTS | {key: value for key, value in config.items() if value is not None}
    heads, width, kind = (theirs.get(key) for key in ("num_attention_heads", "hidden_size", "model_type"))
    if not (isinstance(heads, int) and isinstance(width, int) and heads > 0):
        raise GivenWeightsError(
            f"{folder / CONFIG}: num_attention_heads and hidden_size must be whole numbers, got {heads} and {width}"
        )
    theirs = {"head_dim": width // heads, "num_key_value_heads": heads} | theirs
    if str(kind).startswith("qwen3") and not theirs["use_sliding_window"]:
        theirs["sliding_window"] = None
    if "num_local_experts" in theirs:
        theirs.setdefault("num_experts", theirs["num_local_experts"])  # name of Qwen3-MoE's newer files
    if kind == "mistral" and theirs["sliding_window"] is None:
        kind = "llama"  # Mistral's later models, whose class then computes what Llama's does
    if kind != described["model_type"]:
        rule = "its qk_norm, attention_window and experts make it so"
        raise GivenWeightsError(
            f"{folder / CONFIG}: model_type is {kind!r}, but [model] is a {described['model_type']!r}; {rule}"
        )
    for key in ("rope_scaling", "rope_parameters"):  # names of older and newer files, which may have both
        rope = dict(theirs.get(key) or {})
        theirs["rope_theta"] = rope.pop("rope_theta", theirs["rope_theta"])
        if not rope.items() <= {"type": "default", **described["rope_parameters"]}.items():
            raise GivenWeightsError(
                f"{folder / CONFIG}: {key} must be of rope_type 'default' with rope_theta alone, the decoder's rotary "
                f"positions; got {theirs[key]}"
            )
    wanted = {"use_sliding_window": False} | {
        key: value for key, value in described.items() if key not in _NOT_COMPARED
    }
    _require_same(folder, wanted, theirs)
    pieces: dict[str, list[TensorPart]] = {name: [] for name in weight_shapes(model)}
    zeros = []
    for their, place in llama_places(model, NO_MULTIPLIERS).items():
        shape = tuple(place.shape.shape)
        if place.name is None:
            zeros.append((their, shape))
        else:
            pieces[place.name].append(TensorPart(their, shape, _divided_by(place.factor)))
    return pieces, zeros


def _read_same(folder: Path, config: Mapping[str, Any], model: Member) -> GivenWeights:
    """Return the weights of a folder of the same class of transformers, which loads them under its own rules for older names."""
    from transformers import AutoModelForCausalLM

    family = family_of(model)
    if not isinstance(family, ConfigFamily):
        raise GivenWeightsError(f"{folder}: must be a bundle of the same family for {model}")
    config_class, wanted = family.config_class, family.config(model.d_model, model.n_layers)
    if config.get("model_type") != config_class.model_type:
        raise GivenWeightsError(
            f"{folder / CONFIG}: model_type is {config.get('model_type')!r}, but [model] is a {config_class.model_type!r}"
        )
    try:
        found = config_class.from_dict(dict(config))
    except Exception as error:  # each class raises different exceptions
        raise GivenWeightsError(
            f"{folder / CONFIG}: not a file of {config_class.__name__} ({type(error).__name__}: {error})"
        ) from error
    theirs, ours = (json.loads(of.to_json_string(use_diff=False)) for of in (found, wanted))
    odd = [
        f"{key} is {theirs.get(key)!r}, but [model] makes it {ours.get(key)!r}"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key) and not _OF_TRAINING.search(key)
    ]
    if odd:
        raise GivenWeightsError(f"{folder / CONFIG}: {'; '.join(odd)}")
    tensors = {name: tensor for name, tensor in _open(folder).items() if not name.endswith(_BUFFERS)}
    try:
        with _quiet():
            network, reported = AutoModelForCausalLM._model_mapping[config_class].from_pretrained(
                None,
                config=wanted,
                state_dict=tensors,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # listed in `reported`
                output_loading_info=True,
            )
    except RuntimeError as error:  # its text points to the table of faults, which is not printed
        raise GivenWeightsError(
            f"{folder}: the tensors must be those of [model]; {config_class.__name__} can't stack or split them, so a part, "
            "such as an expert's matrix, is missing or has another shape"
        ) from error
    shapes, held = weight_shapes(model), network.state_dict()
    untied = {f"{_NETWORK}{name}" for name, _ in network.named_parameters()} - shapes.keys()
    _require_none(
        folder,
        {
            "missing": sorted(reported["missing_keys"]),
            "left over": sorted(reported["unexpected_keys"]),
            "of another shape": [
                f"{name} {tuple(there)} instead of {tuple(here)}"
                for name, there, here in sorted(reported["mismatched_keys"])
            ],
            "different from the tensor to which it is tied": sorted(name.removeprefix(_NETWORK) for name in untied),
        },
    )
    return GivenWeights(
        shapes=shapes, read=lambda name: held[name.removeprefix(_NETWORK)], layout=config_class.model_type
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing progress, and faults that become an error."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _require_absorbing(folder: Path, model: Member, weights: Mapping[str, Tensor]) -> None:
    """Require that a model computes the same with multipliers that its weights absorb; each class of transformers is different."""
    built = with_weights(model, weights).eval()
    tokens = torch.randint(model.vocab_size, (1, model.context_length), generator=torch.Generator().manual_seed(0))
    multipliers = replace(NO_MULTIPLIERS, embedding=2.0, readout=0.5)
    with torch.no_grad():
        expected = built(tokens)
        for name, factor in family_of(model).absorbed(model, multipliers).items():
            built.get_parameter(name).div_(factor)
        for name in ("embedding", "readout"):
            built.get_buffer(f"{name}_multiplier").fill_(getattr(multipliers, name))
        off = ((built(tokens) - expected).abs().max() / expected.abs().max()).item()
    if not off <= _TOLERANCE:
        raise GivenWeightsError(
            f"{folder}: {model} must give the same logits when its weights absorb the multipliers of embedding and readout, but they "
            f"differ by {off:.2g} of the largest"
        )


def _read_gpt2(folder: Path, config: Mapping[str, Any], model: ModelConfig) -> dict[str, list[TensorPart]]:
    """Return the pieces of each of our tensors of GPT-2's layout; names are without the prefix of the class with a readout."""
    path, width = folder / CONFIG, model.d_model
    if odd := [f"model.{name} must be {value!r}, got {getattr(model, name)!r}" for name, value in _GPT2.items()
               if getattr(model, name) != value]:  # fmt: skip
        raise GivenWeightsError(f"{path}: weights of GPT-2: {'; '.join(odd)}")
    theirs = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, **config}
    activation = theirs["activation_function"]
    theirs["activation_function"] = _GPT2_ACTIVATIONS.get(activation, activation)
    theirs["n_inner"] = theirs.get("n_inner") or 4 * int(theirs.get("n_embd") or 0)
    wanted = {
        "vocab_size": model.vocab_size,
        "n_embd": width,
        "n_layer": model.n_layers,
        "n_head": model.n_heads,
        "n_inner": model.d_ff,
        "activation_function": model.activation,
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "add_cross_attention": False,
    }
    for name, only in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if (value := theirs.get(name, only)) is not only:
            raise GivenWeightsError(f"{path}: {name} must be {only}, as in the decoder; got {value}")
    _require_same(folder, wanted, {"add_cross_attention": False, **theirs})
    n_positions = theirs.get("n_positions", 1024)
    if not isinstance(n_positions, int) or n_positions < model.context_length:
        raise GivenWeightsError(
            f"{path}: n_positions must be at least model.context_length = {model.context_length}, got {n_positions}"
        )

    def part(number: int, factor: float = 1.0) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor[..., number * width : (number + 1) * width].movedim(0, -1) * factor

    def same(tensor: Tensor) -> Tensor:
        return tensor

    def transposed(tensor: Tensor) -> Tensor:
        return tensor.T

    vector = {"weight": (width,), "bias": (width,)}
    pieces = {
        "embedding.weight": [TensorPart("wte.weight", (model.vocab_size, width), same)],
        "position.weight": [
            TensorPart("wpe.weight", (n_positions, width), lambda tensor: tensor[: model.context_length])
        ],
        **{f"final_norm.{kind}": [TensorPart(f"ln_f.{kind}", shape, same)] for kind, shape in vector.items()},
    }
    if not model.tied:
        pieces["readout.weight"] = [TensorPart("lm_head.weight", (model.vocab_size, width), same)]
    for layer in range(model.n_layers):
        our, their = f"blocks.{layer}", f"h.{layer}"
        for kind, shape in vector.items():
            pieces[f"{our}.attention_norm.{kind}"] = [TensorPart(f"{their}.ln_1.{kind}", shape, same)]
            pieces[f"{our}.mlp_norm.{kind}"] = [TensorPart(f"{their}.ln_2.{kind}", shape, same)]
            of_all = (width, 3 * width) if kind == "weight" else (3 * width,)
            for number, projection in enumerate(("query", "key", "value")):
                factor = 1 / math.sqrt(model.head_dim) if projection == "query" else 1.0
                name = f"{our}.attention.{projection}.{kind}"
                pieces[name] = [TensorPart(f"{their}.attn.c_attn.{kind}", of_all, part(number, factor))]
        for ours, theirs_name, sizes in (
            ("attention.output", "attn.c_proj", (width, width)),
            ("mlp.up", "mlp.c_fc", (width, model.d_ff)),
            ("mlp.down", "mlp.c_proj", (model.d_ff, width)),
        ):
            pieces[f"{our}.{ours}.weight"] = [TensorPart(f"{their}.{theirs_name}.weight", sizes, transposed)]
            pieces[f"{our}.{ours}.bias"] = [TensorPart(f"{their}.{theirs_name}.bias", sizes[1:], same)]
    return pieces


def _divided_by(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor / factor


def _require_same(folder: Path, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise GivenWeightsError for each key of config.json that contradicts [model]."""
    odd = [
        f"{key} is {found.get(key)!r}, but model.{_KEYS.get(key, key)} makes it {value!r}"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if odd:
        raise GivenWeightsError(f"{folder / CONFIG}: {'; '.join(odd)}")


def _require_shapes(
    folder: Path,
    pieces: Mapping[str, Sequence[TensorPart]],
    zeros: Sequence[tuple[str, tuple[int, ...]]],
    found: Mapping[str, tuple[int, ...]],
    *,
    tied: bool,
) -> None:
    """Raise GivenWeightsError listing tensors that are missing, left over or have another shape."""
    wanted = {piece.name: piece.shape for of in pieces.values() for piece in of} | dict(zeros)
    extra = [name for name in found if name not in wanted and not (tied and name == "lm_head.weight")]
    problems = {
        "missing": [f"{name} {wanted[name]}" for name in wanted if name not in found],
        "left over": [f"{name} {found[name]}" for name in extra],
        "of another shape": [
            f"{name} {found[name]} instead of {wanted[name]}"
            for name in wanted
            if found.get(name, wanted[name]) != wanted[name]
        ],
    }
    _require_none(folder, problems)


def _require_none(folder: Path, problems: Mapping[str, Sequence[str]]) -> None:
    """Raise GivenWeightsError listing tensors by the kind of their fault."""
    if reported := [f"{kind}: {_first(names)}" for kind, names in problems.items() if names]:
        raise GivenWeightsError(f"{folder}: the tensors must be those of [model]: {'; '.join(reported)}")


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
