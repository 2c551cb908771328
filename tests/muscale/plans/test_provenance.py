"""The rules and the source of each value of the full run, and the values that have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from muscale.plans.provenance import HyperparameterProvenance, provenance_of
from muscale.settings.plan import REGULARIZERS, model_with_explicit, validate_explicit, with_explicit
from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.stages import HyperparameterStage
from search_spaces import TransferClass
from tests.proxy_models.families import Recurrent

BASE = ModelConfig(d_model=32, n_layers=2, context_length=32)
TUNED = Hyperparameters(learning_rate=0.01, batch_tokens=256)
SCALED_BY_SHAPE = {
    "learning_rate",
    "embedding_rate",
    "output_rate",
    "init_scale",
    "weight_decay_tau",
    "eps",
    "embedding_multiplier",
    "output_multiplier",
    "attention_multiplier",
}


def by_name(
    hyperparameters: Hyperparameters = TUNED, model: ModelConfig = BASE, **changes: Any
) -> dict[str, HyperparameterProvenance]:
    settings: dict[str, Any] = {
        "searched": frozenset({"learning_rate"}),
        "explicit": frozenset(),
        "by_mup": True,
        "trial": "trial 3",
    }
    return {one.name: one for one in provenance_of(hyperparameters, model, BASE, **(settings | changes))}


def test_what_the_table_scales_came_by_mup_and_all_else_is_fixed() -> None:
    found = by_name(model=replace(BASE, d_model=128))
    assert {name for name, one in found.items() if "muP width" in one.rules} == SCALED_BY_SHAPE
    assert found["learning_rate"].rules == ("muP width", "horizon law")
    assert {one.rules for name, one in found.items() if name not in SCALED_BY_SHAPE} == {("fixed",)}
    standard = by_name(by_mup=False)
    assert {one.rules for name, one in standard.items() if name != "learning_rate"} == {("fixed",)}
    assert standard["learning_rate"].rules == ("horizon law",)


def test_depth_is_a_rule_of_its_own_where_it_grows() -> None:
    assert by_name(model=replace(BASE, n_layers=8))["init_scale"].rules == ("muP width", "muP depth")
    assert by_name(model=replace(BASE, n_layers=8))["learning_rate"].rules == ("muP width", "muP depth", "horizon law")
    assert by_name(model=replace(BASE, n_layers=8), by_mup=False)["init_scale"].rules == ("fixed",)
    assert by_name(model=BASE)["init_scale"].rules == ("muP width",)


def test_every_value_has_a_provenance() -> None:
    found = by_name(
        replace(TUNED, beta2=0.98, clip_norm=0.5, warmup_fraction=0.1),
        replace(BASE, z_loss=1e-4),
        searched=frozenset({"learning_rate", "beta2"}),
        explicit=frozenset({"clip_norm"}),
    )
    sources = {name: found[name].source for name in ("learning_rate", "beta2", "clip_norm", "z_loss", "mlp_dropout")}
    assert sources == {
        "learning_rate": "trial 3 and the grids of the transfer check",
        "beta2": "trial 3",
        "clip_norm": "[plan.explicit]",
        "z_loss": "the study file",
        "mlp_dropout": "default",
    }
    assert (found["warmup_fraction"].source, found["milestones"].source) == ("the study file", "default")
    assert found["clip_norm"].rules == ("explicit",)
    assert {name for name, one in found.items() if one.searched} == {"learning_rate", "beta2"}
    assert found["beta2"].value == 0.98
    assert found["milestones"].value == [0.8, 0.9]
    assert {*REGULARIZERS} <= found.keys()


def test_a_swap_s_values_are_listed_where_there_is_one() -> None:
    assert not [name for name in by_name() if name.startswith("swap_")]
    swapped = replace(TUNED, swap_optimizer="muon", swap_fraction=0.5, swap_learning_rate=0.02)
    found = by_name(swapped)
    assert [name for name in found if name.startswith("swap_")] == [
        "swap_optimizer",
        "swap_fraction",
        "swap_learning_rate",
    ]
    assert found["swap_learning_rate"].rules == ("muP width",)


def test_stages_are_the_trial_s_where_they_were_searched_and_else_the_file_s() -> None:
    staged = replace(TUNED, stages=(HyperparameterStage(after=0.5, learning_rate=0.5),))
    assert by_name(staged, searched=frozenset({"stages"}))["stages"].source == "trial 3"
    assert by_name(staged)["stages"].source == "the study file"
    assert by_name(staged)["stages"].value == [{"after": 0.5, "learning_rate": 0.5}]
    assert "stages" not in by_name()


@pytest.mark.parametrize(
    ("name", "changes", "silent"),
    [
        ("mlp_dropout", {"searched": True}, True),
        ("mlp_dropout", {}, False),
        ("mlp_dropout", {"searched": True, "value": 0.0}, False),
        ("mlp_dropout", {"searched": True, "rules": ("explicit",)}, False),
        ("learning_rate", {"searched": True}, False),
        ("my_own", {}, True),
        ("my_own", {"rules": ("explicit",)}, False),
        ("my_own", {"value": 0}, False),
    ],
)
def test_silent_is_what_was_searched_or_is_unknown_and_nobody_stated(
    name: str, changes: dict[str, Any], silent: bool
) -> None:
    one = HyperparameterProvenance(**{"name": name, "value": 0.1, "rules": ("fixed",), "source": "trial 3", **changes})
    assert one.is_silent is silent
    assert one.transfer is {"mlp_dropout": TransferClass.NEVER, "learning_rate": TransferClass.BY_LAW}.get(name)


def test_stated_values_go_to_training_or_to_the_model() -> None:
    explicit = validate_explicit({"learning_rate": 0.004, "mlp_dropout": 0.1, "z_loss": 0.0001})
    assert explicit == {"learning_rate": 0.004, "mlp_dropout": 0.1, "z_loss": 0.0001}
    assert with_explicit(TUNED, explicit) == replace(TUNED, learning_rate=0.004)
    assert model_with_explicit(BASE, explicit) == replace(BASE, mlp_dropout=0.1, z_loss=0.0001)
    window = replace(BASE, attention_window=32)
    assert model_with_explicit(window, validate_explicit({"attention_window": 64})).attention_window == 64
    longer = validate_explicit({"context_length": 512, "rope_theta": 5e5})
    assert with_explicit(TUNED, longer) == TUNED
    assert model_with_explicit(BASE, longer) == replace(BASE, context_length=512, rope_theta=5e5)


def test_a_family_of_one_s_own_states_its_context_and_no_setting_that_it_lacks() -> None:
    model = Recurrent(vocab_size=256, context_length=128).member(32, 2)
    longer = Recurrent(vocab_size=256, context_length=512).member(32, 2)
    assert model_with_explicit(model, {"context_length": 512, "learning_rate": 0.1}) == longer
    with pytest.raises(ValueError, match="^z_loss: .*got 0.1"):
        model_with_explicit(model, {"z_loss": 0.1})
