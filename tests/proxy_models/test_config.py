from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from proxy_models.config import ModelConfig, ModelFamily
from proxy_models.decoder import Decoder, next_token_loss


def group_of(name: str) -> str:
    parts = name.split(".")
    if "norm" in parts[-2]:
        return "norms"
    return next(part for part in parts if part in ("embedding", "attention", "mlp", "readout"))


@pytest.mark.parametrize(("width", "depth"), [(16, 1), (48, 3), (128, 2)])
def test_counts_are_those_of_the_real_model(width: int, depth: int) -> None:
    config = ModelConfig(d_model=width, n_layers=depth)
    counted = dict.fromkeys(config.n_params_by_group, 0)
    for name, parameter in Decoder(config).named_parameters():
        counted[group_of(name)] += parameter.numel()
    assert config.n_params_by_group == counted
    assert config.n_params_total == sum(counted.values())
    assert config.n_params == sum(counted.values()) - counted["embedding"]


def test_flops_per_token_are_those_that_torch_counts() -> None:
    config = ModelConfig(d_model=64, n_layers=2, context_length=64)
    sequences = torch.zeros(3, config.context_length + 1, dtype=torch.int64)
    model = Decoder(config)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        next_token_loss(model, sequences).backward()  # type: ignore[no-untyped-call]
    gains = 6 * config.n_params_by_group["norms"]  # no matrix product, so not counted by torch
    assert counter.get_total_flops() == (config.train_flops_per_token - gains) * 3 * config.context_length


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"d_model": 40}, "multiple of head_dim=16, got 40"),
        ({"d_model": 0}, "d_model must be at least 1"),
        ({"n_layers": 0}, "n_layers must be at least 1, got 0"),
        ({"head_dim": 5, "d_model": 35}, "head_dim must be even"),
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


@given(n_params=st.floats(1e3, 1e8))
def test_for_params_finds_the_nearest_member_in_ratio(n_params: float) -> None:
    family = ModelFamily(base=ModelConfig(d_model=64, n_layers=2))

    def ratio(member: ModelConfig) -> float:
        return max(member.n_params / n_params, n_params / member.n_params)

    found = family.for_params(n_params)
    neighbours = [family.at(width=width) for width in (found.d_model - 16, found.d_model + 16) if width]
    assert all(ratio(found) <= ratio(neighbour) for neighbour in neighbours)


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="n_params must be positive, got 0"):
        ModelFamily(base=ModelConfig(d_model=64, n_layers=2)).for_params(0)


def test_config_and_family_survive_json() -> None:
    family = ModelFamily(base=ModelConfig(d_model=96, n_layers=3, context_length=64))
    assert ModelFamily.from_dict(json.loads(json.dumps(family.to_dict()))) == family
