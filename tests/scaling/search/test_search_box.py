"""Coordinates of a search: into the unit cube and back."""

import numpy as np
import pandas as pd
import pytest

from scaling import SearchBox

BOX = SearchBox(
    bounds={"log2_rate": (-13.0, -5.0), "log2_batch": (4.0, 12.0)},
    choices={"optimizer": ("adam", "lion", "muon"), "activation": ("gelu", "relu2")},
)
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


def test_an_empty_box_is_refused() -> None:
    with pytest.raises(ValueError, match="a box needs coordinates, each name once, got none"):
        SearchBox()
