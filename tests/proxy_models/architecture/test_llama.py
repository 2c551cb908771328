"""The export to Llama's layout: transformers computes the same logits, and what Llama can't hold is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.llama import NotLlamaError, write_llama
from proxy_models.architecture.parametrization import ForwardMultipliers, Scheme, parametrize
from proxy_models.data.tokenizer import BytesTokenizer, Tokenizer
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.optimizer import initialize

BASE = ModelConfig(d_model=32, n_layers=2, context_length=48)
MULTIPLIERS: dict[str, Any] = {"embedding_multiplier": 1.7, "output_multiplier": 0.6, "attention_multiplier": 2.5}
EXPORTED: dict[str, dict[str, Any]] = {
    "default": {},
    "grouped": {"queries_per_kv": 2},
    "multi-query": {"head_dim": 8, "queries_per_kv": 4, "mlp_ratio": 4.0},
    "tied": {"tied": True},
    "longer wavelengths": {"rope_theta": 500_000.0},
    "biases": {"biases": True},
    "window": {"attention_window": 7, "queries_per_kv": 2},
    "window and global blocks": {"attention_window": 7, "global_attention_every": 2, "tied": True},
    "tied, grouped, with biases and a padded vocabulary": {
        "tied": True,
        "queries_per_kv": 2,
        "biases": True,
        "vocab_size": 264,
    },
    "qk-norm": {"qk_norm": True, "queries_per_kv": 2, "tied": True},
    "another eps": {"norm_eps": 1e-2},
    "only the training differs": {"mlp_dropout": 0.1, "stochastic_depth": 0.1, "label_smoothing": 0.1, "z_loss": 0.01},
}


def trained(options: dict[str, Any], *, scheme: Scheme = "mup", width: int = 64, depth: int = 3) -> Decoder:
    """A decoder off the base shape, its gains and biases away from their initial values."""
    base = replace(BASE, **options)
    config = replace(base, d_model=width, n_layers=depth)
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=96, **MULTIPLIERS).resolve(9600)
    model = Decoder(config)
    initialize(model, parametrize(config, base, scheme=scheme), recipe, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def export(model: Decoder, folder: Path, tokenizer: Tokenizer | None, **options: Any) -> None:
    """Write what a decoder computes."""
    multipliers = ForwardMultipliers(
        embedding=float(model.embedding_multiplier),
        branch=float(model.branch_multiplier),
        readout=float(model.readout_multiplier),
        attention=float(model.attention_scale),
    )
    write_llama(model.config, multipliers, dict(model.named_parameters()), folder, tokenizer, **options)


def loaded(transformers: ModuleType, folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("scheme", ["mup", "standard"])
@pytest.mark.parametrize("options", EXPORTED.values(), ids=list(EXPORTED))
@torch.no_grad()
def test_transformers_computes_the_same_logits(
    options: dict[str, Any], scheme: Scheme, transformers: ModuleType, tmp_path: Path
) -> None:
    model = trained(options, scheme=scheme)
    export(model, tmp_path / "llama", BytesTokenizer())
    other = loaded(transformers, tmp_path / "llama")
    tokens = torch.randint(0, model.config.vocab_size, (4, model.config.context_length))
    ours, theirs = model(tokens), other(tokens).logits
    assert ours.std() > 0.05
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
    assert sum(parameter.numel() for parameter in other.parameters()) == model.config.n_params_total
    assert other.config.tie_word_embeddings is model.config.tied


@torch.no_grad()
def test_every_multiplier_has_its_place(transformers: ModuleType, tmp_path: Path) -> None:
    """Each one doubled by itself changes the logits, and the export follows."""
    tokens = torch.arange(40)[None]
    for tied in (False, True):
        model = trained({"tied": tied})
        before = model(tokens)
        for name in ("embedding_multiplier", "attention_scale", "branch_multiplier", "readout_multiplier"):
            buffer = getattr(model, name)
            buffer.mul_(2)
            folder = tmp_path / f"{name} {tied}"
            export(model, folder, None)
            ours = model(tokens)
            assert (ours - before).abs().max() > 1e-3
            torch.testing.assert_close(loaded(transformers, folder)(tokens).logits, ours, atol=1e-4, rtol=0)
            buffer.div_(2)


@torch.no_grad()
def test_weights_of_more_than_a_shard_lie_in_several_files(transformers: ModuleType, tmp_path: Path) -> None:
    model = trained({})
    export(model, tmp_path / "llama", None, max_file_bytes=100_000)
    index = json.loads((tmp_path / "llama" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "llama").glob("model-*.safetensors"))
    assert len(shards) > 2
    found: dict[str, str] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), shard.name)
        assert shard.stat().st_size < 110_000
    assert found == index["weight_map"]
    assert index["metadata"]["total_size"] == 4 * model.config.n_params_total
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(loaded(transformers, tmp_path / "llama")(tokens).logits, model(tokens))


def test_transformers_generates_what_we_generate(transformers: ModuleType, tmp_path: Path) -> None:
    from proxy_models.architecture.generate import generate

    for number, window in enumerate(
        ({}, {"attention_window": 7}, {"attention_window": 7, "global_attention_every": 2})
    ):
        model, folder = trained({"queries_per_kv": 2} | window), tmp_path / str(number)
        export(model, folder, BytesTokenizer())
        prompt = torch.tensor([[0, 104, 105]])
        theirs = loaded(transformers, folder).generate(prompt, max_new_tokens=20)[0, 3:]
        assert theirs.tolist() == generate(model, prompt[0], 20, stop=0).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "layernorm"}, r"model.norm must be 'rmsnorm' \(.*\), got 'layernorm'"),
        ({"activation": "gelu"}, r"model.activation must be 'swiglu' \(.*\), got 'gelu'"),
        ({"positions": "learned"}, r"model.positions must be 'rotary' \(.*\), got 'learned'"),
        ({"positions": "alibi", "rotary_fraction": 0.5}, r"^[^;]*model.positions must be [^;]*$"),
        ({"rotary_fraction": 0.5}, r"model.rotary_fraction must be 1.0 \(.*\), got 0.5"),
        ({"qk_norm": True, "biases": True}, r"model.biases must be False \(.*\), got True"),
        ({"qk_norm": True, "attention_window": 7}, r"model.attention_window must be None \(.*\), got 7"),
        ({"attention_window": 7, "biases": True}, r"model.biases must be False \(.*\), got True"),
        ({"parallel": True}, r"model.parallel must be False \(.*\), got True"),
        ({"norm": "layernorm", "parallel": True}, r"model.norm .*; model.parallel "),
    ],
)
def test_what_llama_has_no_place_for_is_refused_by_name(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = Decoder(replace(BASE, **options))
    with pytest.raises(NotLlamaError, match=message):
        export(model, tmp_path / "llama", None)
    assert not (tmp_path / "llama").exists()


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(FileExistsError, match="must not exist"):
        export(Decoder(BASE), tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
