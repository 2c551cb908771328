from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from proxy_models.architecture.config import ModelConfig, Norm
from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.parametrization import (
    DecayScaling,
    ForwardMultipliers,
    OptimizerName,
    Parametrization,
    Scheme,
    TensorClass,
    TensorRule,
    decoder_shapes,
    parametrization_of,
    parametrize,
)
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.optimizer import clip, initialize, make_optimizer

BASE = ModelConfig(d_model=32, n_layers=2, context_length=16)
FAMILY = ModelFamily(base=BASE)
MATRIX, BLOCK_GAIN = "blocks.1.mlp.down.weight", "blocks.0.attention_norm.weight"


def losses(config: ModelConfig, scheme: Scheme, n_steps: int = 5) -> list[float]:
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=64).resolve(64 * 100)
    parametrization = parametrize(config, BASE, scheme=scheme)
    model = Decoder(config)
    initialize(model, parametrization, recipe, seed=0)
    optimizer = make_optimizer(model, parametrization, recipe)
    sequences = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    values = []
    for _ in range(n_steps):
        loss = next_token_loss(model, sequences)
        values.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        clip(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return values


def test_at_the_base_shape_mup_is_standard_parametrization_bit_for_bit() -> None:
    assert losses(BASE, "mup") == losses(BASE, "standard")
    wider = FAMILY.at(width=64)
    assert losses(wider, "mup") != losses(wider, "standard")


def test_the_table_at_four_times_the_width() -> None:
    # Literal values: d_model 128, d_ff 352, base 32.
    rules = parametrize(FAMILY.at(width=128), BASE).rules
    at = {"width_mult": 4.0, "eps_factor": 0.25}
    expected = {
        "embedding.weight": TensorRule(
            tensor_class=TensorClass.EMBEDDING, init_std=1.0, lr_factor=1.0, weight_decay_factor=1.0, **at
        ),
        "blocks.0.attention.query.weight": TensorRule(
            tensor_class=TensorClass.HIDDEN, init_std=128**-0.5, lr_factor=0.25, weight_decay_factor=4.0, **at
        ),
        MATRIX: TensorRule(
            tensor_class=TensorClass.HIDDEN, init_std=352**-0.5, lr_factor=0.25, weight_decay_factor=4.0, **at
        ),
        BLOCK_GAIN: TensorRule(
            tensor_class=TensorClass.BLOCK_NORM, init_std=0.0, lr_factor=1.0, weight_decay_factor=0.0, **at
        ),
        "final_norm.weight": TensorRule(
            tensor_class=TensorClass.FINAL_NORM, init_std=0.0, lr_factor=1.0, weight_decay_factor=0.0, **at
        ),
        "readout.weight": TensorRule(
            tensor_class=TensorClass.READOUT, init_std=32**-0.5, lr_factor=1.0, weight_decay_factor=1.0, **at
        ),
    }
    for name, rule in expected.items():
        assert vars(rules[name]) == pytest.approx(vars(rule)), name


def test_the_readout_is_divided_by_the_width_multiplier_and_attention_logits_are_not() -> None:
    wide, base = parametrize(FAMILY.at(width=128), BASE).multipliers, parametrize(BASE, BASE).multipliers
    assert wide.readout == base.readout / 4
    assert replace(wide, readout=base.readout) == base


def test_decay_that_keeps_a_sublayer_s_gain_grows_as_the_root_of_the_width_in_hidden_matrices_only() -> None:
    tables = [
        parametrize(FAMILY.at(width=128, depth=8), BASE, decay_scaling=scaling) for scaling in get_args(DecayScaling)
    ]
    for name, (constant, gain) in {
        name: (tables[0].rules[name], tables[1].rules[name]) for name in tables[0].rules
    }.items():
        is_hidden = constant.tensor_class is TensorClass.HIDDEN
        assert gain == replace(constant, weight_decay_factor=2.0 if is_hidden else constant.weight_decay_factor), name
    assert f"{tables[1].rules[MATRIX].weight_decay_factor:>8.3g}" in str(tables[1])
    assert parametrize(BASE, BASE, decay_scaling="sublayer_gain") == parametrize(BASE, BASE)
    with pytest.raises(ValueError, match='"sublayer_gain".*got muon'):
        parametrize(BASE, BASE, optimizer="muon", decay_scaling="sublayer_gain")


@pytest.mark.parametrize(
    ("optimizer", "rate", "decay"),
    [
        ("adamw", 1 / 4, 4.0),
        ("adam", 1 / 4, 4.0),
        ("lion", 1 / 4, 4.0),
        ("adafactor", 1 / 2, 2.0),
        ("muon", 1 / 2, 2.0),
        ("soap", 1 / 2, 2.0),
        ("lamb", 1 / 2, 4.0),  # the ratio of norms has the other half
    ],
)
def test_each_optimizer_has_its_own_power_of_the_width_in_the_rate_of_hidden_matrices(
    optimizer: OptimizerName, rate: float, decay: float
) -> None:
    usual, own = (parametrize(FAMILY.at(width=128, depth=8), BASE, optimizer=name) for name in ("adamw", optimizer))
    assert (own.rules[MATRIX].lr_factor, own.rules[MATRIX].weight_decay_factor) == (rate, decay)
    others = {name for name, rule in own.rules.items() if rule.tensor_class is not TensorClass.HIDDEN}
    assert {name: own.rules[name] for name in others} == {name: usual.rules[name] for name in others}
    assert own.multipliers == usual.multipliers


@pytest.mark.parametrize(("exponent", "rate", "branch"), [(1.0, 1.0, 1 / 4), (0.5, 1 / 2, 1 / 2)])
def test_depth_scales_branches_rates_and_eps_inside_the_blocks_only(
    exponent: float, rate: float, branch: float
) -> None:
    deep = parametrize(FAMILY.at(depth=8), BASE, depth_exponent=exponent)
    shallow = parametrize(BASE, BASE)
    assert deep.multipliers == replace(shallow.multipliers, branch=branch)
    for name in (MATRIX, BLOCK_GAIN):
        decay = shallow.rules[name].weight_decay_factor / rate
        scaled = replace(shallow.rules[name], lr_factor=rate, eps_factor=branch, weight_decay_factor=decay)
        assert deep.rules[name] == scaled, name
    for name in ("embedding.weight", "final_norm.weight", "readout.weight"):
        assert deep.rules[name] == shallow.rules[name], name


@pytest.mark.parametrize("exponent", [1.0, 0.5])
def test_eps_falls_with_depth_as_gradients_in_a_block_do(exponent: float) -> None:
    base = replace(BASE, qk_norm=True)
    deep = ModelFamily(base=base).at(depth=16)
    sequences = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(0))
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=64).resolve(64 * 100)

    def gradients(config: ModelConfig) -> dict[TensorClass, float]:
        table, model = parametrize(config, base, depth_exponent=exponent), Decoder(config)
        initialize(model, table, recipe, seed=0)
        next_token_loss(model, sequences).backward()  # type: ignore[no-untyped-call]
        squares: dict[TensorClass, list[torch.Tensor]] = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            squares.setdefault(table.rules[name].tensor_class, []).append(parameter.grad.square().mean())
        return {kind: float(torch.stack(values).mean().sqrt()) for kind, values in squares.items()}

    at_base, at_depth = gradients(base), gradients(deep)
    factors = {
        rule.tensor_class: rule.eps_factor for rule in parametrize(deep, base, depth_exponent=exponent).rules.values()
    }
    for kind in (TensorClass.HIDDEN, TensorClass.BLOCK_NORM, TensorClass.QK_NORM):
        assert at_depth[kind] / at_base[kind] == pytest.approx(factors[kind], rel=0.3), kind


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor", "muon", "soap", "lamb"])
@pytest.mark.parametrize("exponent", [0.5, 0.75, 1.0])
def test_a_matrix_shrinks_at_the_tuned_speed_at_every_width_and_depth(
    exponent: float, optimizer: OptimizerName
) -> None:
    for model in (FAMILY.at(width=16), FAMILY.at(depth=32), FAMILY.at(width=128, depth=32)):
        for rule in parametrize(model, BASE, depth_exponent=exponent, optimizer=optimizer).rules.values():
            ratio = rule.width_mult**-0.5 if optimizer == "lamb" and rule.tensor_class is TensorClass.HIDDEN else 1.0
            if rule.weight_decay_factor:
                assert ratio * rule.lr_factor * rule.weight_decay_factor == pytest.approx(1)


