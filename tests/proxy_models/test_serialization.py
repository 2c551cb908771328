from __future__ import annotations

import json
from typing import Any

import pytest

from proxy_models.architecture.config import ModelConfig, as_decoder
from proxy_models.architecture.parametrization import Parametrization
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import Segment, chain
from proxy_models.training.numerics import Numerics

MODEL = ModelConfig(d_model=64, n_layers=2, mlp_ratio=3)
NUMERICS = Numerics(model=MODEL, base=MODEL, corpus_key="c", seed=0, evaluation_tokens=1024)


def test_a_whole_number_in_place_of_a_real_one_keeps_its_hash() -> None:
    again = Numerics.from_dict(json.loads(json.dumps(NUMERICS.to_dict())))
    assert again.key == NUMERICS.key
    assert type(as_decoder(again.model).mlp_ratio) is int


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"corpus_key": 3}, "corpus_key"),
        ({"precision": "fp8"}, "precision"),
        ({"model": 3}, "model"),
        ({"model": {**MODEL.to_dict(), "d_model": 7}}, "model"),
        ({"model": {**MODEL.to_dict(), "tied": 1}}, "model.tied"),
        ({"more": 1}, "more"),
    ],
)
def test_what_does_not_fit_is_named_by_its_place(change: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=place):
        Numerics.from_dict({**NUMERICS.to_dict(), **change})


@pytest.mark.parametrize("values", [None, 3, [], "x"])
def test_only_tables_are_read(values: Any) -> None:
    with pytest.raises(ValueError, match="table"):
        Numerics.from_dict(values)


@pytest.mark.parametrize("phase", [{}, {"kind": "Unknown"}, {"kind": []}, 3, {"kind": "Constant", "end": 3}])
def test_an_unknown_phase_is_refused(phase: Any) -> None:
    (first, *_) = chain(Hyperparameters(learning_rate=0.01, batch_tokens=1024), 100 * 1024)
    with pytest.raises(ValueError, match="phase"):
        Segment.from_dict({**first.to_dict(), "phase": phase})


def test_an_enumeration_s_member_becomes_a_string_and_no_more() -> None:
    plain = NUMERICS.parametrization("adamw").to_dict()
    assert {type(rule["tensor_class"]) for rule in plain["rules"].values()} == {str}
    assert Parametrization.from_dict(plain) == NUMERICS.parametrization("adamw")
