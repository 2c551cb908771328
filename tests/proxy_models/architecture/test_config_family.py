"""Families from transformers' configs: proportions, tables, multipliers, training, the coordinate check, and refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from proxy_models.architecture import config_family
from proxy_models.architecture.families import ModelFamily, build, family_of, load
from proxy_models.architecture.family import Family, FamilyError
from proxy_models.architecture.member import ModuleConfig
from proxy_models.architecture.memory import Checkpointing
from proxy_models.architecture.parametrization import TensorClass
from proxy_models.coordinates.measurement import coordinate_check
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import stem
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize
from proxy_models.training.trainer import Trainer
from tests.proxy_models.families import TRANSFORMERS

VALUES = Hyperparameters(learning_rate=2**-8, batch_tokens=4 * 32)
WIDTHS = (32, 64, 128, 256)

pytestmark = pytest.mark.usefixtures("transformers")


def family(name: str, **args: Any) -> Family:
    return load(f"transformers:{name}")(vocab_size=256, context_length=32, **{**TRANSFORMERS[name], **args})


def scaled(of: Family, width: int = 64) -> ModelFamily[ModuleConfig]:
    return ModelFamily(base=cast(ModuleConfig, of.member(width, 2)))


@pytest.fixture(params=list(TRANSFORMERS))
def each(request: pytest.FixtureRequest) -> Family:
    return family(request.param)


def test_sizes_keep_their_proportion_to_the_hidden_size_and_heads_their_size() -> None:
    qwen = cast(config_family.ConfigFamily, family("Qwen3Config", head_dim=16))
    assert qwen.width_step == 16  # 4 heads that share 2 keys, at a hidden size of 32
    config = qwen.config(96, 5)
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size, config.head_dim)
    assert sizes == (12, 6, 288, 16)
    assert (config.num_hidden_layers, config.vocab_size, config.max_position_embeddings) == (5, 256, 32)
    longer = cast(config_family.ConfigFamily, family("GPT2Config", n_positions=128))
    assert (longer.config(32, 1).n_positions, longer.config(64, 1).n_head) == (128, 8)
    heads = {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True}
    sizes_of: dict[str, Any] = {"vocab_size": 256, "context_length": 32, "hidden_size": 32, **heads}
    made = load("transformers:FalconConfig")(**sizes_of)
    falcon = cast(config_family.ConfigFamily, made)
    assert (falcon.config(96, 1).num_attention_heads, falcon.config(96, 1).num_kv_heads) == (12, 6)
    with pytest.raises(ValueError, match="d_model must be a multiple of 16, got 24"):
        qwen.member(24, 2)


def test_counts_are_those_of_gpt_2_written_out() -> None:
    width, depth = 48, 3
    member = family("GPT2Config").member(width, depth)
    block = 12 * width**2 + 13 * width  # 3, 1, 4 and 4 matrices with biases of 9 widths, two norms of 2
    assert member.n_params == depth * block + 2 * width + 256 * width
    assert member.n_params_total == member.n_params + 32 * width
    assert member.train_flops_per_token == 6 * member.n_params + 12 * depth * 32 * width


def test_a_conv1d_s_fan_in_is_its_first_dimension() -> None:
    gpt = family("GPT2Config")
    rules = gpt.parametrization(gpt.member(128, 1), gpt.member(32, 1)).rules
    block = "network.transformer.h.0."
    stds = {name: rules[f"{block}{name}.weight"].init_std for name in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")}
    assert stds == pytest.approx({"attn.c_attn": 128**-0.5, "mlp.c_fc": 128**-0.5, "mlp.c_proj": 512**-0.5})
    assert rules["network.transformer.wte.weight"].tensor_class is TensorClass.TIED
    assert rules["network.transformer.wpe.weight"].tensor_class is TensorClass.EMBEDDING


def test_a_member_is_known_by_its_class_its_files_and_the_arguments_that_were_given(
    each: Family, corpus: Corpus
) -> None:
    base = scaled(each).base
    numerics = Numerics(model=base, base=base, corpus_key=corpus.key, seed=0, evaluation_tokens=512)
    again = Numerics.from_dict(json.loads(json.dumps(numerics.to_dict())))
    assert again.key == numerics.key
    assert family_of(again.model) == each
    assert json.loads(base.arguments) == TRANSFORMERS[base.family.partition(":")[2]]
    with pytest.raises(ValueError, match="transformers:.*'other'"):
        family_of(replace(base, source="other", vocab_size=300))


def test_at_the_base_the_model_is_transformers_own() -> None:
    """Multipliers of 1 change nothing; a depth twice the base's halves what each block adds."""
    qwen = family("Qwen3Config")
    model, tokens = build(qwen.member(32, 2)), torch.arange(32).unsqueeze(0)
    network = cast(Any, model).network
    torch.testing.assert_close(model(tokens), network(input_ids=tokens).logits)
    untouched = network.model.layers[0]
    seen: dict[str, torch.Tensor] = {}
    untouched.register_forward_hook(lambda _module, inputs, output: seen.update(before=inputs[0], after=output))
    model(tokens)
    once = seen["after"] - seen["before"]
    model.get_buffer("branch_multiplier").fill_(0.5)
    model(tokens)
    torch.testing.assert_close(seen["after"] - seen["before"], 0.5 * once)