def test_width_and_depth_multiply() -> None:
    rule = parametrize(FAMILY.at(width=64, depth=8), BASE, depth_exponent=0.5).rules[MATRIX]
    assert (rule.lr_factor, rule.eps_factor) == (1 / 4, 1 / 4)


def test_the_standard_table_has_one_rate_and_fan_in_initialisation() -> None:
    table = parametrize(FAMILY.at(width=128, depth=8), BASE, scheme="standard")
    assert {(rule.lr_factor, rule.eps_factor) for rule in table.rules.values()} == {(1.0, 1.0)}
    assert {rule.weight_decay_factor for name, rule in table.rules.items() if "norm" not in name} == {1.0}
    assert table.rules["readout.weight"].init_std == pytest.approx(128**-0.5)
    assert (table.multipliers.branch, table.multipliers.readout) == (1.0, 1.0)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("biases", [True, False])
def test_a_norm_has_a_bias_where_it_is_a_layernorm_in_a_model_with_biases(norm: Norm, biases: bool) -> None:
    config = replace(BASE, norm=norm, biases=biases)
    rules = parametrize(config, config).rules
    assert list(rules) == [name for name, _ in Decoder(config).named_parameters()]
    assert ("final_norm.bias" in rules) == (norm == "layernorm" and biases)


