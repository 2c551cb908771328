"""The check on real models: it passes for muP and finds each planted fault, each by its own name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.parametrization import (
    RATE_EXPONENT,
    OptimizerName,
    Parametrization,
    Scheme,
    TensorClass,
    TensorRule,
    parametrize,
)
from proxy_models.coordinates.check import CoordinateCheck
from proxy_models.coordinates.coordinate_figures import coordinates_data
from proxy_models.coordinates.measurement import coordinate_check, measure
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.optimizer import clip, initialize, make_optimizer

FAMILY = ModelFamily(base=ModelConfig(d_model=32, n_layers=2, context_length=32))
WIDTHS = (16, 32, 64, 128)
SHALLOW = (1, 2, 4, 8)
DEPTHS = (2, 4, 8, 16)
Rule = Callable[[ModelConfig, ModelConfig], Parametrization]
VALUES = Hyperparameters(learning_rate=2**-8, batch_tokens=512)


def with_rules(table: Parametrization, change: Callable[[str, TensorRule], TensorRule]) -> Parametrization:
    return replace(table, rules={name: change(name, rule) for name, rule in table.rules.items()})


def unscaled_rates(config: ModelConfig, base: ModelConfig) -> Parametrization:
    return with_rules(parametrize(config, base), lambda _, rule: replace(rule, lr_factor=1.0))


def unscaled_init(config: ModelConfig, base: ModelConfig) -> Parametrization:
    at_base = parametrize(base, base).rules
    return with_rules(parametrize(config, base), lambda name, rule: replace(rule, init_std=at_base[name].init_std))


def without(multiplier: str) -> Rule:
    def rule(config: ModelConfig, base: ModelConfig) -> Parametrization:
        table = parametrize(config, base)
        return replace(table, multipliers=replace(table.multipliers, **{multiplier: 1.0}))

    return rule


WITHOUT_BRANCH = without("branch")


def depth_exponent_half(config: ModelConfig, base: ModelConfig) -> Parametrization:
    return parametrize(config, base, depth_exponent=0.5)


def no_rate_factor_in_depth(config: ModelConfig, base: ModelConfig) -> Parametrization:
    rates = parametrize(config, base).rules
    return with_rules(
        depth_exponent_half(config, base), lambda name, rule: replace(rule, lr_factor=rates[name].lr_factor)
    )


def rates_divided_by_depth(config: ModelConfig, base: ModelConfig) -> Parametrization:
    divisor = config.n_layers / base.n_layers
    return with_rules(
        parametrize(config, base),
        lambda name, rule: replace(rule, lr_factor=rule.lr_factor / divisor) if name.startswith("blocks") else rule,
    )


def readout_divided_by_depth(config: ModelConfig, base: ModelConfig) -> Parametrization:
    multipliers = (table := parametrize(config, base)).multipliers
    return replace(
        table, multipliers=replace(multipliers, readout=multipliers.readout * base.n_layers / config.n_layers)
    )


@pytest.fixture(scope="module")
def check(corpus: Corpus) -> Callable[..., CoordinateCheck]:
    @cache
    def run(rule: Rule | None, scheme: Scheme) -> CoordinateCheck:
        return coordinate_check(FAMILY, VALUES, corpus, widths=WIDTHS, scheme=scheme, parametrization=rule)

    return lambda rule=None, scheme="mup": run(rule, scheme)


@pytest.fixture(scope="module")
def in_depth(corpus: Corpus) -> Callable[..., CoordinateCheck]:
    """The check along depth, next to the one along width."""

    @cache
    def run(rule: Rule | None) -> CoordinateCheck:
        return coordinate_check(FAMILY, VALUES, corpus, widths=WIDTHS, depths=DEPTHS, n_steps=1, parametrization=rule)

    return lambda rule=None: run(rule)


def steepest(result: CoordinateCheck, criterion: str) -> float:
    slopes = result.slopes[result.slopes["criterion"].fillna("").str.startswith(criterion)]["slope"]
    return float(slopes.loc[slopes.abs().idxmax()])


def test_mup_passes(check: Callable[..., CoordinateCheck]) -> None:
    result = check()
    assert result.passed, str(result)
    assert result.findings == ()
    assert not result.is_tied
    assert result.caution == result.to_dict()["caution"] == ""
    assert str(result).startswith("coordinate check passed: widths 16, 32, 64, 128; 2 seeds; 5 steps")


def test_mup_passes_in_every_variant(corpus: Corpus, variant: dict[str, Any]) -> None:
    group = variant.get("queries_per_kv", 1)  # the narrowest model has one group of heads
    family = ModelFamily(base=replace(FAMILY.base, d_model=32 * group, **variant))
    widths = [width * group for width in WIDTHS]
    result = coordinate_check(family, VALUES, corpus, widths=widths, depths=SHALLOW, n_steps=3)
    assert result.passed, str(result)


def test_mup_passes_with_an_attention_window(corpus: Corpus) -> None:
    family = ModelFamily(base=replace(FAMILY.base, attention_window=5))
    result = coordinate_check(family, VALUES, corpus, widths=WIDTHS, depths=SHALLOW, n_steps=3)
    assert result.passed, str(result)


RATES: dict[OptimizerName, float] = {
    "adam": 2**-8,
    "lion": 2**-10,
    "adafactor": 2**-6,
    "muon": 2**-8,
    "lamb": 2**-7,
    "soap": 2**-8,
}


@pytest.mark.parametrize("name", RATES)
def test_every_optimizer_passes_with_its_own_exponent_and_with_no_other(corpus: Corpus, name: OptimizerName) -> None:
    values = replace(VALUES, learning_rate=RATES[name])

    def planted(exponent: float, in_depth: float = 0.0) -> Rule:
        def rule(config: ModelConfig, base: ModelConfig) -> Parametrization:
            table = parametrize(config, base, optimizer=name)
            change = (config.d_model / base.d_model) ** (RATE_EXPONENT[name] - exponent)
            change *= (config.n_layers / base.n_layers) ** in_depth
            return with_rules(
                table,
                lambda _, r: replace(r, lr_factor=r.lr_factor * change) if r.tensor_class is TensorClass.HIDDEN else r,
            )

        return rule

    own = RATE_EXPONENT[name]
    result = coordinate_check(
        FAMILY, values, corpus, widths=WIDTHS, depths=SHALLOW, n_steps=3, parametrization=planted(own)
    )
    assert result.passed, str(result)
    first = 2 if name == "soap" else 1  # SOAP's first step moves no matrix
    for other in (own - 0.5, own + 0.5):
        wrong = coordinate_check(FAMILY, values, corpus, widths=WIDTHS, n_steps=first, parametrization=planted(other))
        assert [finding.fault for finding in wrong.findings][:1] == ["learning-rate scaling"], other
    for power in (-1.0, 1.0):
        deep = coordinate_check(
            FAMILY, values, corpus, widths=WIDTHS, depths=SHALLOW, n_steps=first, parametrization=planted(own, power)
        )
        assert [(finding.fault, finding.axis) for finding in deep.findings] == [
            ("learning-rate scaling in depth", "depth")
        ], power


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_a_readout_that_starts_at_zero_passes(corpus: Corpus, name: OptimizerName) -> None:
    values = replace(VALUES, zero_readout=True, optimizer=name)
    result = coordinate_check(FAMILY, values, corpus, widths=WIDTHS, depths=SHALLOW, n_steps=3)
    assert result.passed, str(result)
    assert set(
        result.slopes.dropna(subset="criterion").query("quantity == 'change' and module != 'readout'")["step"]
    ) == {2}


def test_depth_passes_under_the_other_exponent(in_depth: Callable[..., CoordinateCheck]) -> None:
    result = in_depth(depth_exponent_half)
    assert result.passed, str(result)


@pytest.mark.parametrize(
    ("rule", "fault", "criterion", "slope"),
    [
        (WITHOUT_BRANCH, "residual scaling", "(e)", 0.45),
        (no_rate_factor_in_depth, "learning-rate scaling in depth", "(f)", 0.41),
        (rates_divided_by_depth, "learning-rate scaling in depth", "(f)", -1.11),
        (readout_divided_by_depth, "readout multiplier", "(g)", -1.0),
    ],
)
def test_each_fault_planted_in_depth_fails_by_its_own_name_and_in_depth_only(
    in_depth: Callable[..., CoordinateCheck], rule: Rule, fault: str, criterion: str, slope: float
) -> None:
    result = in_depth(rule)
    (finding,) = result.findings
    assert (finding.fault, finding.axis) == (fault, "depth")
    assert f"  {fault}: " in str(result)
    assert steepest(result, criterion) == pytest.approx(slope, abs=0.12)


def test_standard_parametrization_fails_along_both_axes(in_depth: Callable[..., CoordinateCheck]) -> None:
    result = in_depth(lambda config, base: parametrize(config, base, scheme="standard"))
    faults = {(finding.axis, finding.fault) for finding in result.findings}
    assert faults == {("width", "learning-rate scaling"), ("depth", "residual scaling")}


def test_it_looks_at_every_module_of_the_model(check: Callable[..., CoordinateCheck]) -> None:
    slopes = check().slopes
    kinds = slopes.drop_duplicates("module").set_index("module")["kind"].to_dict()
    projections = [f"attention.{name}" for name in ("query", "key", "value", "output")]
    projections += [f"mlp.{name}" for name in ("gate", "up", "down")]
    blocks = ["blocks.0", "blocks.1"]
    hidden = {"embedding", *blocks, *(f"{block}.{name}" for block in blocks for name in projections)}
    norms = {"final_norm", *(f"{block}.{name}" for block in blocks for name in ("attention_norm", "mlp_norm"))}
    assert kinds == {**dict.fromkeys(hidden, "hidden"), **dict.fromkeys(norms, "norm"), "readout": "readout"}
    counts = slopes.groupby("criterion").size().to_dict()
    assert counts == {
        "(a) initial size": len(hidden),
        "(b) first change": len(hidden) + len(norms),
        "(c) trained size": 5 * len(hidden),
        "(d) readout size": 6,
        "(h) initial norm": 2 * len(projections),
        "(i) first update": 2 * len(projections) + 2,
    }
    assert set(slopes[slopes["criterion"] == "(b) first change"]["step"]) == {1}


@pytest.mark.parametrize(
    ("rule", "scheme", "fault", "criterion", "slope"),
    [
        (None, "standard", "learning-rate scaling", "(b)", 0.85),
        (unscaled_rates, "mup", "learning-rate scaling", "(b)", 0.89),
        (unscaled_init, "mup", "init", "(a)", 1.61),
        (without("readout"), "mup", "readout multiplier", "(d)", 0.50),
    ],
)
def test_each_planted_fault_fails_by_its_own_name(
    check: Callable[..., CoordinateCheck], rule: Rule | None, scheme: str, fault: str, criterion: str, slope: float
) -> None:
    result = check(rule, scheme)
    assert not result.passed
    assert {finding.fault for finding in result.findings} == {fault}
    if fault == "readout multiplier":
        assert {finding.module for finding in result.findings} == {"readout"}
    assert f"  {fault}: " in str(result)
    # The slopes are those measured before (mup-rules.md), on another corpus and batch.
    assert steepest(result, criterion) == pytest.approx(slope, abs=0.12)
    first = result.findings[0]
    assert not first.low <= first.slope <= first.high
    assert first.step == (1 if fault == "learning-rate scaling" else 0)


@pytest.mark.parametrize(
    ("init", "rate", "readout", "faults"),
    [
        (0.0, 0.0, 0.0, set()),
        (0.5, 0.0, 0.0, {"init"}),
        (0.0, 0.5, 0.0, {"learning-rate scaling"}),  # a readout's without alignment (Everett et al., arXiv 2407.05872)
        (0.0, -0.5, 0.0, {"learning-rate scaling"}),  # an embedding's of a large vocabulary (arXiv 2506.15025)
        (0.0, 0.0, 1.0, {"readout multiplier"}),
    ],
)
def test_a_tied_table_passes_with_its_own_exponents_and_with_no_others(
    corpus: Corpus, init: float, rate: float, readout: float, faults: set[str]
) -> None:
    """Initial values, rate and readout multiplier are off by these powers of the width."""

    def rule(config: ModelConfig, base: ModelConfig) -> Parametrization:
        table, m = parametrize(config, base), config.d_model / base.d_model

        def planted(_: str, rule: TensorRule) -> TensorRule:
            if rule.tensor_class is not TensorClass.TIED:
                return rule
            return replace(rule, init_std=rule.init_std * m**init, lr_factor=rule.lr_factor * m**rate)

        multipliers = replace(table.multipliers, readout=table.multipliers.readout * m**readout)
        return replace(with_rules(table, planted), multipliers=multipliers)

    family = ModelFamily(base=replace(FAMILY.base, tied=True))
    result = coordinate_check(family, VALUES, corpus, widths=WIDTHS, n_steps=1, parametrization=rule)
    assert result.is_tied
    assert result.caution in str(result)
    assert {finding.fault for finding in result.findings} == faults


def test_a_warmup_or_ramp_longer_than_its_horizon_changes_nothing(corpus: Corpus) -> None:
    long = replace(VALUES, warmup_floor_tokens=10**9, batch_doublings=1, batch_ramp_tokens=10**9)
    first, second = (
        coordinate_check(FAMILY, values, corpus, widths=(16, 32, 64, 128), n_steps=1, n_sequences=1).measurements
        for values in (VALUES, long)
    )
    pd.testing.assert_frame_equal(first, second, check_exact=True)


def test_its_steps_are_those_of_training(corpus: Corpus) -> None:
    config, recipe = FAMILY.at(width=32), replace(VALUES, clip_norm=0.1).resolve(512 * 100)
    table, sequences = parametrize(config, FAMILY.base), torch.arange(99).reshape(3, 33)
    measured = measure(config, table, recipe, sequences, seed=4, n_steps=3)
    model = Decoder(config)
    initialize(model, table, recipe, seed=4)
    optimizer = make_optimizer(model, table, recipe)
    for step in range(4):
        logits = model(sequences[:, :-1]).detach()
        assert measured["readout", "readout", "size", step] == pytest.approx(
            logits.square().mean().sqrt().item(), rel=1e-4
        )
        next_token_loss(model, sequences).backward()  # type: ignore[no-untyped-call]
        clip(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()


def test_a_fault_in_one_tensor_names_that_module(corpus: Corpus) -> None:
    def one_wrong(config: ModelConfig, base: ModelConfig) -> Parametrization:
        wrong = "blocks.0.attention.query.weight"
        table = parametrize(config, base)
        return with_rules(table, lambda name, rule: replace(rule, lr_factor=1.0) if name == wrong else rule)

    result = coordinate_check(FAMILY, VALUES, corpus, widths=WIDTHS, n_steps=1, parametrization=one_wrong)
    (finding,) = result.findings
    assert (finding.fault, finding.module) == ("learning-rate scaling", "blocks.0.attention.query")


def test_in_depth_it_compares_the_last_block_s_stream_and_the_readout(in_depth: Callable[..., CoordinateCheck]) -> None:
    result = in_depth()
    deep = result.slopes[result.slopes["axis"] == "depth"]
    assert deep.drop_duplicates("module").set_index("module")["kind"].to_dict() == {
        "last block": "stream",
        "readout": "readout",
    }
    assert deep.groupby("criterion").size().to_dict() == {
        "(e) stream in depth": 1,
        "(f) change in depth": 1,
        "(g) readout in depth": 2,
    }
    sizes = result.measurements.groupby("axis").agg({"width": "unique", "depth": "unique"})
    assert [list(cell) for cell in sizes.loc["depth"]] == [[32], list(DEPTHS)]
    assert [list(cell) for cell in sizes.loc["width"]] == [list(WIDTHS), [2]]
    assert "widths 16, 32, 64, 128; depths 2, 4, 8, 16; 2 seeds; 1 steps" in str(result)


def test_the_check_survives_json(
    check: Callable[..., CoordinateCheck], in_depth: Callable[..., CoordinateCheck]
) -> None:
    for result in (check(), check(unscaled_init), in_depth(WITHOUT_BRANCH)):
        values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        again = CoordinateCheck.from_dict(values)
        pd.testing.assert_frame_equal(again.measurements, result.measurements)
        assert (again.findings, again.seeds, str(again)) == (result.findings, result.seeds, str(result))
        assert values["passed"] is result.passed


def test_the_figure_shows_every_line_on_logarithmic_axes(check: Callable[..., CoordinateCheck]) -> None:
    result = check()
    figure, lines = result.plot(), coordinates_data(result.measurements)
    shown = np.concatenate([np.asarray(trace.y, float) for trace in figure.data])
    assert np.isfinite(shown).sum() == len(lines)
    assert np.isnan(shown).sum() == len(result.slopes), "a gap after each line"
    assert {axis.type for axis in (*figure.select_xaxes(), *figure.select_yaxes())} == {"log"}
    assert all(axis.title.text for axis in (*figure.select_xaxes(), *figure.select_yaxes()))
    in_legend = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(in_legend) == [f"step {step}" for step in range(6)]


def test_matrices_have_a_row_of_their_own_in_the_figure(check: Callable[..., CoordinateCheck]) -> None:
    figure = check().plot()
    left, right = (
        {trace.text[0].partition(", ")[2].partition(" of ")[0] for trace in figure.data if trace.xaxis == axis}
        for axis in ("x3", "x4")
    )
    assert (left, right) == ({"norm"}, {"update"})


def test_depth_has_a_row_of_its_own_in_the_figure(in_depth: Callable[..., CoordinateCheck]) -> None:
    result = in_depth()
    figure = result.plot()
    assert {axis.title.text for axis in figure.select_xaxes(row=2)} == {"depth (n_layers)"}
    deep = [trace for trace in figure.data if "last block" in trace.text]
    assert [x for trace in deep for x in trace.x[trace.text == "last block"]] == [*DEPTHS] * 3
    assert {trace.xaxis for trace in deep} == {"x3", "x4"}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"widths": (32, 64, 256)}, r"at least 4 widths, got \[32, 64, 256\]"),
        ({"widths": (32, 64, 64, 256)}, r"at least 4 widths, got \[32, 64, 256\]"),
        ({"widths": (32, 64, 96, 128)}, "widths must span at least a factor of 8, got 32 to 128, a factor of 4"),
        ({"depths": (2, 4, 16)}, r"at least 4 depths, got \[2, 4, 16\]"),
        ({"depths": (2, 3, 4, 8)}, "depths must span at least a factor of 8, got 2 to 8, a factor of 4"),
        ({"seeds": (1,)}, r"at least 2 seeds, got \[1\]"),
        ({"seeds": (1, 1)}, r"at least 2 seeds, got \[1, 1\]"),
        ({"n_steps": 0}, "n_steps must be at least 1, got 0"),
    ],
)
def test_too_little_evidence_is_refused(corpus: Corpus, change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        coordinate_check(FAMILY, VALUES, corpus, **{"widths": WIDTHS, **change})
