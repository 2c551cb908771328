"""Coordinates of a search: into the unit cube and back, and the parts that no run has tried."""

import math

import numpy as np
import pandas as pd

from scaling import SearchBox, fit_response
from scaling.search.search_box import is_within, moved_into, untried

BOX = SearchBox(
    bounds={"log2_rate": (-13.0, -5.0), "log2_batch": (4.0, 12.0)},
    choices={"optimizer": ("adam", "lion", "muon"), "activation": ("gelu", "relu2")},
)
TRIED = SearchBox(bounds={"x": (0.0, 1.0)}, choices={"optimizer": ("adamw", "lion", "muon")}, scales=("n_params",))
POINTS = pd.DataFrame(
    {
        "log2_rate": [-13.0, -7.0, -4.0],
        "log2_batch": [12.0, 5.0, 8.0],
        "optimizer": ["muon", "adam", "lion"],
        "activation": ["relu2", "relu2", "gelu"],
    }
)


def test_points_come_back_as_they_were_also_from_outside() -> None:
    encoded = BOX.encode(POINTS)
    np.testing.assert_allclose(encoded[:, :2], np.array([[0, 1], [0.75, 0.125], [1.125, 0.5]]))
    pd.testing.assert_frame_equal(BOX.decode(encoded), POINTS)


def test_two_values_of_one_category_are_as_far_apart_as_the_ends_of_a_number() -> None:
    encoded = BOX.encode(POINTS.assign(log2_rate=-9.0, log2_batch=8.0))
    apart = np.linalg.norm(encoded[:, None] - encoded, axis=2)
    np.testing.assert_allclose(apart, np.sqrt([[0, 1, 2], [1, 0, 2], [2, 2, 0]]))


def test_a_number_for_each_coordinate_places_a_point() -> None:
    unit = np.array([[0.25, 1.0, 0.0, 0.49], [-0.1, 0.5, 0.34, 0.5], [0.5, 1.2, 1.0, 1.0]])
    placed = BOX.decode(BOX.place(unit))
    expected = {"log2_rate": [-11, -13, -9], "log2_batch": [12, 8, 12]}
    pd.testing.assert_frame_equal(
        placed,
        pd.DataFrame(expected, dtype=float).assign(
            optimizer=["adam", "lion", "muon"], activation=["gelu", "relu2", "relu2"]
        ),
    )


def test_untried_are_categories_without_a_run_and_ends_a_third_of_the_range_away() -> None:
    runs = TRIED.encode(pd.DataFrame({"x": [0.4, 0.6, 1.2], "optimizer": ["adamw", "muon", "adamw"]}))
    assert untried(TRIED, runs) == [(0, 0.0, 0.2), (0, 0.8, 1.0), (2, 0.5, 1.0)]
    everything = TRIED.encode(pd.DataFrame({"x": [0.3, 0.7, 0.5], "optimizer": ["adamw", "muon", "lion"]}))
    assert untried(TRIED, everything) == []
    assert [column for column, *_ in untried(TRIED, runs[:0])] == [1, 2, 3], "a range without a run has no ends"


def test_a_point_is_moved_into_each_region_by_one_coordinate() -> None:
    regions = [(0, 0.8, 1.0), (2, 0.5, 1.0)]
    point = TRIED.encode(pd.DataFrame({"x": [0.3], "optimizer": ["adamw"]}))
    moved = moved_into(regions, point[0], TRIED)
    assert TRIED.decode(moved).to_dict("records") == [{"x": 0.8, "optimizer": "adamw"}, {"x": 0.3, "optimizer": "lion"}]
    assert is_within(regions, moved).all()
    assert not is_within(regions, point).any()


def test_what_is_untried_is_explored_and_left_once_it_is_worse() -> None:
    """First the surface's minimum, then each other optimizer, and those no more once they have proved 3 and 4 % worse."""
    x = np.linspace(0.1, 0.9, 5)
    rows = pd.DataFrame({"x": x, "optimizer": "adamw", "n_params": 1.0, "loss": 3 * np.exp(0.1 * (x - 0.5) ** 2)})
    worse = {"adamw": 0.0, "lion": 0.04, "muon": 0.03}
    for _ in range(6):
        point = fit_response(rows, box=TRIED).suggest({"n_params": 4.0})
        loss = 3 * math.exp(0.1 * (point["x"] - 0.5) ** 2 + worse[point["optimizer"]])
        rows = pd.concat([rows, pd.DataFrame([{**point, "n_params": 4.0, "loss": loss}])], ignore_index=True)
    tried = rows["optimizer"].tolist()[len(x) :]
    assert tried[0] == "adamw"
    assert set(tried[:4]) == set(worse)
    assert tried[4:] == ["adamw", "adamw"]


def test_the_untried_end_of_a_range_is_explored() -> None:
    """Known runs lie left of .3 around a basin of their own; the better one lies right."""
    x = np.linspace(0.0, 0.3, 5)
    rows = pd.DataFrame({"x": x, "optimizer": "adamw", "n_params": 1.0, "loss": 3 * np.exp(0.3 * (x - 0.15) ** 2)})
    box = SearchBox(bounds=TRIED.bounds, scales=TRIED.scales)
    for _ in range(2):
        point = fit_response(rows, box=box).suggest({"n_params": 4.0})
        rows.loc[len(rows)] = [point["x"], "adamw", 4.0, 3 * math.exp(0.3 * (point["x"] - 0.15) ** 2)]
    assert rows["x"].iloc[-2] < 0.3
    assert rows["x"].iloc[-1] >= 0.65
