"""Weights in the layouts of transformers: the decoder computes transformers' logits, and what contradicts the model is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.config_family import ConfigFamily
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.families import build, load, weight_shapes, with_weights
from proxy_models.architecture.given_weights import GivenWeightsError, read_weights
from proxy_models.architecture.parametrization import parametrize
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.initial_weights import starting_values, write_initial_weights
from proxy_models.training.numerics import Numerics, key_of_weights
from proxy_models.training.optimizer import initialize
from tests.proxy_models.architecture import test_exported_experts
from tests.proxy_models.architecture.test_llama import EXPORTED, export, trained

OF_GPT2: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "positions": "learned",
    "biases": True,
    "tied": True,
    "norm_eps": 1e-5,
    "mlp_ratio": 4.0,
}
GPT2 = ModelConfig(d_model=32, n_layers=2, context_length=24, vocab_size=97, **OF_GPT2)
LLAMA = ModelConfig(
    d_model=48, n_layers=2, context_length=24, vocab_size=97, queries_per_kv=3, norm_eps=1e-5, rope_theta=500_000.0
)
QWEN3 = replace(LLAMA, qk_norm=True, tied=True, norm_eps=1e-6)
RECIPE = Hyperparameters(learning_rate=0.01, batch_tokens=96, output_multiplier=0.6, attention_multiplier=2.5).resolve(
    9600
)


def random_model(transformers: ModuleType, model: ModelConfig) -> Any:
    """A network of transformers whose values are all away from their initial ones."""
    if model.positions == "learned":
        config = transformers.GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=40, tie_word_embeddings=model.tied
        )
        network = transformers.GPT2LMHeadModel(config)
    else:
        kind = "Qwen3" if model.qk_norm else "Llama"
        network = getattr(transformers, f"{kind}ForCausalLM")(
            getattr(transformers, f"{kind}Config")(
                vocab_size=97,
                hidden_size=48,
                intermediate_size=132,
                num_hidden_layers=2,
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=16,
                rms_norm_eps=model.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
                tie_word_embeddings=model.tied,
            )
        )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network.eval()


def started(folder: Path, model: ModelConfig, store: Path, recipe: Any = RECIPE, **tables: Any) -> Decoder:
    """A decoder as a run initializes it from a folder, with tuned multipliers."""
    given = read_weights(folder, model)
    key = write_initial_weights(store, given.shapes, given, layout=given.layout)
    numerics = Numerics(
        model=model, base=model, corpus_key="", seed=0, evaluation_tokens=1, initial_weights=key, **tables
    )
    decoder = Decoder(model)
    table = parametrize(model, model, **tables)
    initialize(decoder, table, recipe, seed=0, values=starting_values(numerics, recipe, store))
    return decoder.eval()


@pytest.mark.parametrize("scheme", ["mup", "standard"])
@pytest.mark.parametrize(
    "model",
    [GPT2, replace(GPT2, tied=False), LLAMA, QWEN3],
    ids=["gpt2", "gpt2 untied", "llama", "qwen3"],
)
@torch.no_grad()
def test_a_run_starts_from_the_function_of_transformers(
    model: ModelConfig, scheme: str, transformers: ModuleType, tmp_path: Path
) -> None:
    network = random_model(transformers, model)
    network.save_pretrained(tmp_path / "theirs")
    recipe = RECIPE if model.tied else replace(RECIPE, embedding_multiplier=1.7)
    ours = started(tmp_path / "theirs", model, tmp_path / "store", recipe, scheme=scheme)
    tokens = torch.randint(97, (3, 24), generator=torch.Generator().manual_seed(0))
    theirs = network(tokens).logits
    assert theirs.std() > 0.3
    torch.testing.assert_close(ours(tokens), theirs, atol=2e-5 * float(theirs.abs().max()), rtol=0)
    assert float(ours.attention_scale) == pytest.approx(2.5 / 4)


@pytest.mark.parametrize("options", EXPORTED.values(), ids=list(EXPORTED))
@torch.no_grad()
def test_what_the_export_writes_is_read_again(options: dict[str, Any], tmp_path: Path) -> None:
    model = trained(options)
    export(model, tmp_path / "theirs", None)
    ours = started(tmp_path / "theirs", model.config, tmp_path / "store")
    tokens = torch.randint(0, model.config.vocab_size, (2, 48))
    torch.testing.assert_close(ours(tokens), model(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "options", [of for _, of in test_exported_experts.EXPORTED.values()], ids=list(test_exported_experts.EXPORTED)
)
@torch.no_grad()
def test_mixtures_that_the_export_writes_are_read_again(options: dict[str, Any], tmp_path: Path) -> None:
    model, multipliers = test_exported_experts.trained(options)
    test_exported_experts.export(model, multipliers, tmp_path / "theirs")
    ours = started(tmp_path / "theirs", model.config, tmp_path / "store")
    tokens = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(tokens), model(tokens), atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_mixture_that_transformers_saves_again_is_read(transformers: ModuleType, tmp_path: Path) -> None:
    options = dict(test_exported_experts.EXPORTED.values())["Qwen3MoeForCausalLM"]
    model, multipliers = test_exported_experts.trained(options)
    test_exported_experts.export(model, multipliers, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert "num_experts" not in json.loads((tmp_path / "theirs" / "config.json").read_text()), "the newer name"
    again = started(tmp_path / "theirs", model.config, tmp_path / "store")
    tokens = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(again(tokens), model(tokens), atol=1e-4, rtol=0)
    with pytest.raises(GivenWeightsError, match="num_experts"):
        read_weights(tmp_path / "theirs", replace(model.config, n_experts=16))


@torch.no_grad()
def test_half_precision_is_read_as_fp32(transformers: ModuleType, tmp_path: Path) -> None:
    network = random_model(transformers, LLAMA).to(torch.bfloat16)
    network.save_pretrained(tmp_path / "theirs")
    ours = started(
        tmp_path / "theirs", LLAMA, tmp_path / "store", replace(RECIPE, attention_multiplier=1.0, output_multiplier=1.0)
    )
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    torch.testing.assert_close(ours.readout.weight, network.lm_head.weight.float(), rtol=0, atol=0)


def test_the_key_is_that_of_the_values(transformers: ModuleType, tmp_path: Path) -> None:
    network = random_model(transformers, GPT2)
    keys = []
    for number, change in enumerate((0.0, 0.0, 1e-3)):
        with torch.no_grad():
            network.transformer.ln_f.bias[3] += change
        network.save_pretrained(tmp_path / f"theirs {number}", max_shard_size="20KB" if number == 1 else "5GB")
        given = read_weights(tmp_path / f"theirs {number}", GPT2)
        keys.append(write_initial_weights(tmp_path / f"store {number}", given.shapes, given))
        assert key_of_weights(tmp_path / f"store {number}") == keys[-1]
    assert len(list((tmp_path / "theirs 1").glob("*.safetensors"))) > 1
    assert keys[0] == keys[1] != keys[2]
    numerics = Numerics(model=GPT2, base=GPT2, corpus_key="", seed=0, evaluation_tokens=1)
    other = replace(numerics, initial_weights=keys[0])
    assert "initial_weights" not in numerics.to_dict()
    assert other.to_dict()["initial_weights"] == keys[0]
    assert len({numerics.key, other.key, replace(numerics, initial_weights=keys[2]).key}) == 3
    assert starting_values(numerics, RECIPE, None) is None
    for folder in (None, tmp_path / "nothing", tmp_path / "store 2"):
        with pytest.raises(ValueError, match=keys[0]):
            starting_values(other, RECIPE, folder)


def test_names_and_constants_of_older_files_are_read(transformers: ModuleType, tmp_path: Path) -> None:
    """GPT-2's published file has no prefix and the causal masks; others repeat a tied table."""
    from safetensors.torch import load_file, save_file

    random_model(transformers, GPT2).save_pretrained(tmp_path)
    expected = dict(read_weights(tmp_path, GPT2))
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 40, 40), "lm_head.weight": tensors["wte.weight"].clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = dict(read_weights(tmp_path, GPT2))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"norm_eps": 1e-6}, ["layer_norm_epsilon", "1e-05", "1e-06"]),
        ({"activation": "gelu"}, ["activation_function", "'gelu_tanh'", "'gelu'"]),
        ({"head_dim": 8}, ["n_head", "2", "4"]),
        ({"mlp_ratio": 3.0}, ["n_inner", "128", "96"]),
        ({"n_layers": 3}, ["n_layer", "2", "3"]),
        ({"vocab_size": 98}, ["vocab_size", "97", "98"]),
        ({"tied": False}, ["tie_word_embeddings", "True", "False"]),
        ({"context_length": 48}, ["n_positions", "40", "48"]),
        ({"norm": "rmsnorm", "biases": False}, ["model.norm", "model.biases"]),
    ],
)
def test_a_config_that_contradicts_the_model_is_refused(
    changed: dict[str, Any], named: list[str], transformers: ModuleType, tmp_path: Path
) -> None:
    random_model(transformers, GPT2).save_pretrained(tmp_path)
    with pytest.raises(GivenWeightsError) as found:
        read_weights(tmp_path, replace(GPT2, **changed))
    assert all(part in str(found.value) for part in [str(tmp_path), *named])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rope_theta": 10_000.0}, ["rope_theta", "500000.0", "10000.0"]),
        ({"norm_eps": 1e-6}, ["rms_norm_eps", "model.norm_eps", "1e-05", "1e-06"]),
        ({"queries_per_kv": 1}, ["num_key_value_heads", "1", "3"]),
        ({"qk_norm": True}, ["model_type", "'llama'", "'qwen3'"]),
        ({"attention_window": 8}, ["model_type", "'llama'", "'mistral'"]),
        ({"positions": "none"}, ["model.positions", "'none'"]),
    ],
)
def test_a_llama_that_contradicts_the_model_is_refused(
    changed: dict[str, Any], named: list[str], transformers: ModuleType, tmp_path: Path
) -> None:
    random_model(transformers, LLAMA).save_pretrained(tmp_path)
    with pytest.raises(GivenWeightsError) as found:
        read_weights(tmp_path, replace(LLAMA, **changed))
    assert all(part in str(found.value) for part in [str(tmp_path), *named])


