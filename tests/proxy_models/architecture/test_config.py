from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from proxy_models.architecture.config import (
    Activation,
    ExpertScheme,
    ModelConfig,
    Norm,
    Positions,
    RouterScores,
)
from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import DROPPED
from proxy_models.architecture.parametrization import parametrize


def group_of(name: str) -> str:
    parts = name.split(".")
    if "norm" in parts[-2]:
        return "norms"
    if parts[0] == "position":
        return "positions"
    groups = ("router", "experts", "embedding", "attention", "mlp", "readout")
    return next(group for group in groups if group in parts)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any small member of the space of options."""
    queries_per_kv = draw(st.sampled_from([1, 2, 4]))
    chance = st.sampled_from([0.0, 0.3])
    n_layers = draw(st.integers(1, 3))
    experts: dict[str, Any] = {}
    if n_experts := draw(st.sampled_from([None, 2, 4])):
        experts = {
            "n_experts": n_experts,
            "experts_per_token": draw(st.integers(2, n_experts)),
            "expert_ratio": draw(st.sampled_from([1.0, 2.0])),
            "n_shared_experts": draw(st.integers(0, 2)),
            "first_dense_layers": draw(st.integers(0, n_layers - 1)),
            "router_scores": draw(st.sampled_from(get_args(RouterScores))),
            "expert_scheme": draw(st.sampled_from(get_args(ExpertScheme))),
            "balance_loss": draw(chance),
        }
    return ModelConfig(
        head_dim=8,
        d_model=8 * queries_per_kv * draw(st.integers(1, 3)),
        n_layers=n_layers,
        queries_per_kv=queries_per_kv,
        mlp_ratio=draw(st.sampled_from([1.0, 2.75, 4.0])),
        activation=draw(st.sampled_from(get_args(Activation))),
        norm=draw(st.sampled_from(get_args(Norm))),
        positions=draw(st.sampled_from(get_args(Positions))),
        rotary_fraction=draw(st.sampled_from([0.25, 0.5, 1.0])),
        rope_theta=draw(st.sampled_from([10_000.0, 500_000.0])),
        document_separator=None,
        attention_window=None,
        global_attention_every=None,
        qk_norm=draw(st.booleans()),
        parallel=draw(st.booleans()),
        tied=draw(st.booleans()),
        biases=draw(st.booleans()),
        vocab_size=draw(st.integers(2, 40)),
        context_length=draw(st.integers(2, 12)),
        label_smoothing=draw(chance),
        z_loss=draw(chance),
        **dict[str, Any]({name: draw(chance) for name in DROPPED}),
        **experts,
    )


few_configs = settings(max_examples=25)


def token_ids(config: ModelConfig, time: int) -> torch.Tensor:
    return torch.arange(2 * time).reshape(2, -1) % config.vocab_size


@few_configs
@given(config=configs())
def test_a_random_decoder_is_counted_right_and_has_its_table(config: ModelConfig) -> None:
    model = Decoder(config)
    counted = dict.fromkeys(config.n_params_by_group, 0)
    for name, parameter in model.named_parameters():
        counted[group_of(name)] += parameter.numel()
    if config.tied:
        counted["readout"] = counted.pop("embedding")
        counted["embedding"] = 0
    assert config.n_params_by_group == counted
    assert config.n_params_total == sum(counted.values())
    idle = counted["experts"] * (1 - config.active_share)
    assert config.n_params == pytest.approx(config.n_params_total - counted["embedding"] - counted["positions"] - idle)

    mup, standard = parametrize(config, config), parametrize(config, config, scheme="standard")
    assert list(mup.rules) == [name for name, _ in model.named_parameters()]
    assert (mup.rules, mup.multipliers) == (standard.rules, standard.multipliers)


@few_configs
@given(config=configs(), place=st.floats(0, 1))
def test_a_random_decoder_sees_no_future(config: ModelConfig, place: float) -> None:
    model, tokens = Decoder(config).eval(), token_ids(config, config.context_length)
    logits = model(tokens)
    assert logits.shape == (2, config.context_length, config.vocab_size)
    now = round(place * (config.context_length - 1))
    changed = tokens.clone()
    changed[:, now:] = (changed[:, now:] + 1) % config.vocab_size
    moved = model(changed)
    assert torch.equal(moved[:, :now], logits[:, :now])
    assert not torch.equal(moved[:, now:], logits[:, now:])


@few_configs
@given(config=configs())
def test_flops_per_token_are_those_that_torch_counts(config: ModelConfig) -> None:
    model, sequences = Decoder(config).eval(), token_ids(config, config.context_length + 1)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        next_token_loss(model, sequences).backward()  # type: ignore[no-untyped-call]
    assert counter.get_total_flops() == config.train_flops_per_token * sequences[:, 1:].numel()


@pytest.mark.parametrize(
    "more", [{}, {"n_experts": 8, "mlp_ratio": 2.0}, {"attention_window": 8, "global_attention_every": 6}]
)
def test_counts_do_not_walk_over_the_blocks(more: dict[str, Any]) -> None:
    """A mistyped depth took minutes to refuse."""
    deep = ModelConfig(d_model=32, n_layers=10**11, **more)
    shallow = replace(deep, n_layers=60)
    assert deep.n_sparse_layers in (0, deep.n_layers)
    assert deep.attended == pytest.approx(shallow.attended)
    assert deep.n_matrix_entries / deep.n_layers == pytest.approx(shallow.n_matrix_entries / 60)


def test_a_decimal_ratio_makes_whole_widths_whatever_its_rounding() -> None:
    family = ModelFamily(base=ModelConfig(d_model=80, n_layers=2, mlp_ratio=2.7, head_dim=40, rotary_fraction=0.35))
    assert 720 * 2.7 != 1944  # in floating point
    assert family.at(width=720).d_ff == 1944
    assert (family.base.d_ff, family.base.rotary_dim) == (216, 14)
    with pytest.raises(ValueError, match=r"720 \* 2.701"):
        ModelConfig(d_model=720, n_layers=2, mlp_ratio=2.701)
    mixture: dict[str, Any] = {"n_experts": 4, "mlp_ratio": 2.75, "expert_ratio": 1.1}
    base = ModelConfig(d_model=80, n_layers=2, **mixture)
    assert [ModelFamily(base=base).at(width=width).expert_width for width in (80, 160, 320, 720)] == [88, 176, 352, 792]
    with pytest.raises(ValueError, match="multiples of 8"):
        ModelConfig(d_model=96, n_layers=2, **mixture)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"d_model": 40}, "multiple of head_dim=16, got 40"),
        ({"d_model": 0}, "d_model must be at least 1"),
        ({"n_layers": 0}, "n_layers must be at least 1, got 0"),
        ({"head_dim": 5, "d_model": 35, "mlp_ratio": 2.0}, r"head_dim \* rotary_fraction must be even.*got 5 \* 1.0"),
        ({"rotary_fraction": 0.3}, r"head_dim \* rotary_fraction must be even.*got 16 \* 0.3"),
        ({"rope_theta": 0.0}, "rope_theta must be positive and finite, got 0.0"),
        ({"norm_eps": 0.0}, "norm_eps must be positive and finite, got 0.0"),
        ({"rotary_fraction": 0.0}, r"rotary_fraction must lie in \(0, 1\], got 0.0"),
        ({"queries_per_kv": 3}, "queries_per_kv must divide the 4 heads of d_model=64, got 3"),
        ({"activation": "silu"}, "activation must be one of swiglu, gelu, gelu_tanh, relu, relu2, got 'silu'"),
        ({"positions": "sinus"}, "positions must be one of rotary, learned, alibi, none, got 'sinus'"),
        ({"norm": "batch"}, "norm must be one of rmsnorm, layernorm, got 'batch'"),
        ({"mlp_dropout": 1.0}, r"mlp_dropout must lie in \[0, 1\), got 1.0"),
        ({"z_loss": -0.1}, "z_loss must not be negative, got -0.1"),
        ({"mlp_ratio": 2.7}, r"whole number, got 64 \* 2.7"),
        ({"mlp_ratio": -1.0}, "whole number"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"context_length": 0}, "context_length"),
    ],
)
def test_a_shape_that_breaks_a_rule_is_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        ModelConfig(**{"d_model": 64, "n_layers": 2, **change})


@given(heads=st.integers(1, 64), depth=st.integers(1, 12))
def test_a_family_keeps_its_ratios_exactly(heads: int, depth: int) -> None:
    family = ModelFamily(base=ModelConfig(d_model=64, n_layers=2))
    member = family.at(width=16 * heads, depth=depth)
    assert (member.d_model, member.n_layers) == (16 * heads, depth)
    assert member.d_ff * family.base.d_model == family.base.d_ff * member.d_model
    assert member.d_model == member.n_heads * family.base.head_dim


def test_what_is_not_named_stays_and_zero_is_no_default() -> None:
    family = ModelFamily(base=ModelConfig(d_model=64, n_layers=2))
    assert family.at() == family.base
    assert family.at(depth=4).d_model == 64
    for shape in ({"width": 0}, {"depth": 0}):
        with pytest.raises(ValueError, match="at least 1, got 0"):
            family.at(**shape)


def test_a_first_block_drops_nothing_so_one_alone_is_not_random() -> None:
    two = ModelConfig(d_model=64, n_layers=2, stochastic_depth=0.2)
    assert two.is_random
    assert not replace(two, n_layers=1).is_random
    assert replace(two, n_layers=1, mlp_dropout=0.1).is_random


@given(n_params=st.floats(1e3, 1e8))
def test_for_params_finds_the_nearest_member_in_ratio(n_params: float) -> None:
    family = ModelFamily(base=ModelConfig(d_model=64, n_layers=2))

    def ratio(member: ModelConfig) -> float:
        return max(member.n_params / n_params, n_params / member.n_params)

    found = family.for_params(n_params)
    neighbours = [family.at(width=width) for width in (found.d_model - 16, found.d_model + 16) if width]
    assert all(ratio(found) <= ratio(neighbour) for neighbour in neighbours)


@given(n_params=st.floats(1e4, 1e9))
def test_for_params_keeps_to_widths_at_which_the_mlp_s_ratio_is_exact(n_params: float) -> None:
    family = ModelFamily(base=ModelConfig(d_model=768, n_layers=2, head_dim=64, mlp_ratio=8 / 3))
    found = family.for_params(n_params)
    assert found.d_model % 192 == 0
    assert found.d_ff * 3 == found.d_model * 8


@pytest.mark.parametrize("n_params", [0, math.inf, math.nan])
def test_a_size_of_nothing_or_without_end_is_refused(n_params: float) -> None:
    with pytest.raises(ValueError, match=f"n_params must.*got {n_params}"):
        ModelFamily(base=ModelConfig(d_model=64, n_layers=2)).for_params(n_params)


def test_a_config_survives_json() -> None:
    config = ModelConfig(d_model=96, n_layers=3, context_length=64)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
