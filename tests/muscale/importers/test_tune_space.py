"""Tune's param_space as a space: every function of Tune's, from its objects."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import numpy as np
import pytest
from ray import tune

import muscale.tune
from muscale import StageError
from search_spaces import Choice, Distribution, Fixed, Integer, LogUniform, Ordinal, Prior, Space, Uniform

NORMAL = Uniform(low=1.0, high=5.0, prior=Prior(centre=3.0, spread=0.5))
EVERY: list[tuple[Any, Distribution]] = [
    (tune.uniform(0.5, 2), Uniform(low=0.5, high=2.0)),
    (tune.quniform(0, 1, 0.25), Ordinal(values=(0.0, 0.25, 0.5, 0.75, 1.0))),
    (tune.loguniform(1e-4, 1e-1), LogUniform(low=1e-4, high=1e-1)),
    (tune.qloguniform(1, 4, 1), Ordinal(values=(1, 2, 3, 4))),
    (tune.randint(1, 8), Integer(low=1, high=7)),
    (tune.randint(1, 2), Fixed(value=1)),
    (tune.qrandint(128, 512, 128), Ordinal(values=(128, 256, 384, 512))),
    (tune.qrandint(1, 8, 1), Integer(low=1, high=7)),
    (tune.lograndint(1, 64), Integer(low=1, high=63, log=True)),
    (tune.qlograndint(2, 8, 2), Ordinal(values=(2, 4, 6, 8))),
    (tune.randn(3, 0.5), NORMAL),
    (tune.qrandn(3.0, 0.5, 0.1), NORMAL),
    (tune.choice(["adamw", "lion"]), Choice(values=("adamw", "lion"))),
    (tune.choice([256, 512]), Ordinal(values=(256, 512))),
    (tune.grid_search([0.9, 0.95]), Ordinal(values=(0.9, 0.95))),
    (0.9, Fixed(value=0.9)),
    ("wsd", Fixed(value="wsd")),
]


def drawn(config: dict[Any, Any]) -> Any:
    return config["width"] // 2


@pytest.mark.parametrize(("value", "wanted"), EVERY, ids=range(len(EVERY)))
def test_each_function_has_its_distribution(value: Any, wanted: Distribution) -> None:
    assert dict(muscale.tune.space_of({"x": value}).space) == {"x": wanted}
    if hasattr(value, "sample") and not isinstance(wanted, Uniform):
        assert all(wanted.contains(value.sample()) for _ in range(64)), "what Tune draws lies in the space"


def test_a_space_is_flat_and_named_as_here_and_its_text_is_toml() -> None:
    found = muscale.tune.space_of(
        {
            "lr": tune.loguniform(1e-3, 1e-1),
            "optimizer": tune.choice(["adamw", "lion"]),
            "data": None,
            "shape": {"width": 32, "batch_tokens": tune.grid_search([256, 512])},
            "epochs": 10,
        },
        {"lr": "learning_rate", "shape.batch_tokens": "batch_tokens"},
    )
    assert dict(found.space) == {
        "learning_rate": LogUniform(low=1e-3, high=0.1),
        "optimizer": Choice(values=("adamw", "lion")),
        "shape.width": Fixed(value=32),
        "batch_tokens": Ordinal(values=(256, 512)),
        "epochs": Fixed(value=10),
    }
    assert any(note.startswith("data: ") for note in found.notes), "what is no value is reported"
    assert [message.split(" ")[0] for message in found.unknown] == ["shape.width", "epochs"]
    assert Space.from_dict(tomllib.loads(str(found))["sweep"]["space"]) == found.space


def test_grids_alone_are_searched_as_a_grid() -> None:
    grids: dict[str, Any] = {"x": tune.grid_search([1, 2]), "y": tune.grid_search([3, 4]), "z": 5}
    assert muscale.tune.space_of(grids).settings == {"searcher": "grid"}
    mixed = muscale.tune.space_of({**grids, "z": tune.uniform(0, 1)})
    assert mixed.settings == {}
    assert any(note.startswith("grid_search: ") for note in mixed.notes)


def test_numpy_s_values_are_python_s() -> None:
    found = muscale.tune.space_of(
        {"x": tune.choice(list(np.array([1, 2]))), "y": tune.grid_search(np.array([0.5, 1.0])), "z": np.float32(0.5)}
    )
    assert json.loads(json.dumps(found.to_dict()))["sweep"]["space"] == {
        "x": {"distribution": "ordinal", "values": [1, 2]},
        "y": {"distribution": "ordinal", "values": [0.5, 1.0]},
        "z": {"distribution": "fixed", "value": 0.5},
    }


@pytest.mark.parametrize(
    "domain",
    [
        tune.sample_from(drawn),
        tune.choice([tune.uniform(0, 1)]),
        tune.choice([{"a": 1}]),
        tune.choice([]),
        tune.randn(float("nan"), 1),
        tune.randint(1.5, 3),  # type: ignore[arg-type]
        float("nan"),
    ],
    ids=range(7),
)
def test_objects_without_a_counterpart_are_refused_with_their_key(domain: Any) -> None:
    with pytest.raises(StageError, match="param_space: x: "):
        muscale.tune.space_of({"x": domain})


def test_a_space_of_nothing_and_an_unknown_name_are_refused() -> None:
    with pytest.raises(StageError, match="param_space: .*none"):
        muscale.tune.space_of({"data": None})
    with pytest.raises(StageError, match="rate"):
        muscale.tune.space_of({"x": 1}, {"rate": "learning_rate"})
