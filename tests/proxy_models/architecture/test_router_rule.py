"""The row of the router and of experts in the table of rules, written a second time, for every optimizer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy_models.architecture.config import ExpertScheme, ModelConfig
from proxy_models.architecture.parametrization import OptimizerName, TensorClass, TensorRule, parametrize

BASE = ModelConfig(d_model=32, n_layers=2, n_experts=8, experts_per_token=2, mlp_ratio=2.0, expert_ratio=1.0)
WIDE = replace(BASE, d_model=128, n_layers=4)  # four times as wide, twice as deep
ROUTER, DOWN, UP = (f"blocks.1.mlp.{name}" for name in ("router.weight", "experts.down", "experts.up"))


def rule_of(name: str, model: ModelConfig, base: ModelConfig = BASE, optimizer: OptimizerName = "adamw") -> TensorRule:
    return parametrize(model, base, optimizer=optimizer).rules[name]


@pytest.mark.parametrize(
    ("optimizer", "rate", "decay"),
    [
        ("adamw", 1 / 4, 4),
        ("adam", 1 / 4, 4),
        ("lion", 1 / 4, 4),
        ("muon", 1 / 4, 4),  # moved by AdamW
        ("soap", 1 / 4, 4),  # likewise
        ("adafactor", 1, 1),  # its step has the root mean square, which falls as 1/m
        ("lamb", 1, 4),  # likewise, and so has its decay
    ],
)
def test_a_router_is_a_readout_of_the_stream(optimizer: OptimizerName, rate: float, decay: float) -> None:
    base, wide = (rule_of(ROUTER, model, optimizer=optimizer) for model in (BASE, WIDE))
    assert (base.lr_factor, base.weight_decay_factor, base.eps_factor) == (1, 1, 1)
    assert base.init_std == pytest.approx(32**-0.5)
    assert wide.tensor_class is TensorClass.ROUTER
    assert wide.init_std == pytest.approx(base.init_std / 4)
    assert (wide.lr_factor, wide.weight_decay_factor) == (rate, decay)
    assert wide.eps_factor == 1 / 2, "with the depth, not with the width"
    of_step = wide.init_std / base.init_std if optimizer in ("adafactor", "lamb") else 1.0
    assert rate * of_step == 1 / 4, "entries of a step fall as 1/m"
    shrinks = wide.lr_factor * wide.weight_decay_factor * (of_step if optimizer == "lamb" else 1.0)
    assert shrinks == 1, "decay has the same speed at every width"


def test_half_the_exponent_of_the_depth_leaves_the_router_the_rate_of_a_block() -> None:
    rules = parametrize(WIDE, BASE, depth_exponent=0.5).rules
    assert rules[ROUTER].lr_factor == rules[UP].lr_factor == pytest.approx(2**-0.5 / 4)
    assert rules[ROUTER].eps_factor == pytest.approx(2**-0.5)


@pytest.mark.parametrize("scheme", ["fan_in", "mean_field", "sqrt_gate"])
def test_more_experts_change_eps_alone(scheme: ExpertScheme) -> None:
    base = replace(BASE, expert_scheme=scheme)
    for axis, size in (("experts", 32), ("sparsity", 16)):
        more = base.along(axis, size)  # type: ignore[arg-type]
        for name in (ROUTER, UP, DOWN):
            assert rule_of(name, more, base) == replace(rule_of(name, base, base), eps_factor=1 / 4)


@pytest.mark.parametrize(("scheme", "std"), [("fan_in", 2.0), ("mean_field", 4.0), ("sqrt_gate", 2.0)])
def test_finer_experts_change_the_fan_in_of_the_last_matrix(scheme: ExpertScheme, std: float) -> None:
    base = replace(BASE, expert_scheme=scheme)
    fine = base.along("granularity", 4 * base.granularity)
    was, now = rule_of(DOWN, base, base), rule_of(DOWN, fine, base)
    assert now.init_std == pytest.approx(std * was.init_std)
    assert now.lr_factor == pytest.approx(4)
    assert rule_of(UP, fine, base) == replace(rule_of(UP, base, base), eps_factor=1 / 4)