def test_tensors_that_do_not_fit_are_listed(transformers: ModuleType, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    random_model(transformers, GPT2).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.1.ln_2.bias"]
    tensors["transformer.h.0.mlp.c_fc.weight"] = torch.zeros(32, 7)
    tensors["transformer.adapter.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(GivenWeightsError) as found:
        read_weights(tmp_path, GPT2)
    message = str(found.value)
    for part in ("h.1.ln_2.bias (32,)", "adapter.weight (3,)", "h.0.mlp.c_fc.weight (32, 7)", "(32, 128)"):
        assert part in message


def test_folders_without_such_weights_are_refused(transformers: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(GivenWeightsError, match="config.json"):
        read_weights(tmp_path / "nothing", GPT2)
    random_model(transformers, GPT2).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "model.safetensors").rename(tmp_path / "gpt2" / "pytorch_model.bin")
    with pytest.raises(GivenWeightsError, match=r"model\.safetensors.*pytorch_model\.bin"):
        read_weights(tmp_path / "gpt2", GPT2)
    config = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    for wrong in (
        "[1]",
        "{",
        json.dumps(config | {"model_type": "bert"}),
        json.dumps(config | {"scale_attn_by_inverse_layer_idx": True}),
    ):
        (tmp_path / "gpt2" / "config.json").write_text(wrong)
        with pytest.raises(GivenWeightsError, match="config.json"):
            read_weights(tmp_path / "gpt2", GPT2)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["GPT2Config", "LlamaConfig"])
@torch.no_grad()
def test_a_class_of_transformers_starts_from_its_own_weights(
    name: str, tied: bool, transformers: ModuleType, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"GPT2Config": {"n_embd": 32, "n_head": 2}}.get(
        name, {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    )
    sizes["tie_word_embeddings"] = tied
    family = load(f"transformers:{name}")(vocab_size=97, context_length=24, **sizes)
    member = family.member(32, 2)
    network = transformers.AutoModelForCausalLM.from_config(cast(ConfigFamily, family).config(32, 2)).eval()
    for number, parameter in enumerate(network.parameters()):
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.2)
    network.save_pretrained(tmp_path / "theirs")
    given = read_weights(tmp_path / "theirs", member)
    key = write_initial_weights(tmp_path / "store", given.shapes, given)
    numerics = Numerics(model=member, base=member, corpus_key="", seed=0, evaluation_tokens=1, initial_weights=key)
    recipe = replace(RECIPE, attention_multiplier=1.0)
    model = build(member)
    values = starting_values(numerics, recipe, tmp_path / "store")
    initialize(model, family.parametrization(member, member), recipe, seed=0, values=values)
    tokens = torch.randint(97, (3, 24), generator=torch.Generator().manual_seed(0))
    theirs = network(tokens).logits
    torch.testing.assert_close(model.eval()(tokens), theirs, atol=2e-5 * float(theirs.abs().max()), rtol=0)
    assert model.get_buffer("readout_multiplier").item() == pytest.approx(0.6)
    for changed, named in (({"d_model": 64}, "64"), ({"n_layers": 3}, "3")):
        other = family.member(**{"width": 32, "depth": 2} | {"width" if "d_model" in changed else "depth": int(named)})
        with pytest.raises(GivenWeightsError, match=named):
            read_weights(tmp_path / "theirs", other)


LLAMA_SIZES = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
OF_CLASSES: dict[str, dict[str, Any]] = {
    "LlamaConfig": LLAMA_SIZES,
    "GPT2Config": {"n_embd": 32, "n_head": 2},
    "GPTNeoXConfig": {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2},
    "MixtralConfig": {**LLAMA_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {
        **LLAMA_SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
}


def of_class(name: str, transformers: ModuleType, folder: Path, **over: Any) -> tuple[Any, Any]:
    """A member of a class with its usual arguments, and the network that was saved in a folder with those of `over` too."""
    families = [
        load(f"transformers:{name}")(vocab_size=97, context_length=24, **OF_CLASSES[name], **more)
        for more in ({}, over)
    ]
    network = transformers.AutoModelForCausalLM.from_config(cast(ConfigFamily, families[1]).config(32, 2)).eval()
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.2)
    network.save_pretrained(folder)
    return families[0].member(32, 2), network


def edit_config(folder: Path, change: dict[str, Any], without: Sequence[str] = ()) -> None:
    path = folder / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name not in without}
    path.write_text(json.dumps(config | change))


@pytest.mark.parametrize("name", ["GPTNeoXConfig", "MixtralConfig", "Qwen3MoeConfig"])
@torch.no_grad()
def test_a_class_reads_names_that_differ_from_its_parameters(
    name: str, transformers: ModuleType, tmp_path: Path
) -> None:
    """GPT-NeoX saves its readout as `embed_out`, mixtures save each expert; models hold them stacked."""
    member, network = of_class(name, transformers, tmp_path)
    model = with_weights(member, dict(read_weights(tmp_path, member))).eval()
    tokens = torch.randint(97, (3, 24), generator=torch.Generator().manual_seed(0))
    theirs = network(tokens).logits
    assert theirs.std() > 0.3
    torch.testing.assert_close(model(tokens), theirs, atol=2e-5 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("name", "prefix", "constants"),
    [
        ("GPT2Config", "transformer.", {"h.0.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.uint8)}),
        (
            "GPTNeoXConfig",
            "",
            {
                "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 24, 24, dtype=torch.bool),
                "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
                "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2),
            },
        ),
    ],
)
def test_a_class_reads_names_and_constants_of_older_files(
    name: str, prefix: str, constants: dict[str, torch.Tensor], transformers: ModuleType, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    member, _ = of_class(name, transformers, tmp_path)
    expected = dict(read_weights(tmp_path, member))
    tensors = {key.removeprefix(prefix): tensor for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | constants, tmp_path / "model.safetensors")
    found = dict(read_weights(tmp_path, member))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_rotary_base_of_older_files_is_compared(transformers: ModuleType, tmp_path: Path) -> None:
    """Versions before 5 write rope_theta and rope_scaling where newer ones write rope_parameters."""
    member, _ = of_class("LlamaConfig", transformers, tmp_path)
    edit_config(tmp_path, {"rope_theta": 10_000.0, "rope_scaling": None}, without=["rope_parameters"])
    assert dict(read_weights(tmp_path, member)).keys() == weight_shapes(member).keys()
    for change, named in (
        ({"rope_theta": 500.0}, "500.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "mistral"}, "'mistral'"),
        ({"hidden_size": "wide"}, "LlamaConfig"),
    ):
        edit_config(tmp_path, {"rope_theta": 10_000.0, "rope_scaling": None} | change)
        with pytest.raises(GivenWeightsError, match=rf"config\.json: .*{named}"):
            read_weights(tmp_path, member)
        edit_config(tmp_path, {"model_type": "llama", "hidden_size": 32}, without=list(change))


def test_a_value_that_the_file_leaves_to_the_default_is_compared(transformers: ModuleType, tmp_path: Path) -> None:
    of_class("LlamaConfig", transformers, tmp_path)
    edit_config(tmp_path, {}, without=["rms_norm_eps"])
    other = load("transformers:LlamaConfig")(vocab_size=97, context_length=24, **LLAMA_SIZES | {"rms_norm_eps": 0.1})
    with pytest.raises(GivenWeightsError, match=r"rms_norm_eps.*1e-06.*0\.1"):
        read_weights(tmp_path, other.member(32, 2))


@pytest.mark.parametrize(
    ("name", "lost", "changed", "named"),
    [
        ("LlamaConfig", "model.norm.weight", {}, ["missing: model.norm.weight"]),
        ("LlamaConfig", None, {"model.adapter.weight": torch.zeros(3)}, ["left over: model.adapter.weight"]),
        ("LlamaConfig", None, {"model.norm.weight": torch.zeros(7)}, ["model.norm.weight (7,) instead of (32,)"]),
        ("MixtralConfig", "model.layers.1.block_sparse_moe.experts.3.w1.weight", {}, ["MixtralConfig"]),
        ("GPT2Config", None, {"lm_head.weight": torch.zeros(97, 32)}, ["tied", "lm_head.weight"]),
    ],
)
def test_tensors_that_a_class_does_not_have_are_refused(
    name: str,
    lost: str | None,
    changed: dict[str, torch.Tensor],
    named: list[str],
    transformers: ModuleType,
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    member, _ = of_class(name, transformers, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert lost is None or lost in tensors
    save_file({key: of for key, of in (tensors | changed).items() if key != lost}, tmp_path / "model.safetensors")
    with pytest.raises(GivenWeightsError) as found:
        read_weights(tmp_path, member)
    assert all(part in str(found.value) for part in [str(tmp_path), *named])


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"factor": 2.0, "type": "linear"}},  # next to rope_parameters of the default
        {"rope_scaling": {"factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "type": "default", "rope_theta": 500_000.0}},
        {"rope_parameters": [1, 2]},
    ],
)
def test_rotary_positions_that_the_decoder_lacks_are_refused(
    change: dict[str, Any], transformers: ModuleType, tmp_path: Path
) -> None:
    random_model(transformers, LLAMA).save_pretrained(tmp_path)
    edit_config(tmp_path, {"rope_scaling": {"type": "default"}})
    assert read_weights(tmp_path, LLAMA).layout == "llama"
    edit_config(tmp_path, change)
    with pytest.raises(GivenWeightsError, match=r"config\.json"):
        read_weights(tmp_path, LLAMA)


@pytest.mark.parametrize(("dtype", "named"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
@pytest.mark.parametrize("model", [LLAMA, None])
def test_quantized_tensors_are_refused(
    model: ModelConfig | None, dtype: torch.dtype, named: str, transformers: ModuleType, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    if model:
        random_model(transformers, LLAMA).save_pretrained(tmp_path)
    member = model or of_class("LlamaConfig", transformers, tmp_path)[0]
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(GivenWeightsError, match=rf"lm_head\.weight \({named}\)"):
        read_weights(tmp_path, member)


def test_a_missing_or_damaged_shard_is_named(transformers: ModuleType, tmp_path: Path) -> None:
    random_model(transformers, LLAMA).save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(GivenWeightsError, match=shard.name):
        read_weights(tmp_path, LLAMA)
    shard.unlink()
    with pytest.raises(GivenWeightsError, match=shard.name) as found:
        read_weights(tmp_path, LLAMA)
    assert "bin" not in str(found.value)


def test_a_class_that_absorbs_multipliers_otherwise_is_refused(
    transformers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"n_embd": 32, "n_head": 2}
    family = load("transformers:GPT2Config")(vocab_size=97, context_length=24, **sizes)
    network = transformers.AutoModelForCausalLM.from_config(cast(ConfigFamily, family).config(32, 2))
    network.save_pretrained(tmp_path)
    monkeypatch.setattr(ConfigFamily, "absorbed", lambda *_: {"network.transformer.wte.weight": 2.0})
    with pytest.raises(GivenWeightsError, match="logits"):
        read_weights(tmp_path, family.member(32, 2))


def test_values_that_are_not_finite_are_refused(transformers: ModuleType, tmp_path: Path) -> None:
    network = random_model(transformers, GPT2)
    with torch.no_grad():
        network.transformer.h[1].ln_1.weight[0] = torch.nan
    network.save_pretrained(tmp_path / "theirs")
    given = read_weights(tmp_path / "theirs", GPT2)
    with pytest.raises(ValueError, match=r"blocks\.1\.attention_norm\.weight"):
        write_initial_weights(tmp_path / "store", given.shapes, given)
    assert not (tmp_path / "store").exists()
