"""Mixtures of experts in transformers' layouts: its models compute the same logits, and what no layout holds is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.decoder_family import DecoderFamily
from proxy_models.architecture.generate import generate
from proxy_models.architecture.llama import NotLlamaError, write_llama
from proxy_models.architecture.parametrization import ForwardMultipliers, parametrize
from proxy_models.data.tokenizer import BytesTokenizer
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.optimizer import initialize, multipliers_of

BASE = ModelConfig(d_model=32, n_layers=2, context_length=48, n_experts=8, expert_ratio=0.5, experts_per_token=3)
SOFTMAX: dict[str, Any] = {"router_scores": "softmax", "balance_rate": 0.0, "balance_loss": 0.01}
EXPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", {**SOFTMAX, "queries_per_kv": 2, "attention_window": 7}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {**SOFTMAX, "qk_norm": True, "queries_per_kv": 2}),
    "Qwen3-MoE, dense first, tied, window": (
        "Qwen3MoeForCausalLM",
        {**SOFTMAX, "qk_norm": True, "first_dense_layers": 1, "tied": True, "attention_window": 7},
    ),
    "GLM-4-MoE": ("Glm4MoeForCausalLM", {"n_shared_experts": 1, "expert_scheme": "mean_field"}),
    "GLM-4-MoE, dense first, qk-norm": (
        "Glm4MoeForCausalLM",
        {"n_shared_experts": 2, "first_dense_layers": 1, "qk_norm": True, "queries_per_kv": 2},
    ),
    "GLM-4-MoE without shared experts": ("Glm4MoeForCausalLM", {}),
}


def trained(options: dict[str, Any]) -> tuple[Decoder, ForwardMultipliers]:
    """A decoder off the base shape, with gains away from 1 and, for sigmoid routers, biases that change the selection."""
    base = replace(BASE, **options)
    config = replace(base, d_model=64, n_layers=3)
    values: dict[str, Any] = {"embedding_multiplier": 1.7, "output_multiplier": 0.6, "attention_multiplier": 2.5}
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=96, **values).resolve(9600)
    model, table = Decoder(config), parametrize(config, base)
    initialize(model, table, recipe, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("balance_bias") and config.router_scores == "sigmoid":
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model.eval(), multipliers_of(table, recipe)


def export(model: Decoder, multipliers: ForwardMultipliers, folder: Path) -> None:
    weights = DecoderFamily.of(model.config).stored(model)
    write_llama(model.config, multipliers, weights, folder, BytesTokenizer(), max_file_bytes=100_000)


@pytest.mark.parametrize(("kind", "options"), EXPORTED.values(), ids=list(EXPORTED))
@torch.no_grad()
def test_transformers_own_model_computes_the_same_logits_and_text(
    kind: str, options: dict[str, Any], transformers: ModuleType, tmp_path: Path
) -> None:
    model, multipliers = trained(options)
    export(model, multipliers, tmp_path / "exported")
    other, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert type(other).__name__ == kind
    assert not any(info.values()), info
    tokens = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(0))
    ours, theirs = model(tokens), other.eval()(tokens).logits
    assert ours.std() > 0.05
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
    added = 0 if model.config.n_shared_experts or kind != "Glm4MoeForCausalLM" else 3 * 3 * 32 * 64  # zeros
    assert sum(parameter.numel() for parameter in other.parameters()) == model.config.n_params_total + added
    prompt = torch.tensor([[0, 104, 105]])
    written = other.generate(prompt, max_new_tokens=12)[0, 3:]
    assert written.tolist() == generate(model, prompt[0], 12, stop=0).tolist()


@torch.no_grad()
def test_every_part_matters(transformers: ModuleType, tmp_path: Path) -> None:
    """A state, a shared expert or a router that were left out would change the logits."""
    model, _ = trained(EXPORTED["GLM-4-MoE"][1])
    tokens = torch.arange(40)[None]
    before = model(tokens)
    for name in ("router.balance_bias", "router.weight", "shared.down.weight", "experts.down"):
        module, _, last = f"blocks.1.mlp.{name}".rpartition(".")
        tensor = getattr(model.get_submodule(module), last)
        kept = tensor.clone()
        tensor.copy_(tensor.flip(0))
        assert (model(tokens) - before).abs().max() > 1e-3, name
        tensor.copy_(kept)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({**SOFTMAX, "n_shared_experts": 1}, ["n_shared_experts"]),
        ({**SOFTMAX, "first_dense_layers": 1}, ["first_dense_layers"]),
        ({**SOFTMAX, "qk_norm": True, "biases": True}, ["biases"]),
        ({**SOFTMAX, "expert_scheme": "sqrt_gate"}, ["expert_scheme"]),
        ({**SOFTMAX, "attention_window": 7, "global_attention_every": 2}, ["global_attention_every"]),
        ({"attention_window": 7, "activation": "gelu"}, ["attention_window", "activation"]),
    ],
)
def test_what_no_layout_holds_is_refused_by_name(options: dict[str, Any], fields: list[str], tmp_path: Path) -> None:
    model, multipliers = trained(options)
    with pytest.raises(NotLlamaError) as refused:
        export(model, multipliers, tmp_path / "exported")
    assert all(f"model.{field} must" in str(refused.value) for field in fields)
    assert str(refused.value).count("; model.") == len(fields) - 1
    assert not (tmp_path / "exported").exists()


def test_a_moved_bias_under_softmax_is_refused_and_an_equal_one_is_not(tmp_path: Path) -> None:
    model, multipliers = trained(SOFTMAX)
    bias = model.get_buffer("blocks.2.mlp.router.balance_bias")
    bias.fill_(0.5)
    export(model, multipliers, tmp_path / "equal")
    bias[3] = 0.4
    with pytest.raises(NotLlamaError, match="blocks.2.mlp.router.balance_bias"):
        export(model, multipliers, tmp_path / "moved")
    assert not (tmp_path / "moved").exists()
