"""What holds of every space: tables, pickles and points give it back, and its samples are in it."""

from __future__ import annotations

import json
import math
import pickle
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces import (
    Choice,
    Condition,
    Constraint,
    Distribution,
    Fixed,
    Integer,
    LogUniform,
    OneOf,
    Ordinal,
    Prior,
    Range,
    Simplex,
    Space,
    Uniform,
    Weights,
)

NAMES = ("a", "b", "c", "d", "e", "f")
PARTS = ("web", "code", "books", "talk")


@st.composite
def distributions(draw: st.DrawFn, when: Condition | None) -> Distribution:
    low = draw(st.integers(1, 50))
    high = low + draw(st.integers(1, 500))
    values = tuple(draw(st.lists(st.integers(-9, 9), min_size=2, max_size=5, unique=True)))
    parts = PARTS[: draw(st.integers(2, 4))]
    flat: Distribution = draw(
        st.sampled_from(
            [
                Uniform(low=low, high=high, when=when),
                LogUniform(low=low / 64, high=high, when=when),
                Integer(low=low, high=high, when=when),
                Integer(low=low, high=high, log=True, when=when),
                Ordinal(values=values, when=when),
                Choice(values=values, when=when),
                Simplex(parts=parts, low=Weights({parts[0]: 0.125}), when=when),
                Fixed(value=low, when=when),
            ]
        )
    )
    if isinstance(flat, Fixed) or draw(st.booleans()):
        return flat
    prior = Prior(centre=flat.decode([0.25] * flat.dimensions), spread=draw(st.floats(0.05, 0.95)))
    return type(flat)(**{**vars_of(flat), "prior": prior})


def vars_of(distribution: Distribution) -> dict[str, Any]:
    return {key: getattr(distribution, key) for key in distribution._keys()}


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    found: dict[str, Distribution] = {}
    for name in NAMES[: draw(st.integers(1, 6))]:
        parents = [other for other, d in found.items() if not isinstance(d, Simplex)]
        when = None
        conditional: bool = draw(st.booleans())
        if parents and conditional:
            parent = draw(st.sampled_from(parents))
            value: Any = found[parent].decode([draw(st.sampled_from([0.0, 0.5, 1.0]))] * found[parent].dimensions)
            kinds: list[OneOf | Range] = [OneOf(values=(value,)), Range(low=value), Range(high=value)]
            allowed = draw(st.sampled_from(kinds))
            when = Condition(parents=((parent, allowed),))
        found[name] = draw(distributions(when))
    order: list[str] = list(draw(st.permutations(list(found))))
    numbers = [name for name in order if isinstance(found[name], Uniform | LogUniform)]
    constraints = {}
    if len(numbers) >= 2:
        constraints["room"] = Constraint(rule="sum_at_most", names=tuple(numbers), bound=400.0 * len(numbers))
    return Space({name: found[name] for name in order}, constraints)


@settings(max_examples=60)
@given(spaces())
def test_json_and_pickle_give_the_space_back(space: Space) -> None:
    table = space.to_dict()
    assert json.loads(json.dumps(table)) == table
    for copy in (Space.from_dict(json.loads(json.dumps(table))), pickle.loads(pickle.dumps(space))):
        assert copy == space
        assert tuple(copy) == tuple(space)
        assert copy.to_dict() == table
        assert str(copy) == str(space)
        assert copy.sample(3, seed=1) == space.sample(3, seed=1)


@settings(max_examples=60)
@given(spaces(), st.integers(0, 10**9))
def test_samples_are_in_the_space_repeat_and_survive_a_ledger(space: Space, seed: int) -> None:
    configs = space.sample(4, seed)
    assert configs == space.sample(6, seed)[:4]
    for config in configs:
        space.validate(config)
        assert space.contains(json.loads(json.dumps(config)))
        assert math.isfinite(space.log_prior(config))
        assert list(config) == list(space.active(config))


@settings(max_examples=60)
@given(spaces(), st.data())
def test_points_decode_into_the_supports_and_back(space: Space, data: st.DataObject) -> None:
    n = len(space.axes)
    point = data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    config = space.decode(point)
    if not space.contains(config):
        assert any(not constraint.holds(config) for constraint in space.constraints.values())
        return
    encoded = space.encode(config)
    assert encoded.shape == (n,)
    assert ((encoded >= 0) & (encoded <= 1)).all()
    # The same to rounding; where rounding crosses a parent's range, others become active.
    again = space.decode(encoded)
    for name in config.keys() & again.keys():
        assert again[name] == pytest.approx(config[name], rel=1e-9, abs=1e-9)
    assert space.from_prior(point).shape == (n,)