def test_vectors_and_tied_tables_follow_their_rows() -> None:
    base = ModelConfig(
        d_model=32,
        n_layers=2,
        context_length=16,
        norm="layernorm",
        biases=True,
        tied=True,
        qk_norm=True,
        positions="learned",
    )
    table = parametrize(ModelFamily(base=base).at(width=128, depth=4), base, depth_exponent=0.5)
    rules, in_block = table.rules, {"lr_factor": 2**-0.5, "eps_factor": 1 / (4 * 2**0.5)}
    expected: dict[str, dict[str, float]] = {
        "embedding.weight": {"init_std": 32**-0.5, "lr_factor": 1, "eps_factor": 0.25, "weight_decay_factor": 1},
        "position.weight": {"init_std": 1, "lr_factor": 1, "eps_factor": 0.25, "weight_decay_factor": 1},
        "blocks.0.attention.query.bias": {"init_std": 0, "init_mean": 0, "weight_decay_factor": 0, **in_block},
        "blocks.0.attention_norm.bias": {"init_std": 0, "init_mean": 0, "weight_decay_factor": 0, **in_block},
        "blocks.0.attention.query_norm.weight": {
            "init_mean": 1,
            "width_mult": 1,
            "weight_decay_factor": 0,
            "lr_factor": 2**-0.5,
            "eps_factor": 2**-0.5,
        },
        "final_norm.bias": {"init_mean": 0, "lr_factor": 1, "eps_factor": 0.25, "weight_decay_factor": 0},
    }
    for name, values in expected.items():
        assert {key: getattr(rules[name], key) for key in values} == pytest.approx(values), name
    assert table.multipliers.embedding == pytest.approx(32**0.5)
    assert table.multipliers.readout == 0.25


def test_at_the_base_shape_every_variant_is_standard_parametrization(variant: dict[str, Any]) -> None:
    base = ModelConfig(d_model=64, n_layers=2, context_length=16, **variant)
    mup, standard = parametrize(base, base), parametrize(base, base, scheme="standard")
    assert mup.multipliers == standard.multipliers
    assert mup.rules == standard.rules


