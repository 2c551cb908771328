"""A simplex takes one place fewer than parts, uniformly, and there and back is the same mixture."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from search_spaces import Simplex, SpaceError, Weights

PARTS = ("web", "code", "books", "talk", "maths")


@st.composite
def simplexes(draw: st.DrawFn) -> Simplex:
    parts = PARTS[: draw(st.integers(2, 5))]
    low = draw(st.dictionaries(st.sampled_from(parts), st.floats(0, 0.19)))
    return Simplex(parts=parts, low=Weights(low))


@given(simplexes(), st.data())
def test_weights_sum_to_one_and_survive_encode_and_decode(simplex: Simplex, data: st.DataObject) -> None:
    n = simplex.dimensions
    places = data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    weights: Any = simplex.decode(places)
    assert n == len(simplex.parts) - 1
    assert isinstance(weights, Weights)
    assert simplex.contains(weights)
    assert sum(weights.values()) == pytest.approx(1, abs=1e-12)
    assert all(weights[part] >= simplex.low.get(part, 0) - 1e-12 for part in simplex.parts)
    back: Any = simplex.decode(simplex.encode(weights))
    assert back == pytest.approx(weights, abs=1e-9)


@given(simplexes(), st.data())
def test_places_survive_decode_and_encode(simplex: Simplex, data: st.DataObject) -> None:
    n = simplex.dimensions
    places = data.draw(st.lists(st.floats(0.01, 0.99), min_size=n, max_size=n))
    assert simplex.encode(simplex.decode(places)) == pytest.approx(places, abs=1e-9)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_it_is_uniform_each_part_and_each_ratio_has_its_distribution(k: int) -> None:
    simplex = Simplex(parts=PARTS[:k])
    rng = np.random.default_rng(0)
    draws = np.array([list(simplex.sample(rng).values()) for _ in range(4_000)])  # type: ignore[union-attr]
    # Dirichlet(1, …, 1): each part is Beta(1, k - 1), and a part's share of any two is uniform.
    for j in range(k):
        assert kstest(draws[:, j], "beta", args=(1, k - 1)).pvalue > 0.001
        other = draws[:, (j + 1) % k]
        assert kstest(draws[:, j] / (draws[:, j] + other), "uniform").pvalue > 0.001


def test_lower_bounds_shrink_it_without_bending_it() -> None:
    simplex = Simplex(parts=PARTS[:3], low=Weights(code=0.3, books=0.2))
    rng = np.random.default_rng(1)
    draws: Any = [simplex.sample(rng) for _ in range(4_000)]
    assert kstest([(d["code"] - 0.3) / 0.5 for d in draws], "beta", args=(1, 2)).pvalue > 0.001
    assert kstest([d["web"] / 0.5 for d in draws], "beta", args=(1, 2)).pvalue > 0.001


@pytest.mark.parametrize(("k", "n"), [(2, 5), (3, 3), (4, 4)])
def test_a_grid_has_every_mixture_in_even_steps(k: int, n: int) -> None:
    grid: Any = Simplex(parts=PARTS[:k]).grid(n)
    assert len({*grid}) == len(grid) == comb(n - 1 + k - 1, k - 1)
    assert all(weight * (n - 1) == pytest.approx(round(weight * (n - 1))) for mix in grid for weight in mix.values())
    assert Simplex(parts=PARTS[:k]).grid(1) == [pytest.approx(dict.fromkeys(PARTS[:k], 1 / k))]


def test_a_corner_encodes_though_nothing_is_left_of_the_stick() -> None:
    simplex = Simplex(parts=PARTS[:4])
    for part in simplex.parts:
        corner = {name: float(name == part) for name in simplex.parts}
        assert simplex.decode(simplex.encode(corner)) == corner


@pytest.mark.parametrize(
    "value",
    [
        {"web": 0.5, "code": 0.5},
        {"web": 0.5, "code": 0.3, "books": 0.1},
        {"web": 1.1, "code": -0.2, "books": 0.1},
        {"web": 0.6, "code": 0.3, "books": 0.1, "talk": 0.0},
        {"web": 0.9, "code": 0.05, "books": 0.05},
        {"web": "0.5", "code": 0.3, "books": 0.2},
        0.5,
    ],
)
def test_other_mixtures_are_not_in_it(value: object) -> None:
    simplex = Simplex(parts=PARTS[:3], low=Weights(code=0.1))
    assert not simplex.contains(value)
    with pytest.raises(SpaceError, match="\\+ code >= 0.1 \\+ books"):
        simplex.encode(value)


def test_a_dict_is_a_value() -> None:
    simplex = Simplex(parts=PARTS[:3])
    assert simplex.contains({"books": 0.333333, "code": 0.333333, "web": 0.333333}), "rounded to six digits"


def test_weights_are_an_immutable_dict() -> None:
    weights = Weights(web=0.75, code=0.25)
    assert weights == {"code": 0.25, "web": 0.75}
    assert hash(weights) == hash(Weights(code=0.25, web=0.75))
    assert pickle.loads(pickle.dumps(weights)) == json.loads(json.dumps(weights)) == weights
    assert str(weights) == "web 0.75, code 0.25"
    changes: list[Callable[[], object]] = [
        lambda: weights.update(web=1.0),
        lambda: weights.__setitem__("web", 1.0),
        lambda: weights.pop("web"),
        lambda: weights.setdefault("x", 1.0),
        lambda: weights.clear(),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="weights do not change"):
            change()
