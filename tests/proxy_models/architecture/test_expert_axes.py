"""Sizes of a mixture of experts along its three axes, and members of other sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from proxy_models.architecture.config import ExpertAxis, ModelConfig
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Counts, ModuleConfig
from proxy_models.architecture.parametrization import parametrize

BASE = ModelConfig(d_model=32, n_layers=2, n_experts=8, experts_per_token=2, mlp_ratio=2.0, expert_ratio=1.0)


def experts(model: ModelConfig) -> tuple[int | None, int, float | None]:
    return model.n_experts, model.experts_per_token, model.expert_ratio


@pytest.mark.parametrize(
    ("axis", "size", "expected"),
    [
        ("experts", 16, (16, 4, 1.0)),
        ("experts", 32, (32, 8, 1.0)),
        ("granularity", 2, (8, 2, 1.0)),
        ("granularity", 8, (32, 8, 0.25)),
        ("granularity", 4, (16, 4, 0.5)),
        ("sparsity", 4, (8, 2, 1.0)),
        ("sparsity", 16, (32, 2, 1.0)),
    ],
)
def test_one_axis_changes_and_the_others_stay(axis: ExpertAxis, size: float, expected: tuple[int, int, float]) -> None:
    found = ModelFamily(base=BASE).along(axis, size)
    assert experts(found) == expected
    before, now = BASE.expert_sizes(BASE), found.expert_sizes(BASE)
    assert now == before | {axis: size}
    parametrize(found, BASE)  # which carries values to it


def test_a_step_along_each_axis_leads_anywhere() -> None:
    far = BASE.along("granularity", 4).along("sparsity", 8)
    assert far.expert_sizes(BASE) == {"experts": 8, "granularity": 4, "sparsity": 8}
    assert experts(far) == (32, 4, 0.5)


def test_granularity_and_sparsity_keep_a_token_s_computation_but_the_router_s() -> None:
    for model in (BASE.along("granularity", 8), BASE.along("sparsity", 16)):
        router = 2 * (32 - 8) * 32
        assert model.n_matrix_entries - BASE.n_matrix_entries == router


@pytest.mark.parametrize(
    ("axis", "size"), [("experts", 6), ("granularity", 3), ("sparsity", 4.3), ("granularity", 16), ("experts", 2)]
)
def test_a_size_without_whole_experts_is_refused(axis: ExpertAxis, size: float) -> None:
    with pytest.raises(ValueError, match=r"whole|multiples"):
        BASE.along(axis, size)


def test_the_property_sparsity_counts_parameters_of_the_law() -> None:
    assert ModelConfig(d_model=32, n_layers=2).sparsity == 1
    for tied in (False, True):
        model = replace(BASE, tied=tied)
        tables = 0 if tied else model.vocab_size * 32
        assert model.sparsity == (model.n_params_total - tables) / model.n_params
        idle = 2 * 6 * 3 * 32 * 32
        assert model.sparsity == 1 + idle / model.n_params
    counts = Counts(n_params=1000, n_params_total=1000 + (256 + 128) * 4, train_flops_per_token=6e3)
    dense = ModuleConfig(d_model=4, n_layers=1, family="a:B", source="", counts=counts)
    assert dense.sparsity == 1
    assert replace(dense, counts=replace(counts, n_inactive_params=500)).sparsity == 1.5


@pytest.mark.parametrize("axis", get_args(ExpertAxis))
def test_a_dense_model_has_no_such_axis(axis: ExpertAxis) -> None:
    with pytest.raises(ValueError, match="n_experts"):
        ModelConfig(d_model=32, n_layers=2).along(axis, 2)
