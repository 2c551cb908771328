from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from search_spaces import Choice, Fixed, Integer, LogUniform, Space, SpaceError, Uniform


@pytest.fixture
def space() -> Space:
    return Space(
        {
            "learning_rate": LogUniform(low=1e-3, high=0.1),
            "dropout": Uniform(low=0, high=0.3),
            "batch_tokens": Integer(low=512, high=16_384, log=True),
            "optimizer": Choice(values=("adamw", "lion")),
            "qk_norm": Choice(values=(False, True)),
            "schedule": Fixed(value="wsd"),
        }
    )


def test_a_space_is_a_mapping_that_nothing_changes(space: Space) -> None:
    distributions = dict(space)
    copy = Space(distributions)
    distributions["dropout"] = Fixed(value=0)
    assert copy == space
    assert len(space) == 6
    assert tuple(space) == tuple(distributions)
    assert space.searched == ("learning_rate", "dropout", "batch_tokens", "optimizer", "qk_norm")
    with pytest.raises(AttributeError):
        space.distributions = {}  # type: ignore[misc]


def test_seeds_and_names_have_streams_of_their_own() -> None:
    unit = Uniform(low=0, high=1)
    space = Space({"a": unit, "b": unit})
    values = [config[name] for seed in range(10) for config in space.sample(200, seed) for name in space]
    assert len(set(values)) == 4_000
    a, b = (np.array([config[name] for config in space.sample(2_000, seed=0)]) for name in space)
    # The standard error of a correlation of 2,000 independent pairs is 0.022.
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.1
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.1


def test_samples_stay_the_same_between_versions() -> None:
    """A recorded sweep is replayed by its seed: a change of these values breaks every ledger."""
    space = Space({"learning_rate": LogUniform(low=1e-5, high=1e-3), "optimizer": Choice(values=("adamw", "lion"))})
    assert space.sample(4, seed=0) == [
        {"learning_rate": pytest.approx(0.00047052741606451893, rel=1e-12), "optimizer": "lion"},
        {"learning_rate": pytest.approx(0.000234681019350426, rel=1e-12), "optimizer": "lion"},
        {"learning_rate": pytest.approx(1.946171793710687e-05, rel=1e-12), "optimizer": "adamw"},
        {"learning_rate": pytest.approx(1.4623714877814331e-05, rel=1e-12), "optimizer": "adamw"},
    ]


def test_sampling_refuses_a_negative_number_and_a_seed_that_is_not_whole(space: Space) -> None:
    with pytest.raises(SpaceError, match="must.*got -1"):
        space.sample(-1, seed=0)
    with pytest.raises(TypeError):
        space.sample(1, seed=0.5)  # type: ignore[arg-type]


def test_a_grid_is_the_product_of_its_columns(space: Space) -> None:
    configs = space.grid(3)
    assert len(configs) == 3**3 * 2 * 2
    assert len({tuple(config.values()) for config in configs}) == len(configs)
    assert all(map(space.contains, configs))


def test_a_grid_takes_points_by_name_and_varies_the_last_name_fastest() -> None:
    space = Space({"x": Integer(low=0, high=9), "kind": Choice(values=("a", "b")), "y": Integer(low=0, high=8)})
    assert [tuple(config.values()) for config in space.grid({"y": 3, "x": 2})] == [
        (x, kind, y) for x in (0, 9) for kind in ("a", "b") for y in (0, 4, 8)
    ]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (0, "^learning_rate: .*0"),
        ({"learning_rate": 3, "dropout": 0, "batch_tokens": 3}, "^dropout: .*0"),
        ({"learning_rate": 3, "batch_tokens": 3}, "dropout"),
        ({"learning_rate": 3, "dropout": 3, "batch_tokens": 3, "dropuot": 3}, "'dropuot'"),
        ({"learning_rate": 3, "dropout": 3, "batch_tokens": 3, "optimizer": 2}, "'optimizer'"),
    ],
)
def test_a_grid_refuses_other_points(space: Space, points: Any, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        space.grid(points)


def test_the_unit_cube_has_only_the_searched_axes(space: Space) -> None:
    config = space.decode(np.zeros(5))
    assert config == {
        "learning_rate": 1e-3,
        "dropout": 0.0,
        "batch_tokens": 512,
        "optimizer": "adamw",
        "qk_norm": False,
        "schedule": "wsd",
    }
    assert space.encode(config)[[0, 1, 3, 4]].tolist() == [0, 0, 0.25, 0.25]
    with pytest.raises(SpaceError, match=r"a point needs shape \(5,\) .* got \(6,\)"):
        space.decode(np.zeros(6))
    with pytest.raises(SpaceError, match=r"^dropout:.*\[0, 1\], got 2"):
        space.decode([0.5, 2, 0.5, 0.5, 0.5])


def test_validate_names_everything_that_is_wrong(space: Space) -> None:
    config: dict[str, object] = {**space.sample(1, seed=0)[0]}
    space.validate(config)
    config["dropout"] = 0.9
    config["optimiser"] = config.pop("optimizer")
    assert not space.contains(config)
    for check in (space.validate, space.encode):
        with pytest.raises(SpaceError, match="dropout = 0.9.*; optimizer is missing; .*'optimiser'"):
            check(config)


def test_str_is_aligned_and_html_is_escaped() -> None:
    space = Space({"rate": LogUniform(low=1e-3, high=0.1), "<kind>": Choice(values=("<a>", "b"))})
    assert str(space) == "rate    log_uniform  0.001 … 0.1\n<kind>  choice       <a> | b"
    assert "<td>&lt;kind&gt;</td><td>choice</td><td>&lt;a&gt; | b</td>" in space._repr_html_()