def test_tuned_multipliers_multiply() -> None:
    tuned = parametrize(FAMILY.at(width=128), BASE).multipliers.tuned(embedding=2, readout=3, attention=5)
    assert (tuned.embedding, tuned.readout, tuned.attention, tuned.branch) == (2, 0.75, 1.25, 1)
    tied = replace(BASE, tied=True)
    assert parametrize(tied, tied).multipliers.tuned(embedding=2, readout=1, attention=1).embedding == pytest.approx(
        2 * 32**0.5
    )


def test_another_table_is_refused_with_what_differs() -> None:
    table = parametrize(FAMILY.at(width=64), BASE)
    table.require(parametrize(FAMILY.at(width=64), BASE))
    rules = {**table.rules, MATRIX: replace(table.rules[MATRIX], lr_factor=0.25)}
    with pytest.raises(ValueError, match=rf"another parametrization: {MATRIX}'s lr_factor is 0.25 there and 0.5 here$"):
        table.require(replace(table, rules=rules))
    three = replace(table.rules[MATRIX], lr_factor=0.25, eps_factor=0.25, init_std=0.25)
    with pytest.raises(ValueError, match=rf"{MATRIX}'s eps_factor is 0\.25 there and 0\.5 here$"):
        table.require(replace(table, rules={**table.rules, MATRIX: three}))
    readout = replace(table.multipliers, readout=2.0)
    with pytest.raises(ValueError, match=r"readout.*2.0.*0.5 here$"):
        table.require(replace(table, multipliers=readout))
    fewer = {name: rule for name, rule in table.rules.items() if name != MATRIX}
    with pytest.raises(ValueError, match=rf"{MATRIX}'s tensor_class.*None.*hidden.*3 more$"):
        table.require(replace(table, rules=fewer))
    with pytest.raises(ValueError, match=r"optimizer is muon there and adamw here; .*; and \d+ more"):
        table.require(parametrize(FAMILY.at(width=64), BASE, optimizer="muon"))


def test_the_table_survives_json_and_prints_a_line_for_each_kind_of_tensor() -> None:
    table = parametrize(FAMILY.at(width=64, depth=3), BASE)
    assert Parametrization.from_dict(json.loads(json.dumps(table.to_dict()))) == table
    lines = str(table).splitlines()
    of_one_layer = parametrize(FAMILY.at(width=64, depth=1), BASE).rules
    assert len(lines) == len(of_one_layer) + 2
    assert len({len(line) for line in lines[:-1]}) == 1


@pytest.mark.parametrize("change", [{"context_length": 32}, {"head_dim": 8}, {"mlp_ratio": 3.0}, {"vocab_size": 128}])
def test_mup_carries_across_width_and_depth_only(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))} is {next(iter(change.values()))} but"):
        parametrize(replace(BASE, **change), BASE)


@pytest.mark.parametrize("exponent", [0.4, 1.1])
def test_a_depth_exponent_outside_completep_s_range_is_refused(exponent: float) -> None:
    with pytest.raises(ValueError, match=rf"depth_exponent must lie in \[0.5, 1\].*got {exponent}"):
        parametrize(BASE, BASE, depth_exponent=exponent)


def test_readouts_have_one_width() -> None:
    shapes = dict(decoder_shapes(FAMILY.at(width=64), BASE))
    second = replace(shapes["readout.weight"], width_mult=3.0)
    with pytest.raises(ValueError, match=r"got \[2.0, 3.0\]"):
        parametrization_of({**shapes, "other.weight": second}, depth_mult=1, attention=0.25)
    del shapes["readout.weight"]
    with pytest.raises(ValueError, match="got no readout"):
        parametrization_of(shapes, depth_mult=1, attention=0.25)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, "1", None, {}, 10**400])
def test_a_multiplier_that_a_decoder_can_not_keep_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="32 bits, got "):
        ForwardMultipliers(embedding=1.0, branch=value, readout=1.0, attention=1.0)
