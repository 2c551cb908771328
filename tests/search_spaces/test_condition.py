"""What is inactive is absent, everywhere; parents decide in order, however the table lists them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from search_spaces import Condition, Integer, LogUniform, Range, Space, SpaceError, schedule

TABLE: dict[str, Any] = {
    # The child stands before its parent, and has a child of its own.
    "beta2": {"distribution": "uniform", "low": 0.9, "high": 0.999, "when": {"beta1": {"low": 0.85}}},
    "beta1": {"distribution": "uniform", "low": 0.8, "high": 0.95, "when": {"optimizer": ["adamw", "lion"]}},
    "optimizer": {"distribution": "choice", "values": ["adamw", "lion", "sgd"]},
    "n_layers": {"distribution": "integer", "low": 1, "high": 8},
    "stochastic_depth": {"distribution": "uniform", "low": 0, "high": 0.2, "when": {"n_layers": {"low": 3, "high": 6}}},
}


@pytest.fixture
def space() -> Space:
    return Space.from_dict(TABLE)


def test_samples_have_what_is_active_and_nothing_else(space: Space) -> None:
    configs: list[Any] = list(space.sample(300, seed=0))
    for config in configs:
        assert ("beta1" in config) == (config["optimizer"] != "sgd")
        assert ("beta2" in config) == (config.get("beta1", 0) >= 0.85)
        assert ("stochastic_depth" in config) == (3 <= config["n_layers"] <= 6)
        assert list(config) == [name for name in space if name in config] == list(space.active(config))
        assert space.contains(config)
    assert len({tuple(config) for config in configs}) == 6


def test_a_value_does_not_depend_on_whether_it_has_a_condition(space: Space) -> None:
    free = Space.from_dict({name: {k: v for k, v in entry.items() if k != "when"} for name, entry in TABLE.items()})
    for config, whole in zip(space.sample(50, seed=4), free.sample(50, seed=4), strict=True):
        assert config == {name: whole[name] for name in config}


def test_an_inactive_value_encodes_to_the_middle_and_decodes_to_nothing(space: Space) -> None:
    config = {"optimizer": "sgd", "n_layers": 8}
    point = space.encode(config)
    assert dict(zip(space.axes, point, strict=True)) == pytest.approx(
        {"beta2": 0.5, "beta1": 0.5, "optimizer": 5 / 6, "n_layers": 7.5 / 8, "stochastic_depth": 0.5}
    )
    assert space.decode(point) == config


def test_a_grid_has_no_combinations_of_what_is_inactive(space: Space) -> None:
    grid = space.grid({"beta1": 3, "beta2": 2, "n_layers": 8, "stochastic_depth": 3})
    assert len({tuple(config.items()) for config in grid}) == len(grid)
    # adamw and lion: 1 low beta1 + 2 higher ones × 2; sgd: 1. Depths: 4 without × 1 + 4 with × 3.
    assert len(grid) == (2 * (1 + 2 * 2) + 1) * (4 + 4 * 3)
    assert Counter(config["optimizer"] for config in grid)["sgd"] == 16
    assert all(map(space.contains, grid))


def test_what_is_there_although_inactive_is_refused(space: Space) -> None:
    config: dict[str, object] = {"optimizer": "sgd", "n_layers": 1, "beta1": 0.9, "stochastic_depth": 0.1}
    with pytest.raises(SpaceError, match="beta1 is inactive.*; stochastic_depth is inactive"):
        space.validate(config)


def test_what_is_active_and_missing_is_named(space: Space) -> None:
    with pytest.raises(SpaceError, match="^beta1 is missing$"):
        space.validate({"optimizer": "adamw", "n_layers": 1})


def test_only_the_wrong_parent_is_reported_and_not_its_child(space: Space) -> None:
    with pytest.raises(SpaceError, match="^optimizer = 'adam'.*\\| lion \\| sgd$"):
        space.validate({"optimizer": "adam", "n_layers": 1, "beta1": 0.9})
    with pytest.raises(SpaceError, match="^optimizer is missing$"):
        space.validate({"n_layers": 1, "beta1": 0.9})


def test_order_puts_parents_first(space: Space) -> None:
    assert space.order.index("optimizer") < space.order.index("beta1") < space.order.index("beta2")


def test_true_is_not_one_and_text_is_in_no_range() -> None:
    assert not Condition.from_dict({"a": [1]}).holds({"a": True})
    assert not Range(low=0).holds("1")
    assert not Range(low=0).holds(True)
    assert Range(high=2).holds(np.float64(2))
    assert [str(r) for r in (Range(low=1), Range(high=2.5), Range(low=1, high=2))] == [">= 1", "<= 2.5", "in 1 … 2"]


def test_str_shows_the_condition_and_the_prior() -> None:
    assert str(schedule()["final_fraction"]) == "0 … 0.2, if schedule = cosine"
    space = Space(
        {"n": Integer(low=1, high=4), "x": LogUniform(low=1, high=2, when=Condition.from_dict({"n": [1, 2]}))}
    )
    assert "x  log_uniform  1 … 2, if n = 1 | 2" in str(space)
