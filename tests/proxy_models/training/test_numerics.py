from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from proxy_models.architecture.config import ModelConfig, as_decoder
from proxy_models.architecture.parametrization import parametrize
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.numerics import Numerics

BASE = ModelConfig(d_model=32, n_layers=1)
NUMERICS = Numerics(model=replace(BASE, d_model=64), base=BASE, corpus_key="abc", seed=0, evaluation_tokens=1024)


@pytest.mark.parametrize(
    "change",
    [
        {"model": replace(BASE, d_model=128)},
        {"base": replace(BASE, d_model=16)},
        {"corpus_key": "abd"},
        {"seed": 1},
        {"evaluation_tokens": 2048},
        {"scheme": "standard"},
        {"depth_exponent": 0.5},
        {"decay_scaling": "sublayer_gain"},
        {"precision": "bf16"},
        {"guard": GuardSettings()},
        {"stages_by_fraction": True},
        {"semantics": 0},
    ],
    ids=lambda change: str(next(iter(change))),
)
def test_every_field_is_in_the_key(change: dict[str, Any]) -> None:
    assert replace(NUMERICS, **change).key != NUMERICS.key


def test_a_change_of_what_is_rounded_is_in_the_keys_of_low_precision_alone() -> None:
    assert replace(NUMERICS, rounding=1).key == NUMERICS.key
    assert "rounding" not in NUMERICS.to_dict()
    low = replace(NUMERICS, precision="bf16")
    assert replace(low, rounding=1).key != low.key


def test_a_change_of_the_decay_in_depth_is_in_the_keys_of_depth_exponents_below_1_alone() -> None:
    assert replace(NUMERICS, depth_decay=1).key == NUMERICS.key
    assert "depth_decay" not in NUMERICS.to_dict()
    lower = replace(NUMERICS, depth_exponent=0.75)
    assert replace(lower, depth_decay=1).key != lower.key


def test_fields_of_the_model_that_came_later_are_in_the_key_only_where_they_are_set() -> None:
    later: dict[str, Any] = {
        "rope_theta": 5e5,
        "document_separator": 0,
        "attention_window": 8,
        "global_attention_every": 2,
    }
    numerics = replace(NUMERICS, model=replace(NUMERICS.model, n_layers=2))
    for name, value in later.items():
        assert name not in numerics.to_dict()["model"]
        changed = replace(numerics, model=replace(numerics.model, **{name: value}))
        assert changed.key != numerics.key
        assert Numerics.from_dict(changed.to_dict()) == changed
        numerics = changed


@pytest.mark.parametrize(
    "change", [{}, {"guard": GuardSettings(action="rewind", window=9)}, {"precision": "bf16", "rounding": 1}]
)
def test_numerics_and_their_key_survive_json(change: dict[str, Any]) -> None:
    numerics = replace(NUMERICS, **change)
    again = Numerics.from_dict(json.loads(json.dumps(numerics.to_dict())))
    assert again == numerics
    assert again.key == numerics.key


def test_a_run_has_a_key_of_its_own_only_where_stages_end_at_fractions_of_it() -> None:
    assert NUMERICS.for_run(4096) is NUMERICS
    NUMERICS.require_length(10**9)
    curriculum = replace(NUMERICS, stages_by_fraction=True)
    assert len({curriculum.key, curriculum.for_run(4096).key, curriculum.for_run(8192).key}) == 3
    curriculum.for_run(4096).require_length(4096)
    with pytest.raises(ValueError, match="a run of 4096 tokens, which can't be trained to 4128"):
        curriculum.for_run(4096).require_length(4128)
    with pytest.raises(ValueError, match=r"for_run\(n_tokens\)"):
        curriculum.require_length(32)
    with pytest.raises(ValueError, match="run_tokens.*got 4096"):
        replace(NUMERICS, run_tokens=4096)


def test_the_table_is_of_this_shape_and_scheme() -> None:
    standard = replace(NUMERICS, scheme="standard", depth_exponent=0.5)
    assert standard.parametrization("adamw") == parametrize(
        as_decoder(standard.model), BASE, scheme="standard", depth_exponent=0.5
    )
    gain = replace(NUMERICS, decay_scaling="sublayer_gain")
    assert gain.parametrization("adamw") == parametrize(as_decoder(gain.model), BASE, decay_scaling="sublayer_gain")