def test_every_multiplier_moves_the_logits_and_the_readout_s_doubles_them(each: Family) -> None:
    base = each.member(64, 2)
    model, tokens = build(base), torch.arange(32).unsqueeze(0)
    initialize(model, each.parametrization(base, base), VALUES.resolve(1000 * 128), seed=0)
    model.eval()
    once = model(tokens)
    for name in ("readout", "branch", "embedding"):
        buffer = model.get_buffer(f"{name}_multiplier")
        buffer.mul_(2)
        again = model(tokens)
        buffer.div_(2)
        assert not torch.allclose(again, once)
        if name == "readout":
            torch.testing.assert_close(again, 2 * once)


def test_the_coordinate_check_passes_over_width_and_depth(each: Family, corpus: Corpus) -> None:
    check = coordinate_check(scaled(each), VALUES, corpus, widths=WIDTHS, depths=(1, 2, 4, 8), n_steps=1)
    assert check.passed, check
    assert {"network.lm_head", "last block"} <= set(check.measurements["module"])


@pytest.mark.parametrize("name", ["Qwen3Config", "GPT2Config"])
def test_the_coordinate_check_names_a_readout_without_its_multiplier(
    name: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = family(name)
    plain = type(found).build

    def forgetful(self: Any, width: int, depth: int) -> Any:
        model = plain(self, width, depth)
        model.get_submodule("network.lm_head")._forward_pre_hooks.clear()
        return model

    monkeypatch.setattr(type(found), "build", forgetful)
    check = coordinate_check(scaled(found), VALUES, corpus, widths=WIDTHS, n_steps=1)
    assert [(finding.fault, finding.module) for finding in check.findings] == [
        ("readout multiplier", "network.lm_head")
    ]


def test_it_learns_in_the_lean_loop_in_parts_recomputed_and_in_bf16(corpus: Corpus) -> None:
    qwen = scaled(family("Qwen3Config"), 32)
    numerics = Numerics(model=qwen.at(width=64), base=qwen.base, corpus_key=corpus.key, seed=0, evaluation_tokens=512)
    segment = stem(replace(VALUES, learning_rate=0.01).resolve(16 * 128), 16 * 128)
    one = Trainer(corpus, compile=False).train(numerics, segment)
    parts = Trainer(corpus, compile=False, micro_batch=2).train(numerics, segment)
    rounded = Trainer(corpus, compile=False).train(replace(numerics, precision="bf16"), segment)
    assert one.loss is not None
    assert one.loss < float(one.curve.train_loss[0]) - 0.5
    assert parts.loss == pytest.approx(one.loss, rel=1e-3)
    assert rounded.loss == pytest.approx(one.loss, rel=2e-2)
    assert rounded.loss != one.loss


def test_whole_blocks_are_recomputed_to_the_same_gradients() -> None:
    qwen = family("Qwen3Config")
    model, tokens = build(qwen.member(32, 2)), torch.arange(33).unsqueeze(0)
    gradients = []
    kinds: tuple[Checkpointing, ...] = ("none", "full")
    for checkpointing in kinds:
        qwen.set_checkpointing(model, checkpointing)
        torch.autograd.backward(qwen.training_loss(model, tokens))
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        model.zero_grad()
    torch.testing.assert_close(*gradients)
    with pytest.raises(ValueError, match='checkpointing must be .* got "selective"'):
        qwen.set_checkpointing(model, "selective")


@pytest.mark.parametrize("name", ["Qwen3Config", "GemmaConfig"])  # Gemma's embed_scale is the root of the width
def test_constants_are_those_of_the_member_s_own_width(name: str) -> None:
    found = load(f"transformers:{name}")(vocab_size=256, context_length=32, **TRANSFORMERS["Qwen3Config"])
    with torch.device("meta"):
        model = found.build(64, 2)
    model.to_empty(device="cpu")
    found.write_constants(model, 64, 2)
    built = dict(found.build(64, 2).named_buffers())
    assert built.keys() == dict(model.named_buffers()).keys()
    for buffer_name, buffer in built.items():
        torch.testing.assert_close(model.get_buffer(buffer_name), buffer)


@pytest.mark.parametrize(
    ("name", "args", "rule"),
    [
        # its initial values are neither normal nor constant
        (
            "MambaConfig",
            {},
            "A_log of shape .* is none of embedding",
        ),
        ("BertConfig", {}, "cls.predictions.bias of shape .* is none of embedding"),
        ("ViTConfig", {}, "must be the configuration of a causal language model, got 'transformers:ViTConfig'"),
    ],
)
def test_what_has_no_rules_is_refused(name: str, args: dict[str, Any], rule: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rule):
        load(f"transformers:{name}")(vocab_size=256, context_length=32, **args).member(64, 2)


SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("name", "args", "keys"),
    [
        ("GPTNeoXConfig", {"hidden_size": 64, "num_attention_heads": 5}, ["hidden_size", "num_attention_heads"]),
        ("LlamaConfig", {**SMALL, "num_attention_heads": 5}, ["hidden_size", "num_attention_heads"]),
        ("GPT2Config", {"n_embd": 32, "n_head": 5}, ["n_embd", "n_head"]),
        (
            "Qwen3Config",
            {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 3, "head_dim": 8},
            ["num_attention_heads", "num_key_value_heads"],
        ),
        (
            "MistralConfig",
            {"hidden_size": 32, "num_attention_heads": 4},
            ["num_attention_heads", "num_key_value_heads"],
        ),
        ("MistralConfig", {**SMALL, "num_attention_heads": 0}, ["num_attention_heads"]),
        ("LlamaConfig", {**SMALL, "hidden_size": 0}, ["hidden_size"]),
        ("LlamaConfig", {**SMALL, "num_attention_heads": -4}, ["num_attention_heads"]),
        ("LlamaConfig", {**SMALL, "hidden_act": "nonsense"}, ["hidden_act"]),
        ("GPT2Config", {"n_embd": 32, "n_head": 4, "n_positions": 16}, ["n_positions", "context_length"]),
        ("GPTNeoConfig", {}, ["n_layers", "num_layers"]),  # its kinds of attention are listed for 24 layers
        ("Mamba2Config", {"hidden_size": 64}, ["hidden_size", "num_heads"]),
        ("Gemma3nTextConfig", SMALL, ["intermediate_size"]),  # makes a list of it
        ("Gemma4TextConfig", SMALL, ["head_dim"]),  # has one for each layer
    ],
)
def test_whatever_a_class_or_its_model_raises_names_the_arguments(
    name: str, args: dict[str, Any], keys: list[str]
) -> None:
    with pytest.raises(FamilyError) as refused:
        made = load(f"transformers:{name}")(vocab_size=256, context_length=32, **args)
        made.member(made.width_step, 2)
    assert all(key in str(refused.value) for key in keys)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("CwmConfig", {**SMALL, "head_dim": 8}),  # needs an id of the first token
        ("MinistralConfig", SMALL),  # needs head_dim, and has none
        ("OpenAIGPTConfig", {"n_embd": 32, "n_head": 4}),  # its blocks return lists
        ("MptConfig", {"d_model": 32, "n_heads": 4}),  # its longest context is 2,048 by default
    ],
)
def test_valid_sizes_train(name: str, args: dict[str, Any]) -> None:
    made = load(f"transformers:{name}")(vocab_size=256, context_length=2100, **args)
    base = made.member(32, 1)
    model = build(base)
    initialize(model, made.parametrization(base, base), VALUES.resolve(1000 * 128), seed=0)
    loss = made.training_loss(model, torch.arange(2101).unsqueeze(0) % 256)
    torch.autograd.backward(loss)
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["CwmConfig", "ModernBertDecoderConfig"])
def test_ids_of_tokens_are_none_or_in_the_vocabulary_and_every_token_is_learned(name: str) -> None:
    known = load(f"transformers:{name}")
    args = {key: value for key, value in SMALL.items() if hasattr(known, key)}
    made = cast(config_family.ConfigFamily, known(vocab_size=256, context_length=32, **args))
    config, model = made.config(32, 1), made.build(32, 1)
    assert {config.pad_token_id, config.bos_token_id} <= {None, 0}
    torch.autograd.backward(made.training_loss(model, torch.arange(33).unsqueeze(0)))
    gradient = cast(Any, model.network).get_input_embeddings().weight.grad
    assert (gradient[:32].abs().sum(dim=1) > 0).all()


@pytest.mark.parametrize("name", ["BailingHybridConfig", "DeepseekV4Config"])
def test_a_class_with_its_own_rope_theta_has_it_once(name: str) -> None:
    assert "rope_theta" in {each.name for each in fields(load(f"transformers:{name}"))}


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, transformers: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"muscale\[huggingface\]"):
        load("transformers:Qwen3Config")
    assert transformers


@pytest.mark.parametrize("name", ["GemmaConfig", "Gemma2Config"])
def test_a_gain_of_one_plus_weight_is_refused_as_training_would_start_it_at_two(name: str) -> None:
    args = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 96,
    }
    gemma = load(f"transformers:{name}")(vocab_size=256, context_length=32, **args)
    member = gemma.member(32, 2)
    with pytest.raises(FamilyError):
        gemma.parametrization(member, member)