@settings(max_examples=40)
@given(spaces(), st.integers(0, 99))
def test_more_names_leave_the_values_of_the_others(space: Space, seed: int) -> None:
    more = space.updated({"z": Uniform(low=0, high=1), "y": Ordinal(values=(1, 2))})
    for config, larger in zip(space.sample(3, seed), more.sample(3, seed), strict=True):
        assert {name: larger[name] for name in space if name in larger} == config


STUDY = """
[sweep.space]
learning_rate = { distribution = "log_uniform", low = 1e-4, high = 0.1, prior = { centre = 0.004, spread = 1.5 } }
optimizer     = { distribution = "choice", values = ["adamw", "lion", "sgd"], prior = { centre = "adamw", spread = 0.4 } }
n_layers      = { distribution = "ordinal", values = [2, 4, 8] }
beta1         = { distribution = "uniform", low = 0.8, high = 0.99, when = { optimizer = ["adamw", "lion"] } }
dropout       = { distribution = "uniform", low = 0, high = 0.3, when = { n_layers = { low = 4 } } }
seed          = { distribution = "fixed", value = 7 }

[sweep.space.beta2]
distribution = "ordinal"
values = [0.9, 0.95, 0.99, 0.999]
prior = { centre = 0.95, spread = 1 }
when = { optimizer = ["adamw", "lion"], n_layers = [2, 4] }

[sweep.space.data_mixture]
distribution = "simplex"
parts = ["web", "code", "books"]
low = { code = 0.05 }
prior = { centre = { web = 0.7, code = 0.2, books = 0.1 }, spread = 0.5 }

[sweep.space.constraints]
beta_order = { less = ["beta1", "beta2"] }
gentle     = { sum_at_most = { names = ["dropout", "learning_rate"], bound = 0.35 } }
"""


def test_toml_describes_everything_a_space_can_contain() -> None:
    space = Space.from_dict(tomllib.loads(STUDY)["sweep"]["space"])
    optimizers = OneOf(values=("adamw", "lion"))
    assert space == Space(
        {
            "learning_rate": LogUniform(low=1e-4, high=0.1, prior=Prior(centre=0.004, spread=1.5)),
            "optimizer": Choice(values=("adamw", "lion", "sgd"), prior=Prior(centre="adamw", spread=0.4)),
            "n_layers": Ordinal(values=(2, 4, 8)),
            "beta1": Uniform(low=0.8, high=0.99, when=Condition(parents=(("optimizer", optimizers),))),
            "dropout": Uniform(low=0, high=0.3, when=Condition(parents=(("n_layers", Range(low=4)),))),
            "seed": Fixed(value=7),
            "beta2": Ordinal(
                values=(0.9, 0.95, 0.99, 0.999),
                prior=Prior(centre=0.95, spread=1),
                when=Condition(parents=(("optimizer", optimizers), ("n_layers", OneOf(values=(2, 4))))),
            ),
            "data_mixture": Simplex(
                parts=("web", "code", "books"),
                low=Weights(code=0.05),
                prior=Prior(centre=Weights(web=0.7, code=0.2, books=0.1), spread=0.5),
            ),
        },
        {
            "beta_order": Constraint(rule="less", names=("beta1", "beta2")),
            "gentle": Constraint(rule="sum_at_most", names=("dropout", "learning_rate"), bound=0.35),
        },
    )
    assert Space.from_dict(space.to_dict()).to_dict() == space.to_dict()
    assert len(space.axes) == 8
    assert space.axes[-2:] == ("data_mixture.web", "data_mixture.code")
    config = tomllib.loads(
        """
        learning_rate = 0.002
        optimizer = "sgd"
        n_layers = 4
        dropout = 0.1
        seed = 7
        data_mixture = { web = 0.5, code = 0.25, books = 0.25 }
        """
    )
    space.validate(config)
    back = space.decode(space.encode(config))
    assert back.pop("data_mixture") == pytest.approx(config.pop("data_mixture"))
    assert back == pytest.approx(config)
