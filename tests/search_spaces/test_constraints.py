"""Every configuration that a space gives satisfies its constraints, and a broken one is named."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from search_spaces import Constraint, Integer, Space, SpaceError, Uniform, register_constraint

UNIT = {"distribution": "uniform", "low": 0, "high": 1}
TABLE: dict[str, Any] = {
    "a": UNIT,
    "b": UNIT,
    "c": UNIT,
    "d_model": {"distribution": "integer", "low": 8, "high": 128},
    "head_dim": {"distribution": "ordinal", "values": [8, 16, 32]},
    "constraints": {
        "order": {"less": ["a", "b"]},
        "room": {"sum_at_most": {"names": ["a", "b"], "bound": 1.2}},
        "heads": {"multiple_of": ["d_model", "head_dim"]},
    },
}


@pytest.fixture
def space() -> Space:
    return Space.from_dict(TABLE)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_samples_satisfy_every_constraint(seed: int) -> None:
    space = Space.from_dict(TABLE)
    configs: list[Any] = list(space.sample(5, seed))
    for config in configs:
        assert config["a"] < config["b"]
        assert config["a"] + config["b"] <= 1.2
        assert config["d_model"] % config["head_dim"] == 0
        assert space.contains(config)


def test_a_sample_is_uniform_over_what_is_left(space: Space) -> None:
    ordered = Space(
        {"a": Uniform(low=0, high=1), "b": Uniform(low=0, high=1)}, {"o": Constraint(rule="less", names=("a", "b"))}
    )
    configs: Any = ordered.sample(1_500, seed=0)
    # The smaller and the larger of two uniform numbers.
    assert kstest([config["a"] for config in configs], "beta", args=(1, 2)).pvalue > 0.001
    assert kstest([config["b"] for config in configs], "beta", args=(2, 1)).pvalue > 0.001
    dims = Counter(config["head_dim"] for config in space.sample(1_000, seed=0))
    possible = np.array([sum(d % h == 0 for d in range(8, 129)) for h in (8, 16, 32)])
    assert [dims[h] / 1_000 for h in (8, 16, 32)] == pytest.approx(possible / possible.sum(), abs=0.045)


def test_what_no_constraint_is_about_is_drawn_as_without_any(space: Space) -> None:
    free = Space(space.distributions)
    for config, without in zip(space.sample(40, seed=1), free.sample(40, seed=1), strict=True):
        assert config["c"] == without["c"]
        if space.contains(without):
            assert config == without, "nothing is redrawn that satisfies them"


def test_more_samples_and_more_names_leave_the_earlier_ones(space: Space) -> None:
    assert space.sample(20, seed=2)[:7] == space.sample(7, seed=2)
    more = space.updated(
        {"e": Uniform(low=0, high=1), "f": Uniform(low=0, high=1)},
        {"more": Constraint(rule="at_most", names=("e", "f"))},
    )
    for config, larger in zip(space.sample(20, seed=2), more.sample(20, seed=2), strict=True):
        assert config == {name: larger[name] for name in config}


def test_a_grid_leaves_out_what_breaks_one(space: Space) -> None:
    grid: Any = Space.from_dict({k: v for k, v in TABLE.items() if k not in ("c",)}).grid(
        {"a": 5, "b": 5, "d_model": 16}
    )
    pairs = {(config["a"], config["b"]) for config in grid}
    assert pairs == {(a / 4, b / 4) for a in range(5) for b in range(5) if a < b and a + b <= 4.8}
    assert all(config["d_model"] % config["head_dim"] == 0 for config in grid)


def test_a_broken_constraint_is_named_with_its_values(space: Space) -> None:
    config = {"a": 0.5, "b": 0.25, "c": 0.0, "d_model": 12, "head_dim": 8}
    with pytest.raises(SpaceError) as caught:
        space.validate(config)
    assert str(caught.value).split("; ") == [
        "breaks order, less(a, b): a = 0.5, b = 0.25",
        "breaks heads, multiple_of(d_model, head_dim): d_model = 12, head_dim = 8",
    ]


def test_an_infeasible_space_is_reported_with_how_often_each_constraint_holds() -> None:
    table = {"a": UNIT, "b": UNIT, "constraints": {"up": {"less": ["a", "b"]}, "down": {"less": ["b", "a"]}}}
    with pytest.raises(SpaceError, match=r"1,000 draws of a, b .*: up by \d\d\.\d%, down"):
        Space.from_dict(table).sample(1, seed=0)
    with pytest.raises(SpaceError, match=r"4.*\(less\(a, b\)\), down"):
        Space.from_dict(table).grid(2)


def test_a_constraint_holds_where_one_of_its_names_is_inactive() -> None:
    table = {
        "kind": {"distribution": "choice", "values": ["one", "two"]},
        "a": UNIT,
        "b": {**UNIT, "when": {"kind": ["two"]}},
        "constraints": {"order": {"less": ["a", "b"]}},
    }
    configs: Any = Space.from_dict(table).sample(400, seed=0)
    assert all(config["a"] < config["b"] for config in configs if "b" in config)
    alone = [config for config in configs if "b" not in config]
    # Two configurations in three: the other kind loses half of its draws.
    assert len(alone) / 400 == pytest.approx(2 / 3, abs=0.1)
    assert max(config["a"] for config in alone) > 0.95


@pytest.mark.parametrize(
    ("rule", "values", "holds"),
    [
        ({"less": ["a", "b", "c"]}, (1, 2, 3), True),
        ({"less": ["a", "b", "c"]}, (1, 2, 2), False),
        ({"at_most": ["a", "b", "c"]}, (1, 2, 2), True),
        ({"multiple_of": ["a", "b"]}, (0.3, 0.1, 0), True),
        ({"multiple_of": ["a", "b"]}, (0.35, 0.1, 0), False),
        ({"multiple_of": ["a", "b"]}, (1, 0, 0), False),
        ({"sum_at_most": {"names": ["a", "b"], "bound": 3}}, (1, 2, 9), True),
        ({"sum_at_most": {"names": ["a", "b"], "bound": 3}}, (1.5, 2, 9), False),
        ({"product_at_most": {"names": ["a", "b", "c"], "bound": 6}}, (1, 2, 3), True),
        ({"product_at_least": {"names": ["a", "b", "c"], "bound": 6.5}}, (1, 2, 3), False),
    ],
)
def test_the_rules(rule: dict[str, Any], values: tuple[float, ...], holds: bool) -> None:
    constraint = Constraint.from_dict(rule)
    assert constraint.to_dict() == rule
    assert constraint.holds(dict(zip("abc", values, strict=True))) is holds


def even(a: float, b: float) -> bool:
    return (a + b) % 2 == 0


def test_a_registered_rule_is_written_by_its_name_alone() -> None:
    register_constraint("even_sum", even)
    register_constraint("even_sum", even)  # again, as by a second import
    space = Space(
        {"a": Integer(low=0, high=9), "b": Integer(low=0, high=9)},
        {"even": Constraint(rule="even_sum", names=("a", "b"))},
    )
    assert space.to_dict()["constraints"] == {"even": {"even_sum": ["a", "b"]}}
    assert Space.from_dict(space.to_dict()) == space
    configs: list[Any] = list(space.sample(50, seed=0))
    assert all(even(**config) for config in configs)
    with pytest.raises(SpaceError, match="got 'less'"):
        register_constraint("less", even)


def test_spaces_with_other_constraints_differ(space: Space) -> None:
    assert Space(space.distributions) != space
    assert Space(space.distributions, space.constraints) == space


@pytest.mark.parametrize(
    ("constraint", "config", "holds"),
    [
        ({"sum_at_most": {"names": ["a", "b"], "bound": 0.3}}, {"a": 0.1, "b": 0.2}, True),
        ({"sum_at_most": {"names": ["a", "b"], "bound": 0.3}}, {"a": 0.1, "b": 0.2000001}, False),
        ({"product_at_most": {"names": ["a", "b"], "bound": 0.3}}, {"a": 3, "b": 0.1}, True),
        ({"product_at_least": {"names": ["a", "b"], "bound": 2.1}}, {"a": 3, "b": 0.7}, True),
        ({"multiple_of": ["a", "b"]}, {"a": 0.3, "b": 0.1}, True),
        ({"multiple_of": ["a", "b"]}, {"a": 10**10 + 1, "b": 2}, False),
        ({"multiple_of": ["a", "b"]}, {"a": 10**10 + 1.0, "b": 2.0}, False),
        ({"multiple_of": ["a", "b"]}, {"a": 2**40, "b": 512}, True),
        ({"multiple_of": ["a", "b"]}, {"a": 3, "b": 0}, False),
        ({"multiple_of": ["a", "b"]}, {"a": 1e300, "b": 1e-300}, False),
    ],
)
def test_decimal_fractions_count_as_written_and_whole_numbers_exactly(
    constraint: Any, config: dict[str, Any], holds: bool
) -> None:
    assert Constraint.from_dict(constraint).holds(config) is holds
