"""The coordinate check of mixtures of experts: the router is a readout of the stream, stacks are hidden matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from proxy_models.architecture.config import ExpertScheme, ModelConfig
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.parametrization import (
    Parametrization,
    TensorClass,
    decoder_shapes,
    parametrization_of,
    parametrize,
)
from proxy_models.coordinates.check import CoordinateCheck
from proxy_models.coordinates.measurement import coordinate_check
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from tests.quick import quick_and_soak

BASE = ModelConfig(d_model=32, n_layers=2, context_length=32, n_experts=8, experts_per_token=2, expert_ratio=1.0)
WIDTHS = (16, 32, 64, 128)
LOG2_RATES = {"adamw": -9, "adam": -8, "lion": -11, "adafactor": -6, "muon": -8, "lamb": -7, "soap": -8}
Rule = Callable[[ModelConfig, ModelConfig], Parametrization]


def checked(corpus: Corpus, base: ModelConfig, rule: Rule | None = None, **options: object) -> CoordinateCheck:
    optimizer = str(options.pop("optimizer", "adamw"))
    # With few rows for each expert, the change of one attention output grows as width^.22 under SOAP; dense models have as much.
    n_sequences = 16 if optimizer == "soap" else 4
    values = Hyperparameters(learning_rate=2.0 ** LOG2_RATES[optimizer], batch_tokens=256, optimizer=optimizer)  # type: ignore[arg-type]
    options = {"widths": WIDTHS, "n_steps": 2, "n_sequences": n_sequences, "parametrization": rule} | options
    return coordinate_check(ModelFamily(base=base), values, corpus, **options)  # type: ignore[arg-type]


def router_as_hidden(optimizer: str) -> Rule:
    """The table with every router taken for a hidden matrix."""

    def rule(config: ModelConfig, base: ModelConfig) -> Parametrization:
        shapes = {
            name: replace(shape, tensor_class=TensorClass.HIDDEN) if shape.tensor_class is TensorClass.ROUTER else shape
            for name, shape in decoder_shapes(config, base)
        }
        depth = config.n_layers / base.n_layers
        return parametrization_of(shapes, depth_mult=depth, attention=config.head_dim**-0.5, optimizer=optimizer)  # type: ignore[arg-type]

    return rule


def router_with_rate(optimizer: str, exponent: int) -> Rule:
    """The table with the rate of every router wrong by a power of the width."""

    def rule(config: ModelConfig, base: ModelConfig) -> Parametrization:
        table = parametrize(config, base, optimizer=optimizer)  # type: ignore[arg-type]
        wrong = (config.d_model / base.d_model) ** exponent
        rules = {
            name: replace(rule, lr_factor=rule.lr_factor * wrong) if rule.tensor_class is TensorClass.ROUTER else rule
            for name, rule in table.rules.items()
        }
        return replace(table, rules=rules)

    return rule


@pytest.mark.parametrize("optimizer", LOG2_RATES)
def test_mixtures_pass_under_every_optimizer(corpus: Corpus, optimizer: str) -> None:
    found = checked(corpus, BASE, optimizer=optimizer, seeds=(0, 1, 2))
    assert found.passed, found
    kinds = found.measurements.groupby("module")["kind"].agg(set)
    assert {"router", "router matrix"} == kinds["blocks.1.mlp.router"]
    assert {"hidden", "hidden matrix"} == kinds["blocks.1.mlp.experts"]


@pytest.mark.parametrize("scheme", get_args(ExpertScheme))
def test_every_scheme_passes_in_width_and_depth(corpus: Corpus, scheme: ExpertScheme) -> None:
    found = checked(corpus, replace(BASE, expert_scheme=scheme), depths=(1, 2, 4, 8))
    assert found.passed, found


@pytest.mark.parametrize("optimizer", LOG2_RATES)
def test_a_router_taken_for_a_hidden_matrix_fails(corpus: Corpus, optimizer: str) -> None:
    found = checked(corpus, BASE, router_as_hidden(optimizer), optimizer=optimizer)
    assert {finding.module for finding in found.findings} == {"blocks.0.mlp.router", "blocks.1.mlp.router"}


def test_muon_moves_a_router_taken_for_a_hidden_matrix_too_far(corpus: Corpus) -> None:
    slopes = checked(corpus, BASE, router_as_hidden("muon"), optimizer="muon").slopes
    updates = slopes[slopes["module"].str.endswith("router") & (slopes["quantity"] == "update of weight")]
    assert updates["slope"].between(0.45, 0.55).all()


@pytest.mark.parametrize(
    ("optimizer", "exponent"),
    quick_and_soak(product(LOG2_RATES, (1, -1)), *product(LOG2_RATES, (1,)), ("muon", -1)),
)
def test_a_router_whose_rate_is_wrong_by_a_power_of_the_width_fails(
    corpus: Corpus, optimizer: str, exponent: int
) -> None:
    found = checked(corpus, BASE, router_with_rate(optimizer, exponent), optimizer=optimizer)
    assert {finding.module for finding in found.findings} >= {"blocks.0.mlp.router", "blocks.1.mlp.router"}
    assert {finding.fault for finding in found.findings} == {"learning-rate scaling"}
