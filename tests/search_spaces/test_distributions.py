from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces import (
    Choice,
    Distribution,
    Fixed,
    Integer,
    LogUniform,
    Ordinal,
    Simplex,
    SpaceError,
    Uniform,
    Value,
    Weights,
    distribution_from_dict,
)
from search_spaces.distributions import LARGEST_INTEGER
from search_spaces.registry import KINDS


def bounds(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    pairs = st.tuples(numbers, numbers).filter(lambda pair: pair[0] != pair[1])
    return pairs.map(lambda pair: {"low": min(pair), "high": max(pair)})


scalars = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
uniforms = bounds(st.floats(-1e300, 1e300)).map(lambda ends: Uniform(**ends))
log_uniforms = bounds(st.floats(1e-150, 1e150)).map(lambda ends: LogUniform(**ends))
integers = st.one_of(
    bounds(st.integers(-LARGEST_INTEGER, LARGEST_INTEGER)).map(lambda ends: Integer(**ends)),
    bounds(st.integers(1, LARGEST_INTEGER)).map(lambda ends: Integer(**ends, log=True)),
)
choices = st.lists(scalars, min_size=2, max_size=6, unique=True).map(lambda values: Choice(values=tuple(values)))
ordinals = st.lists(scalars, min_size=2, max_size=6, unique=True).map(lambda values: Ordinal(values=tuple(values)))
fixed = scalars.map(lambda value: Fixed(value=value))
distributions = st.one_of(uniforms, log_uniforms, integers, ordinals, choices, fixed)
places = st.floats(0, 1)

one_of_each = [
    Uniform(low=-1, high=3),
    LogUniform(low=1e-5, high=1e-3),
    Integer(low=-2, high=9),
    Integer(low=512, high=16_384, log=True),
    Ordinal(values=(0.9, 0.95, 0.99)),
    Choice(values=("adamw", "lion", "adafactor")),
    Simplex(parts=("web", "code", "books"), low=Weights(code=0.1)),
    Fixed(value="wsd"),
]


@given(distributions, places)
def test_decode_lies_in_the_support_and_encode_in_the_unit_interval(distribution: Distribution, u: float) -> None:
    value = distribution.decode([u] * distribution.dimensions)
    places = distribution.encode(value)
    assert distribution.contains(value)
    assert len(places) == distribution.dimensions
    assert all(0 <= place <= 1 for place in places)


@given(uniforms, places)
def test_a_real_value_survives_encode_and_decode(distribution: Uniform, u: float) -> None:
    value = distribution.decode([u])
    back = distribution.decode(distribution.encode(value))
    assert back == pytest.approx(value, rel=0, abs=1e-14 * max(abs(distribution.low), abs(distribution.high)))


@given(log_uniforms, places)
def test_a_log_value_survives_encode_and_decode(distribution: LogUniform, u: float) -> None:
    value = distribution.decode([u])
    assert distribution.decode(distribution.encode(value)) == pytest.approx(value, rel=1e-12)


@given(integers | ordinals | choices | fixed, places)
def test_a_discrete_value_survives_encode_and_decode_exactly(distribution: Distribution, u: float) -> None:
    value = distribution.decode([u] * distribution.dimensions)
    back = distribution.decode(distribution.encode(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("log", [False, True])
def test_the_largest_integers_survive_encode_and_decode(log: bool) -> None:
    distribution = Integer(low=1, high=LARGEST_INTEGER, log=log)
    for value in [*range(1, 100), *range(LARGEST_INTEGER - 100, LARGEST_INTEGER + 1)]:
        assert distribution.decode(distribution.encode(value)) == value


@given(uniforms | log_uniforms | integers)
def test_the_ends_of_the_unit_interval_are_the_bounds_exactly(distribution: Uniform | LogUniform | Integer) -> None:
    assert distribution.decode([0.0]) == distribution.low
    assert distribution.decode([1.0]) == distribution.high


@given(distributions)
def test_json_gives_the_same_table_and_the_same_distribution(distribution: Distribution) -> None:
    table = distribution.to_dict()
    assert json.loads(json.dumps(table)) == table
    assert distribution_from_dict(json.loads(json.dumps(table))) == distribution


def test_one_of_each_covers_every_kind() -> None:
    assert {distribution.kind for distribution in one_of_each} == set(KINDS)


@pytest.mark.parametrize("distribution", one_of_each, ids=repr)
def test_samples_lie_in_the_support_and_repeat_with_the_generator(distribution: Distribution) -> None:
    first, second = ([distribution.sample(rng) for _ in range(200)] for rng in map(np.random.default_rng, (7, 7)))
    assert first == second
    assert all(map(distribution.contains, first))


# Means and shares of 20,000 draws have standard errors below 0.004 of the range; the tolerance is five of them.
N_DRAWS, TOLERANCE = 20_000, 0.02


def draws(distribution: Distribution) -> list[Any]:
    rng = np.random.default_rng(0)
    return [distribution.sample(rng) for _ in range(N_DRAWS)]


def test_uniform_has_the_mean_and_variance_of_its_interval() -> None:
    x = np.array(draws(Uniform(low=2, high=6)))
    assert x.mean() == pytest.approx(4, abs=4 * TOLERANCE)
    assert x.var() == pytest.approx(16 / 12, rel=0.03)


def test_log_uniform_has_the_mean_and_variance_of_its_logarithm() -> None:
    log10 = np.log10(draws(LogUniform(low=1e-5, high=1e-1)))
    assert log10.mean() == pytest.approx(-3, abs=4 * TOLERANCE)
    assert log10.var() == pytest.approx(16 / 12, rel=0.03)


def test_integers_and_choices_are_equally_likely() -> None:
    values = ("a", "b", "c", "d")
    for distribution in (Integer(low=-1, high=2), Choice(values=values), Ordinal(values=values)):
        counts = Counter(draws(distribution))
        assert len(counts) == 4
        assert all(count / N_DRAWS == pytest.approx(0.25, abs=TOLERANCE) for count in counts.values())


def test_log_integers_are_as_likely_as_the_factor_they_cover() -> None:
    counts = Counter(draws(Integer(low=1, high=4, log=True)))
    for k in range(1, 5):
        expected = math.log((k + 0.5) / (k - 0.5)) / math.log(4.5 / 0.5)
        assert counts[k] / N_DRAWS == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("distribution", "n", "expected"),
    [
        (Uniform(low=0, high=1), 5, [0, 0.25, 0.5, 0.75, 1]),
        (Uniform(low=0, high=1), 1, [0.5]),
        (LogUniform(low=1e-4, high=1), 5, [1e-4, 1e-3, 1e-2, 1e-1, 1]),
        (LogUniform(low=1e-4, high=1), 1, [1e-2]),
        (Integer(low=0, high=10), 3, [0, 5, 10]),
        (Integer(low=0, high=2), 9, [0, 1, 2]),
        (Integer(low=1, high=1000, log=True), 4, [1, 10, 100, 1000]),
    ],
)
def test_a_numeric_grid_is_even_on_its_scale(distribution: Distribution, n: int, expected: list[float]) -> None:
    assert distribution.grid(n) == pytest.approx(expected, rel=1e-12)


def test_a_grid_of_a_choice_or_a_fixed_value_is_whole() -> None:
    assert Choice(values=("a", "b", "c")).grid(2) == ["a", "b", "c"]
    assert Fixed(value=3).grid(5) == [3]


@given(uniforms | log_uniforms | integers, st.integers(2, 20))
def test_a_grid_holds_both_bounds_and_rises(distribution: Uniform | LogUniform | Integer, n: int) -> None:
    grid: list[Any] = distribution.grid(n)
    assert grid[0] == distribution.low
    assert grid[-1] == distribution.high
    assert grid == sorted(grid)
    assert len(grid) <= n


@pytest.mark.parametrize("n", [0, -1, 2.0, True])
def test_a_grid_needs_points(n: Any) -> None:
    with pytest.raises(SpaceError, match="at least 1, got"):
        Uniform(low=0, high=1).grid(n)


@pytest.mark.parametrize(
    ("distribution", "value"),
    [
        (Uniform(low=0, high=1), 1.5),
        (Uniform(low=0, high=1), math.nan),
        (Uniform(low=0, high=1), True),
        (Uniform(low=0, high=1), "0.5"),
        (Integer(low=0, high=9), 3.0),
        (Integer(low=0, high=9), True),
        (Integer(low=0, high=9), 10),
        (Choice(values=(0, 1)), True),
        (Choice(values=(False, True)), 1),
        (Choice(values=("a", "b")), None),
        (Choice(values=(1, 2)), np.array([1, 2])),
        (Fixed(value=1), True),
    ],
)
def test_what_is_outside_the_support_is_not_encoded(distribution: Distribution, value: object) -> None:
    assert not distribution.contains(value)
    with pytest.raises(SpaceError, match=f"is not in {distribution.kind}"):
        distribution.encode(value)


@pytest.mark.parametrize(
    ("distribution", "value"),
    [
        (Uniform(low=0, high=2), np.float32(0.5)),
        (Uniform(low=0, high=2), 1),
        (LogUniform(low=1, high=9), np.float64(3)),
        (Integer(low=0, high=9), np.int64(4)),
    ],
)
def test_numpy_scalars_and_whole_numbers_are_numbers(distribution: Distribution, value: Any) -> None:
    assert distribution.decode(distribution.encode(value)) == pytest.approx(value)


@pytest.mark.parametrize("u", [-0.1, 1.1, math.nan])
def test_a_place_outside_the_unit_interval_is_not_decoded(u: float) -> None:
    with pytest.raises(SpaceError, match=r"must lie in \[0, 1\], got"):
        Choice(values=(1, 2)).decode([u])


def test_as_many_places_are_decoded_as_there_are_dimensions() -> None:
    for distribution, places in ((Fixed(value=1), [0.5]), (Uniform(low=0, high=1), []), (one_of_each[6], [0.5])):
        with pytest.raises(SpaceError, match=f"{distribution.dimensions} places, got {len(places)}"):
            distribution.decode(places)


def test_ranks_are_the_order_of_an_ordinal() -> None:
    ordinal = Ordinal(values=("small", "medium", "large", "huge"))
    assert [ordinal.encode(value) for value in ordinal.values] == [(0.125,), (0.375,), (0.625,), (0.875,)]
    assert str(ordinal) == "small < medium < large < huge"


def test_bounds_are_stored_in_one_form() -> None:
    assert repr(Uniform(low=0, high=1)) == repr(Uniform(low=0.0, high=np.float64(1))) == "Uniform(low=0.0, high=1.0)"


def test_a_distribution_is_frozen_and_hashable() -> None:
    distribution = Choice(values=["a", "b"])  # type: ignore[arg-type]
    assert {distribution: 1}[Choice(values=("a", "b"))] == 1
    with pytest.raises(AttributeError):
        distribution.values = ("c", "d")  # type: ignore[misc]


def test_values_are_built_in_python_types() -> None:
    rng = np.random.default_rng(0)
    values: list[Value] = [distribution.sample(rng) for distribution in one_of_each]
    assert [type(value) for value in values] == [float, float, int, int, float, str, Weights, str]
